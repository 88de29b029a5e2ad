"""What a lease of a long cached prompt costs, over a memcmp of the same bytes.

32,768 cached tokens in 8 nodes, pages of 16, given as an int32 array: making the key, entering the lease, leaving it.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from aradix import CacheInitParams, RadixCache, RadixKey, SlotAllocator
from stress.bench.plots import pyplot, save

__all__ = ["ABOUT", "draw", "measure", "table"]

ABOUT = "a lease of 32k cached tokens, over a memcmp of the same bytes"

NUM_TOKENS = 32_768
PAGE_SIZE = 16
DEPTHS = (1, 8, 64)
ROUNDS = 2_000


async def _branch(cache: RadixCache, ids: np.ndarray[Any, np.dtype[np.int32]], num_nodes: int) -> None:
    """Cache the prompt so that its path has this many nodes: others leave it at equal distances."""
    for end in range(NUM_TOKENS // num_nodes, NUM_TOKENS + 1, NUM_TOKENS // num_nodes):
        key = RadixKey(np.append(ids[:end], np.full(PAGE_SIZE, 7, np.int32)))
        async with cache.lease(key) as lease:
            await lease.allocate(len(key) - lease.num_matched)
            lease.commit(key)


async def _time(num_nodes: int) -> dict[str, Any]:
    ids = np.arange(NUM_TOKENS, dtype=np.int32)
    same, copy = ids.tobytes(), bytearray(ids.tobytes())
    allocator = SlotAllocator(1 << 18, PAGE_SIZE)
    leases, compares = [], []
    async with RadixCache(CacheInitParams(allocator, PAGE_SIZE, low_watermark=0, high_watermark=0)) as cache:
        await _branch(cache, ids, num_nodes)
        for _ in range(ROUNDS):
            began = time.perf_counter()
            async with cache.lease(RadixKey(ids)) as lease:
                found = lease.num_matched
            leases.append(time.perf_counter() - began)
            assert found == NUM_TOKENS
            began = time.perf_counter()
            equal = copy == same
            compares.append(time.perf_counter() - began)
            assert equal
        cache.check()
    lease_us, memcmp_us = statistics.median(leases) * 1e6, statistics.median(compares) * 1e6
    return {"nodes": num_nodes, "lease_us": lease_us, "memcmp_us": memcmp_us, "ratio": lease_us / memcmp_us}


def measure() -> dict[str, Any]:
    """Medians, for paths of 1, 8 and 64 nodes; takes a second."""
    return {"bench": "lease", "tokens": NUM_TOKENS, "rows": [anyio.run(_time, depth) for depth in DEPTHS]}


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"{row['nodes']:>5} {row['lease_us']:>9.1f} {row['memcmp_us']:>10.1f} {row['ratio']:>6.1f}"
        for row in found["rows"]
    ]
    return "\n".join([f"{'nodes':>5} {'lease us':>9} {'memcmp us':>10} {'ratio':>6}", *lines])


def draw(found: dict[str, Any], path: Path) -> None:
    """A lease and a memcmp over the number of nodes. Needs matplotlib."""
    figure, axis = pyplot().subplots(figsize=(6, 3), layout="constrained")
    nodes = [row["nodes"] for row in found["rows"]]
    for name in ("lease_us", "memcmp_us"):
        axis.plot(nodes, [row[name] for row in found["rows"]], marker="o", label=name.removesuffix("_us"))
    axis.set(xscale="log", ylim=0, xlabel="nodes on the path", ylabel="us")
    axis.legend(frameon=False)
    save(figure, path)
