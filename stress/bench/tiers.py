"""What a match costs on a subtree whose nodes are being written to the host or loaded from it.

The traffic of the contention figure, through `HiRadixCache`: 256 tasks in 8 namespaces that share a system prompt each,
a device pool too small for all, and copies that take 2 ms each way, on a virtual clock. A match that finds a copy under
way in its own namespace is told apart from one that finds none. A step of the tree takes 5 us of the one thread that
all share, so times are the protocol's own, not the machine's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup

from aradix import CacheInitParams, HiRadixCache, HostKVPool, MatchPrefixParams, Namespace, RadixKey, SlotAllocator
from aradix.errors import RetractError
from aradix.memory.copiers import BookCopier, Job
from aradix.memory.kv_pool import BookKVPool
from aradix.memory.streams import InlineStream
from stress.bench.contention import (
    COMPUTE_SECONDS,
    COPY_SECONDS,
    NUM_NAMESPACES,
    NUM_SLOTS,
    NUM_TASKS,
    PAGE_SIZE,
    REQUESTS_A_TASK,
    Thread,
)
from stress.bench.plots import pyplot, save
from stress.schedules import Scripted, run

__all__ = ["ABOUT", "draw", "measure", "table"]

ABOUT = "p99 of a match while its own subtree is written back or loaded, against one with no copy under way"


class _TimedEvent:
    """Reached so long after it was recorded."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._is_over = False

    def record(self, stream: Any) -> None:
        """The copy before it begins now."""

    def query(self) -> bool:
        return self._is_over

    def when_over(self, callback: Callable[[Any], object]) -> None:
        async def finish() -> None:
            await anyio.sleep(COPY_SECONDS)
            self._is_over = True
            callback(self)

        self._tasks.start_soon(finish)


class _TimedStream(InlineStream):
    def wait_event(self, event: Any) -> None:
        """What the copies wait for takes no time here."""


class _TimedCopier(BookCopier):
    """Copies that take `COPY_SECONDS` of the loop's time."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self.num_copies = 0

    def new_stream(self, name: str) -> InlineStream:
        return _TimedStream()

    def new_event(self) -> Any:
        return _TimedEvent(self._tasks)

    def launch(self, stream: Any, job: Job, layer: int | None) -> None:
        super().launch(stream, job, layer)
        self.num_copies += 1

    def when_done(self, event: Any, callback: Callable[[Any], object]) -> None:
        event.when_over(callback)


class _Run:
    def __init__(self, write_policy: Any) -> None:
        self._write_policy = write_policy
        self._matches: dict[bool, list[float]] = {False: [], True: []}
        self._thread = Thread()

    async def traffic(self) -> dict[str, Any]:
        kv_pool = BookKVPool(NUM_SLOTS, PAGE_SIZE)
        async with anyio.create_task_group() as copies:
            copier = _TimedCopier(copies)
            params = CacheInitParams(
                SlotAllocator(NUM_SLOTS, PAGE_SIZE),
                PAGE_SIZE,
                kv_pool=kv_pool,
                host=HostKVPool(4 * NUM_SLOTS, PAGE_SIZE, kv_pool),
                write_policy=self._write_policy,
                copier=copier,
                clock=anyio.current_time,
            )
            async with HiRadixCache(params) as cache:
                await self._all_tasks(cache)
                await anyio.sleep(4 * COPY_SECONDS)  # for the last copies
                cache.check()
                stats = cache.stats()
        during, otherwise = (sorted(self._matches[busy]) for busy in (True, False))
        return {
            "write_policy": self._write_policy,
            "matches_during_a_copy": len(during),
            "during_p99_us": _p99(during) * 1e6,
            "otherwise_p99_us": _p99(otherwise) * 1e6,
            "slowest_during_us": during[-1] * 1e6 if during else 0.0,
            "copies": copier.num_copies,
            "load_back_tokens": stats.load_back_tokens,
            "backuped_tokens": stats.backuped_tokens,
        }

    async def _all_tasks(self, cache: HiRadixCache) -> None:
        async with anyio.create_task_group() as tasks:
            for seed in range(NUM_TASKS):
                tasks.start_soon(self._task, cache, seed)

    async def _task(self, cache: HiRadixCache, seed: int) -> None:
        chance = random.Random(seed)
        await anyio.sleep(chance.random() * 2 * COMPUTE_SECONDS)
        for _ in range(REQUESTS_A_TASK):
            await self._request(cache, chance)

    async def _request(self, cache: HiRadixCache, chance: random.Random) -> None:
        namespace = Namespace(tenant=str(chance.randrange(NUM_NAMESPACES)))
        prompt = [*range(512), *(1000 + chance.randrange(64) for _ in range(4))]
        prompt += [chance.randrange(100) for _ in range(60)] if chance.random() < 0.5 else []
        key = RadixKey(prompt, namespace)
        is_busy = namespace in cache._tiers.copying()
        asked = anyio.current_time()
        await self._thread.step()
        await cache.match_prefix(MatchPrefixParams(key))
        self._matches[is_busy].append(anyio.current_time() - asked)
        try:
            async with cache.lease(key) as lease:
                await lease.allocate(len(key) - lease.num_matched)
                await anyio.sleep(COMPUTE_SECONDS)
                lease.commit(key)
        except RetractError:
            return


def _p99(times: list[float]) -> float:
    return times[len(times) * 99 // 100] if times else 0.0


def measure() -> dict[str, Any]:
    """Times of matches for each write policy; takes some seconds."""
    rows = [
        run(_Run(policy).traffic, backend="asyncio", chooser=Scripted(()), max_steps=100_000_000).result()
        for policy in ("write_through", "write_back")
    ]
    slowest = max(row["slowest_during_us"] for row in rows)
    return {
        "bench": "tiers",
        "tasks": NUM_TASKS,
        "copy_us": COPY_SECONDS * 1e6,
        "rows": rows,
        "slowest_match_over_a_copy": slowest / (COPY_SECONDS * 1e6),
    }


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    head = (
        f"{'policy':<14} {'copies':>8} {'matches meanwhile':>18} {'p99 us':>8} {'slowest us':>11} {'p99 else us':>12}"
    )
    lines = [
        f"{row['write_policy']:<14} {row['copies']:>8,} {row['matches_during_a_copy']:>18,} "
        f"{row['during_p99_us']:>8,.0f} {row['slowest_during_us']:>11,.0f} {row['otherwise_p99_us']:>12,.0f}"
        for row in found["rows"]
    ]
    return "\n".join([head, *lines])


def draw(found: dict[str, Any], path: Path) -> None:
    """Bars of a match meanwhile, a match otherwise and a copy, as SVG or PNG by the file's ending. Needs matplotlib."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 2.3), layout="constrained")
    row = found["rows"][0]
    names = ["a match, no copy under way", "a match, its subtree being copied", "a copy"]
    bars = axis.barh(names, [row["otherwise_p99_us"], row["during_p99_us"], found["copy_us"]], color="#2463eb")
    axis.bar_label(bars, fmt="{:,.0f}", padding=4, fontsize=9)
    axis.set_xscale("log")
    axis.set_title("p99, us (log)", fontsize=10, loc="left")
    axis.invert_yaxis()
    save(figure, path)
