"""What a lease of a long cached prompt costs, over a memcmp of the same bytes.

32,768 cached tokens in 1, 8 and 64 nodes, pages of 16. A lease is entering and leaving it, on asyncio, with a key that
is made already; with its key, it is that and making the key of an int32 array, which copies and checks the ids.
SGLang's caches match, lock and unlock the same prompt, on the same path. Each side has a few calls at a time, so that
none runs on what the one before it left of the processor's caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
import numpy.typing as npt

from aradix import CacheInitParams, RadixCache, RadixKey, SlotAllocator
from aradix.tree import core_name
from stress.bench.pairs import median_ratio, quiet
from stress.bench.peers import PeerMissing
from stress.bench.peers.sglang_release import SGLangCache, load_sglang
from stress.bench.plots import line_figure

__all__ = ["ABOUT", "draw", "measure", "table"]

ABOUT = "a lease of 32k cached tokens, over a memcmp of the same bytes"

NUM_TOKENS = 32_768
PAGE_SIZE = 16
DEPTHS = (1, 8, 64)
NUM_SLOTS = 1 << 18
VISITS = 40
CALLS_A_VISIT = 15
AT_MOST = 5.0
AT_MOST_US = 15.0

Ids = npt.NDArray[np.int32]
Sample = Callable[[], Awaitable[None]]


def _branches(ids: Ids, num_nodes: int) -> list[Ids]:
    """Prompts that make the path of `ids` this many nodes: others leave it at equal distances."""
    step = NUM_TOKENS // num_nodes
    other = np.full(PAGE_SIZE, 7, np.int32)
    return [np.append(ids[:end], other) for end in range(step, NUM_TOKENS + 1, step)]


async def _ours(core: Literal["python", "cpp"], ids: Ids, num_nodes: int, exits: AsyncExitStack) -> dict[str, Sample]:
    allocator = SlotAllocator(NUM_SLOTS, PAGE_SIZE)
    params = CacheInitParams(allocator, PAGE_SIZE, low_watermark=0, high_watermark=0, tree_core=core)
    cache = await exits.enter_async_context(RadixCache(params))
    for branch in _branches(ids, num_nodes):
        key = RadixKey(branch)
        async with cache.lease(key) as lease:
            await lease.allocate(len(key) - lease.num_matched)
            lease.commit(key)
    made = RadixKey(ids)

    async def given_key() -> None:
        async with cache.lease(made) as lease:
            assert lease.num_matched == NUM_TOKENS

    async def own_key() -> None:
        async with cache.lease(RadixKey(ids)) as lease:
            assert lease.num_matched == NUM_TOKENS

    return {f"aradix {core}": given_key, f"aradix {core}, with its key": own_key}


async def _theirs(sglang: Any, core: Literal["rust", "python"], ids: Ids, num_nodes: int) -> dict[str, Sample]:
    cache = SGLangCache(sglang, core, PAGE_SIZE, NUM_SLOTS * 8)
    for branch in _branches(ids, num_nodes):
        cache.put(SGLangCache.packed(branch.tolist()))
    tokens = SGLangCache.packed(ids.tolist())

    async def sample() -> None:
        assert cache.hold(tokens) == NUM_TOKENS

    return {f"SGLang {core}": sample}


async def _measure(sglang: Any, num_nodes: int) -> list[dict[str, Any]]:
    ids = np.arange(NUM_TOKENS, dtype=np.int32)
    same, copy = ids.tobytes(), bytearray(ids.tobytes())

    async def memcmp() -> None:
        assert copy == same

    sides: dict[str, Sample] = {"memcmp": memcmp}
    async with AsyncExitStack() as exits:
        if core_name() == "cpp":
            sides |= await _ours("cpp", ids, num_nodes, exits)
        sides |= await _ours("python", ids, num_nodes, exits)
        if sglang is not None:
            sides |= await _theirs(sglang, "rust", ids, num_nodes)
            sides |= await _theirs(sglang, "python", ids, num_nodes)
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(VISITS):
            for name, sample in sides.items():
                calls = []
                for _ in range(CALLS_A_VISIT):
                    # By the clock, for the processor's own is too coarse: medians leave out who was interrupted.
                    began = time.perf_counter()
                    await sample()
                    calls.append(time.perf_counter() - began)
                taken[name].append(statistics.median(calls))
    return [
        {
            "side": name,
            "nodes": num_nodes,
            "us": statistics.median(seconds) * 1e6,
            "over_memcmp": median_ratio(seconds, taken["memcmp"]),
        }
        for name, seconds in taken.items()
    ]


def measure() -> dict[str, Any]:
    """Medians, for paths of 1, 8 and 64 nodes; takes some seconds."""
    skipped = []
    sglang = None
    try:
        sglang = load_sglang()
    except PeerMissing as missing:
        skipped.append(str(missing))
    with quiet():
        rows = [row for depth in DEPTHS for row in anyio.run(_measure, sglang, depth)]
    return {
        "bench": "lease",
        "tokens": NUM_TOKENS,
        "rows": rows,
        "at_most": AT_MOST,
        "at_most_us": AT_MOST_US,
        "skipped": skipped,
    }


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    depths = sorted({row["nodes"] for row in found["rows"]})
    cells = {(row["side"], row["nodes"]): row for row in found["rows"]}
    lines = [f"{'us, over memcmp':<30}" + "".join(f"{f'{depth} nodes':>18}" for depth in depths)]
    for name in dict.fromkeys(row["side"] for row in found["rows"]):
        texts = [f"{cells[name, depth]['us']:.1f} {cells[name, depth]['over_memcmp']:>7.1f}" for depth in depths]
        lines.append(f"{name:<30}" + "".join(f"{text:>18}" for text in texts))
    lines.append(
        f"a lease on the compiled core: at most {found['at_most']:g} times memcmp, and {found['at_most_us']:g} us"
    )
    return "\n".join([*lines, *found["skipped"]])


def draw(found: dict[str, Any], path: Path) -> None:
    """Each side over the number of nodes. Needs matplotlib."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in found["rows"]:
        xs, ys = series.setdefault(row["side"], ([], []))
        xs.append(row["nodes"])
        ys.append(row["us"])
    line_figure(path, series, x="nodes on the path", y="us", y_scale="log")
