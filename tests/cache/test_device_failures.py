"""Events that cannot be recorded, streams that cannot wait: nothing is lost, and the user hears of it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch

from aradix import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    SlotAllocator,
)
from aradix.errors import (
    CacheClosedError,
    CapacityError,
    ConfigError,
    TransferError,
    UsageError,
)
from stress.device import VirtualDevice, VirtualStream
from tests.cache.acts import begin, entered, key, settled
from tests.cache.bench import Bench, computed
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


async def test_an_event_that_cannot_record_is_refused_at_the_door() -> None:
    device = VirtualDevice()
    stream = device.stream()
    for factory in (torch.Event, lambda: 1 / 0):
        allocator = SlotAllocator(4, event_factory=factory)
        with pytest.raises(ConfigError, match="streams"):
            RadixCache(CacheInitParams(allocator=allocator, streams=(stream,)))
    with pytest.raises(ConfigError, match="streams"):
        RadixCache(CacheInitParams(allocator=SlotAllocator(4), streams=(stream,)))


@pytest.mark.parametrize("step", ["commit", "insert"])
async def test_a_ready_event_that_cannot_be_recorded_ends_the_cache(step: str) -> None:
    bench = Bench(8)
    with pytest.RaisesGroup(TransferError, flatten_subgroups=True):
        async with RadixCache(CacheInitParams(allocator=bench.allocator, streams=(bench.a, bench.b))) as cache:
            lease = await entered(cache, key(range(4)), 4)
            outside = bench.allocator.alloc(4)
            assert outside is not None
            bench.events.fail_record = True
            with pytest.raises(TransferError):
                if step == "commit":
                    lease.commit(key(range(4)))
                else:
                    await cache.insert(InsertParams(key(range(4)), outside))
            cache.check()
            assert cache.peek(key(range(4))) == 0  # nobody may read what nobody can wait for
            assert cache.stats().outside == 4
            bench.events.fail_record = False
            lease.release()
            bench.allocator.free(outside)
            await anyio.sleep_forever()
    assert bench.free_now() == 8


@pytest.mark.parametrize("step", ["release", "evict", "truncate", "flush"])
async def test_slots_whose_fence_cannot_be_recorded_go_into_quarantine_and_end_the_cache(step: str) -> None:
    bench = Bench(8)
    with pytest.RaisesGroup(TransferError):
        async with RadixCache(CacheInitParams(allocator=bench.allocator, streams=(bench.a, bench.b))) as cache:
            (await computed(bench, cache, key(range(4)), bench.a)).release()
            lease = await entered(cache, key(range(10, 14)), 4)
            bench.events.fail_record = True
            if step == "release":
                lease.release()  # does not raise
            elif step == "truncate":
                lease.truncate(0)
            elif step == "evict":
                await cache.evict(EvictParams(4))
            else:
                await cache.flush()
            bench.events.fail_record = False
            assert cache.stats().quarantined == 4
            cache.check()
            lease.release()
            await anyio.sleep_forever()
    bench.finish()
    assert bench.free_now() == 4
    bench.allocator.check()


async def test_those_who_wait_hear_of_the_failure() -> None:
    bench = Bench(8)
    acts = []
    with pytest.RaisesGroup(TransferError):
        async with anyio.create_task_group() as tasks:
            try:
                async with RadixCache(CacheInitParams(allocator=bench.allocator, streams=(bench.a,))) as cache:
                    hog = await entered(cache, key(range(8)), 8)
                    lease = await entered(cache, key(range(10, 18)))
                    acts.append(await begin(tasks, lease.allocate, 8))
                    acts.append(await begin(tasks, cache.lease(key(range(8)), reserve=8).__aenter__))
                    bench.events.fail_record = True
                    hog.release()
                    lease.release()
                    await anyio.sleep_forever()
            except* TransferError as group:
                raise group.exceptions[0] from None
    for act in acts:
        assert isinstance(act.error, CacheClosedError | CapacityError), act.error


class Unwaitable(VirtualStream):
    """A stream that refuses to wait for anybody."""

    def wait_event(self, event: Any) -> None:
        raise RuntimeError("the device is lost")


@pytest.mark.parametrize("step", ["match", "repoint", "reserve", "release of another", "match_prefix"])
async def test_a_stream_that_cannot_be_made_to_wait_loses_nothing_and_ends_the_cache(step: str) -> None:
    bench = Bench(16)
    stream = Unwaitable(bench.device, bench.device.stream("lost")._actor)
    with pytest.raises(ExceptionGroup):
        async with RadixCache(CacheInitParams(allocator=bench.allocator, streams=(bench.a, stream))) as cache:
            mine = await entered(cache, key(range(6)), 6, stream=stream)
            hog = await entered(cache, key(range(50, 56)), 6)
            acts = []
            try:
                async with anyio.create_task_group() as tasks:
                    if step == "release of another":
                        hog.allocate_nowait(1)
                        acts.append(await begin(tasks, cache.lease(key(range(8)), stream=stream, reserve=8).__aenter__))
                    first = await computed(bench, cache, key(range(3)), bench.a)
                    if step == "match":
                        acts.append(await begin(tasks, cache.lease(key(range(3)), stream=stream).__aenter__))
                    elif step == "reserve":
                        acts.append(await begin(tasks, cache.lease(key(range(3)), stream=stream, reserve=3).__aenter__))
                    elif step == "match_prefix":
                        with pytest.raises(TransferError):
                            await cache.match_prefix(MatchPrefixParams(key(range(3))))
                    elif step == "repoint":
                        with pytest.raises(TransferError):
                            mine.commit(key(range(6)))
                    hog.release()
                    # Whoever would have read it unordered hears of the end instead; the cache is ended from within.
                    await anyio.sleep_forever()
            finally:
                for lease in (mine, hog, first):
                    lease.release()
                cache.check()
                assert cache.stats().protected == 0
                assert cache.stats().leased == 0
    assert not any(act.returned for act in acts)


@pytest.mark.parametrize("stream", [None, [], object()], ids=["None", "unhashable", "no stream"])
async def test_a_bad_stream_is_refused_and_nothing_is_lost(stream: Any) -> None:
    """Without an event factory there is no stream that could be named at all."""
    async with opened(8) as cache:
        lease = await entered(cache, key(range(4)), 4)
        with pytest.raises(UsageError):
            lease.used_on(stream)
        if stream is not None:
            with pytest.raises(UsageError):
                async with cache.lease(key(range(10, 14)), stream=stream) as other:
                    await other.allocate(2)
        lease.release()
        await settled()
        assert cache.stats().free == 8
