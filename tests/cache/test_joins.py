"""`lease(key, join=True)`: of many that want the same one computes it, and the others wait for its commits."""

from __future__ import annotations

import gc
import warnings

import anyio
import pytest

from aradix import Lease, RadixCache, RadixKey
from aradix.errors import LeaseReleasedError, RetractError
from tests.cache.acts import begin, entered, filled, joiner, key, leader, settled
from tests.support.caches import opened

pytestmark = pytest.mark.anyio

PROMPT = key(range(12))


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


# ---- priorities ----


@pytest.mark.parametrize("reserve", [None, 12])
async def test_who_is_waited_for_is_as_urgent_as_the_most_urgent_that_waits(reserve: int | None) -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        fresh = cache.lease(PROMPT, join=True, priority=7)
        assert fresh.urgency == 7  # of one that is not entered
        first = await leader(tasks, cache, PROMPT, 12, priority=-3)
        assert first.urgency == -3
        half = await joiner(tasks, cache, PROMPT[:6], reserve=reserve and 6, priority=5)
        low = await joiner(tasks, cache, PROMPT, reserve=reserve, priority=-9)
        assert first.urgency == 5
        whole, vanishing = [await joiner(tasks, cache, PROMPT, reserve=reserve, priority=n) for n in (2, 9)]
        assert first.urgency == 9
        vanishing.scope.cancel()
        await settled()
        assert first.urgency == 5
        first.commit(PROMPT[:6])  # in that step one has what it wanted
        assert first.urgency == 2
        await settled()
        first.release()
        assert first.urgency == -3
        await settled()
        assert low.value.urgency == 2  # the heir
        half.value.release()
        low.value.release()
        await settled()
        assert whole.value.urgency == 2
        whole.value.release()


async def test_nobody_is_urgent_for_those_who_do_not_wait_for_it() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        plain = await entered(cache, PROMPT, 12, priority=1)
        first = await leader(tasks, cache, PROMPT, 12, priority=1)
        twin = first.fork()
        act = await joiner(tasks, cache, PROMPT, priority=2)
        assert [lease.urgency for lease in (plain, first, twin)] == [1, 2, 1]
        await cache.flush()
        assert first.urgency == 1
        await settled()
        for lease in (plain, first, twin, act.value):
            lease.release()


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
