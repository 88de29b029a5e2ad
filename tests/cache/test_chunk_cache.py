"""`ChunkCache`, and `disable=True`: the same waiting, nothing shared."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aradix import (
    CacheInitParams,
    ChunkCache,
    EvictParams,
    FlushResult,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    SlotAllocator,
)
from aradix.errors import OutOfSlotsError, RetractError, UsageError
from stress.device import VirtualDevice
from tests.cache.acts import begin, entered, key, settled
from tests.support.caches import opened

pytestmark = pytest.mark.anyio

WAYS: list[dict[str, Any]] = [{"cache_class": ChunkCache}, {"disable": True}]


@pytest.mark.parametrize("way", WAYS, ids=["ChunkCache", "disable"])
async def test_it_matches_nothing_publishes_nothing_and_frees_all(way: dict[str, Any]) -> None:
    async with opened(16, 4, **way) as cache:
        for _ in range(2):
            async with cache.lease(key(range(9)), reserve=9) as lease:
                assert lease.num_matched == 0
                assert len(lease.slots) == 9
                done = lease.commit(key(range(9)))
                assert done.num_adopted == 0
                assert done.duplicates.tolist() == []
                await lease.allocate(1)
                lease.commit(key(range(10)))
                assert cache.peek(key(range(9))) == 0
                assert len(lease.slots) == 10
                lease.truncate(5)
                fork = lease.fork()
                assert fork.slots.tolist() == []
                fork.release()
            assert cache.stats().free == 16
        assert cache.stats().num_namespaces == 0
        assert cache.stats().queries == 2
        assert await cache.flush() == FlushResult(0, 0)
        assert (await cache.evict(EvictParams(4))).num_freed_tokens == 0


@pytest.mark.parametrize("way", WAYS, ids=["ChunkCache", "disable"])
async def test_waiting_is_the_same(way: dict[str, Any]) -> None:
    async with opened(8, **way) as cache, anyio.create_task_group() as tasks:
        one = await entered(cache, key(range(4)), 4)
        two = await entered(cache, key(range(4)), 4)
        waiting = await begin(tasks, one.allocate, 1)
        with pytest.raises(OutOfSlotsError):
            two.allocate_nowait(1)
        with pytest.raises(RetractError):
            await two.allocate(1)
        admission = await begin(tasks, cache.lease(key(range(4)), reserve=3).__aenter__)
        two.release()
        await settled()
        assert waiting.returned
        assert admission.returned
        one.release()
        admission.value.release()


@pytest.mark.parametrize("way", WAYS, ids=["ChunkCache", "disable"])
async def test_the_low_level_calls_hand_back_what_they_get(way: dict[str, Any]) -> None:
    allocator = SlotAllocator(8)
    async with opened(allocator=allocator, **way) as cache:
        slots = allocator.alloc(4)
        assert slots is not None
        done = await cache.insert(InsertParams(key(range(4)), slots))
        assert done.duplicates.tolist() == slots.tolist()
        match = await cache.match_prefix(MatchPrefixParams(key(range(4))))
        assert match.device_indices.tolist() == []
        assert cache.inc_lock_ref(match.last_device_node) == 0
        assert cache.dec_lock_ref(match.last_device_node) == 0
        async with cache.exclusive(key(range(4))) as mine:
            assert mine.num_matched == 0
        allocator.free(done.duplicates)


async def test_fencing_is_the_same() -> None:
    device = VirtualDevice()
    stream = device.stream()
    allocator = SlotAllocator(8, event_factory=device.event)
    async with opened(allocator=allocator, cache_class=ChunkCache, streams=(stream,)) as cache:
        lease = await entered(cache, key(range(4)), 4)
        stream.launch(lease.slots)
        lease.release()
        assert cache.stats().fenced == 4
        device.run_until_idle()
        allocator.reclaim()
        assert cache.stats().free == 8


async def test_both_take_params_and_nothing_else() -> None:
    for cache_class in (ChunkCache, RadixCache):
        with pytest.raises(UsageError, match="CacheInitParams"):
            cache_class(SlotAllocator(8))  # type: ignore[arg-type]
    params = CacheInitParams(allocator=SlotAllocator(8))
    ChunkCache(params)
    assert params.disable is False
