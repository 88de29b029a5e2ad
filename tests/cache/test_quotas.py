"""Quotas: a tenant gives what is above its share before anybody loses what he has a claim on; nobody is refused."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aradix import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    Namespace,
    RadixCache,
    RadixKey,
    SlotAllocator,
    TenantStats,
)
from aradix.cache.tenants import AccountedHold
from aradix.errors import ConfigError
from tests.cache.acts import begin, entered, filled, key, settled
from tests.support.caches import idle_sum, opened
from tests.tree.lockstep import CORES

pytestmark = pytest.mark.anyio

A, B, C = (Namespace(tenant=name) for name in "ABC")
HALVES = {"A": 0.5, "B": 0.5}


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def prompts(tenant: Namespace, count: int, length: int = 10, first: int = 0) -> list[RadixKey]:
    """Prompts that share nothing."""
    return [key(range(1000 * n, 1000 * n + length), namespace=tenant) for n in range(first, first + count)]


def cached(cache: RadixCache, keys: list[RadixKey]) -> list[int]:
    return [cache.peek(each) for each in keys]


@pytest.mark.parametrize("free", [0.1, 0.35, 0.9])
async def test_a_burst_of_one_tenant_takes_its_own_oldest_and_leaves_the_other_what_it_has(
    core: str, free: float
) -> None:
    async with opened(100, quotas=HALVES, low_watermark=free, high_watermark=free, tree_core=core) as cache:
        theirs, ours = prompts(B, 1), prompts(A, 12)
        await filled(cache, *theirs)
        for each in ours:  # 120 tokens: more than the pool, and each is served at once
            with anyio.fail_after(0):
                async with cache.lease(each) as lease:
                    lease.allocate_nowait(10)
                    lease.commit(each)
            await settled()
            assert cached(cache, theirs) == [10]
        left = cached(cache, ours)
        assert left == sorted(left)  # the oldest went first
        assert sum(left) == {0.1: 80, 0.35: 55, 0.9: 50}[free]
        stats = cache.tenant_stats()
        assert (stats["A"].evicted, stats["B"].evicted) == (120 - sum(left), 0)


async def test_a_share_that_nobody_uses_is_lent_and_comes_back_on_demand(core: str) -> None:
    async with opened(100, quotas=HALVES, tree_core=core) as cache:
        ours, theirs = prompts(A, 10), prompts(B, 7)
        await filled(cache, *ours)
        assert cached(cache, ours) == [10] * 10
        await filled(cache, *theirs)
        assert cached(cache, theirs) == [0, 0] + [10] * 5
        assert cached(cache, ours) == [0] * 5 + [10] * 5


async def test_a_tenant_at_its_share_pays_for_what_it_asks_itself(core: str) -> None:
    async with opened(100, quotas=HALVES, tree_core=core) as cache:
        ours, theirs = prompts(A, 5), prompts(B, 5)
        await filled(cache, *theirs, *ours)  # theirs are the older ones
        lease = await entered(cache, prompts(A, 1, 20, first=9)[0], 20)
        assert cached(cache, theirs) == [10] * 5
        assert cached(cache, ours) == [0, 0, 10, 10, 10]
        lease.release()


async def test_what_leases_hold_counts_before_it_is_committed(core: str) -> None:
    async with opened(100, quotas=HALVES, tree_core=core) as cache:
        ours, theirs = prompts(A, 1), prompts(B, 5)
        await filled(cache, *theirs, *ours)
        running = await entered(cache, prompts(A, 1, 40, first=9)[0], 40)
        assert cache.tenant_stats()["A"] == TenantStats(50, 10, 40, 0, 2, 50, 0)
        another = await entered(cache, prompts(A, 1, 10, first=8)[0], 10)
        assert cached(cache, theirs + ours) == [10] * 5 + [0]
        assert cache.tenant_stats()["A"].leased == 50
        running.truncate(10)
        assert cache.tenant_stats()["A"].leased == 20
        another.release()
        running.commit(running.key[:10])
        assert cache.tenant_stats()["A"] == TenantStats(50, 10, 0, 10, 3, 60, 0)
        running.release()


async def test_nobody_is_refused_for_a_quota(core: str) -> None:
    async with opened(100, quotas=HALVES, tree_core=core) as cache:
        theirs = prompts(B, 5)
        await filled(cache, *theirs)
        whole = await entered(cache, prompts(A, 1, 100)[0], 100)  # twice its share, and it has nothing to give itself
        assert len(whole.slots) == 100
        assert cached(cache, theirs) == [0] * 5
        async with anyio.create_task_group() as tasks:
            waiting = await begin(tasks, filled_when_there_is_room, cache, theirs[0])
            assert waiting.waits
            whole.release()
            await settled()
            assert waiting.returned
        assert cached(cache, theirs[:1]) == [10]


async def filled_when_there_is_room(cache: RadixCache, prompt: RadixKey) -> None:
    async with cache.lease(prompt, reserve=len(prompt)) as lease:
        lease.commit(prompt)


async def test_tenants_without_a_quota_share_the_rest(core: str) -> None:
    async with opened(100, quotas={"A": 0.6}, tree_core=core) as cache:
        ours, others = prompts(A, 6), [*prompts(C, 3), *prompts(Namespace(), 3)]
        await filled(cache, *ours, *others)
        assert cached(cache, ours) == [10] * 6
        assert cached(cache, others) == [0, 0, 10, 10, 10, 10]
        assert cache.tenant_stats()[None].share == 40
        assert cache.tenant_stats()[None].cached == 40


async def test_one_tenant_may_have_many_namespaces(core: str) -> None:
    async with opened(100, quotas=HALVES, tree_core=core) as cache:
        theirs = prompts(B, 2)
        salted = [key(range(10), namespace=Namespace(tenant="A", salt=salt)) for salt in range(12)]
        await filled(cache, *theirs, *salted)
        assert cached(cache, theirs) == [10, 10]
        assert cached(cache, salted) == [0] * 4 + [10] * 8
        await cache.flush(Namespace(tenant="A", salt=11))
        assert cache.tenant_stats()["A"].cached == 70


@pytest.mark.parametrize("only", ["explicit evict", "watermark"])
async def test_below_all_shares_the_background_stops_and_an_explicit_evict_does_not(core: str, only: str) -> None:
    marks: dict[str, Any] = {"low_watermark": 1.0, "high_watermark": 1.0} if only == "watermark" else {}
    async with opened(100, quotas=HALVES, tree_core=core, **marks) as cache:
        await filled(cache, *prompts(A, 6), *prompts(B, 2))
        await settled()
        if only == "watermark":
            assert cache.stats().evictable == 70  # A's 50 and B's 20
        else:
            assert (await cache.evict(EvictParams(15))).num_freed_tokens == 15
            stats = cache.tenant_stats()
            assert (stats["A"].evicted, stats["B"].evicted) == (15, 0)  # nearest to its share once nobody is above
            assert (await cache.evict(EvictParams(100))).num_freed_tokens == 65
        assert idle_sum(cache) == 100


@pytest.mark.parametrize("evict_unit", ["page", "node"])
@pytest.mark.parametrize("page_size", [1, 4])
async def test_every_slot_of_a_tenant_is_counted_once(core: str, evict_unit: str, page_size: int) -> None:
    options: dict[str, Any] = {"quotas": {"A": 0.25, 7: 0.5}, "evict_unit": evict_unit, "tree_core": core}
    async with opened(64, page_size, **options) as cache:
        seven = Namespace(tenant=7, lora="x")
        first = await entered(cache, key(range(17), namespace=seven), 17)
        first.commit(key(range(13), namespace=seven))
        twin = first.fork()
        twin.allocate_nowait(9)
        waiting = cache.lease(key(range(60), namespace=A), reserve=60)
        async with anyio.create_task_group() as tasks:
            entering = await begin(tasks, waiting.__aenter__)
            assert entering.waits
            cache.check()
            await cache.flush(seven)
            cache.check()
            assert cache.tenant_stats()[7].cached == 13 // page_size * page_size
            first.release()
            cache.check()
            entering.scope.cancel()
        twin.release()
        cache.check()
        assert {name: (each.cached, each.leased) for name, each in cache.tenant_stats().items()} == {
            "A": (0, 0),
            7: (0, 0),
            None: (0, 0),
        }


async def test_slots_given_by_a_caller_count_to_the_tenant_of_their_key(core: str) -> None:
    allocator = SlotAllocator(100)
    async with opened(allocator=allocator, quotas=HALVES, tree_core=core) as cache:
        slots = allocator.alloc(60)
        await cache.insert(InsertParams(key(range(60), namespace=A), slots))
        await filled(cache, *prompts(B, 4))
        await filled(cache, *prompts(B, 1, first=7))
        assert cache.tenant_stats()["A"].cached == 50
        assert cache.tenant_stats()["B"].cached == 50


async def test_queries_are_counted_by_tenant() -> None:
    async with opened(100, quotas={"A": 0.5}) as cache:
        (ours,) = prompts(A, 1)
        await filled(cache, ours)
        await filled(cache, ours, resume=True)
        await filled(cache, ours, *prompts(C, 1))
        stats = cache.tenant_stats()
        assert (stats["A"].queries, stats["A"].query_tokens, stats["A"].hit_tokens) == (2, 20, 10)
        assert (stats[None].queries, stats[None].query_tokens, stats[None].hit_tokens) == (1, 10, 0)


async def test_without_quotas_there_are_no_accounts() -> None:
    async with opened(16) as cache:
        lease = await entered(cache, prompts(A, 1)[0], 10)
        assert not isinstance(lease._hold, AccountedHold)
        assert cache.tenant_stats() == {}
        lease.release()


@pytest.mark.parametrize(
    ("quotas", "said"),
    [
        ([("A", 0.5)], ("dict", "[('A', 0.5)]")),
        ("A", ("dict", "'A'")),
        ({None: 0.5}, ("tenant", "None")),
        ({True: 0.5}, ("tenant", "True")),
        ({A: 0.5}, ("tenant", "Namespace(")),
        ({"A": 0}, ("'A'", "got 0")),
        ({"A": -0.5}, ("'A'", "-0.5")),
        ({"A": 1.5}, ("'A'", "1.5")),
        ({"A": float("nan")}, ("'A'", "nan")),
        ({"A": True}, ("'A'", "True")),
        ({"A": "0.5"}, ("'A'", "'0.5'")),
        ({"A": 0.6, "B": 0.5}, ("0.6", "0.5", "1.1", "at most 1")),
        ({"A": 0.01}, ("0.01", "64 slots", "page of 4")),
    ],
)
def test_quotas_that_cannot_be_are_refused_with_their_numbers(quotas: Any, said: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        CacheInitParams(allocator=SlotAllocator(64, 4), page_size=4, quotas=quotas)
    assert all(part in str(refused.value) for part in said)


def test_quotas_are_whole_pages_and_a_copy() -> None:
    given: dict[str | int, float] = {"A": 0.29, "B": 1 / 3, 1: 0.1, "1": 0.1}
    made = CacheInitParams(allocator=SlotAllocator(100), quotas=given)
    given["A"] = 1.0
    assert made.shares() == [("A", 29), ("B", 33), (1, 10), ("1", 10), (None, 18)]
    assert hash(made) == hash(CacheInitParams(allocator=made.allocator, clock=made.clock))
    thirds = CacheInitParams(allocator=SlotAllocator(96, 16), page_size=16, quotas=dict.fromkeys("ABC", 1 / 3))
    assert thirds.shares() == [("A", 32), ("B", 32), ("C", 32), (None, 0)]
    assert CacheInitParams(allocator=SlotAllocator(8)).shares() == []
