"""Slots and the device: what a stream may still touch is not handed out, and nothing is read before it is written."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aradix import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    SlotAllocator,
)
from aradix.errors import (
    OutOfSlotsError,
    RetractError,
)
from stress.device import VirtualDevice, VirtualStream
from tests.cache.acts import begin, entered, filled, key, settled
from tests.cache.bench import LONG_TIME, Bench, computed
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("busy", ["a", "b"])
async def test_evicted_slots_retire_behind_every_stream_of_the_engine(busy: str) -> None:
    bench = Bench()
    async with bench.cache() as cache:
        lease = await computed(bench, cache, key(range(4)), bench.a)
        bench.finish()
        lease.release()
        reader: VirtualStream = getattr(bench, busy)
        reader.launch(range(1, 9), duration=LONG_TIME)
        assert (await cache.evict(EvictParams(4))).num_freed_tokens == 4
        assert bench.free_now() == 4
        assert cache.stats().fenced == 4
        bench.finish()
        assert bench.free_now() == 8


async def test_uncommitted_slots_retire_behind_every_stream_unless_some_are_named() -> None:
    for used, comes_back_at_once in ((None, False), ("a", True), ("b", False), ("x", True)):
        bench = Bench()
        async with bench.cache() as cache:
            lease = await entered(cache, key(range(4)), 4)
            if used:
                lease.used_on({"a": bench.a, "b": bench.b, "x": bench.extra}[used])
            bench.b.launch(duration=LONG_TIME)
            lease.release()
            assert (bench.free_now() == 8) is comes_back_at_once
            bench.finish()
            assert bench.free_now() == 8


async def test_several_named_streams_all_count() -> None:
    bench = Bench()
    async with bench.cache() as cache:
        lease = await entered(cache, key(range(4)), 4)
        lease.used_on(bench.a)
        lease.used_on(bench.extra)
        lease.used_on(bench.a)
        bench.extra.launch(lease.slots, duration=LONG_TIME)
        lease.truncate(2)
        assert bench.free_now() == 4
        bench.finish()
        lease.release()
        assert bench.free_now() == 8


@pytest.mark.parametrize("how", ["stream of the lease", "used_on"])
async def test_evicted_slots_retire_behind_streams_that_only_leases_named(how: str) -> None:
    bench = Bench()
    async with bench.cache() as cache:
        (await computed(bench, cache, key(range(4)), bench.a)).release()
        bench.finish()
        lease = await entered(cache, key(range(4)), stream=bench.extra if how != "used_on" else bench.a)
        if how == "used_on":
            lease.used_on(bench.extra)
            bench.extra.wait_event(bench.a.record_event())  # only the lease's own stream is ordered by the cache
        bench.extra.launch(lease.slots, duration=LONG_TIME)
        lease.release()
        await cache.evict(EvictParams(2))
        assert bench.free_now() == 4
        bench.finish()
        assert bench.free_now() == 6
        assert not bench.device.races


async def test_a_slow_reader_on_one_stream_and_a_writer_on_another_are_ordered() -> None:
    bench = Bench(4)
    async with bench.cache() as cache:
        (await computed(bench, cache, key(range(4)), bench.a)).release()
        bench.finish()
        reader = await entered(cache, key(range(4)), stream=bench.a)
        bench.a.launch(reader.slots, duration=LONG_TIME)
        reader.release()
        writer = cache.lease(key(range(10, 14)), stream=bench.b)
        async with writer:
            await writer.allocate(4)  # the device waits, the host does not
            bench.b.launch(writes=writer.slots)
        assert bench.device.races == []


@pytest.mark.parametrize("page_size", [1, 2])
async def test_a_match_on_another_stream_waits_for_what_is_still_being_written(page_size: int) -> None:
    bench = Bench(16, page_size)
    async with bench.cache() as cache:
        first = await computed(bench, cache, key(range(4)), bench.a)
        second = await entered(cache, key(range(8)), 4, stream=bench.b)
        bench.b.launch(second.slots[:4], second.slots[4:])
        second.commit(key(range(8)))
        third = await entered(cache, key(range(6)), stream=bench.extra)  # ends inside what the second wrote
        bench.extra.launch(third.slots)
        fourth = await entered(cache, key(range(8)), 0, stream=bench.a)
        bench.a.launch(fourth.slots)
        for lease in (first, second, third, fourth):
            lease.release()
        assert bench.device.races == []


async def test_a_lease_that_is_repointed_waits_for_the_one_that_came_first() -> None:
    bench = Bench(16)
    async with bench.cache() as cache:
        one = await entered(cache, key(range(4)), 4, stream=bench.a)
        two = await entered(cache, key(range(6)), 6, stream=bench.b)
        bench.b.launch(writes=two.slots)
        bench.a.launch(writes=one.slots, duration=LONG_TIME)
        one.commit(key(range(4)))
        done = two.commit(key(range(6)))
        assert done.repointed == (0, 4)
        assert two.slots[:4].tolist() == one.slots.tolist()
        bench.b.launch(two.slots)
        # The duplicates are free for others only behind what wrote them.
        again = await entered(cache, key(range(50, 62)), 10, stream=bench.extra)
        bench.extra.launch(writes=again.slots)
        for lease in (one, two, again):
            lease.release()
        assert bench.device.races == []


async def test_nobody_waits_for_his_own_stream_or_for_what_has_passed() -> None:
    waits = []
    bench = Bench(16)
    real = bench.a.wait_event

    def noted(event: Any) -> None:
        waits.append(event)
        real(event)

    bench.a.wait_event = noted  # type: ignore[method-assign]
    async with bench.cache() as cache:
        (await computed(bench, cache, key(range(4)), bench.a)).release()
        bench.b.launch()
        bench.finish()
        (await computed(bench, cache, key(range(8)), bench.a)).release()
        assert waits == []


async def test_low_level_calls_are_ordered_for_every_stream_of_the_engine() -> None:
    bench = Bench(16)
    async with bench.cache() as cache:
        slots = bench.allocator.alloc(4)
        assert slots is not None
        bench.a.launch(writes=slots, duration=LONG_TIME)
        await cache.insert(InsertParams(key(range(4)), slots))
        match = await cache.match_prefix(MatchPrefixParams(key(range(4))))
        bench.b.launch(match.device_indices)
        lease = await entered(cache, key(range(4)), stream=bench.extra)
        bench.extra.launch(lease.slots)
        lease.release()
        assert bench.device.races == []


async def test_a_cancelled_allocation_is_not_clean_because_nobody_used_it() -> None:
    bench = Bench(4)
    async with bench.cache() as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(4)), 4, stream=bench.a)
        bench.a.launch(hog.slots, duration=LONG_TIME)
        lease = cache.lease(key(range(10, 14)), stream=bench.b)
        await lease.__aenter__()
        waiting = await begin(tasks, lease.allocate, 4)
        waiting.scope.cancel()
        hog.release()  # grants, on stream order, what its caller will never hear of
        await settled()
        assert waiting.scope.cancelled_caught
        assert lease.num_tokens == 0
        third = await entered(cache, key(range(20, 24)), 4, stream=bench.extra)
        bench.extra.launch(writes=third.slots)
        third.release()
        lease.release()
        assert bench.device.races == []


async def test_a_cancelled_wait_behind_a_fence_leaves_the_slots_to_the_next() -> None:
    bench = Bench(4)
    async with opened(allocator=bench.allocator) as cache, anyio.create_task_group() as tasks:
        outside = bench.allocator.alloc(4)
        bench.a.launch(outside, duration=LONG_TIME)
        assert outside is not None
        bench.allocator.free(outside, streams=(bench.a,))
        lease = await entered(cache, key(range(4)))
        first = await begin(tasks, lease.allocate, 4)
        assert first.waits
        first.scope.cancel()
        await settled()
        assert cache.stats().fenced == 4
        second = await begin(tasks, lease.allocate, 4)
        assert second.waits
        bench.finish()
        await until(lambda: second.returned)
        assert lease.num_tokens == 4
        lease.release()


async def until(holds: Any) -> None:
    """Yield until something holds that only the cache's own polling brings about."""
    while not holds():
        await checkpoint()


async def test_slots_freed_outside_behind_a_fence_serve_a_waiter_once_it_has_passed() -> None:
    bench = Bench(4)
    async with opened(allocator=bench.allocator) as cache, anyio.create_task_group() as tasks:
        outside = bench.allocator.alloc(4)
        lease = await entered(cache, key(range(4)))
        waiting = await begin(tasks, lease.allocate, 4)
        bench.a.launch(outside, duration=LONG_TIME)
        assert outside is not None
        bench.allocator.free(outside, streams=(bench.a,))
        await settled()
        assert waiting.waits
        bench.finish()
        for _ in range(20_000):  # of the loop's own turns; the poll is due every millisecond
            if not waiting.waits:
                break
            await checkpoint()
        assert waiting.returned
        lease.release()
        tasks.cancel_scope.cancel()


async def test_a_slow_fence_does_not_drain_the_cache() -> None:
    bench = Bench(8)
    async with opened(allocator=bench.allocator) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)))
        outside = bench.allocator.alloc(4)
        bench.a.launch(outside, duration=LONG_TIME)
        assert outside is not None
        bench.allocator.free(outside, streams=(bench.a,))
        lease = await entered(cache, key(range(10, 20)))
        waiting = await begin(tasks, lease.allocate, 4)
        assert waiting.waits
        assert cache.stats().evicted == 0
        other = await entered(cache, key(range(30, 34)))
        with pytest.raises(OutOfSlotsError):
            other.allocate_nowait(1)
        bench.finish()
        await until(lambda: waiting.returned)
        assert cache.peek(key(range(4))) == 4
        lease.release()
        other.release()


# ---- everything at once ----


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("durations", [(0.1, 1.0), (50.0, 500.0)], ids=["short kernels", "long kernels"])
async def test_no_schedule_of_leases_on_three_streams_makes_a_race(seed: int, durations: tuple[float, float]) -> None:
    chance = random.Random(seed)
    device = VirtualDevice(seed, durations)
    streams = [device.stream(name) for name in "abx"]
    page_size = chance.choice((1, 2, 4))
    allocator = SlotAllocator(24, page_size, event_factory=device.event)

    async def request(cache: RadixCache, number: int) -> None:
        prompt = key(range(chance.randrange(8)), range(100 * number % 400, 100 * number % 400 + chance.randrange(1, 8)))
        stream = chance.choice(streams)
        reserve = len(prompt) if chance.random() < 0.5 else None
        with suppress(RetractError), anyio.CancelScope() as scope:
            async with cache.lease(prompt, stream=stream, reserve=reserve) as lease:
                if chance.random() < 0.3:
                    lease.used_on(stream)
                if chance.random() < 0.1:
                    scope.cancel()
                await lease.allocate(len(prompt) - lease.num_tokens)
                stream.launch(lease.slots[: lease.num_matched], lease.slots[lease.num_matched :])
                await checkpoint()
                lease.commit(prompt)
                stream.launch(lease.slots)
                for step in range(chance.randrange(4)):
                    await lease.allocate(1)
                    prompt = key(prompt.token_ids().tolist(), 900 + step)
                    stream.launch(lease.slots[:-1], lease.slots[-1:])
                    if chance.random() < 0.5:
                        lease.commit(prompt)
                        stream.launch(lease.slots)
                    if chance.random() < 0.3:
                        fork = lease.fork()
                        stream.launch(fork.slots)
                        await checkpoint()
                        fork.release()

    async with opened(allocator=allocator, streams=tuple(streams[:2])) as cache:
        async with anyio.create_task_group() as tasks:
            for number in range(60):
                tasks.start_soon(request, cache, number)
                if chance.random() < 0.5:
                    await checkpoint()
                if chance.random() < 0.3:
                    device.advance(chance.random() * durations[1])
                if chance.random() < 0.1:
                    await cache.evict(EvictParams(chance.randrange(12)))
                if chance.random() < 0.05:
                    await cache.flush()
                cache.check()
        assert device.races == []
        assert cache.stats().protected == 0
        device.run_until_idle()
        allocator.reclaim()
        assert cache.stats().fenced == 0
