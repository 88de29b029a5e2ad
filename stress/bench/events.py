"""What recording KV events costs a turn of a chat, up to where a sink has them, and what is done with them after that.

The load is that of `chats.py`, at page sizes 1 and 16, on the compiled core: each turn stores 256 tokens, and evicts as
many once the pool is full. The loop comes round after each turn of a chat, so each has a delivery of its own. Sides:

- off: no events;
- sink: recorded, and handed to a sink that drops them, as one does that hands them to a thread;
- late: the same, but they may wait for a millisecond, and come together;
- read: recorded, and looked at in the sink each turn: the pages are hashed there and then;
- published: late, and a thread hashes, cuts, encodes and sends; there is no reader.

The last two, which go through the memory of all that was recorded, are played after the others and not between them,
against a side without events of their own.

Two times are told of each: of the loop's thread, which is what a turn pays, and of all threads of the process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import anyio
from anyio.lowlevel import checkpoint

from aradix import CacheInitParams, RadixCache, RadixKey, SlotAllocator
from aradix.events import KVCacheEvent
from aradix.observe import KVEventPublisher
from aradix.tree import core_name
from stress.bench.chats import NUM_SLOTS, Turn, chat_turns
from stress.bench.pairs import median_ratio, quiet
from stress.bench.plots import pyplot, save

__all__ = ["ABOUT", "draw", "measure", "table"]

ABOUT = "what recording and publishing KV events costs a turn"

PAGE_SIZES = (1, 16)
STRETCH = 100
NUM_RUNS = 3
AT_MOST = 0.15
DELAY = 0.001

Side = Literal["off", "sink", "late", "read", "published"]
GROUPS: tuple[tuple[Side, ...], ...] = (("off", "sink", "late"), ("off", "read", "published"))
SIDES: tuple[Side, ...] = ("sink", "late", "read", "published")
THREADS = ("loop", "all")


class _Player:
    """A cache of ours, open on the running loop, and its part of the load."""

    def __init__(self, side: Side, page_size: int) -> None:
        self._side = side
        self.num_events = 0
        self._cache = RadixCache(
            CacheInitParams(
                SlotAllocator(NUM_SLOTS, page_size),
                page_size,
                low_watermark=0,
                high_watermark=0,
                enable_kv_cache_events=side != "off",
            )
        )
        self._publisher: KVEventPublisher | None = None

    async def open(self, exits: AsyncExitStack) -> None:
        await exits.enter_async_context(self._cache)
        if self._side in ("sink", "late"):
            self._cache.add_event_sink(self._take, delay=DELAY if self._side == "late" else 0)
        elif self._side == "read":
            self._cache.add_event_sink(self._read)
        elif self._side == "published":
            self._publisher = KVEventPublisher(self._cache, "inproc://aradix-bench-events", delay=DELAY)
            await exits.enter_async_context(self._publisher)

    def _take(self, events: Sequence[KVCacheEvent]) -> None:
        self.num_events += len(events)

    def _read(self, events: Sequence[KVCacheEvent]) -> None:
        self.num_events += sum(1 for _ in events)

    async def play(self, turns: list[Turn]) -> None:
        cache = self._cache
        for turn in turns:
            tokens = turn.tokens
            async with cache.lease(RadixKey(tokens[: turn.num_prompt])) as lease:
                await lease.allocate(len(tokens) - lease.num_matched)
                lease.commit(RadixKey(tokens))
            await checkpoint()

    async def catch_up(self) -> None:
        """Wait until the thread has done all that was recorded."""
        if self._publisher is not None:
            await self._publisher.sent()

    def check(self) -> None:
        self._cache.check()
        if self._publisher is not None and self._publisher.num_dropped:
            raise AssertionError(f"{self._publisher.num_dropped} turns were dropped")


async def _play(turns: list[Turn], page_size: int, sides: tuple[Side, ...]) -> dict[tuple[str, Side], list[float]]:
    """The load once on each of some sides, some turns of each side at a time: seconds of each such stretch."""
    players = {side: _Player(side, page_size) for side in sides}
    taken: dict[tuple[str, Side], list[float]] = {(threads, side): [] for threads in THREADS for side in sides}
    async with AsyncExitStack() as exits:
        for player in players.values():
            await player.open(exits)
        for number, begin in enumerate(range(0, len(turns), STRETCH)):
            for side in sides if number % 2 == 0 else sides[::-1]:
                began, loop_began = time.process_time(), time.thread_time()
                await players[side].play(turns[begin : begin + STRETCH])
                taken["loop", side].append(time.thread_time() - loop_began)
                await players[side].catch_up()
                taken["all", side].append(time.process_time() - began)
        for player in players.values():
            player.check()
    return taken


def measure() -> dict[str, Any]:
    """Microseconds of processor time a turn on each side, and what events add; takes some seconds."""
    turns = chat_turns()
    rows = []
    with quiet():
        for page_size in PAGE_SIZES:
            runs = {sides: [anyio.run(_play, turns, page_size, sides) for _ in range(NUM_RUNS)] for sides in GROUPS}
            for threads in THREADS:
                row: dict[str, Any] = {"page_size": page_size, "threads": threads}
                for sides in reversed(GROUPS):  # of what both have, the first one's counts
                    taken = {side: [seconds for run in runs[sides] for seconds in run[threads, side]] for side in sides}
                    for side in sides:
                        row[f"{side}_us"] = statistics.median(taken[side]) / STRETCH * 1e6
                        row[f"{side}_adds"] = median_ratio(taken[side], taken["off"]) - 1
                rows.append(row)
    return {"bench": "events", "core": core_name(), "turns": len(turns), "at_most": AT_MOST, "rows": rows}


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'page':>4} {'threads':>8} {'off us':>8}" + "".join(f"{f'{side} us':>13} {'adds':>6}" for side in SIDES)]
    for row in found["rows"]:
        sides = "".join(f"{row[f'{side}_us']:>13.1f} {row[f'{side}_adds']:>6.0%}" for side in SIDES)
        lines.append(f"{row['page_size']:>4} {row['threads']:>8} {row['off_us']:>8.1f}" + sides)
    lines.append(
        f"{found['core']} core, processor time of the loop's thread and of all; "
        f"to the loop, late may add {found['at_most']:.0%} at most"
    )
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """Microseconds of the loop's thread a turn on each side. Needs matplotlib."""
    figure, axis = pyplot().subplots(figsize=(6, 2.6), layout="constrained")
    rows = [row for row in found["rows"] if row["threads"] == "loop"]
    labels = [f"page {row['page_size']}, {side}" for row in rows for side in ("off", *SIDES)]
    bars = axis.barh(labels, [row[f"{side}_us"] for row in rows for side in ("off", *SIDES)])
    axis.bar_label(bars, fmt="%.1f us", padding=4)
    axis.invert_yaxis()
    axis.margins(x=0.2)
    save(figure, path)
