"""`lease(key, join=True)` beside flushes, gates, slots, tasks and tiers; what is heard and audited of it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import anyio
import pytest

from aradix import ChunkCache, EvictParams, Namespace, RadixKey
from aradix.cache.watch import Watcher, watch
from aradix.errors import CacheClosedError, InvariantError, UsageError
from tests.cache.acts import entered, filled, join, joiner, key, leader, settled
from tests.support.caches import opened
from tests.support.tiers import TieredScene, opened_tiers

pytestmark = pytest.mark.anyio

PROMPT = key(range(12))


@pytest.mark.parametrize("fields", [{}, {"lora": "a"}])
async def test_after_a_flush_nobody_waits_for_what_is_published_no_more(fields: dict[str, str]) -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        wanted = key(range(12), namespace=Namespace(lora="a"))
        first = await leader(tasks, cache, wanted, 12)
        first.commit(wanted[:4])
        second, third = [await joiner(tasks, cache, wanted) for _ in range(2)]
        await cache.flush(**fields)
        cache.check()
        await settled()
        assert second.value.num_matched == 0
        assert third.waits
        first.commit(wanted)
        await settled()
        assert third.waits
        second.value.allocate_nowait(12)
        second.value.commit(wanted)
        await settled()
        assert third.value.num_matched == 12
        for lease in (first, second.value, third.value):
            lease.release()


async def test_a_flush_of_another_namespace_changes_nothing() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        act = await joiner(tasks, cache, PROMPT)
        await cache.flush("another")
        await settled()
        assert act.waits
        first.release()
        await settled()
        act.value.release()


async def test_a_gate_is_granted_over_who_waits_and_lets_go_on_afterwards() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        first.commit(PROMPT[:4])
        second, third = [await joiner(tasks, cache, PROMPT) for _ in range(2)]
        inside, end = anyio.Event(), anyio.Event()

        async def alone() -> None:
            async with cache.exclusive(PROMPT[:4]):
                inside.set()
                await end.wait()

        tasks.start_soon(alone)
        await settled()
        assert not inside.is_set()
        first.release()
        await settled()
        assert inside.is_set()
        assert second.waits
        assert third.waits
        cache.check()
        end.set()
        await settled()
        assert second.returned != third.returned  # which of them is first at a gate, their loop says
        heir, other = (second, third) if second.returned else (third, second)
        assert heir.value.num_matched == 4
        heir.value.release()
        await settled()
        other.value.release()


def at_once(call: Coroutine[Any, Any, Any]) -> None:
    """Run a call that does not wait, before any other task gets its turn."""
    with pytest.raises(StopIteration):
        call.send(None)


@pytest.mark.parametrize("reserve", [None, 12])
async def test_who_was_let_through_a_gate_finds_what_was_committed_before_it_woke(reserve: int | None) -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        alone = cache.exclusive(key())
        await alone.__aenter__()
        act = await joiner(tasks, cache, PROMPT, reserve=reserve)
        assert act.waits
        at_once(alone.__aexit__(None, None, None))
        quick = cache.lease(PROMPT)
        at_once(quick.__aenter__())
        quick.allocate_nowait(12)
        quick.commit(PROMPT)
        quick.release()
        await settled()
        assert act.value.num_matched == 12
        act.value.release()


async def test_a_task_that_has_a_subtree_waits_for_nobody() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(50, 54)))
        first = await leader(tasks, cache, PROMPT, 12)
        async with cache.exclusive(key(range(50, 54))):
            lease = await join(cache, PROMPT)
            other = await join(cache, PROMPT, reserve=12)
            lease.release()
            other.release()
        first.release()
        assert cache.stats().joins == 0


async def test_closing_ends_the_wait() -> None:
    async with anyio.create_task_group() as tasks:
        async with opened() as cache:
            first = await leader(tasks, cache, PROMPT, 12)
            waiting = [await joiner(tasks, cache, PROMPT), await joiner(tasks, cache, PROMPT, reserve=12)]
        await settled()
        assert all(isinstance(act.error, CacheClosedError) for act in waiting)
        first.commit(PROMPT)
        first.release()
        cache.check()


# ---- with slots ----


async def test_who_reserves_waits_without_slots_and_others_are_served_past_it() -> None:
    async with opened(24) as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        act = await joiner(tasks, cache, PROMPT, reserve=16)
        assert act.waits
        stats = cache.stats()
        assert (stats.num_joiners, stats.num_slot_waiters, stats.free) == (1, 1, 12)
        other = await joiner(tasks, cache, key(range(50, 56)), reserve=6)
        assert other.returned
        first.commit(PROMPT[:6])
        await settled()
        assert act.waits
        first.commit(PROMPT)
        await settled()
        assert act.value.num_matched == 12
        assert act.value.num_tokens == 16
        assert cache.stats().joined_tokens == 12
        for lease in (first, other.value, act.value):
            lease.release()


async def test_of_many_that_reserve_one_takes_over_and_each_keeps_its_place() -> None:
    async with opened(16) as cache, anyio.create_task_group() as tasks:
        current = await leader(tasks, cache, PROMPT, 12)
        waiting = [await joiner(tasks, cache, PROMPT, reserve=12) for _ in range(3)]
        late = await joiner(tasks, cache, key(range(70, 76)), reserve=6)
        assert late.waits  # for slots
        for number, heir in enumerate(waiting):
            current.commit(PROMPT[: 2 * number + 2])
            current.release()
            cache.check()
            await settled()
            assert heir.value.num_matched == 2 * number + 2
            assert all(act.waits for act in (*waiting[number + 1 :], late))
            current = heir.value
        assert cache.stats().join_takeovers == 3
        current.release()
        await settled()
        late.value.release()


async def test_who_was_queued_for_slots_waits_for_who_was_entered_before() -> None:
    async with opened(30) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(50, 80)), 30)
        first, second, third = [await joiner(tasks, cache, PROMPT, reserve=12) for _ in range(3)]
        assert cache.stats().joins == 0
        hog.release()
        await settled()
        assert first.returned
        assert second.waits
        assert third.waits
        assert cache.stats().num_joiners == 2
        second.scope.cancel()
        await settled()
        assert cache.stats().num_joiners == 1
        first.value.commit(PROMPT)
        await settled()
        assert third.value.num_matched == 12
        first.value.release()
        third.value.release()


async def test_a_leader_is_served_before_who_waits_for_it() -> None:
    """The pool is full of what nobody would give, if those that wait kept anything."""
    async with opened(12) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(50, 56)))
        first = await leader(tasks, cache, PROMPT, 6)
        waiting = [await joiner(tasks, cache, key(range(12), 90 + number), reserve=number) for number in (12, 2)]
        waiting += [await joiner(tasks, cache, key(range(12), number)) for number in (80, 81)]
        assert all(act.waits for act in waiting)
        with anyio.fail_after(1):
            await first.allocate(6)
        first.commit(PROMPT)
        first.release()
        await settled()
        for act in waiting:
            assert act.value.num_matched == 12
            act.value.release()


# ---- the rest of the house ----


async def test_bigrams_are_waited_for_as_well() -> None:
    async with opened(is_eagle=True) as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 11)
        act = await joiner(tasks, cache, key(range(9), range(50, 54)))
        first.commit(PROMPT[:8])
        await settled()
        assert act.waits
        first.commit(PROMPT[:9])
        await settled()
        assert act.value.num_matched == 8
        act.value.release()
        first.release()


async def on_the_host(scene: TieredScene, wanted: RadixKey) -> None:
    await scene.fill(wanted)
    scene.copier.finish_all()
    await scene.cache.evict(EvictParams(len(wanted)))


@pytest.mark.parametrize("options", [{}, {"reserve": 12}])
async def test_who_shares_a_copy_from_the_host_shares_what_is_computed_after_it(options: dict[str, int]) -> None:
    async with opened_tiers(at_once=False) as scene, anyio.create_task_group() as tasks:
        cache = scene.cache
        await on_the_host(scene, PROMPT[:6])
        acts = [await joiner(tasks, cache, PROMPT, **options) for _ in range(3)]
        assert all(act.waits for act in acts)
        assert cache.stats().joins == 0
        scene.copier.next("load").finish()
        await settled()
        heir = next(act for act in acts if act.returned)
        first = heir.value
        assert first.num_matched == 6
        assert cache.stats().num_joiners == 2
        cache.check()
        if not options:
            first.allocate_nowait(6)
        scene.compute(first, PROMPT)
        first.commit(PROMPT)
        first.release()
        await settled()
        acts.remove(heir)
        for act in acts:
            scene.assert_right(act.value, PROMPT)
            assert act.value.num_matched == 12
            act.value.release()
        scene.copier.finish_all()


async def test_what_went_to_the_host_meanwhile_is_brought_back_before_anybody_takes_over() -> None:
    async with opened_tiers(at_once=False) as scene, anyio.create_task_group() as tasks:
        cache = scene.cache
        first = await leader(tasks, cache, PROMPT, 6)
        scene.compute(first, PROMPT)
        first.commit(PROMPT[:6])
        acts = [await joiner(tasks, cache, PROMPT) for _ in range(2)]
        await scene.fill(PROMPT[:10])  # by one who waits for nobody
        while scene.copier.running:  # what stands below is stored after what stands above
            scene.copier.finish_all()
            await settled()
        await cache.evict(EvictParams(4))
        first.release()
        cache.check()
        await settled()
        assert all(act.waits for act in acts)
        assert cache.stats().num_joiners == 0
        scene.copier.next("load").finish()
        await settled()
        heir, other = sorted((act for act in acts), key=lambda act: act.waits)
        scene.assert_right(heir.value, PROMPT)
        assert heir.value.num_matched == 10
        assert other.waits
        heir.value.release()
        await settled()
        other.value.release()


async def test_a_cache_that_shares_nothing_has_nothing_to_wait_for() -> None:
    async with opened(cache_class=ChunkCache) as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        acts = [await joiner(tasks, cache, PROMPT), await joiner(tasks, cache, PROMPT, reserve=12)]
        assert all(act.returned for act in acts)
        for lease in (first, *(act.value for act in acts)):
            lease.release()


async def test_join_is_a_bool() -> None:
    async with opened() as cache:
        with pytest.raises(UsageError, match="join must be a bool"):
            cache.lease(PROMPT, join=1)  # type: ignore[arg-type]


async def test_a_watcher_hears_of_waits() -> None:
    class Heard(Watcher):
        count = 0

        def waited_to_join(self, began: float) -> None:
            self.count += 1

    async with opened() as cache, anyio.create_task_group() as tasks:
        heard, also = Heard(), Heard()
        ends = [watch(cache, each) for each in (heard, also)]
        first = await leader(tasks, cache, PROMPT, 12)
        act = await joiner(tasks, cache, PROMPT)
        first.release()
        await settled()
        act.value.release()
        assert (heard.count, also.count) == (1, 1)
        for end in ends:
            end()


async def test_a_lease_nobody_can_wait_for_any_more_is_as_quick_as_any() -> None:
    async with opened() as cache:
        async with cache.lease(PROMPT, join=True) as lease:
            assert lease._short_calls is None
            lease.allocate_nowait(13)
            lease.commit(PROMPT)
            assert lease._short_calls is cache._short_calls
            lease.commit(key(range(12), 99))


@pytest.mark.parametrize("harm", ["stranded", "early", "past", "twice"])
async def test_the_audit_sees_who_waits_in_vain_and_who_computes_what_another_one_does(harm: str) -> None:
    async with anyio.create_task_group() as tasks:
        with pytest.raises(InvariantError, match="I9"):
            async with opened() as cache:
                first = await leader(tasks, cache, PROMPT, 12)
                joins = cache._leases.joins
                if harm == "twice":
                    joins._fronts.clear()  # it is not found
                act = await joiner(tasks, cache, PROMPT)
                flight = next(iter(joins.flights.values()))
                if harm == "stranded":
                    joins.flights.clear()
                elif harm == "early":
                    joins.joiners[next(iter(joins.joiners))].target = 0
                elif harm == "past":
                    flight.front = 3
                cache.check()
        tasks.cancel_scope.cancel()
    assert act.returned == (harm == "twice")
    first.release()
    if act.returned:
        act.value.release()
