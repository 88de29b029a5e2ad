"""Copies to the host: pinned while they run, heard of before anybody evicts, and a miss where they fail."""

from __future__ import annotations

import random
import warnings
from typing import Any

import anyio
import pytest

from aradix import EvictParams, InsertParams, MatchPrefixParams
from aradix.errors import OutOfSlotsError, TransferError
from tests.cache.acts import begin, entered, key, settled
from tests.support.tiers import TieredScene, opened_tiers

pytestmark = pytest.mark.anyio


async def evicted(scene: TieredScene, num_tokens: int) -> int:
    return (await scene.cache.evict(EvictParams(num_tokens))).num_freed_tokens


async def test_an_eviction_hears_of_the_copies_that_ended_with_nothing_after_them() -> None:
    async with opened_tiers(at_once=False) as scene:
        for i in range(4):
            await scene.fill(key(range(100 * i + 1, 100 * i + 5)))
        assert scene.cache.evictable_size() == 0
        # No turn of the loop between the end of the copies and the eviction.
        while scene.copier.running:
            scene.copier.next("store").finish()
        assert await evicted(scene, 16) == 16
        stats = scene.cache.stats()
        assert (stats.free, stats.host_used, stats.storing) == (64, 16, 0)


async def test_what_is_being_stored_is_matched_and_extended_and_not_evicted() -> None:
    async with opened_tiers(at_once=False) as scene:
        await scene.fill(key(range(1, 9)))
        assert await evicted(scene, 8) == 0
        await scene.fill(key(range(1, 9), 50, 51))
        assert scene.cache.stats().hit_tokens == 8
        scene.copier.finish_all()
        await settled()
        scene.copier.finish_all()
        assert await evicted(scene, 64) == 10
        assert scene.cache.peek_tiers(key(range(1, 9), 50, 51)) == (0, 10)


async def test_a_split_in_mid_copy_leaves_both_halves_on_the_host() -> None:
    async with opened_tiers(at_once=False) as scene:
        await scene.fill(key(range(1, 9)))
        found = await scene.cache.match_prefix(MatchPrefixParams(key(range(1, 5), 99)))
        assert len(found.device_indices) == 4
        assert scene.cache._tiered.evict_host(8) == []
        scene.copier.next("store").finish()
        scene.cache.check()
        assert scene.cache.protected_size() == 0
        assert await evicted(scene, 8) == 8
        assert scene.cache.peek_tiers(key(range(1, 9))) == (0, 8)


async def test_a_copy_that_fails_leaves_the_device_as_it_was() -> None:
    async with opened_tiers(page_size=4, at_once=False) as scene:
        await scene.fill(key(range(1, 17)))
        scene.copier.next("store").fail(num_pages=1)
        stats = scene.cache.stats()
        assert (stats.evictable, stats.host_used, stats.host_free, stats.failed_copies) == (16, 4, 60, 1)
        (fault,) = scene.cache.take_faults()
        assert (fault.operation, fault.num_tokens, type(fault.error)) == ("store", 12, TransferError)
        assert await evicted(scene, 16) == 16
        assert scene.cache.peek_tiers(key(range(1, 17))) == (0, 4)


@pytest.mark.parametrize("at_launch", [True, False])
async def test_a_host_that_fails_does_not_hold_up_who_waits_for_slots(at_launch: bool) -> None:
    async with opened_tiers(8, write_policy="write_back", at_once=False) as scene:
        await scene.fill(key(range(1, 9)))
        if at_launch:
            scene.copier.refuse = RuntimeError("no engine")
        async with anyio.create_task_group() as tasks:

            async def compute() -> None:
                async with scene.cache.lease(key(range(21, 29))) as lease:
                    await lease.allocate(8)

            act = await begin(tasks, compute)
            if not at_launch:
                scene.copier.next("store").fail()
                await settled()
            assert act.returned
        assert scene.cache.stats().failed_copies == 1
        assert scene.cache.peek_tiers(key(range(1, 9))) == (0, 0)


async def test_what_finds_no_room_on_the_host_is_stored_when_it_is_found_again() -> None:
    async with opened_tiers(32, 8, at_once=True) as scene:
        await scene.fill(key(range(1, 9)))
        await scene.fill(key(range(21, 29)))  # the host is full of what is on the device as well
        assert scene.cache.stats().host_used == 8
        await evicted(scene, 8)
        await scene.fill(key(range(21, 29)))
        assert scene.cache.stats().backuped_tokens == 16


async def test_low_level_inserts_are_stored_too() -> None:
    async with opened_tiers() as scene:
        slots = scene.cache._params.allocator.alloc(8)
        await scene.cache.insert(InsertParams(key(range(1, 9)), slots))
        assert scene.cache.stats().backuped_tokens == 8


async def test_closing_keeps_host_slots_until_the_copy_into_them_has_ended() -> None:
    async with opened_tiers(at_once=False) as scene:
        await scene.fill(key(range(1, 9)))
    assert scene.num_fenced_at_close == (8, 8)


async def test_a_lease_outlives_the_cache_and_its_copies() -> None:
    async with opened_tiers(at_once=False) as scene:
        await scene.fill(key(range(1, 9)))
        lease = await entered(scene.cache, key(range(1, 9)))
        await scene.cache.__aexit__(None, None, None)
        lease.release()


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("evict_unit", ["page", "node"])
async def test_nothing_is_left_after_thousands_of_leases_half_of_which_were_cancelled(
    write_policy: str, evict_unit: str
) -> None:
    draw = random.Random(7)
    prompts = [key(range(100 * i, 100 * i + draw.randint(1, 20))) for i in range(12)]
    async with opened_tiers(
        64, 96, write_policy=write_policy, at_once=False, evict_unit=evict_unit, load_back_threshold=3
    ) as scene:

        async def request() -> None:
            wanted = draw.choice(prompts)
            wanted = wanted[: draw.randint(1, len(wanted))]
            options: dict[str, Any] = {"reserve": len(wanted)} if draw.random() < 0.5 else {}
            async with scene.cache.lease(wanted, **options) as lease:
                if not options:
                    await lease.allocate(len(wanted) - lease.num_matched)
                scene.assert_right(lease, wanted)
                await anyio.lowlevel.checkpoint()
                scene.compute(lease, wanted)
                lease.commit(wanted)

        async def maybe_cancelled() -> None:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    if draw.random() < 0.5:
                        tasks.start_soon(cancel_later, scope)
                    await request()

        async def cancel_later(scope: anyio.CancelScope) -> None:
            for _ in range(draw.randint(0, 6)):
                await anyio.lowlevel.checkpoint()
            scope.cancel()

        async def end_copies(until: anyio.Event) -> None:
            while not until.is_set():
                await anyio.lowlevel.checkpoint()
                if scene.copier.running and draw.random() < 0.7:
                    copy = scene.copier.running.pop(draw.randrange(len(scene.copier.running)))
                    if draw.random() < 0.2:
                        copy.fail(draw.randint(0, len(copy.job.source_pages) - 1))
                    else:
                        copy.finish()

        async with anyio.create_task_group() as helpers:
            over = anyio.Event()
            helpers.start_soon(end_copies, over)
            for _ in range(60):
                async with anyio.create_task_group() as tasks:
                    for _ in range(10):
                        tasks.start_soon(maybe_cancelled)
                scene.cache.check()
            over.set()
        scene.copier.finish_all()
        await settled()
        scene.copier.finish_all()
        stats = scene.cache.stats()
        assert (stats.protected, stats.leased, stats.loading, stats.storing, stats.num_slot_waiters) == (0, 0, 0, 0, 0)
        assert scene.cache._tiers.job_ids == set()
        assert scene.cache._tiered.jobs() == []
        assert len(scene.cache._leases.passing) == 0


async def test_ten_thousand_look_ups_that_load_nothing_pin_nothing() -> None:
    async with opened_tiers(load_back_threshold=10) as scene:
        await scene.fill(key(range(1, 9)))
        await evicted(scene, 4)
        for _ in range(10_000):
            async with scene.cache.lease(key(range(1, 9))) as lease:
                assert lease.num_matched == 4
            lease.release()  # a second time
        stats = scene.cache.stats()
        assert (stats.protected, stats.num_leases, stats.load_backs, stats.queries) == (0, 0, 0, 1)


async def test_a_lease_dropped_unclosed_says_where_it_was_opened_and_its_slots_come_back() -> None:
    async with opened_tiers() as scene:
        await scene.fill(key(range(1, 9)))
        await evicted(scene, 8)
        lease: Any = await entered(scene.cache, key(range(1, 9)), 2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            del lease
        assert [warning.category for warning in told] == [ResourceWarning]
        assert "acts.py" in str(told[0].message)
        await settled()
        stats = scene.cache.stats()
        assert (stats.protected, stats.leased, stats.evictable) == (0, 0, 8)


async def test_who_waits_hears_of_a_copy_though_another_call_has_heard_of_it_first() -> None:
    async with opened_tiers(8, at_once=False) as scene, anyio.create_task_group() as tasks:
        await scene.fill(key(range(1, 5)))
        holder = await entered(scene.cache, key(range(21, 25)), 4)
        other = await entered(scene.cache, key(range(31, 39)))
        waiting = await begin(tasks, lambda: entered(scene.cache, key(range(41, 45)), reserve=4))
        assert waiting.waits
        scene.copier.next("store").finish()
        with pytest.raises(OutOfSlotsError):
            other.allocate_nowait(5)  # which hears of the copy, and gains nothing by it
        await settled()
        assert waiting.returned
        for lease in (holder, other, waiting.value):
            lease.release()
