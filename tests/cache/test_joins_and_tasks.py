"""A task that holds something waits for nobody's commits, so that joining closes no circle."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aradix import Lease, RadixCache
from tests.cache.acts import begin, entered, filled, join, joiner, key, leader, settled
from tests.support.caches import opened

pytestmark = pytest.mark.anyio

PROMPT = key(range(12))
OTHER = key(range(100, 108))


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
        assert cache.stats().joins == 0


async def hold(cache: RadixCache, how: str) -> Lease:
    """A lease that is held by the task that calls, got in one way or another."""
    if how == "joined":
        return await join(cache, OTHER)
    if how == "reserved":
        return await entered(cache, OTHER, reserve=4)
    plain = await entered(cache, OTHER, 4)
    if how == "forked":
        twin = plain.fork()
        plain.release()
        return twin
    return plain


@pytest.mark.parametrize("how", ["plain", "reserved", "joined", "forked"])
@pytest.mark.parametrize("options", [{}, {"reserve": 12}])
async def test_a_task_that_holds_another_lease_waits_for_nobody_while_it_does(
    how: str, options: dict[str, Any]
) -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        release, released = anyio.Event(), anyio.Event()

        async def want_the_same_twice() -> int:
            with anyio.fail_after(1):
                other = await hold(cache, how)
                lease = await join(cache, PROMPT, **options)
            lease.release()
            await release.wait()
            other.release()
            released.set()
            async with cache.lease(PROMPT, join=True, **options) as lease:
                return lease.num_matched

        act = await begin(tasks, want_the_same_twice)
        assert cache.stats().joins == 0
        release.set()
        await settled()
        assert released.is_set()
        assert act.waits
        assert cache.stats().joins == 1
        first.commit(PROMPT)
        await settled()
        assert act.value == 12
        first.release()


async def test_who_enters_a_twin_holds_it_and_not_who_forked_it() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 12)
        plain = await entered(cache, OTHER, 4)
        twin = plain.fork()
        plain.release()
        end = anyio.Event()

        async def sample() -> int:
            async with twin:
                async with cache.lease(PROMPT, join=True) as lease:
                    await end.wait()
                    return lease.num_matched

        sampling = await begin(tasks, sample)
        assert cache.stats().joins == 0

        async def commit() -> None:
            await settled()
            first.commit(PROMPT)

        tasks.start_soon(commit)
        async with cache.lease(PROMPT, join=True) as mine:
            assert mine.num_matched == 12
            assert cache.stats().joins == 1
        end.set()
        await settled()
        assert sampling.value == 0
        first.release()


async def test_a_leader_that_waits_for_slots_of_the_joining_task_gets_them() -> None:
    async with opened(16) as cache, anyio.create_task_group() as tasks:
        first = await leader(tasks, cache, PROMPT, 4)
        steps: list[str] = []

        async def hold_slots_and_want_the_same() -> None:
            async with cache.lease(OTHER) as mine:
                mine.allocate_nowait(8)
                while not first.waits_for_slots:
                    await checkpoint()
                async with cache.lease(PROMPT, join=True) as again:
                    steps.append(f"entered with {again.num_matched}")
            steps.append("released")

        act = await begin(tasks, hold_slots_and_want_the_same)
        with anyio.fail_after(1):
            await first.allocate(8)
        await settled()
        assert act.returned
        assert steps == ["entered with 0", "released"]
        first.release()


async def test_a_leader_that_waits_for_a_subtree_of_the_joining_task_gets_it() -> None:
    async with opened() as cache, anyio.create_task_group() as tasks:
        await filled(cache, OTHER)
        wanted = anyio.Event()

        async def hold_a_part_and_want_the_same() -> None:
            async with cache.lease(OTHER):
                await wanted.wait()
                await settled()
                async with cache.lease(PROMPT, join=True) as again:
                    assert again.num_matched == 0

        async def lead() -> None:
            async with cache.lease(PROMPT, join=True):
                wanted.set()
                async with cache.exclusive(OTHER):
                    cache.check()

        acts = [await begin(tasks, hold_a_part_and_want_the_same), await begin(tasks, lead)]
        await settled()
        assert all(act.returned for act in acts)


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
