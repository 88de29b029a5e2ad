"""A task in a tight loop leaves the others their turn, whatever it calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aradix import EvictParams, InsertParams, MatchPrefixParams, RadixCache
from tests.cache.acts import entered, filled, key
from tests.support.caches import opened

pytestmark = pytest.mark.anyio

BOUND = 1000
"""Iterations of one task within which another must have had a turn."""
HOT = key(range(8))


async def lease(cache: RadixCache) -> None:
    async with cache.lease(HOT):
        pass


async def lease_and_allocate(cache: RadixCache) -> None:
    async with cache.lease(HOT) as held:
        await held.allocate(2)


async def reserve(cache: RadixCache) -> None:
    async with cache.lease(HOT, reserve=10):
        pass


async def match(cache: RadixCache) -> None:
    await cache.match_prefix(MatchPrefixParams(HOT))


async def insert(cache: RadixCache) -> None:
    slots = cache._params.allocator.alloc(8)
    if slots is not None:
        done = await cache.insert(InsertParams(HOT, slots))
        cache._params.allocator.free(done.duplicates)


async def evict(cache: RadixCache) -> None:
    await cache.evict(EvictParams(1))


async def flush(cache: RadixCache) -> None:
    await cache.flush()


async def exclusive(cache: RadixCache) -> None:
    async with cache.exclusive(HOT):
        pass


CALLS = [lease, lease_and_allocate, reserve, match, insert, evict, flush, exclusive]


@pytest.mark.parametrize("call", CALLS, ids=[call.__name__ for call in CALLS])
async def test_a_tight_loop_of_calls_lets_other_tasks_run(call: Callable[[RadixCache], Awaitable[None]]) -> None:
    async with opened(32) as cache, anyio.create_task_group() as tasks:
        await filled(cache, HOT)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await checkpoint()

        tasks.start_soon(other)
        for _ in range(4):
            before = turns
            for _ in range(BOUND):
                await call(cache)
                if turns > before:
                    break
            assert turns > before
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("hog", [lease, lease_and_allocate, match], ids=["lease", "allocate", "match"])
@pytest.mark.parametrize("wanting", CALLS, ids=[call.__name__ for call in CALLS])
async def test_others_get_at_a_hot_subtree_within_a_bounded_number_of_iterations(
    hog: Callable[[RadixCache], Awaitable[None]], wanting: Callable[[RadixCache], Awaitable[None]]
) -> None:
    async with opened(32) as cache, anyio.create_task_group() as tasks:
        await filled(cache, HOT)
        done = 0

        async def want() -> None:
            nonlocal done
            for _ in range(3):
                await wanting(cache)
                done += 1

        tasks.start_soon(want)
        for _ in range(10 * BOUND):
            await hog(cache)
            if done == 3:
                break
        assert done == 3


async def test_an_evictor_works_beside_a_hot_loop() -> None:
    async with opened(32, low_watermark=0.5, high_watermark=0.5) as cache:
        await filled(cache, HOT)
        await filled(cache, key(range(50, 68)))
        for _ in range(BOUND):
            await lease(cache)
            if cache.stats().free >= 16:
                break
        assert cache.stats().free == 16


async def test_a_whole_owner_of_the_loop_cannot_keep_a_subtree_from_an_exclusive_that_waits() -> None:
    async with opened(32) as cache, anyio.create_task_group() as tasks:
        await filled(cache, HOT)
        held = await entered(cache, HOT)
        got = anyio.Event()

        async def want() -> None:
            async with cache.exclusive(HOT):
                got.set()

        tasks.start_soon(want)
        for _ in range(BOUND):
            # Another lease is always taken before the last one ends: without a gate the subtree would never be free.
            if got.is_set():
                break
            with anyio.CancelScope() as scope:
                scope.deadline = anyio.current_time() + 3600
                following: list[object] = []

                async def follow() -> None:
                    following.append(await entered(cache, HOT))  # noqa: B023

                tasks.start_soon(follow)
                await checkpoint()
                await checkpoint()
            held.release()
            await checkpoint()
            await checkpoint()
            await checkpoint()
            if following:
                held = following.pop()  # type: ignore[assignment]
        assert got.is_set()
        for _ in range(10):
            await checkpoint()
        if following:
            held = following.pop()  # type: ignore[assignment]
        held.release()
