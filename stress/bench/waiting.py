"""What a hand-over costs as more tasks wait: each waits for the slots of a pool that is out, and passes them on.

N tasks wait for the one page there is; the holder gives it back, and each who gets it does so at once. The time is from
that moment until the last one had it, divided by N. `admission` waits in `lease(key, reserve=n)`, `growth` in
`lease.allocate(n)`. Beside them the two ways an engine does it by hand: a queue of its own, `asyncio.Semaphore`, which
keeps no slots and is the floor; and waking everybody to look again, `asyncio.Condition.notify_all`, which grows with
the square of N.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from aradix import CacheInitParams, RadixCache, RadixKey, SlotAllocator
from stress.bench.pairs import quiet
from stress.bench.plots import line_figure

__all__ = ["ABOUT", "draw", "measure", "table"]

ABOUT = "a hand-over of slots, over the number of tasks that wait"

COUNTS = (10, 100, 1_000, 10_000)
MOST_WOKEN = 1_000
PAGE_SIZE = 16
LEAST_HANDOVERS = 2_000


async def _cache_side(num_tasks: int, grows: bool) -> float:
    allocator = SlotAllocator(PAGE_SIZE, PAGE_SIZE)
    key = RadixKey(range(PAGE_SIZE))
    served = 0
    async with RadixCache(CacheInitParams(allocator, PAGE_SIZE, low_watermark=0, high_watermark=0)) as cache:

        async def wait() -> None:
            nonlocal served
            if grows:
                async with cache.lease(key) as lease:
                    await lease.allocate(PAGE_SIZE)
                    served += 1
            else:
                async with cache.lease(key, reserve=PAGE_SIZE):
                    served += 1

        holder = cache.lease(key)
        await holder.__aenter__()
        await holder.allocate(PAGE_SIZE)
        async with anyio.create_task_group() as tasks:
            for _ in range(num_tasks):
                tasks.start_soon(wait)
            while cache.stats().num_slot_waiters < num_tasks:
                await checkpoint()
            began = time.process_time()
            holder.release()
        seconds = time.process_time() - began
        cache.check()
    assert served == num_tasks
    return seconds


async def _semaphore_side(num_tasks: int) -> float:
    semaphore = asyncio.Semaphore(0)
    waiting = 0

    async def wait() -> None:
        nonlocal waiting
        waiting += 1
        async with semaphore:
            pass

    async with anyio.create_task_group() as tasks:
        for _ in range(num_tasks):
            tasks.start_soon(wait)
        while waiting < num_tasks:
            await checkpoint()
        began = time.process_time()
        semaphore.release()
    return time.process_time() - began


async def _condition_side(num_tasks: int) -> float:
    condition = asyncio.Condition()
    free, waiting = 0, 0

    async def wait() -> None:
        nonlocal free, waiting
        async with condition:
            waiting += 1
            while not free:
                await condition.wait()
            free -= 1
        async with condition:
            free += 1
            condition.notify_all()

    async with anyio.create_task_group() as tasks:
        for _ in range(num_tasks):
            tasks.start_soon(wait)
        while waiting < num_tasks:
            await checkpoint()
        began = time.process_time()
        async with condition:
            free += 1
            condition.notify_all()
    return time.process_time() - began


SIDES: dict[str, Callable[[int], Awaitable[float]]] = {
    "aradix growth": lambda num_tasks: _cache_side(num_tasks, grows=True),
    "aradix admission": lambda num_tasks: _cache_side(num_tasks, grows=False),
    "Semaphore": _semaphore_side,
    "notify_all": _condition_side,
}


async def _measure() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for num_tasks in COUNTS:
        sides = [name for name in SIDES if name != "notify_all" or num_tasks <= MOST_WOKEN]
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(max(1 if num_tasks == COUNTS[-1] else 3, LEAST_HANDOVERS // num_tasks)):
            for name in sides:
                if name != "notify_all" or num_tasks < MOST_WOKEN or not taken[name]:
                    taken[name].append(await SIDES[name](num_tasks) / num_tasks)
        rows += [
            {"side": name, "tasks": num_tasks, "handover_us": statistics.median(taken[name]) * 1e6} for name in sides
        ]
    least = {row["side"]: row["handover_us"] for row in rows if row["tasks"] == COUNTS[1]}
    for row in rows:
        row["over_hundred"] = row["handover_us"] / least[row["side"]]
    return rows


def measure() -> dict[str, Any]:
    """The cost of a hand-over for each number of tasks; takes some ten seconds."""
    with quiet():
        rows = anyio.run(_measure)
    return {"bench": "waiting", "rows": rows}


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'':<18} {'tasks':>7} {'hand-over us':>13} {'ratio':>6}"]
    lines += [
        f"{row['side']:<18} {row['tasks']:>7,} {row['handover_us']:>13.1f} {row['over_hundred']:>6.2f}"
        for row in sorted(found["rows"], key=lambda row: str(row["side"]))
    ]
    lines.append("ratio: over that with 100 tasks; processor time, the tasks' own ends and the loop's work with it")
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """The cost over the number of tasks. Needs matplotlib."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in found["rows"]:
        xs, ys = series.setdefault(row["side"], ([], []))
        xs.append(row["tasks"])
        ys.append(row["handover_us"])
    line_figure(path, series, x="tasks that wait", y="us a hand-over", y_scale="log")
