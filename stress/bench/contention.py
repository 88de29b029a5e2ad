"""What a match costs while subtrees are copied: one global lock, a lock for each child of the root, and leases.

The same requests go three times through the real cache, on a virtual clock with first come, first served order: 256
tasks in 8 namespaces that share a system prompt each, a pool too small for all, and copies of 2 ms (a write-back, a
load-back) on the way. The two locks are put around the cache as engines put them: held over a step and over a copy.
Slots are awaited outside of them, for inside they deadlock. A step of the tree takes 5 us of the one thread that all
share, so times are the protocol's own, not the machine's.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio

from aradix import CacheInitParams, Namespace, RadixCache, RadixKey, SlotAllocator
from aradix.errors import RetractError
from stress.bench.plots import pyplot, save
from stress.schedules import Scripted, run

__all__ = ["ABOUT", "draw", "measure", "table"]

ABOUT = "p99 of a match while subtrees are copied: one lock, a lock a root child, leases"

NUM_TASKS = 256
NUM_NAMESPACES = 8
REQUESTS_A_TASK = 12
NUM_SLOTS = 40_000
PAGE_SIZE = 16
STEP_SECONDS = 5e-6
COPY_SECONDS = 2e-3
COMPUTE_SECONDS = 10e-3
SHARE_COPIED = 0.25


class Locking(Protocol):
    """A protocol under test: what is held over a step of the tree, and over a copy of a subtree."""

    name: str

    def stepping(self, namespace: int) -> Any:
        """Held while the tree is walked or changed."""

    def copying(self, namespace: int) -> Any:
        """Held while a node of this namespace is copied."""


class OneLock:
    name = "one global lock"

    def __init__(self) -> None:
        self._lock = anyio.Lock()

    def stepping(self, namespace: int) -> anyio.Lock:
        return self._lock

    def copying(self, namespace: int) -> anyio.Lock:
        return self._lock


class RootChildLocks:
    name = "a lock a root child"

    def __init__(self) -> None:
        self._locks = [anyio.Lock() for _ in range(NUM_NAMESPACES)]

    def stepping(self, namespace: int) -> anyio.Lock:
        return self._locks[namespace]

    def copying(self, namespace: int) -> anyio.Lock:
        return self._locks[namespace]


class Leases:
    name = "leases (aradix)"

    @asynccontextmanager
    async def stepping(self, namespace: int) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def copying(self, namespace: int) -> AsyncIterator[None]:
        yield


class Thread:
    """The one thread of the event loop: steps take time, and stand in line for it."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def step(self) -> None:
        self._free_at = max(self._free_at, anyio.current_time()) + STEP_SECONDS
        await anyio.sleep_until(self._free_at)


async def _request(
    cache: RadixCache, locking: Locking, thread: Thread, chance: random.Random, matches: list[float]
) -> None:
    namespace = chance.randrange(NUM_NAMESPACES)
    prompt = [*range(512), *(1000 + chance.randrange(64) for _ in range(4))] + [
        chance.randrange(100) for _ in range(60)
    ]
    key = RadixKey(prompt, Namespace(tenant=namespace))
    asked = anyio.current_time()
    lease = cache.lease(key)
    async with locking.stepping(namespace):
        await thread.step()
        await lease.__aenter__()
    matches.append(anyio.current_time() - asked)
    try:
        await lease.allocate(len(key) - lease.num_matched)
        await anyio.sleep(COMPUTE_SECONDS)
        async with locking.stepping(namespace):
            await thread.step()
            lease.commit(key)
        if chance.random() < SHARE_COPIED:
            async with locking.copying(namespace):
                await anyio.sleep(COPY_SECONDS)
    except RetractError:
        return
    finally:
        lease.release()


async def _traffic(make: type[OneLock | RootChildLocks | Leases]) -> dict[str, Any]:
    locking, thread = make(), Thread()
    matches: list[float] = []
    allocator = SlotAllocator(NUM_SLOTS, PAGE_SIZE)
    async with RadixCache(CacheInitParams(allocator, PAGE_SIZE, clock=anyio.current_time)) as cache:

        async def task(seed: int) -> None:
            chance = random.Random(seed)
            await anyio.sleep(chance.random() * 2 * COMPUTE_SECONDS)  # or all would begin in one burst
            for _ in range(REQUESTS_A_TASK):
                await _request(cache, locking, thread, chance, matches)

        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for seed in range(NUM_TASKS):
                tasks.start_soon(task, seed)
        seconds = anyio.current_time() - began
        cache.check()
        stats = cache.stats()
    matches.sort()
    return {
        "protocol": locking.name,
        "requests_per_s": len(matches) / seconds,
        "match_p50_us": matches[len(matches) // 2] * 1e6,
        "match_p99_us": matches[len(matches) * 99 // 100] * 1e6,
        "slot_waits": stats.slot_waits,
        "evicted_tokens": stats.evicted,
    }


def measure() -> dict[str, Any]:
    """Requests per virtual second and the time of a match, for each protocol; takes some seconds."""
    rows = [
        run(_traffic, make, backend="asyncio", chooser=Scripted(()), max_steps=100_000_000).result()
        for make in (OneLock, RootChildLocks, Leases)
    ]
    ours = rows[-1]
    return {
        "bench": "contention",
        "tasks": NUM_TASKS,
        "namespaces": NUM_NAMESPACES,
        "rows": rows,
        "requests_over_one_lock": ours["requests_per_s"] / rows[0]["requests_per_s"],
        "p99_one_lock_over_ours": rows[0]["match_p99_us"] / ours["match_p99_us"],
        "p99_root_child_over_ours": rows[1]["match_p99_us"] / ours["match_p99_us"],
    }


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    head = f"{'protocol':<20} {'requests/s':>11} {'match p50 us':>13} {'match p99 us':>13}"
    lines = [
        f"{row['protocol']:<20} {row['requests_per_s']:>11,.0f} {row['match_p50_us']:>13,.0f} "
        f"{row['match_p99_us']:>13,.0f}"
        for row in found["rows"]
    ]
    return "\n".join([head, *lines])


def draw(found: dict[str, Any], path: Path) -> None:
    """Two bar charts side by side, as SVG or PNG by the file's ending. Needs matplotlib."""
    plt = pyplot()
    names = [row["protocol"] for row in found["rows"]]
    colours = ["#b8bcc4", "#8a909c", "#2463eb"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.3), layout="constrained", sharey=True)
    panels = [("match_p99_us", "p99 of a match, us (log)", "log"), ("requests_per_s", "requests/s", "linear")]
    for axis, (name, title, scale) in zip(axes, panels, strict=True):
        values = [row[name] for row in found["rows"]]
        bars = axis.barh(names, values, color=colours, height=0.62)
        axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=4, fontsize=9)
        axis.set_xscale(scale)
        axis.set_title(title, fontsize=10, loc="left")
        axis.margins(x=0.2)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
        axis.tick_params(axis="y", length=0)
        axis.invert_yaxis()
    axes[1].invert_yaxis()
    save(figure, path)
