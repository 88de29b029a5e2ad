"""A lease object stands for one entering: used twice, or by two tasks, it says so and loses nothing."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from aradix.errors import LeaseReleasedError, UsageError
from tests.cache.acts import begin, entered, filled, key, settled
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


async def test_a_lease_is_entered_once() -> None:
    async with opened(8) as cache:
        lease = cache.lease(key(range(4)))
        async with lease:
            with pytest.raises(UsageError, match="entered already"):
                await lease.__aenter__()
        with pytest.raises(UsageError, match="entered already"):
            await lease.__aenter__()


async def test_a_lease_whose_entering_was_cancelled_leaks_nothing_when_tried_again() -> None:
    async with opened(8) as cache:
        await filled(cache, key(range(4)))
        hog = await entered(cache, key(range(10, 14)), 4)
        lease = cache.lease(key(range(8)), reserve=8)
        async with anyio.create_task_group() as tasks:
            first = await begin(tasks, lease.__aenter__)
            first.scope.cancel()
        hog.release()
        try:
            async with lease:
                assert len(lease.slots) == 8
        except UsageError:
            pass  # to refuse is as good
        assert cache.stats().protected == 0
        assert cache.stats().leased == 0
        assert cache.stats().num_leases == 0


async def test_a_lease_is_not_entered_in_two_tasks_at_once() -> None:
    async with opened(8) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)))
        hog = await entered(cache, key(range(10, 14)), 4)
        lease = cache.lease(key(range(8)), reserve=8)
        first = await begin(tasks, lease.__aenter__)
        second = await begin(tasks, lease.__aenter__)
        assert first.waits
        assert isinstance(second.error, UsageError)
        hog.release()
        await settled()
        assert first.returned
        lease.release()
        assert cache.stats().protected == 0
        assert cache.stats().leased == 0


async def test_a_lease_that_is_not_held_shows_and_does_nothing() -> None:
    async with opened(8) as cache:
        lease = cache.lease(key(range(4)))
        calls: list[Callable[[], object]] = [
            lambda: lease.slots,
            lambda: lease.node,
            lambda: lease.slots_on("cpu"),
            lease.page_table,
            lambda: lease.allocate_nowait(1),
            lambda: lease.commit(key(range(4))),
            lambda: lease.truncate(0),
            lease.fork,
            lambda: lease.used_on(object()),
        ]
        for call in calls:
            with pytest.raises(LeaseReleasedError, match="not entered"):
                call()
        lease.release()  # nothing to release, and no error
        async with lease:
            pass
        for call in calls:
            with pytest.raises(LeaseReleasedError, match="released"):
                call()
        with pytest.raises(LeaseReleasedError):
            await lease.allocate(1)
        lease.release()
        assert cache.stats().free == 8


async def test_a_lease_never_entered_holds_nothing_and_warns_of_nothing() -> None:
    async with opened(8) as cache:
        await filled(cache, key(range(4)))
        for _ in range(10):
            cache.lease(key(range(4)))
        assert cache.stats().num_leases == 0
        assert cache.stats().protected == 0


@pytest.mark.parametrize("how", ["same task", "child task", "task that outlives it"])
async def test_a_lease_may_be_closed_by_another_task_than_the_one_that_opened_it(how: str) -> None:
    async with opened(8) as cache, anyio.create_task_group() as tasks:
        with anyio.CancelScope(deadline=anyio.current_time() + 3600):
            lease = cache.lease(key(range(4)))
            if how == "task that outlives it":
                await begin(tasks, lease.__aenter__)
            else:
                await lease.__aenter__()
        lease.allocate_nowait(4)
        if how == "child task":
            await begin(tasks, lease.__aexit__, None, None, None)
        else:
            lease.release()
        assert cache.stats().free == 8


async def test_a_task_that_ends_leaves_its_lease_to_whoever_has_it() -> None:
    async with opened(8) as cache:
        leases = []

        async def open_and_end() -> None:
            leases.append(await entered(cache, key(range(4)), 4))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_and_end)
        assert cache.stats().num_leases == 1
        async with cache.lease(key(range(10, 14))) as other:
            await other.allocate(4)  # it holds no lock
        leases.pop().release()
        assert cache.stats().free == 8
