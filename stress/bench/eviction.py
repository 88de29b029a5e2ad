"""What evicting costs as the tree gets wider: 64 tokens out, 64 in, over the number of leaves.

Leaves of 2 tokens below one root, LRU, whole leaves go. The trees of all sizes stand at the same time and are evicted
from in turn. `cache` is `await cache.evict(...)`, tree, slots and all; `core` is the tree alone. `shuffled` leaves were
used in another order than they were made in, so that each victim lies somewhere else in memory; the others go in the
order they came. SGLang's caches do the same through their own call, up to a number of leaves at which each eviction
takes too long to wait for.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np

from aradix import CacheInitParams, EvictParams, InsertParams, RadixCache, RadixKey, SlotAllocator
from aradix.tree import core_name, make_core
from stress.bench.pairs import median_ratio, quiet
from stress.bench.peers import PeerMissing
from stress.bench.peers.sglang_release import SGLangCache, load_sglang
from stress.bench.plots import line_figure

__all__ = ["ABOUT", "draw", "measure", "measure_long", "table"]

ABOUT = "evicting 64 tokens, over the number of leaves"

SIZES = (5_000, 50_000, 500_000)
ROUNDS = 400
PEER_ROUNDS = 20
AT_MOST = 1.5

Sample = Callable[[], Awaitable[float]]
"""Evicts 64 tokens, gives the seconds that took, and puts 64 others in."""


def _key(number: int) -> RadixKey:
    return RadixKey(np.array([number, 1], np.int32))


async def _cache(num_leaves: int, exits: AsyncExitStack) -> Sample:
    allocator = SlotAllocator(2 * num_leaves + 64)
    params = CacheInitParams(allocator, low_watermark=0, high_watermark=0)
    cache = await exits.enter_async_context(RadixCache(params))
    numbers = iter(range(2**30))

    async def insert(count: int) -> None:
        for _ in range(count):
            await cache.insert(InsertParams(_key(next(numbers)), allocator.alloc(2)))

    async def sample() -> float:
        began = time.process_time()
        await cache.evict(EvictParams(64))
        seconds = time.process_time() - began
        await insert(32)
        return seconds

    await insert(num_leaves)
    return sample


async def _core(which: Literal["python", "cpp"], num_leaves: int, shuffled: bool = False) -> Sample:
    core = make_core(which, policy="lru", page_size=1)
    numbers = iter(range(2**30))
    slots = np.arange(2)

    def insert(count: int) -> None:
        for _ in range(count):
            core.insert(_key(next(numbers)), slots)

    async def sample() -> float:
        began = time.process_time()
        core.evict(64)
        seconds = time.process_time() - began
        insert(32)
        return seconds

    insert(num_leaves)
    if shuffled:
        for number in random.Random(1).sample(range(num_leaves), num_leaves):
            core.match(_key(number))
    return sample


async def _sglang(sglang: Any, which: Literal["rust", "python"], num_leaves: int) -> Sample:
    cache = SGLangCache(sglang, which, 1, 2 * num_leaves + 64)
    numbers = iter(range(2**30))

    def insert(count: int) -> None:
        for _ in range(count):
            cache.put(SGLangCache.packed([next(numbers), 1]))

    async def sample() -> float:
        began = time.process_time()
        cache.evict(64)
        seconds = time.process_time() - began
        insert(32)
        return seconds

    insert(num_leaves)
    return sample


async def _measure(sglang: Any, cache_sizes: tuple[int, ...], peer_sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    sides: dict[str, dict[int, Sample]] = {}
    async with AsyncExitStack() as exits:
        sides[f"aradix cache, {core_name()}"] = {size: await _cache(size, exits) for size in cache_sizes}
        if core_name() == "cpp":
            sides["aradix core, cpp"] = {size: await _core("cpp", size) for size in SIZES}
            sides["aradix core, cpp, shuffled"] = {size: await _core("cpp", size, shuffled=True) for size in SIZES}
        sides["aradix core, python"] = {size: await _core("python", size) for size in SIZES[:-1]}
        if sglang is not None:
            sides["SGLang rust"] = {size: await _sglang(sglang, "rust", size) for size in peer_sizes}
            sides["SGLang python"] = {size: await _sglang(sglang, "python", size) for size in peer_sizes}
        rows = []
        for name, samples in sides.items():
            taken: dict[int, list[float]] = {size: [] for size in samples}
            for _ in range(PEER_ROUNDS if name.startswith("SGLang") else ROUNDS):
                for size, sample in samples.items():
                    taken[size].append(await sample())
            rows += [
                {
                    "side": name,
                    "leaves": size,
                    "evict_us": statistics.median(seconds) * 1e6,
                    "over_narrowest": median_ratio(seconds, taken[min(taken)]),
                }
                for size, seconds in taken.items()
            ]
    return rows


def _run(cache_sizes: tuple[int, ...], peer_sizes: tuple[int, ...]) -> dict[str, Any]:
    skipped = []
    sglang = None
    try:
        sglang = load_sglang()
    except PeerMissing as missing:
        skipped.append(str(missing))
    with quiet():
        rows = anyio.run(_measure, sglang, cache_sizes, peer_sizes)
    return {"bench": "eviction", "rows": rows, "at_most": AT_MOST, "skipped": skipped}


def measure() -> dict[str, Any]:
    """Medians for narrow and wide trees; takes some seconds."""
    return _run(SIZES[:-1], SIZES[:1])


def measure_long() -> dict[str, Any]:
    """With the whole cache at all sizes, and wider trees of the peers; takes a minute or two."""
    return _run(SIZES, SIZES[:-1])


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'':<26} {'leaves':>8} {'evict us':>10} {'ratio':>6}"]
    lines += [
        f"{row['side']:<26} {row['leaves']:>8,} {row['evict_us']:>10.1f} {row['over_narrowest']:>6.2f}"
        for row in found["rows"]
    ]
    lines.append(f"ratio: over the narrowest of the same side, of ours at most {found['at_most']}; processor time")
    return "\n".join([*lines, *found["skipped"]])


def draw(found: dict[str, Any], path: Path) -> None:
    """The cost over the number of leaves. Needs matplotlib."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in found["rows"]:
        xs, ys = series.setdefault(row["side"], ([], []))
        xs.append(row["leaves"])
        ys.append(row["evict_us"])
    line_figure(path, series, x="leaves", y="us to evict 64 tokens", y_scale="log")
