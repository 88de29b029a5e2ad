"""A load is shared by all who want it, harmed by none who leaves, and takes its slots in turn."""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import pytest

from aradix import EvictParams, Lease, RadixKey
from aradix.errors import CacheClosedError, LeaseReleasedError, TransferError
from tests.cache.acts import begin, entered, key, settled
from tests.support.tiers import TieredScene, opened_tiers

pytestmark = pytest.mark.anyio


async def on_the_host(scene: TieredScene, *keys: RadixKey) -> None:
    """Cache some keys, and let them leave the device."""
    for each in keys:
        await scene.fill(each)
        scene.copier.finish_all()
        await scene.cache.evict(EvictParams(len(each)))
    scene.copier.num_launched = 0


async def take(scene: TieredScene, wanted: RadixKey, **options: Any) -> Lease:
    lease = await entered(scene.cache, wanted, **options)
    scene.assert_right(lease, wanted)
    return lease


async def test_fifty_leases_share_one_copy_and_resume_together() -> None:
    wanted = key(range(1, 10_001))
    async with opened_tiers(10_240, 10_240, at_once=False) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, wanted)
        acts = [await begin(tasks, take, scene, wanted) for _ in range(50)]
        assert all(act.waits for act in acts)
        (load,) = scene.copier.running
        assert len(load.job.source_pages) == 10_000
        scene.copier.next().finish()
        await settled()
        assert [act.value.num_matched for act in acts] == [10_000] * 50
        assert scene.copier.num_launched == 1
        assert scene.cache.protected_size() == 10_000
        for act in acts:
            act.value.release()


@pytest.mark.parametrize("who", [0, 1, 2])
async def test_cancelling_a_sharer_harms_no_other(who: int) -> None:
    wanted = key(range(1, 9))
    async with opened_tiers(at_once=False) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, wanted)
        acts = [await begin(tasks, take, scene, wanted) for _ in range(3)]
        acts.pop(who).scope.cancel()
        await settled()
        scene.cache.check()
        scene.copier.next("load").finish()
        await settled()
        assert [act.value.num_matched for act in acts] == [8, 8]
        assert scene.copier.num_launched == 1
        for act in acts:
            act.value.release()


async def test_whoever_preempts_hears_of_all_who_wait_for_a_load_that_waits_for_slots() -> None:
    wanted = key(range(1, 9))
    async with opened_tiers(16, at_once=False) as scene, anyio.create_task_group() as tasks:
        cache = scene.cache
        await on_the_host(scene, wanted)
        hog = await entered(cache, key(range(100, 116)), 16)
        sharers = [cache.lease(wanted) for _ in range(2)]
        heard: list[list[bool]] = []
        cache._pressure.on_shortage.append(lambda: heard.append([sharer.waits_for_slots for sharer in sharers]))
        await begin(tasks, sharers[0].__aenter__)
        assert heard[-1] == [True, False]
        await begin(tasks, sharers[1].__aenter__)
        assert heard[-1] == [True, True]
        hog.release()
        await settled()
        scene.copier.next("load").finish()
        await settled()
        for sharer in sharers:
            assert sharer.num_matched == 8
            sharer.release()


async def test_a_load_goes_on_though_all_who_wanted_it_were_cancelled() -> None:
    wanted = key(range(1, 9))
    async with opened_tiers(at_once=False) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, wanted)
        acts = [await begin(tasks, take, scene, wanted) for _ in range(3)]
        for act in acts:
            act.scope.cancel()
        await settled()
        assert scene.cache.stats().loading == 8
        scene.copier.next("load").finish()
        await settled()
        assert scene.cache.stats().loading == 0
        assert (scene.cache.evictable_size(), scene.cache.protected_size()) == (8, 0)
        lease = await take(scene, wanted)
        assert lease.num_matched == 8
        lease.release()


async def test_who_is_cancelled_as_the_load_ends_leaves_no_pin() -> None:
    wanted = key(range(1, 9))
    for order in itertools.permutations(("cancel", "finish")):
        async with opened_tiers(at_once=False) as scene, anyio.create_task_group() as tasks:
            await on_the_host(scene, wanted)
            acts = [await begin(tasks, take, scene, wanted) for _ in range(2)]
            for what in order:
                if what == "cancel":
                    acts[0].scope.cancel()
                else:
                    scene.copier.next("load").finish()
                    scene.cache.stats()
            await settled()
            assert acts[1].value.num_matched == 8
            assert acts[0].waits is False
            if acts[0].value is not None:
                acts[0].value.release()
            acts[1].value.release()
            assert scene.cache.protected_size() == 0


async def test_a_copy_that_fails_half_way_leaves_a_shorter_and_true_prefix() -> None:
    wanted = key(range(1, 17))
    async with opened_tiers(page_size=4, at_once=False) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, wanted)
        acts = [await begin(tasks, take, scene, wanted) for _ in range(2)]
        scene.copier.next("load").fail(num_pages=2)
        await settled()
        assert [act.value.num_matched for act in acts] == [8, 8]
        stats = scene.cache.stats()
        assert (stats.failed_copies, stats.load_back_tokens, stats.loading) == (1, 8, 0)
        assert scene.cache.peek_tiers(wanted) == (8, 8)
        (fault,) = scene.cache.take_faults()
        assert (fault.operation, fault.num_tokens, type(fault.error)) == ("load", 8, TransferError)
        assert scene.cache.take_faults() == []
        for act in acts:
            act.value.release()


async def test_a_copy_that_cannot_begin_is_a_miss() -> None:
    wanted = key(range(1, 9))
    async with opened_tiers() as scene:
        await on_the_host(scene, wanted)
        scene.copier.refuse = RuntimeError("no engine")
        lease = await take(scene, wanted)
        assert lease.num_matched == 0
        assert scene.cache.stats().failed_copies == 1
        lease.release()
        scene.copier.refuse = None
        lease = await take(scene, wanted)
        assert lease.num_matched == 8
        lease.release()


async def test_who_wants_more_than_what_is_being_loaded_loads_the_rest() -> None:
    async with opened_tiers(at_once=False) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, key(range(1, 17)))
        short = await begin(tasks, take, scene, key(range(1, 9)))
        long = await begin(tasks, take, scene, key(range(1, 17)))
        assert len(scene.copier.running) == 1
        scene.copier.next("load").finish()
        await settled()
        assert short.value.num_matched == 8
        assert long.waits
        scene.copier.next("load").finish()
        await settled()
        assert long.value.num_matched == 16
        for act in (short, long):
            act.value.release()


async def test_what_is_published_while_it_is_loaded_wins() -> None:
    wanted = key(range(1, 9))
    async with opened_tiers(at_once=False) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, wanted)
        act = await begin(tasks, take, scene, wanted)
        await scene.fill(wanted, load_back=False)
        scene.copier.next("load").finish()
        await settled()
        assert act.value.num_matched == 8
        assert scene.cache.stats().free == 64 - 8
        act.value.release()


# ---- slots ----


async def test_a_load_evicts_for_its_slots() -> None:
    async with opened_tiers(8, 16) as scene:
        await on_the_host(scene, key(range(1, 9)))
        await scene.fill(key(range(21, 29)))
        lease = await take(scene, key(range(1, 9)))
        assert lease.num_matched == 8
        assert scene.cache.peek_tiers(key(range(21, 29))) == (0, 8)
        lease.release()


async def test_a_full_host_is_read_before_its_room_is_wanted() -> None:
    async with opened_tiers(8, 8, write_policy="write_back", at_once=False) as scene:
        await scene.fill(key(range(1, 9)))
        async with anyio.create_task_group() as tasks:
            await begin(tasks, scene.cache.evict, EvictParams(8))
            scene.copier.next("store").finish()
        await scene.fill(key(range(21, 29)))
        async with anyio.create_task_group() as tasks:
            act = await begin(tasks, take, scene, key(range(1, 9)))
            scene.copier.next("load").finish()
        assert act.value.num_matched == 8
        assert scene.cache.peek_tiers(key(range(21, 29))) == (0, 0)
        act.value.release()


async def test_a_load_waits_for_its_slots_behind_who_came_first() -> None:
    async with opened_tiers(16, 32) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, key(range(1, 9)))
        holder = await entered(scene.cache, key(range(21, 37)), 16)
        first = await begin(tasks, lambda: entered(scene.cache, key(range(41, 49)), reserve=8))
        load = await begin(tasks, take, scene, key(range(1, 9)))
        assert scene.cache.stats().num_slot_waiters == 2
        holder.truncate(9)
        await settled()
        assert first.waits
        assert load.waits
        holder.truncate(8)
        await settled()
        assert first.returned
        assert load.waits
        holder.release()
        await settled()
        assert load.value.num_matched == 8
        for act in (first, load):
            act.value.release()


async def test_a_load_that_nobody_waits_for_any_more_is_not_begun() -> None:
    async with opened_tiers(16, 32) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, key(range(1, 9)))
        holder = await entered(scene.cache, key(range(21, 37)), 16)
        acts = [await begin(tasks, take, scene, key(range(1, 9))) for _ in range(2)]
        acts[0].scope.cancel()
        await settled()
        assert scene.cache.stats().num_slot_waiters == 1
        acts[1].scope.cancel()
        await settled()
        assert scene.cache.stats().num_slot_waiters == 0
        scene.cache.check()
        holder.release()
        assert scene.copier.num_launched == 0


async def test_a_load_that_stands_in_the_way_of_all_gives_up() -> None:
    """Two leases grow, and the prefix that the load stands on has the last slots: it yields before a lease must."""
    async with opened_tiers(16, 32) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, key(range(1, 13)))
        (await take(scene, key(range(1, 5)))).release()
        assert scene.cache.peek_tiers(key(range(1, 13))) == (4, 8)
        grower = await entered(scene.cache, key(range(21, 33)), 12)
        load = await begin(tasks, take, scene, key(range(1, 13)))
        assert load.waits
        growth = await begin(tasks, grower.allocate, 4)
        await settled()
        # The load gave up; its lease is entered with what the device had, and ends.
        assert load.value.num_matched == 4
        load.value.release()
        await settled()
        assert growth.returned
        assert scene.cache.stats().retracts == 0
        grower.release()


async def test_a_load_is_cut_to_what_the_pool_can_hold() -> None:
    async with opened_tiers(8, 32) as scene:
        await scene.fill(key(range(1, 9)))
        await scene.cache.evict(EvictParams(8))
        async with scene.cache.lease(key(range(1, 9))) as lease:
            assert lease.num_matched == 8
        found = key(range(1, 9), range(9, 17))
        assert (await scene.cache.evict(EvictParams(8))).num_freed_tokens == 8
        lease = await take(scene, found)
        assert lease.num_matched == 8
        lease.release()


async def test_the_slots_of_a_load_count_as_coming_back() -> None:
    """All others wait, but a copy is under way: nobody has to give way for it."""
    async with opened_tiers(16, 32, at_once=False) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, key(range(1, 9)))
        load = await begin(tasks, take, scene, key(range(1, 9)))
        grower = await entered(scene.cache, key(range(21, 29)), 8)
        growth = await begin(tasks, grower.allocate, 4)
        assert growth.waits
        assert scene.cache.stats().retracts == 0
        load.scope.cancel()
        scene.copier.next("load").finish()
        await settled()
        assert growth.returned
        grower.release()


# ---- gates ----


async def test_a_gate_waits_for_the_load_below_it_and_the_sharers_wait_for_the_gate() -> None:
    wanted = key(range(1, 9))
    async with opened_tiers(at_once=False) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, wanted)
        leave = anyio.Event()

        async def alone() -> None:
            async with scene.cache.exclusive(key()):
                await leave.wait()

        act = await begin(tasks, take, scene, wanted)
        gate = await begin(tasks, alone)
        scene.copier.next("load").finish()
        await settled()
        assert act.waits
        assert gate.waits
        leave.set()
        await settled()
        assert act.value.num_matched == 8
        act.value.release()


async def test_a_pending_gate_makes_a_load_below_it_that_waits_for_slots_give_up() -> None:
    wanted = key(range(1, 9))
    async with opened_tiers(16, 32) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, wanted)
        holder = await entered(scene.cache, key(range(21, 37), namespace="other"), 16)
        act = await begin(tasks, take, scene, wanted)
        assert act.waits

        async def alone() -> None:
            async with scene.cache.exclusive(key()):
                pass

        await alone()
        await settled()
        assert act.value.num_matched == 0
        act.value.release()
        holder.release()


async def test_a_task_that_holds_a_subtree_loads_nothing() -> None:
    async with opened_tiers() as scene:
        await on_the_host(scene, key(range(1, 9)))
        async with scene.cache.exclusive(key(namespace="other")):
            lease = await take(scene, key(range(1, 9)))
            assert lease.num_matched == 0
            lease.release()


# ---- ends ----


async def test_releasing_a_lease_ends_its_wait_for_a_load() -> None:
    wanted = key(range(1, 9))
    async with opened_tiers(at_once=False) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, wanted)
        leases = [scene.cache.lease(wanted) for _ in range(2)]
        acts = [await begin(tasks, lease.__aenter__) for lease in leases]
        leases[0].release()
        await settled()
        assert isinstance(acts[0].error, LeaseReleasedError)
        scene.copier.next("load").finish()
        await settled()
        assert acts[1].value.num_matched == 8
        leases[1].release()


async def test_closing_ends_the_wait_for_a_load_and_keeps_its_slots_until_the_copy_has_ended() -> None:
    wanted = key(range(1, 9))
    async with anyio.create_task_group() as tasks:
        async with opened_tiers(at_once=False) as scene:
            await on_the_host(scene, wanted)
            acts = [await begin(tasks, take, scene, wanted) for _ in range(2)]
        assert scene.num_fenced_at_close == (8, 8)
        await settled()
        assert [type(act.error) for act in acts] == [CacheClosedError] * 2


async def test_who_waits_for_a_copy_waits_for_slots_until_it_begins() -> None:
    async with opened_tiers(16, 32, at_once=False) as scene, anyio.create_task_group() as tasks:
        await on_the_host(scene, key(range(1, 9)))
        holder = await entered(scene.cache, key(range(21, 37)), 16)
        leases = [scene.cache.lease(key(range(1, 9))) for _ in range(2)]
        for lease in leases:
            assert not lease.waits_for_slots
            await begin(tasks, lease.__aenter__)
        assert all(lease.waits_for_slots for lease in leases)
        holder.release()
        await settled()
        assert not any(lease.waits_for_slots for lease in leases)
        scene.copier.next("load").finish()
        await settled()
        for lease in leases:
            assert (lease.num_matched, lease.waits_for_slots) == (8, False)
            lease.release()


async def test_closing_ends_a_load_that_waits_for_slots() -> None:
    async with anyio.create_task_group() as tasks:
        async with opened_tiers(16, 32) as scene:
            await on_the_host(scene, key(range(1, 9)))
            holder = await entered(scene.cache, key(range(21, 37)), 16)
            act = await begin(tasks, take, scene, key(range(1, 9)))
            await scene.cache.__aexit__(None, None, None)
            await settled()
            assert isinstance(act.error, CacheClosedError)
            holder.release()
