"""Calls that are odd, and must either work or be refused with nothing lost."""

from __future__ import annotations

import gc
from typing import Any

import anyio
import numpy as np
import pytest

from aradix import CacheInitParams, InsertParams, RadixCache, RadixKey, SlotAllocator
from aradix.errors import InvalidKeyError, UsageError
from tests.support.caches import idle_sum, opened

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("priority", ["high", None, 1.5, True])
async def test_a_priority_that_is_no_int_is_refused_before_anything_changes(priority: Any) -> None:
    async with opened(16) as cache:
        slots = cache._params.allocator.alloc(4)
        with pytest.raises(UsageError, match="priority"):
            await cache.insert(InsertParams(RadixKey(range(4)), slots, priority=priority))
        with pytest.raises(UsageError, match="priority"):
            cache.lease(RadixKey(range(4)), priority=priority)
        assert (cache.total_size(), cache.stats().outside) == (0, 4)
        cache._params.allocator.free(slots)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("is_eagle", [False, True])
async def test_after_truncating_other_tokens_may_follow(page_size: int, is_eagle: bool) -> None:
    async with opened(128, page_size, is_eagle=is_eagle) as cache:
        async with cache.lease(RadixKey(range(20))) as lease:
            await lease.allocate(24)
            lease.commit(RadixKey(range(20)))
            rejected = RadixKey([*range(20), 70, 71, 72, 73])
            if lease.node.depth + page_size > 24:
                lease.commit(rejected)  # fills no page more, so it can still be taken back
            lease.truncate(20)
            await lease.allocate(4)
            accepted = RadixKey([*range(20), 90, 91, 92, 93])
            lease.commit(accepted)
            assert lease.key == accepted
        assert cache.peek(accepted) == (24 - is_eagle) // page_size * page_size


async def test_a_view_of_bigrams_is_not_taken_for_tokens() -> None:
    async with opened(16) as cache:
        view = RadixKey([1, 2, 3]).maybe_to_bigram_view(True)
        for refused in (lambda: cache.peek(view), lambda: cache.lease(view)):
            with pytest.raises(InvalidKeyError, match="bigrams"):
                refused()
        async with cache.lease(RadixKey([1, 2, 2, 3])) as lease:
            await lease.allocate(4)
            with pytest.raises(InvalidKeyError, match="bigrams"):
                lease.commit(view)
        assert cache.total_size() == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_leases_dropped_after_their_loop_has_ended_give_everything_back(backend: str) -> None:
    allocator = SlotAllocator(400)
    kept: list[Any] = []

    async def engine() -> None:
        async with RadixCache(CacheInitParams(allocator)) as cache:
            for number in range(100):
                lease = cache.lease(RadixKey([number, *range(3)]))
                await lease.__aenter__()
                await lease.allocate(4)
                if number % 2:
                    lease.commit(RadixKey([number, *range(3)]))
                kept.append(lease)

    anyio.run(engine, backend=backend)
    assert allocator.available_size() == 0
    with pytest.warns(ResourceWarning, match="never released"):
        kept.clear()
        gc.collect()
    assert allocator.available_size() == 400
    allocator.check()


class Owner:
    """An engine's object that gives its slots back when it is collected."""

    def __init__(self, allocator: SlotAllocator, slots: Any) -> None:
        self.allocator, self.slots, self.me = allocator, slots, self

    def __del__(self) -> None:
        self.allocator.retire(self.slots)


class Meddling:
    """A policy that lets the collector loose in the middle of every step."""

    def rank(self, node: Any) -> int:
        gc.collect()
        return int(node.last_access)


async def test_slots_retired_by_a_finaliser_serve_a_waiter_only_after_the_step() -> None:
    async with opened(40, eviction_policy=Meddling()) as cache, anyio.create_task_group() as tasks:
        allocator = cache._params.allocator

        async def wants() -> None:
            async with cache.lease(RadixKey(range(2000, 2040)), reserve=40) as lease:
                assert len(np.unique(lease.slots)) == 40

        async with cache.lease(RadixKey(range(16))) as lease:
            await lease.allocate(16)
            lease.commit(RadixKey(range(16)))
        slots = allocator.alloc(24)
        tasks.start_soon(wants)
        await anyio.wait_all_tasks_blocked()
        assert cache.stats().num_slot_waiters == 1
        gc.disable()
        try:
            Owner(allocator, slots)  # garbage at once, in a cycle: collected in the middle of the step that follows
            async with cache.lease(RadixKey(range(8))) as lease:
                assert lease.num_matched == 8
                assert len(lease.slots) == 8
                cache.check()
        finally:
            gc.enable()
    assert idle_sum(cache) == 40
