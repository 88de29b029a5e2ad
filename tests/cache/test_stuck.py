"""When nothing comes by itself: who is served out of turn, whose pins are revoked, who has to give way."""

from __future__ import annotations

import anyio
import pytest

from aradix import Lease, MatchPrefixParams, RadixCache, RadixKey, SlotAllocator
from aradix.errors import (
    RequestTooLargeError,
    RetractError,
    TransferError,
)
from stress.device import VirtualDevice
from tests.cache.acts import begin, entered, filled, key, settled
from tests.memory.faults import FaultyEvents
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


async def test_a_lone_lease_that_nobody_can_serve_any_more_is_told_to_give_way() -> None:
    device = VirtualDevice()
    events = FaultyEvents(device)
    allocator = SlotAllocator(8, event_factory=events)
    async with opened(allocator=allocator) as cache, anyio.create_task_group() as tasks:
        outside = allocator.alloc(4)
        lease = await entered(cache, key(range(8)), 2)
        waiting = await begin(tasks, lease.allocate, 4)
        assert waiting.waits
        events.fail_record = True
        with pytest.raises(TransferError):
            allocator.free(outside, streams=(device.default_stream,))  # into quarantine, for good
        await settled()
        assert isinstance(waiting.error, RetractError)
        with pytest.raises(RequestTooLargeError):
            await lease.allocate(4)
        lease.release()
        assert cache.stats().free == 4


async def test_of_two_that_wait_the_younger_is_told_to_give_way() -> None:
    async with opened(8) as cache:
        other = await entered(cache, key(range(6)), 6)
        lease = await entered(cache, key(range(10, 20)), 2)
        async with anyio.create_task_group() as tasks:
            elder = await begin(tasks, other.allocate, 1)
            with pytest.raises(RetractError):
                await lease.allocate(4)
            assert elder.waits
            lease.release()
        assert elder.returned
        other.release()
        assert cache.stats().retracts == 1


async def test_the_only_waiter_of_a_full_pool_gets_a_retract_error_not_a_hang() -> None:
    async with opened(8) as cache:
        allocator = cache._params.allocator
        lease = await entered(cache, key(range(8)), 4)
        twin = await entered(cache, key(range(20, 28)), 4)
        async with anyio.create_task_group() as tasks:
            first = await begin(tasks, lease.allocate, 1)
            assert first.waits
            second = await begin(tasks, twin.allocate, 1)
            assert isinstance(second.error, RetractError)
            assert first.waits
            twin.truncate(3)  # or release: what it says is enough
            await settled()
            assert first.returned
        lease.release()
        twin.release()
        assert allocator.available_size() == 8


async def test_the_youngest_gives_way_whoever_asked_first() -> None:
    async with opened(9) as cache, anyio.create_task_group() as tasks:
        leases = [await entered(cache, key(range(10 * i, 10 * i + 9)), 3) for i in range(3)]
        youngest = await begin(tasks, leases[2].allocate, 1)
        middle = await begin(tasks, leases[1].allocate, 1)
        assert youngest.waits
        eldest = await begin(tasks, leases[0].allocate, 1)
        assert isinstance(youngest.error, RetractError)
        assert middle.waits
        assert eldest.waits
        leases[2].release()
        await settled()
        assert middle.returned
        assert eldest.returned
        for lease in leases[:2]:
            lease.release()


async def test_a_lease_told_to_give_way_keeps_all_it_has() -> None:
    async with opened(8) as cache:
        one = await entered(cache, key(range(8)), 4)
        two = await entered(cache, key(range(20, 28)), 4)
        async with anyio.create_task_group() as tasks:
            elder = await begin(tasks, one.allocate, 1)
            slots = two.slots.clone()
            with pytest.raises(RetractError, match="4 tokens"):
                await two.allocate(1)
            assert two.slots.tolist() == slots.tolist()
            two.commit(key(range(20, 24)))
            two.release()
        assert elder.returned
        one.release()


async def test_when_stuck_whoever_fits_is_served_out_of_turn() -> None:
    async with opened(8) as cache, anyio.create_task_group() as tasks:
        one = await entered(cache, key(range(8)), 3)
        two = await entered(cache, key(range(20, 28)), 3)
        large = await begin(tasks, one.allocate, 4)
        assert large.waits  # two still runs, and may release
        small = await begin(tasks, two.allocate, 2)
        assert small.returned
        assert large.waits
        assert cache.stats().retracts == 0
        two.release()
        await settled()
        assert large.returned
        one.release()


async def test_a_lease_that_holds_nothing_keeps_nobody_waiting() -> None:
    async with opened(4) as cache:
        idle = await entered(cache, key(range(50, 54)))
        one = await entered(cache, key(range(4)), 2)
        two = await entered(cache, key(range(10, 14)), 2)
        async with anyio.create_task_group() as tasks:
            elder = await begin(tasks, one.allocate, 1)
            younger = await begin(tasks, two.allocate, 1)
            assert isinstance(younger.error, RetractError)
            two.release()
        assert elder.returned
        one.release()
        idle.release()


async def test_low_level_pins_and_outside_slots_count_as_able_to_release() -> None:
    allocator = SlotAllocator(8)
    async with opened(allocator=allocator) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)))
        match = await cache.match_prefix(MatchPrefixParams(key(range(4))))
        cache.inc_lock_ref(match.last_device_node)
        lease = await entered(cache, key(range(10, 18)), 4)
        waiting = await begin(tasks, lease.allocate, 2)
        assert waiting.waits
        cache.dec_lock_ref(match.last_device_node)
        await settled()
        assert waiting.returned
        lease.release()


async def test_pins_of_a_waiting_reserve_are_revoked_when_stuck() -> None:
    async with opened(8) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)))
        grower = await entered(cache, key(range(10, 18)), 4)
        admission = await begin(tasks, reserved, cache, key(range(8)), 8)
        assert admission.waits
        assert cache.stats().protected == 4
        growth = await begin(tasks, grower.allocate, 2)
        assert growth.returned  # by way of the pins of the one that is not entered yet
        assert admission.waits
        grower.release()
        await settled()
        assert admission.returned
        lease = admission.value
        assert lease.num_matched == cache.stats().hit_tokens
        assert len(lease.slots) == 8
        assert len(set(lease.slots.tolist())) == 8
        lease.release()


async def reserved(cache: RadixCache, opened_with: RadixKey, num_tokens: int) -> Lease:
    return await cache.lease(opened_with, reserve=num_tokens).__aenter__()


async def test_a_waiting_reserve_matches_again_when_it_is_granted() -> None:
    async with opened(12) as cache, anyio.create_task_group() as tasks:
        other = await entered(cache, key(range(8)), 8)
        admission = await begin(tasks, reserved, cache, key(range(8)), 8)
        assert admission.waits
        other.commit(key(range(8)))  # now the waiting one could share it
        await settled()
        assert admission.returned
        assert admission.value.num_matched == 8
        assert admission.value.slots.tolist() == other.slots.tolist()
        other.release()
        admission.value.release()


@pytest.mark.parametrize("keeps_pins", [True, False])
async def test_what_a_waiter_holds_meanwhile_is_a_choice(keeps_pins: bool) -> None:
    async with opened(8, waiters_keep_pins=keeps_pins) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(2)))
        hog = await entered(cache, key(range(10, 18)), 6)
        admission = await begin(tasks, reserved, cache, key(range(8)), 8)
        assert cache.stats().protected == (2 if keeps_pins else 0)
        hog.release()
        await settled()
        assert admission.value.num_matched == 2
        admission.value.release()
