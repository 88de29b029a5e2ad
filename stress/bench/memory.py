"""Bytes of resident memory a cached token, and whether anything grows as prompts come and go.

Each figure is a process of its own, which looks at its resident set after the first million cached tokens and after two
million more, so that what Python and torch take is not counted. Prompts are new, of 256 tokens. `cache` counts the
slot allocator too, `core` is the tree alone. Growth is what the resident set gains over the cycles after the first
tenth: a prompt of 64 tokens in, 64 tokens out, with 1,000 prompts resident.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np

from aradix import CacheInitParams, EvictParams, InsertParams, RadixCache, RadixKey, SlotAllocator
from aradix.tree import core_name, make_core
from stress.bench.plots import pyplot, save

__all__ = ["ABOUT", "draw", "measure", "measure_long", "table"]

ABOUT = "bytes of resident memory a cached token, and growth over insert/evict cycles"

PAGE_SIZES = (1, 16)
FIRST_TOKENS = 1 << 20
MORE_TOKENS = 2 << 20
PROMPT_TOKENS = 256
CYCLE_TOKENS = 64
RESIDENT_PROMPTS = 1_000
CYCLES = {"core": 200_000, "cache": 20_000}
LONG_CYCLES = {"core": 10_000_000, "cache": 1_000_000}
AT_MOST = 8.0

_STATM = Path("/proc/self/statm")

Core = Literal["python", "cpp"]


def _resident() -> int:
    """The resident set, in bytes."""
    gc.collect()
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def _new_keys(num_tokens: int) -> Iterator[RadixKey]:
    """Keys that nobody saw before: each has its number in front, and tokens that do not repeat."""
    number = 0
    tail = np.arange(num_tokens - 2, dtype=np.int32)
    while True:
        tokens = np.concatenate((np.array([number >> 16, number & 0xFFFF], np.int32), tail + number % 1000))
        yield RadixKey(tokens)
        number += 1


class _CoreSide:
    """The tree alone."""

    def __init__(self, core: Core, page_size: int) -> None:
        self._core = make_core(core, policy="lru", page_size=page_size)
        self._next_slot = page_size

    async def insert(self, key: RadixKey) -> None:
        slots = np.arange(self._next_slot, self._next_slot + len(key))
        self._next_slot = (self._next_slot + len(key)) % (1 << 24)
        self._core.insert(key, slots)

    async def evict(self, num_tokens: int) -> None:
        self._core.evict(num_tokens)


class _CacheSide:
    """The whole cache."""

    def __init__(self, cache: RadixCache, allocator: SlotAllocator) -> None:
        self._cache, self._allocator = cache, allocator

    async def insert(self, key: RadixKey) -> None:
        slots = self._allocator.alloc(len(key))
        await self._cache.insert(InsertParams(key, slots))

    async def evict(self, num_tokens: int) -> None:
        await self._cache.evict(EvictParams(num_tokens))


async def _with(side: str, core: Core, page_size: int, num_slots: int, what: Any) -> Any:
    if side == "core":
        return await what(_CoreSide(core, page_size))
    allocator = SlotAllocator(num_slots, page_size)
    params = CacheInitParams(allocator, page_size, low_watermark=0, high_watermark=0, tree_core=core)
    async with RadixCache(params) as cache:
        return await what(_CacheSide(cache, allocator))


def _bytes_a_token(side: str, core: Core, page_size: int) -> float:
    async def fill(target: _CoreSide | _CacheSide) -> float:
        keys = _new_keys(PROMPT_TOKENS)
        seen = []
        for num_tokens in (FIRST_TOKENS, MORE_TOKENS):
            for _ in range(num_tokens // PROMPT_TOKENS):
                await target.insert(next(keys))
            seen.append(_resident())
        return (seen[1] - seen[0]) / MORE_TOKENS

    return float(anyio.run(_with, side, core, page_size, FIRST_TOKENS + MORE_TOKENS, fill))


def _growth(side: str, core: Core, page_size: int, num_cycles: int) -> float:
    async def go_round(target: _CoreSide | _CacheSide) -> float:
        # Made beforehand, and so many that none is resident when it comes again.
        keys = cycle(list(islice(_new_keys(CYCLE_TOKENS), 4 * RESIDENT_PROMPTS)))
        for _ in range(RESIDENT_PROMPTS):
            await target.insert(next(keys))

        async def turn(count: int) -> int:
            for _ in range(count):
                await target.evict(CYCLE_TOKENS)
                await target.insert(next(keys))
            return _resident()

        before = await turn(num_cycles // 10)
        return await turn(num_cycles - num_cycles // 10) - before

    return float(anyio.run(_with, side, core, page_size, (RESIDENT_PROMPTS + 1) * CYCLE_TOKENS, go_round))


@contextmanager
def _fresh_processes() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, max_tasks_per_child=1) as processes:
        yield processes


def _run(cycles: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {"bench": "memory", "tokens": MORE_TOKENS, "at_most": AT_MOST, "rows": [], "growth": []}
    if not _STATM.exists():
        return {**found, "skipped": [f"memory is skipped: there is no {_STATM} here"]}
    cores: list[Core] = ["cpp", "python"] if core_name() == "cpp" else ["python"]
    with _fresh_processes() as processes:
        for core in cores:
            for side in ("core", "cache") if core == cores[0] else ("core",):
                for page_size in PAGE_SIZES:
                    taken = processes.submit(_bytes_a_token, side, core, page_size).result()
                    found["rows"].append({"side": side, "core": core, "page_size": page_size, "bytes_a_token": taken})
        for side, num_cycles in cycles.items():
            grown = processes.submit(_growth, side, cores[0], PAGE_SIZES[-1], num_cycles).result()
            found["growth"].append({"side": side, "core": cores[0], "cycles": num_cycles, "grown_bytes": grown})
    return {**found, "skipped": []}


def measure() -> dict[str, Any]:
    """Bytes a token of both cores, and growth over a few cycles; takes some ten seconds."""
    return _run(CYCLES)


def measure_long() -> dict[str, Any]:
    """The same with ten million cycles of the tree and a million of the cache; takes minutes."""
    return _run(LONG_CYCLES)


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'':<16} " + "".join(f"{f'page {size}':>9}" for size in PAGE_SIZES) + "  bytes a cached token"]
    cells = {(row["core"], row["side"], row["page_size"]): row["bytes_a_token"] for row in found["rows"]}
    for core, side in dict.fromkeys((row["core"], row["side"]) for row in found["rows"]):
        texts = [f"{cells[core, side, size]:>9.2f}" for size in PAGE_SIZES]
        lines.append(f"{core + ' ' + side:<16} " + "".join(texts))
    lines.append(f"at most {found['at_most']:g} for the compiled core at page size {PAGE_SIZES[-1]}")
    lines += [
        f"{row['core']} {row['side']}: {row['cycles']:,} insert/evict cycles leave {row['grown_bytes']:+,.0f} bytes"
        for row in found["growth"]
    ]
    return "\n".join([*lines, *found["skipped"]])


def draw(found: dict[str, Any], path: Path) -> None:
    """Bytes a cached token, by core and page size. Needs matplotlib."""
    figure, axis = pyplot().subplots(figsize=(6, 2.6), layout="constrained")
    rows = found["rows"]
    names = [f"{row['core']} {row['side']}, page {row['page_size']}" for row in rows]
    values = [row["bytes_a_token"] for row in rows]
    colours = ["#2463eb" if row["core"] == "cpp" else "#8a909c" for row in rows]
    bars = axis.barh(names, values, color=colours)
    axis.bar_label(bars, [f"{value:.1f}" for value in values], padding=4, fontsize=9)
    axis.set_title("bytes of resident memory a cached token", fontsize=10, loc="left")
    axis.margins(x=0.15)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(axis="x", bottom=False, labelbottom=False)
    axis.invert_yaxis()
    save(figure, path)
