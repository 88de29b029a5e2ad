"""Gates among those who wait for slots, and what may be published and looked at around them."""

from __future__ import annotations

import anyio
import pytest

from aradix import InsertParams, Lease, MatchPrefixParams, RadixCache, RadixKey, SlotAllocator
from aradix.errors import UsageError
from tests.cache.acts import begin, entered, filled, key, settled
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


async def hold_exclusive(cache: RadixCache, place: RadixKey, end: anyio.Event, order: list[str], name: str) -> None:
    async with cache.exclusive(place):
        order.append(name)
        await end.wait()


async def open_lease(cache: RadixCache, opened_with: RadixKey) -> Lease:
    return await cache.lease(opened_with).__aenter__()


# ---- those who wait for slots ----


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("opens_another", [False, True])
async def test_who_met_a_gate_in_the_queue_is_matched_again_before_it_enters(opens_another: bool, joins: bool) -> None:
    """What it still has pinned is above the gate, and says nothing of what is below it."""
    async with opened(60) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(200), key(0, 1, 60))
        hogs = [await entered(cache, key(range(100, 130)), 30), await entered(cache, key(range(400, 420)), 20)]
        before = await begin(tasks, lambda: entered(cache, key(range(150, 162)), reserve=12))
        act = await begin(tasks, lambda: entered(cache, key(range(12)), reserve=12, join=joins))
        assert before.waits
        assert act.waits
        first = await entered(cache, key(range(6), 70, 71), 4)
        first.commit(key(range(6)))
        ends, order = [anyio.Event(), anyio.Event()], list[str]()
        await begin(tasks, hold_exclusive, cache, key(range(3)), ends[0], order, "in the way")
        await begin(tasks, hold_exclusive, cache, key(200), ends[1], order, "another")
        assert order == ["another"]  # the other one waits for the lease below it
        hogs[1].truncate(10)
        await settled()
        assert before.returned  # so that the next one was asked, and met the gate
        if opens_another:
            ends[1].set()
            await settled()
        hogs[0].release()
        await settled()
        assert act.waits
        cache.check()
        first.release()
        for end in ends:
            end.set()
        await settled()
        assert act.value.num_matched == 6
        for lease in (act.value, before.value, hogs[1]):
            lease.release()


async def test_a_pending_gate_lets_walkers_pass_while_a_lease_below_waits_for_slots() -> None:
    async with opened(16) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)))
        hog = await entered(cache, key(range(50, 60)), 10)
        below = await entered(cache, key(range(8)), 2)
        growth = await begin(tasks, below.allocate, 2)
        assert growth.waits
        end, order = anyio.Event(), list[str]()
        await begin(tasks, hold_exclusive, cache, key(range(4)), end, order, "owner")
        # The one that holds the slots has to walk through the gate before it ends.
        walker = await begin(tasks, open_lease, cache, key(range(4)))
        assert walker.returned
        walker.value.release()
        hog.release()
        await settled()
        assert growth.returned
        late = await begin(tasks, open_lease, cache, key(range(4)))
        assert late.waits  # nobody below waits for slots any more
        assert order == []
        below.release()
        await settled()
        assert order == ["owner"]
        end.set()
        await settled()
        assert late.returned
        late.value.release()


async def test_a_lease_that_starts_to_wait_below_a_pending_gate_opens_it_for_walkers() -> None:
    async with opened(16) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)))
        hog = await entered(cache, key(range(50, 60)), 10)
        below = await entered(cache, key(range(8)), 2)
        end, order = anyio.Event(), list[str]()
        end.set()
        owner = await begin(tasks, hold_exclusive, cache, key(range(4)), end, order, "owner")
        walker = await begin(tasks, open_lease, cache, key(range(4)))
        assert walker.waits
        growth = await begin(tasks, below.allocate, 2)
        assert growth.waits
        assert walker.returned
        growth.scope.cancel()
        await settled()
        late = await begin(tasks, open_lease, cache, key(range(4)))
        assert late.waits
        for lease in (hog, below, walker.value):
            lease.release()
        await settled()
        assert owner.returned
        assert late.returned
        late.value.release()


async def test_pins_of_those_who_wait_to_be_entered_do_not_hold_up_a_gate() -> None:
    async with opened(16) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)))
        hog = await entered(cache, key(range(50, 60)), 10)
        admission = await begin(tasks, reserved, cache, key(range(8)), 8)
        assert admission.waits
        assert cache.stats().protected == 4
        end, order = anyio.Event(), list[str]()
        await begin(tasks, hold_exclusive, cache, key(range(4)), end, order, "owner")
        assert order == ["owner"]
        hog.release()
        await settled()
        assert admission.waits  # at the gate now
        other = await begin(tasks, reserved, cache, key(range(80, 84)), 4)
        assert other.returned  # and holds up nobody who can go on
        end.set()
        await settled()
        assert admission.returned
        assert admission.value.num_matched == 4
        admission.value.release()
        other.value.release()


async def reserved(cache: RadixCache, opened_with: RadixKey, num_tokens: int) -> Lease:
    return await cache.lease(opened_with, reserve=num_tokens).__aenter__()


async def test_an_admission_that_needs_a_victim_keeps_its_pins_while_it_is_served() -> None:
    async with opened(11) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)), key(range(50, 54)))
        below = await entered(cache, key(range(20)), 2)
        other = await entered(cache, key(range(70, 80)), 1)
        growth = await begin(tasks, below.allocate, 5)
        end, order = anyio.Event(), list[str]()
        end.set()
        owner = await begin(tasks, hold_exclusive, cache, key(range(2)), end, order, "owner")
        admission = await begin(tasks, reserved, cache, key(range(4), range(90, 92)), 6)
        assert admission.waits
        # Now all wait and nothing will come by itself, so it is served out of turn, through the gate that lets walkers
        # pass. What it evicts tells the gate that something changed, in the middle of that.
        more = await begin(tasks, other.allocate, 5)
        assert admission.returned
        assert growth.waits
        assert more.waits
        assert admission.value.num_matched == 4
        assert len(admission.value.slots) == 6
        admission.value.commit(key(range(4), range(90, 92)))
        cache.check()
        for lease in (admission.value, other, below):
            lease.release()
        await settled()
        assert owner.returned


async def test_an_owner_may_wait_for_nothing_of_the_cache() -> None:
    allocator = SlotAllocator(16)
    async with opened(allocator=allocator) as cache:
        await filled(cache, key(range(4)))
        full = await entered(cache, key(range(50, 62)), 12)
        async with cache.exclusive(key(range(4))):
            before = cache.stats()
            with pytest.raises(UsageError, match="holds a subtree"):
                async with cache.lease(key(range(4))):
                    pass
            with pytest.raises(UsageError, match="holds a subtree"):
                async with cache.lease(key(range(90, 94)), reserve=4):
                    pass
            with pytest.raises(UsageError, match="holds a subtree"):
                await full.allocate(1)
            with pytest.raises(UsageError, match="one"):
                async with cache.exclusive(key(range(90, 94))):
                    pass
            with pytest.raises(UsageError, match="holds a subtree"):
                await cache.match_prefix(MatchPrefixParams(key(range(4))))
            assert cache.stats().protected == before.protected
            assert cache.stats().num_slot_waiters == 0
            cache.check()
        full.release()


async def test_a_lease_taken_in_an_owners_hand_needs_no_waiting() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(4)))
        async with cache.exclusive(key(range(4))), cache.lease(key(range(20, 24)), reserve=4) as lease:
            lease.commit(key(range(20, 24)))
        assert cache.peek(key(range(20, 24))) == 4


# ---- publishing ----


async def test_a_commit_below_a_granted_gate_publishes_up_to_it_and_tries_again() -> None:
    async with opened(64) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(8)))
        end, order = anyio.Event(), list[str]()
        # This lease stands above the gate, and what it computed leads through it.
        lease = cache.lease(key(range(12)), leave_last=8)
        await lease.__aenter__()
        assert lease.num_matched == 4
        await lease.allocate(8)
        slots = lease.slots.clone()
        await begin(tasks, hold_exclusive, cache, key(range(8)), end, order, "owner")
        assert order == ["owner"]
        done = lease.commit(key(range(12)))
        assert done.num_adopted == 0
        assert lease.slots.tolist() == slots.tolist()
        cache.check()
        end.set()
        await settled()
        again = lease.commit(key(range(12)))
        assert again.prefix_len == 8
        assert again.num_adopted == 4
        assert again.repointed == (4, 8)
        assert lease.slots[8:].tolist() == slots[8:].tolist()
        lease.release()
        assert cache.peek(key(range(12))) == 12


async def test_a_lease_below_a_pending_gate_still_publishes() -> None:
    async with opened(64) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)))
        lease = await entered(cache, key(range(12)), 8)
        end, order = anyio.Event(), list[str]()
        end.set()
        owner = await begin(tasks, hold_exclusive, cache, key(range(4)), end, order, "owner")
        assert lease.commit(key(range(8))).num_adopted == 4
        assert lease.commit(key(range(12))).num_adopted == 4
        cache.check()
        assert owner.waits
        lease.release()
        await settled()
        assert owner.returned
        assert cache.peek(key(range(12))) == 12


async def test_low_level_calls_wait_at_a_gate_and_hold_nothing_meanwhile() -> None:
    allocator = SlotAllocator(32)
    async with opened(allocator=allocator) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(8)))
        end, order = anyio.Event(), list[str]()
        await begin(tasks, hold_exclusive, cache, key(range(4)), end, order, "owner")
        slots = allocator.alloc(12)
        assert slots is not None
        insert = await begin(tasks, cache.insert, InsertParams(key(range(12)), slots))
        match = await begin(tasks, cache.match_prefix, MatchPrefixParams(key(range(12))))
        assert insert.waits
        assert match.waits
        assert cache.stats().outside == 12
        cache.check()
        end.set()
        await settled()
        assert insert.value.num_adopted == 4
        assert insert.value.duplicates.tolist() == slots[:8].tolist()
        assert len(match.value.device_indices) in (8, 12)
        allocator.free(insert.value.duplicates)


async def test_a_place_behind_a_granted_gate_cannot_be_pinned() -> None:
    async with opened(32) as cache:
        await filled(cache, key(range(8)))
        match = await cache.match_prefix(MatchPrefixParams(key(range(8))))
        async with cache.exclusive(key(range(4))):
            with pytest.raises(UsageError):
                cache.inc_lock_ref(match.last_device_node)
        match = await cache.match_prefix(MatchPrefixParams(key(range(8))))
        assert cache.inc_lock_ref(match.last_device_node) == 8
        assert cache.dec_lock_ref(match.last_device_node) == 8


async def test_peek_looks_through_gates() -> None:
    async with opened(32) as cache:
        await filled(cache, key(range(8)))
        async with cache.exclusive(key(range(4))):
            assert cache.peek(key(range(8))) == 8
            assert cache.snapshot()["namespaces"]


async def test_an_exclusive_is_entered_once_and_used_inside() -> None:
    async with opened(8) as cache:
        mine = cache.exclusive(key())
        with pytest.raises(UsageError, match="not held"):
            mine.evict()
        async with mine:
            with pytest.raises(UsageError):
                await mine.__aenter__()
        with pytest.raises(UsageError, match="not held"):
            _ = mine.num_matched
        with pytest.raises(UsageError, match="again"):
            await mine.__aenter__()
