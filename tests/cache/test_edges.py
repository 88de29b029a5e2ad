"""What must hold at the edges: numbers beyond all sizes, two caches on one pool, calls from where none may come."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from aradix import CacheInitParams, EvictParams, Namespace, RadixCache, RadixKey, SlotAllocator
from aradix.errors import LeaseReleasedError, OutOfSlotsError, RequestTooLargeError, UsageError, WrongLoopError
from aradix.params import PriorityRange
from tests.cache.acts import begin, entered, filled, key, settled
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("number", [101, 2**31, 2**63 - 1, 2**63, 10**30])
async def test_a_number_of_tokens_that_can_never_fit_is_told_so_however_large(page_size: int, number: int) -> None:
    async with opened(100, page_size=page_size) as cache:
        async with cache.lease(key(range(8))) as lease:
            with pytest.raises(RequestTooLargeError):
                lease.allocate_nowait(number)
            with pytest.raises(RequestTooLargeError):
                await lease.allocate(number)
            assert lease.num_tokens == 0
        with pytest.raises(RequestTooLargeError):
            cache.lease(key(range(8)), reserve=number)
        cache.check()


async def test_a_budget_beyond_all_sizes_is_no_limit() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(8)))
        with cache.pin(key(range(8)), budget=10**30) as pin:
            assert pin.num_tokens == 8
        cache.check()


@pytest.mark.parametrize("duration", [1e10, 1e300])
async def test_a_priority_for_longer_than_any_clock_runs_is_one_for_ever(duration: float) -> None:
    async with opened(16, eviction_policy="priority") as cache:
        async with cache.lease(key(range(8))) as lease:
            lease.allocate_nowait(8)
            lease.commit(key(range(8)), priorities=[PriorityRange(0, 4, 5, duration=duration)])
        await filled(cache, key(range(20, 28)))
        await cache.evict(EvictParams(12))
        assert cache.peek(key(range(8))) == 4
        cache.check()


@pytest.mark.parametrize("wrong", [0.0, False, "0", None])
async def test_leave_last_is_a_count(wrong: Any) -> None:
    async with opened(16) as cache:
        with pytest.raises(UsageError, match="leave_last"):
            cache.lease(key(range(4)), leave_last=wrong)
        cache.check()


async def test_who_waits_in_another_cache_on_the_pool_hears_of_the_rest_of_an_evicted_leaf() -> None:
    allocator = SlotAllocator(64)
    params: dict[str, Any] = {"low_watermark": 0, "high_watermark": 0}
    one = RadixCache(CacheInitParams(allocator, evict_unit="node", **params))
    other = RadixCache(CacheInitParams(allocator, **params))
    async with one, other, anyio.create_task_group() as tasks:
        await filled(one, key(range(48)))
        grown, waits = await entered(one, key(100), 12), await entered(other, key(200), 4)

        async def wait() -> None:
            await waits.allocate(8)

        act = await begin(tasks, wait)
        await settled()
        assert not act.returned
        grown.allocate_nowait(4)  # the leaf of 48 goes for it
        await settled()
        assert act.returned
        for lease in (grown, waits):
            lease.release()
        one.check()
        other.check()


async def test_a_lease_released_while_it_lets_others_run_is_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(8)))
        lease = cache.lease(key(range(8)))
        cache._calls._run_length = 10**6

        async def others_run() -> None:
            lease.release()

        monkeypatch.setattr("aradix.cache.lease.checkpoint", others_run)
        with pytest.raises(LeaseReleasedError):
            await lease.__aenter__()
        assert cache.stats().num_leases == cache.stats().protected == 0
        cache.check()


async def test_a_growth_that_failed_is_no_query() -> None:
    async with opened(8) as cache:
        await filled(cache, key(range(4)))
        other = await entered(cache, key(50), 3)
        before = cache.stats().queries
        async with cache.lease(key(range(4))) as lease:
            with pytest.raises(OutOfSlotsError):
                lease.allocate_nowait(3)
            assert cache.stats().queries == before
        other.release()
        cache.check()


async def test_what_a_gate_evicts_is_counted_for_its_tenant() -> None:
    space = Namespace(tenant="a")
    async with opened(32, quotas={"a": 0.5}) as cache:
        await filled(cache, key(range(16), namespace=space))
        async with cache.exclusive(key(namespace=space)) as gate:
            assert gate.evict() == 16
        assert cache.tenant_stats()["a"].evicted == cache.stats().evicted == 16
        cache.check()


async def test_a_subtree_and_a_sink_answer_to_their_own_loop_only() -> None:
    async with opened(16, enable_kv_cache_events=True) as cache:
        await filled(cache, key(range(4)))
        remove = cache.add_event_sink(lambda events: None)
        errors: list[str] = []
        async with cache.exclusive(key(range(4))) as gate:

            def elsewhere() -> None:
                for call in (lambda: gate.slots, lambda: gate.num_matched, remove):
                    try:
                        call()
                    except WrongLoopError:
                        errors.append("refused")

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert errors == ["refused"] * 3
        remove()
        remove()
        cache.check()


async def test_a_fork_may_go_on_otherwise_after_the_last_whole_page() -> None:
    async with opened(64, page_size=4) as cache:
        async with cache.lease(key(range(6))) as lease:
            lease.allocate_nowait(10)
            lease.commit(key(range(10)))
            with_twin = lease.fork()
            async with with_twin as twin:
                assert len(twin.key) == twin.num_tokens == 8
                twin.allocate_nowait(2)
                twin.commit(RadixKey([*range(8), 70, 71]))
        cache.check()
