"""What evicting costs as the tree gets wider: 64 tokens out, 64 in, over the number of leaves."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from aradix import CacheInitParams, EvictParams, InsertParams, RadixCache, RadixKey, SlotAllocator
from stress.bench.plots import pyplot, save

__all__ = ["ABOUT", "draw", "measure", "table"]

ABOUT = "evicting 64 tokens, over the number of leaves"

LEAF_COUNTS = (5_000, 50_000)
ROUNDS = 400


async def _time(num_leaves: int) -> dict[str, Any]:
    allocator = SlotAllocator(2 * num_leaves + 64)
    seconds = []
    async with RadixCache(CacheInitParams(allocator, low_watermark=0, high_watermark=0)) as cache:

        async def insert(number: int) -> None:
            await cache.insert(InsertParams(RadixKey(np.array([number, 1], np.int32)), allocator.alloc(2)))

        for number in range(num_leaves):
            await insert(number)
        for number in range(num_leaves, num_leaves + 32 * ROUNDS, 32):
            began = time.perf_counter()
            await cache.evict(EvictParams(64))
            seconds.append(time.perf_counter() - began)
            for fresh in range(number, number + 32):
                await insert(fresh)
        cache.check()
    return {"leaves": num_leaves, "evict_us": statistics.median(seconds) * 1e6}


def measure() -> dict[str, Any]:
    """Medians for narrow and wide trees; takes some seconds."""
    rows = [anyio.run(_time, count) for count in LEAF_COUNTS]
    return {"bench": "eviction", "rows": rows, "widest_over_narrowest": rows[-1]["evict_us"] / rows[0]["evict_us"]}


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{row['leaves']:>8,} {row['evict_us']:>9.1f}" for row in found["rows"]]
    return "\n".join([f"{'leaves':>8} {'evict us':>9}", *lines, f"ratio {found['widest_over_narrowest']:.2f}"])


def draw(found: dict[str, Any], path: Path) -> None:
    """The cost over the number of leaves. Needs matplotlib."""
    figure, axis = pyplot().subplots(figsize=(6, 3), layout="constrained")
    rows = found["rows"]
    axis.plot([row["leaves"] for row in rows], [row["evict_us"] for row in rows], marker="o")
    axis.set(xscale="log", ylim=0, xlabel="leaves", ylabel="us to evict 64 tokens")
    save(figure, path)
