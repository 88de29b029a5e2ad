"""`lease(key, join=True)`: of many that want the same one computes it, and the others wait for its commits."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import anyio
import pytest

from aradix import ChunkCache, EvictParams, Lease, Namespace, RadixCache, RadixKey
from aradix.cache.watch import Watcher, watch
from aradix.errors import CacheClosedError, InvariantError, LeaseReleasedError, RetractError, UsageError
from tests.cache.acts import Act, begin, entered, filled, key, settled
from tests.support.caches import opened
from tests.support.tiers import TieredScene, opened_tiers

pytestmark = pytest.mark.anyio

PROMPT = key(range(12))


async def join(cache: RadixCache, wanted: RadixKey, **options: Any) -> Lease:
    """A lease in hand that has waited for others; the caller releases it."""
    lease = cache.lease(wanted, join=True, **options)
    await lease.__aenter__()
    return lease


async def leader(tasks: Any, cache: RadixCache, wanted: RadixKey, num_fresh: int = 0, **options: Any) -> Lease:
    """As `join`, entered in a task of its own that is over by now, and holding so many fresh tokens."""
    act = await joiner(tasks, cache, wanted, **options)
    lease: Lease = act.value
    if num_fresh:
        lease.allocate_nowait(num_fresh)
    return lease


async def joiner(tasks: Any, cache: RadixCache, wanted: RadixKey, **options: Any) -> Act:
    """A task that enters a lease, perhaps after others."""
    return await begin(tasks, lambda: join(cache, wanted, **options))


async def test_who_wants_the_same_waits_for_the_commits_and_computes_nothing() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        waiting = [await joiner(tasks, cache, PROMPT) for _ in range(3)]
        assert all(act.waits for act in waiting)
        assert cache.stats().num_joiners == 3
        first.commit(PROMPT[:5])
        await settled()
        assert all(act.waits for act in waiting)
        cache.check()
        first.commit(PROMPT)
        assert cache.stats().num_leases == 4  # they are entered in that step
        await settled()
        assert [act.value.num_matched for act in waiting] == [12, 12, 12]
        stats = cache.stats()
        assert (stats.num_joiners, stats.joins, stats.joined_tokens, stats.join_takeovers) == (0, 3, 36, 0)
        for lease in (first, *(act.value for act in waiting)):
            lease.release()


async def test_who_waits_holds_nothing() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        await filled(cache, PROMPT[:4])
        first = await leader(tasks, cache, PROMPT, 8)
        act = await joiner(tasks, cache, PROMPT)
        assert act.waits
        assert [view.lock_ref for view in cache._core.walk() if view.num_tokens] == [1]
        first.release()
        await settled()
        act.value.release()


@pytest.mark.parametrize("page_size", [1, 4])
async def test_who_shares_a_part_goes_on_as_soon_as_that_part_is_committed(page_size: int) -> None:
    async with opened(page_size=page_size) as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        act = await joiner(tasks, cache, key(range(9), range(50, 60)))
        for num_tokens in range(1, 8):
            first.commit(PROMPT[:num_tokens])
            await settled()
            assert act.waits
        first.commit(PROMPT[:8])
        await settled()
        if page_size == 1:
            assert act.waits
            first.commit(PROMPT[:9])
            await settled()
        assert act.value.num_matched == 9 // page_size * page_size
        act.value.release()
        first.release()


async def test_who_would_gain_less_than_a_page_does_not_wait() -> None:
    async with opened(page_size=4) as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        others = [
            await joiner(tasks, cache, key(range(3), range(50, 60))),
            await joiner(tasks, cache, PROMPT[:3]),
            await joiner(tasks, cache, PROMPT[:8], leave_last=5),
            await joiner(tasks, cache, key(range(12), namespace="x")),
        ]
        assert all(act.returned for act in others)
        first.commit(PROMPT[:8])
        late = await joiner(tasks, cache, PROMPT, leave_last=1)
        assert late.returned
        assert cache.stats().joins == 0
        for lease in (first, *(act.value for act in (*others, late))):
            lease.release()


async def test_without_join_nobody_waits_and_nobody_is_waited_for() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        async with cache.lease(PROMPT) as plain:
            assert plain.num_matched == 0
        first.release()
        async with cache.lease(PROMPT):
            act = await joiner(tasks, cache, PROMPT)
            assert act.returned
            act.value.release()
        assert cache.stats().joins == 0


async def test_a_lease_that_publishes_nothing_is_not_waited_for_but_waits() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        silent = await leader(tasks, cache, PROMPT, 12, store=False)
        first = await joiner(tasks, cache, PROMPT)
        assert first.returned
        second = await joiner(tasks, cache, PROMPT, store=False)
        assert second.waits
        silent.release()
        first.value.allocate_nowait(12)
        first.value.commit(PROMPT)
        await settled()
        assert second.value.num_matched == 12
        second.value.release()
        first.value.release()


async def test_a_twin_leads_nobody_and_the_leader_leads_on() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        twin = first.fork()
        act = await joiner(tasks, cache, PROMPT)
        twin.release()
        first.truncate(6)
        await settled()
        assert act.waits
        first.release()
        await settled()
        assert act.returned
        act.value.release()


# ---- when the leader ends ----


async def test_exactly_one_takes_over_from_what_was_committed_in_the_order_of_arrival() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        current = await leader(tasks, cache, PROMPT, 12)
        waiting = [await joiner(tasks, cache, PROMPT) for _ in range(4)]
        for number, heir in enumerate(waiting):
            current.commit(PROMPT[: 2 * number + 2])
            current.release()
            cache.check()
            await settled()
            assert heir.value.num_matched == 2 * number + 2
            assert all(act.waits for act in waiting[number + 1 :])
            assert cache.stats().join_takeovers == number + 1
            current = heir.value
            current.allocate_nowait(12 - current.num_matched)
        current.commit(PROMPT)
        current.release()
        assert cache.stats().joined_tokens == 2 + 4 + 6 + 8


async def test_what_was_committed_is_not_evicted_between_the_leaders_end_and_the_heirs_begin() -> None:
    async with opened(12) as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        act = await joiner(tasks, cache, PROMPT)
        hungry = await begin(tasks, lambda: entered_and_grown(cache, key(range(50, 62)), 4))
        assert hungry.waits
        first.commit(PROMPT[:10])
        first.release()
        await settled()
        assert act.value.num_matched == 10
        act.value.release()
        await settled()
        hungry.value.release()


async def entered_and_grown(cache: RadixCache, wanted: RadixKey, num_tokens: int) -> Lease:
    lease = await entered(cache, wanted)
    await lease.allocate(num_tokens)
    return lease


async def test_a_leader_that_fails_is_cancelled_or_dropped_strands_nobody() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        broken = anyio.Event()

        async def fails() -> None:
            async with cache.lease(PROMPT, join=True):
                await broken.wait()
                raise ValueError("the engine failed")

        async def sleeps() -> None:
            async with cache.lease(PROMPT, join=True):
                await anyio.sleep_forever()

        failing = await begin(tasks, fails)
        second = await begin(tasks, sleeps)
        third = await joiner(tasks, cache, PROMPT)
        broken.set()
        await settled()
        assert isinstance(failing.error, ValueError)
        assert second.waits
        assert third.waits
        assert cache.stats().num_leases == 1
        second.scope.cancel()
        await settled()
        assert third.returned
        fourth = await joiner(tasks, cache, PROMPT)
        assert fourth.waits
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            third.value = None
            gc.collect()
            await settled()
        assert fourth.returned
        fourth.value.release()
        assert cache.stats().join_takeovers == 3


async def test_a_leader_that_has_to_give_way_is_followed_by_who_waited_for_it() -> None:
    async with opened(8) as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT[:8], 4)
        first.commit(PROMPT[:2])
        act = await joiner(tasks, cache, PROMPT[:8])
        hog = await entered(cache, key(range(50, 54)), 4)
        growing = await begin(tasks, first.allocate, 4)
        assert growing.waits
        with pytest.raises(RetractError):
            await hog.allocate(1)
        assert act.waits
        hog.release()
        await settled()
        assert growing.returned
        assert act.waits
        first.release()
        await settled()
        assert act.value.num_matched == 2
        act.value.release()


async def test_who_waits_may_be_cancelled_or_released_and_harms_nobody() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        cancelled = await joiner(tasks, cache, PROMPT)
        lease = cache.lease(PROMPT, join=True)
        released = await begin(tasks, lease.__aenter__)
        last = await joiner(tasks, cache, PROMPT)
        cancelled.scope.cancel()
        lease.release()
        await settled()
        assert isinstance(released.error, LeaseReleasedError)
        assert last.waits
        assert cache.stats().num_joiners == 1
        first.release()
        await settled()
        assert last.returned
        last.value.release()


async def test_who_is_let_go_on_and_cancelled_in_the_same_moment_hands_over() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        second, third = [await joiner(tasks, cache, PROMPT) for _ in range(2)]
        first.commit(PROMPT[:3])
        first.release()
        second.scope.cancel()
        await settled()
        assert not second.waits
        if second.value is not None:  # it had returned before the cancellation came to it
            second.value.release()
            await settled()
        assert third.value.num_matched == 3
        third.value.release()


async def test_a_chain_of_keys_goes_on_link_by_link() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        keys = [key(range(4)), key(range(8)), key(range(12))]
        first = await leader(tasks, cache, keys[0], 4)
        second = await joiner(tasks, cache, keys[1])
        third = await joiner(tasks, cache, keys[2])
        assert second.waits
        assert third.waits
        first.commit(keys[0])
        await settled()
        assert second.value.num_matched == 4
        assert third.waits
        second.value.allocate_nowait(4)
        second.value.commit(keys[1])
        await settled()
        assert third.value.num_matched == 8
        for lease in (first, second.value, third.value):
            lease.release()
        assert cache.stats().joins == 2


# ---- flushes, gates, closing ----


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


# ---- tasks ----


@pytest.mark.parametrize("options", [{}, {"reserve": 12}])
async def test_a_task_does_not_wait_for_itself(options: dict[str, int]) -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        mine = await join(cache, PROMPT)
        with anyio.fail_after(1):
            second = await join(cache, PROMPT, **options)
        act = await joiner(tasks, cache, PROMPT)
        assert act.waits
        cache.check()
        mine.release()
        await settled()
        assert act.waits
        second.release()
        await settled()
        act.value.release()


@pytest.mark.parametrize("reserve", [None, 12])
async def test_tasks_do_not_wait_for_one_another_in_a_circle(reserve: int | None) -> None:
    others = [key(range(start, start + 12)) for start in (100, 200, 300)]
    async with opened(256) as cache, anyio.create_task_group() as tasks:
        ready = [anyio.Event() for _ in others]

        async def hold_one_and_want_the_next(number: int) -> None:
            async with cache.lease(others[number], join=True):
                ready[number].set()
                for event in ready:
                    await event.wait()
                async with cache.lease(others[(number + 1) % 3], join=True, reserve=reserve):
                    cache.check()

        acts = [await begin(tasks, hold_one_and_want_the_next, number) for number in range(3)]
        await settled()
        assert all(act.returned for act in acts)
        assert cache.stats().joins == 2


async def test_a_task_that_is_over_is_not_taken_for_another_one() -> None:
    """The ids of tasks come again; a leader is entered here by one that is long gone when the next one joins."""
    async with opened() as cache, anyio.create_task_group() as tasks:
        for _ in range(5):
            first = await leader(tasks, cache, PROMPT, 12)
            act = await joiner(tasks, cache, PROMPT)
            assert act.waits
            first.release()
            await settled()
            act.value.release()
            del first, act


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
