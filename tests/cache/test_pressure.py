"""Who waits for slots, and who is served next."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aradix import Lease, RadixCache, RadixKey, SlotAllocator
from aradix.errors import (
    LeaseReleasedError,
    OutOfSlotsError,
    RequestTooLargeError,
    UsageError,
)
from tests.cache.acts import begin, entered, filled, key, settled
from tests.support.caches import idle_sum, opened

pytestmark = pytest.mark.anyio


async def test_what_fits_is_granted_without_waiting() -> None:
    async with opened(8) as cache:
        async with cache.lease(key(range(8))) as lease:
            await lease.allocate(8)
            assert len(lease.slots) == 8
        assert cache.stats().slot_waits == 0
        assert cache.stats().free == 8


@pytest.mark.parametrize("page_size", [1, 4])
async def test_growth_is_served_first_come_first_served(page_size: int) -> None:
    async with opened(8 * page_size, page_size) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(8)), 5 * page_size)
        growers = [await entered(cache, key(range(100 * i, 100 * i + 9)), page_size) for i in (1, 2, 3)]
        order: list[int] = []

        async def grow(index: int, num_pages: int) -> None:
            await growers[index].allocate(num_pages * page_size)
            order.append(index)

        # The first wants most: those behind it must not slip past, though less is enough for them.
        for index, num_pages in enumerate((3, 1, 1)):
            await begin(tasks, grow, index, num_pages)
        assert cache.stats().num_slot_waiters == 3
        hog.truncate(3 * page_size)
        await settled()
        assert order == []
        hog.release()
        await settled()
        assert sorted(order) == [0, 1, 2]
        for grower in growers:
            grower.release()


async def test_admissions_are_served_in_the_order_in_which_they_asked() -> None:
    async with opened(4) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(4)), 4)
        acts = [await begin(tasks, entered_with_reserve, cache, i, 4) for i in range(4)]
        released = hog
        for i in range(4):
            released.release()
            await settled()
            assert [act.returned for act in acts] == [j <= i for j in range(4)]
            released = acts[i].value
        released.release()


async def entered_with_reserve(cache: RadixCache, index: int, num_tokens: int) -> Lease:
    return await reserved(cache, key(range(1000 * index, 1000 * index + num_tokens)), num_tokens)


async def test_growth_of_entered_leases_goes_before_admission_of_new_ones() -> None:
    async with opened(6) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(4)), 4)
        grower = await entered(cache, key(range(10, 14)), 2)
        admission = await begin(tasks, entered_with_reserve, cache, 5, 4)
        growth = await begin(tasks, grower.allocate, 2)
        assert admission.waits
        assert growth.waits
        hog.release()
        await settled()
        assert growth.returned
        assert admission.waits
        grower.release()
        await settled()
        assert admission.returned
        admission.value.release()


async def test_nobody_barges_in_between_a_release_and_the_wake_up_of_the_head() -> None:
    async with opened(4) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(4)), 4)
        waiting = await begin(tasks, entered_with_reserve, cache, 1, 4)
        hog.release()
        # The head was given its slots in the same step, so this comes too late though it has not woken yet.
        newcomer = await entered(cache, key(range(50, 54)))
        with pytest.raises(OutOfSlotsError):
            newcomer.allocate_nowait(1)
        await settled()
        assert waiting.returned
        newcomer.release()
        waiting.value.release()


async def test_nowait_does_not_pass_those_who_queue_already() -> None:
    async with opened(6) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(4)), 3)
        grower = await entered(cache, key(range(10, 14)), 1)
        other = await entered(cache, key(range(20, 24)))
        growth = await begin(tasks, grower.allocate, 4)
        before = cache.stats()
        with pytest.raises(OutOfSlotsError, match="1 more tokens"):
            other.allocate_nowait(1)
        assert cache.stats() == before
        hog.release()
        await settled()
        assert growth.returned
        grower.release()
        other.release()


async def test_a_reserve_does_not_pass_those_who_queue_already() -> None:
    async with opened(6) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(4)), 4)
        large = await begin(tasks, entered_with_reserve, cache, 1, 6)
        small = await begin(tasks, entered_with_reserve, cache, 2, 1)
        assert large.waits
        assert small.waits
        hog.release()
        await settled()
        assert large.returned
        assert small.waits
        large.value.release()
        await settled()
        small.value.release()


async def test_the_rest_of_the_last_page_is_nobodys_but_the_leases_own() -> None:
    async with opened(8, 4) as cache, anyio.create_task_group() as tasks:
        one = await entered(cache, key(range(8)), 1)
        two = await entered(cache, key(range(20, 28)), 1)
        waiting = await begin(tasks, two.allocate, 4)
        assert waiting.waits
        for _ in range(3):
            await one.allocate(1)  # though another waits: these slots can serve nobody else
        assert one.num_tokens == 4
        one.release()
        await settled()
        assert waiting.returned
        two.release()


async def test_a_demand_takes_no_victim_until_all_of_it_can_be_met() -> None:
    async with opened(8) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)))
        hog = await entered(cache, key(range(10, 14)), 4)
        grower = await entered(cache, key(range(20, 30)))
        waiting = await begin(tasks, grower.allocate, 6)
        assert waiting.waits
        assert cache.peek(key(range(4))) == 4
        assert cache.stats().evicted == 0
        hog.release()
        await settled()
        assert waiting.returned
        assert cache.stats().evicted == 2
        grower.release()


async def test_a_request_that_can_never_fit_is_told_at_once() -> None:
    async with opened(8, 4) as cache:
        with pytest.raises(RequestTooLargeError, match="9 tokens"):
            cache.lease(key(range(9)), reserve=9)
        async with cache.lease(key(range(9))) as lease:
            await lease.allocate(5)
            before = cache.stats()
            with pytest.raises(RequestTooLargeError):
                await lease.allocate(4)
            with pytest.raises(RequestTooLargeError):
                lease.allocate_nowait(4)
            assert cache.stats() == before
            await lease.allocate(3)


async def test_slots_freed_by_anybody_serve_a_waiter() -> None:
    allocator = SlotAllocator(4)
    async with opened(allocator=allocator) as cache, anyio.create_task_group() as tasks:
        outside = allocator.alloc(4)
        lease = await entered(cache, key(range(4)))
        waiting = await begin(tasks, lease.allocate, 4)
        assert waiting.waits  # and is not told to give way: whoever holds the slots may give them back
        assert outside is not None
        allocator.free(outside)
        await settled()
        assert waiting.returned
        lease.release()


async def test_slots_freed_on_another_thread_serve_a_waiter() -> None:
    allocator = SlotAllocator(4)
    async with opened(allocator=allocator) as cache, anyio.create_task_group() as tasks:
        outside = allocator.alloc(4)
        lease = await entered(cache, key(range(4)))
        waiting = await begin(tasks, lease.allocate, 4)
        await anyio.to_thread.run_sync(allocator.retire, outside)
        await settled()
        assert waiting.returned
        lease.release()


async def test_what_an_eviction_frees_serves_a_waiter() -> None:
    async with opened(4) as cache, anyio.create_task_group() as tasks:
        pinned = await entered(cache, key(range(4)), 4)
        pinned.commit(key(range(4)))
        lease = await entered(cache, key(range(10, 14)))
        waiting = await begin(tasks, lease.allocate, 2)
        pinned.release()
        await settled()
        assert waiting.returned
        assert cache.stats().evictable == 2
        lease.release()


# ---- who waits is audited and counted like everybody else ----


async def test_the_audit_holds_between_a_grant_and_the_wake_up_of_the_one_who_got_it() -> None:
    async with opened(8) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(2)))
        hog = await entered(cache, key(range(10, 18)), 6)
        admission = await begin(tasks, reserved, cache, key(range(8)), 8)
        hog.release()
        cache.check()
        assert idle_sum(cache) == 8
        await settled()
        admission.value.release()


async def test_an_admission_granted_but_not_awake_yet_counts_as_able_to_release() -> None:
    async with opened(10) as cache, anyio.create_task_group() as tasks:
        short = await entered(cache, key(range(4)), 4)
        grower = await entered(cache, key(range(20, 30)), 6)
        admission = await begin(tasks, reserved, cache, key(range(10, 14)), 4)
        short.release()  # grants the admission
        growth = await begin(tasks, grower.allocate, 1)
        assert growth.waits, growth.error
        admission.value.release()
        await settled()
        assert growth.returned
        grower.release()


async def test_a_grant_and_a_wait_in_the_same_step_ask_nobody_to_give_way() -> None:
    async with opened(10) as cache:
        short = await entered(cache, key(range(4)), 4)
        grower = await entered(cache, key(range(20, 30)), 6)
        async with anyio.create_task_group() as tasks:
            admission = await begin(tasks, reserved, cache, key(range(10, 14)), 4)

            async def release_and_grow() -> None:
                short.release()
                await grower.allocate(1)  # queues before the admitted one has woken

            growth = await begin(tasks, release_and_grow)
            assert growth.error is None
            admission.value.release()
            await settled()
            assert growth.returned
        grower.release()


# ---- the same lease in two tasks ----


async def test_a_lease_waits_in_one_task_at_a_time() -> None:
    async with opened(4) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(4)), 3)
        lease = await entered(cache, key(range(10, 14)), 1)
        waiting = await begin(tasks, lease.allocate, 2)
        with pytest.raises(UsageError, match="waits for slots"):
            await lease.allocate(1)
        with pytest.raises(UsageError, match="waits for slots"):
            lease.truncate(0)
        hog.release()
        await settled()
        assert waiting.returned
        lease.release()


async def test_release_in_another_task_ends_the_wait() -> None:
    async with opened(4) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(4)), 3)
        lease = await entered(cache, key(range(10, 14)), 1)
        waiting = await begin(tasks, lease.allocate, 2)
        lease.release()
        await settled()
        assert isinstance(waiting.error, LeaseReleasedError)
        assert cache.stats().num_slot_waiters == 0
        assert cache.stats().free == 1
        hog.release()


async def test_release_right_after_the_grant_still_tells_the_waiter() -> None:
    async with opened(4) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(4)), 3)
        lease = await entered(cache, key(range(10, 14)), 1)
        waiting = await begin(tasks, lease.allocate, 2)
        hog.release()
        lease.release()
        await settled()
        assert isinstance(waiting.error, LeaseReleasedError)
        assert cache.stats().free == 4


async def test_the_wait_of_one_ends_when_the_next_release_comes_in_the_same_tick() -> None:
    async with opened(6) as cache, anyio.create_task_group() as tasks:
        one = await entered(cache, key(range(6)), 3)
        two = await entered(cache, key(range(10, 16)), 3)
        lease = await entered(cache, key(range(20, 26)))
        waiting = await begin(tasks, lease.allocate, 6)
        one.release()
        assert cache.stats().num_slot_waiters == 1
        two.release()
        assert cache.stats().num_slot_waiters == 0
        await checkpoint()
        await settled()
        assert waiting.returned
        lease.release()


async def test_a_cancelled_growth_takes_back_only_what_it_was_given() -> None:
    async with opened(8) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(8)), 6)
        lease = await entered(cache, key(range(10, 18)), 2)
        waiting = await begin(tasks, lease.allocate, 3)
        waiting.scope.cancel()
        hog.release()  # granted in the moment in which it was cancelled
        lease.truncate(2)  # and given back by another hand before the caller wakes
        await settled()
        assert waiting.scope.cancelled_caught
        assert lease.num_tokens == 2
        lease.release()


async def test_a_cancelled_waiter_passes_its_turn_on() -> None:
    for order in ("cancel, release", "release, cancel"):
        async with opened(4) as cache, anyio.create_task_group() as tasks:
            hog = await entered(cache, key(range(4)), 4)
            first = await begin(tasks, entered_with_reserve, cache, 1, 4)
            second = await begin(tasks, entered_with_reserve, cache, 2, 2)
            third = await begin(tasks, entered_with_reserve, cache, 3, 2)
            if order == "cancel, release":
                first.scope.cancel()
                hog.release()
            else:
                hog.release()
                first.scope.cancel()
            await settled()
            if first.returned:
                first.value.release()  # some loops let a grant win over a cancellation that comes later
                await settled()
            assert second.returned
            assert third.returned
            second.value.release()
            third.value.release()


async def test_a_cancelled_head_that_asked_for_much_makes_way_for_those_who_fit() -> None:
    async with opened(4) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(4)), 2)
        large = await begin(tasks, entered_with_reserve, cache, 1, 4)
        small = await begin(tasks, entered_with_reserve, cache, 2, 2)
        assert small.waits
        large.scope.cancel()
        await settled()
        assert small.returned
        small.value.release()
        hog.release()


async def reserved(cache: RadixCache, opened_with: RadixKey, num_tokens: int) -> Lease:
    return await cache.lease(opened_with, reserve=num_tokens).__aenter__()


async def test_two_caches_on_one_pool_wait_for_one_another() -> None:
    allocator = SlotAllocator(8)
    async with (
        opened(allocator=allocator) as here,
        opened(allocator=allocator) as there,
        anyio.create_task_group() as tasks,
    ):
        hog = await entered(there, key(range(8)), 6)
        lease = await entered(here, key(range(8)), 2)
        waiting = await begin(tasks, lease.allocate, 4)
        assert waiting.waits  # and need not give way: the other cache may release
        hog.truncate(2)
        await settled()
        assert waiting.returned
        assert here.stats().outside == 2
        assert there.stats().outside == 6
        for each in (hog, lease):
            each.release()


async def test_a_lease_says_whether_it_waits_for_slots() -> None:
    async with opened(4) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(4)), 4)
        waiting = cache.lease(key(range(10, 12)), reserve=2)
        assert not waiting.waits_for_slots
        await begin(tasks, waiting.__aenter__)
        assert (waiting.waits_for_slots, hog.waits_for_slots) == (True, False)
        hog.release()
        await settled()
        assert not waiting.waits_for_slots
        other = await entered(cache, key(range(20, 22)), 2)
        await begin(tasks, waiting.allocate, 1)
        assert waiting.waits_for_slots
        other.release()
        await settled()
        assert not waiting.waits_for_slots
        waiting.release()
        assert not waiting.waits_for_slots


async def test_who_waits_for_what_another_one_computes_does_not_wait_for_slots() -> None:
    async with opened(8) as cache, anyio.create_task_group() as tasks:
        leader = cache.lease(key(range(4)), reserve=4, join=True)
        await leader.__aenter__()
        joiner = cache.lease(key(range(4)), reserve=4, join=True)
        await begin(tasks, joiner.__aenter__)
        assert cache.stats().num_leases == 1
        assert not joiner.waits_for_slots
        leader.release()
        await settled()
        assert cache.stats().num_leases == 1
        joiner.release()
