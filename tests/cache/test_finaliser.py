"""A lease that nobody releases: told of, with where it was opened, and its slots come back."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aradix import MatchPrefixParams, RadixCache, SlotAllocator
from aradix.errors import RetractError
from tests.cache.acts import entered, filled, key, settled
from tests.support.caches import idle_sum, opened

pytestmark = pytest.mark.anyio


async def test_a_dropped_lease_warns_with_where_it_was_opened_and_its_slots_come_back() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(4)))
        lease = cache.lease(key(range(8)))  # this line
        await lease.__aenter__()
        await lease.allocate(4)
        line = test_a_dropped_lease_warns_with_where_it_was_opened_and_its_slots_come_back.__code__.co_firstlineno + 3
        with pytest.warns(ResourceWarning, match=rf"{__file__}:{line} was never released"):
            del lease
            gc.collect()
        assert cache.stats().free == 12
        assert cache.stats().protected == 0
        assert cache.stats().num_leases == 0


async def test_a_dropped_lease_serves_those_who_wait_without_another_call() -> None:
    async with opened(8) as cache, anyio.create_task_group() as tasks:
        dropped = await entered(cache, key(range(8)), 8)
        lease = await entered(cache, key(range(20, 24)))
        tasks.start_soon(lease.allocate, 4)
        await settled()
        with pytest.warns(ResourceWarning):
            del dropped
            gc.collect()
        await settled()
        assert lease.num_tokens == 4
        lease.release()


async def test_a_lease_collected_on_another_thread_comes_back_all_the_same() -> None:
    async with opened(8) as cache:
        box = [await entered(cache, key(range(8)), 8)]
        with pytest.warns(ResourceWarning):
            thread = threading.Thread(target=box.clear)
            thread.start()
            await anyio.to_thread.run_sync(thread.join)
        await settled()
        assert cache.stats().free == 8


async def test_a_thousand_leases_lost_with_their_engine_come_back() -> None:
    async with opened(4000) as cache:
        await filled(cache, key(range(100)))

        class Engine:
            def __init__(self) -> None:
                self.running = [cache.lease(key(range(100), range(1000 + 3 * i, 1003 + 3 * i))) for i in range(1000)]

            async def step(self) -> None:
                for i, lease in enumerate(self.running):
                    await lease.__aenter__()
                    await lease.allocate(3)
                    if i % 2:
                        lease.commit(lease.key)
                raise ZeroDivisionError

        async def run() -> None:
            await Engine().step()

        with pytest.warns(ResourceWarning):
            with pytest.raises(ZeroDivisionError):
                await run()
            gc.collect()
        await settled()
        assert cache.stats().num_leases == 0
        assert cache.stats().protected == 0
        assert cache.stats().leased == 0
        assert idle_sum(cache) == 4000


async def test_a_crash_inside_the_blocks_of_a_thousand_leases_releases_them_all() -> None:
    async with opened(4000) as cache:
        await filled(cache, key(range(100)))

        async def request(i: int) -> None:
            async with cache.lease(key(range(100), range(1000 + 3 * i, 1003 + 3 * i))) as lease:
                await lease.allocate(3)
                if i == 999:
                    raise ZeroDivisionError
                await anyio.sleep_forever()

        with pytest.RaisesGroup(ZeroDivisionError):
            async with anyio.create_task_group() as tasks:
                for i in range(1000):
                    tasks.start_soon(request, i)
        assert cache.stats().num_leases == 0
        assert cache.stats().free == 3900


async def test_a_dropped_fork_is_told_of_as_well() -> None:
    async with opened(8) as cache:
        lease = await entered(cache, key(range(4)), 4)
        lease.commit(key(range(4)))
        fork = lease.fork()
        with pytest.warns(ResourceWarning, match=__file__):
            del fork
            gc.collect()
        assert cache.stats().num_leases == 1
        lease.release()
        assert cache.stats().protected == 0


async def test_a_lease_dropped_after_the_cache_was_closed_comes_back() -> None:
    allocator = SlotAllocator(8)
    async with opened(allocator=allocator) as cache:
        lease = await entered(cache, key(range(8)), 4)
        lease.commit(key(range(2)))
    with pytest.warns(ResourceWarning):
        del lease
        gc.collect()
    await settled()
    assert allocator.available_size() == 8


async def tokens(cache: RadixCache) -> AsyncIterator[int]:
    async with cache.lease(key(range(8))) as lease:
        for i in range(8):
            await lease.allocate(1)
            yield i


@pytest.mark.parametrize("how", ["closed", "exhausted", "left by an exception"])
async def test_a_generator_that_is_closed_properly_warns_of_nothing(how: str) -> None:
    async with opened(8) as cache:
        generator = tokens(cache)
        if how == "closed":
            await anext(generator)
            await generator.aclose()  # type: ignore[attr-defined]
        elif how == "exhausted":
            assert [i async for i in generator] == list(range(8))
        else:
            await anext(generator)
            with pytest.raises(ZeroDivisionError):
                await generator.athrow(ZeroDivisionError)  # type: ignore[attr-defined]
        assert cache.stats().free == 8


async def test_a_lease_in_an_abandoned_generator_is_reclaimed_with_a_warning() -> None:
    async with opened(8) as cache:
        with pytest.warns(ResourceWarning):
            async for _ in tokens(cache):
                break
            gc.collect()
            await settled()
        assert cache.stats().num_leases == 0
        assert cache.stats().free == 8


async def test_look_ups_that_pin_nothing_leave_nothing() -> None:
    async with opened(64) as cache:
        await filled(cache, key(range(32)))
        for i in range(10_000):
            await cache.match_prefix(MatchPrefixParams(key(range(i % 40))))
        assert cache.stats().protected == 0
        assert cache.stats().num_namespaces == 1
        assert cache.stats().queries == 1


async def test_every_table_is_empty_after_two_thousand_leases_half_of_them_cancelled() -> None:
    async with opened(64, 2) as cache:

        async def request(i: int, scope: anyio.CancelScope) -> None:
            with scope, suppress(RetractError):
                async with cache.lease(key(range(i % 7), range(100, 110)), reserve=i % 13) as lease:
                    await checkpoint()
                    await lease.allocate(i % 5)
                    await checkpoint()
                    lease.commit(key(range(i % 7), range(100, 110))[: max(lease.num_matched, lease.num_tokens // 2)])

        for start in range(0, 2_000, 50):
            async with anyio.create_task_group() as tasks:
                scopes = [anyio.CancelScope() for _ in range(50)]
                for i, scope in enumerate(scopes):
                    tasks.start_soon(request, start + i, scope)
                await checkpoint()
                for scope in scopes[::2]:
                    scope.cancel()
        assert not cache._leases.holds
        assert not cache._pressure.growth
        assert not cache._pressure.admission
        assert not cache._gates.standing
        assert not cache._gates.num_walkers
        assert not cache._calls._dropped
        assert cache.stats().protected == 0
        assert idle_sum(cache) == 64
        await cache.flush()
        assert cache.stats().free == 64
        assert cache.stats().num_namespaces == 0
