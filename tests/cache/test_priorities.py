"""Priorities of parts of a prompt: they decide what goes first, page by page, until their time is over."""

from __future__ import annotations

from typing import Any

import pytest

from aradix import EvictParams, PriorityRange, RadixCache, RadixKey
from aradix.errors import UsageError
from tests.cache.acts import entered, filled, key
from tests.cache.test_pins import Clock
from tests.support.caches import opened
from tests.tree.lockstep import CORES

pytestmark = pytest.mark.anyio


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def committed(cache: RadixCache, prompt: RadixKey, *priorities: PriorityRange, priority: int = 0) -> None:
    async with cache.lease(prompt, priority=priority) as lease:
        lease.allocate_nowait(len(prompt) - lease.num_matched)
        lease.commit(prompt, priorities=priorities)


async def evicted(cache: RadixCache, num_tokens: int) -> None:
    assert (await cache.evict(EvictParams(num_tokens))).num_freed_tokens == num_tokens


@pytest.mark.parametrize("page_size", [1, 2, 4])
async def test_a_part_that_is_worth_more_outlives_younger_prompts(core: str, page_size: int) -> None:
    async with opened(64, page_size, eviction_policy="priority", tree_core=core) as cache:
        await committed(cache, key(range(24)), PriorityRange(0, 8, 9), PriorityRange(16, None, -1))
        await filled(cache, key(range(50, 58)))
        assert cache.stats().num_nodes == 4
        await evicted(cache, 8)  # the part that is worth less
        assert (cache.peek(key(range(24))), cache.peek(key(range(50, 58)))) == (16, 8)
        await evicted(cache, 16)  # then by recency
        assert (cache.peek(key(range(24))), cache.peek(key(range(50, 58)))) == (8, 0)


async def test_a_page_belongs_to_the_range_of_its_first_token(core: str) -> None:
    async with opened(64, 4, eviction_policy="priority", tree_core=core) as cache:
        await committed(cache, key(range(24)), PriorityRange(0, 6, 3), PriorityRange(6, 17, 2))
        (shown,) = cache.snapshot()["namespaces"]
        found, node = [], shown["root"]
        while node["children"]:
            (node,) = node["children"]
            found.append((node["num_tokens"], node["priority"]))
        assert found == [(8, 3), (12, 2), (4, 0)]


async def test_a_priority_falls_back_when_its_time_is_over(core: str) -> None:
    clock = Clock()
    async with opened(64, eviction_policy="priority", clock=clock, tree_core=core) as cache:
        await committed(cache, key(range(8)), PriorityRange(0, None, 9, duration=5), priority=1)
        await committed(cache, key(range(50, 58)), priority=2)
        await committed(cache, key(range(60, 68)), PriorityRange(0, None, 9))
        clock.now += 4.99
        await evicted(cache, 4)
        assert cache.peek(key(range(50, 58))) == 4
        clock.now += 0.01
        await evicted(cache, 4)
        assert cache.peek(key(range(8))) == 4
        await evicted(cache, 8)
        assert [cache.peek(key(range(n, n + 8))) for n in (0, 50, 60)] == [0, 0, 8]


async def test_it_falls_back_to_what_others_gave_the_same_tokens(core: str) -> None:
    clock = Clock()
    async with opened(64, eviction_policy="priority", clock=clock, tree_core=core) as cache:
        await committed(cache, key(range(8)), PriorityRange(0, 8, -5, duration=5))
        await committed(cache, key(range(9)), priority=7)
        await committed(cache, key(range(50, 58)), priority=3)
        await evicted(cache, 3)  # the younger prompt, for what is worth least stands below what is worth more
        assert (cache.peek(key(range(9))), cache.peek(key(range(50, 58)))) == (9, 5)
        clock.now += 5
        await evicted(cache, 5)
        assert (cache.peek(key(range(9))), cache.peek(key(range(50, 58)))) == (9, 0)
        assert cache.stats().num_nodes == 1


async def test_an_ended_priority_ranks_anew_for_an_allocation_too(core: str) -> None:
    clock = Clock()
    async with opened(16, eviction_policy="priority", clock=clock, tree_core=core) as cache:
        await committed(cache, key(range(8)), PriorityRange(0, None, 9, duration=5))
        await committed(cache, key(range(50, 58)), priority=2)
        clock.now += 5
        lease = await entered(cache, key(range(70, 78)), 8)
        assert (cache.peek(key(range(8))), cache.peek(key(range(50, 58)))) == (0, 8)
        lease.release()


async def test_the_last_commit_says_what_counts_and_a_part_that_is_not_published_has_none(core: str) -> None:
    async with opened(64, 4, eviction_policy="priority", tree_core=core) as cache:
        prompt = key(range(10))
        async with cache.lease(prompt) as lease:
            await lease.allocate(10)
            lease.commit(prompt, priorities=[PriorityRange(0, 10, 5), PriorityRange(8, 10, 9)])
            lease.commit(prompt, priorities=[PriorityRange(4, None, 1)])
        (shown,) = cache.snapshot()["namespaces"]
        (first,) = shown["root"]["children"]
        (second,) = first["children"]
        assert [(node["num_tokens"], node["priority"]) for node in (first, second)] == [(4, 5), (4, 1)]


async def test_after_a_flush_or_unstored_there_is_nothing_to_rank() -> None:
    async with opened(64, eviction_policy="priority") as cache:
        for store in (True, False):
            lease = await entered(cache, key(range(8)), 8, store=store)
            await cache.flush()
            lease.commit(key(range(8)), priorities=[PriorityRange(0, None, 1)])
            lease.release()
        assert cache.stats().free == 64


async def test_a_policy_that_looks_at_other_things_is_not_disturbed(core: str) -> None:
    async with opened(64, tree_core=core) as cache:
        await committed(cache, key(range(24)), PriorityRange(0, 8, 9, duration=1), PriorityRange(16, None, -1))
        assert cache.stats().num_nodes == 1


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ((-1, 4, 0), "-1"),
        ((4, 4, 0), "from 4 to 4"),
        ((0, 4, 1.5), "1.5"),
        ((True, 4, 1), "True"),
        ((0, "4", 1), "'4'"),
        ((0, 4, 1, 0), "got 0"),
        ((0, 4, 1, float("inf")), "inf"),
        ((0, 4, 1, float("nan")), "nan"),
        ((0, 4, 1, True), "True"),
        ((0, 4, 1, "5"), "'5'"),
    ],
)
def test_a_range_that_cannot_be_is_refused(bad: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        PriorityRange(*bad)


async def test_what_is_no_range_is_refused_and_nothing_is_committed() -> None:
    async with opened(16) as cache:
        lease = await entered(cache, key(range(8)), 8)
        wrong: Any = [(0, 4, 1)]
        with pytest.raises(UsageError, match="PriorityRange"):
            lease.commit(key(range(8)), priorities=wrong)
        assert cache.peek(key(range(8))) == 0
        lease.release()
