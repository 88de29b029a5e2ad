"""Which tokens go, how many, and that nothing which cannot be reached stays."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import pytest

from aradix import EvictParams, InsertParams, Lease, MatchPrefixParams, NodeRef, RadixCache
from tests.cache.acts import entered, filled, key
from tests.support.caches import idle_sum, opened

pytestmark = pytest.mark.anyio


async def evicted(cache: RadixCache, num_tokens: int) -> int:
    return (await cache.evict(EvictParams(num_tokens))).num_freed_tokens


@pytest.mark.parametrize("page_size", [1, 2])
async def test_only_what_lies_below_a_lease_is_evictable(page_size: int) -> None:
    async with opened(400 * page_size, page_size) as cache:
        p = page_size
        for length in (2, 4, 6):
            await filled(cache, key(range(length * p)))
        lease = await entered(cache, key(range(4 * p)))
        assert await evicted(cache, 10 * p) == 2 * p
        assert cache.protected_size() == 4 * p
        lease.release()
        await filled(cache, key(range(1000, 1000 + 100 * p)))
        lease = await entered(cache, key(range(1000, 1000 + 30 * p), 9, 9, 9, 9))
        await evicted(cache, 4 * p)  # what the first lease has left
        assert await evicted(cache, 100 * p) == 70 * p
        assert cache.protected_size() == 30 * p
        lease.release()


@pytest.mark.parametrize("page_size", [1, 4])
async def test_the_tail_goes_first_and_no_more_than_was_asked(page_size: int) -> None:
    async with opened(64 * page_size, page_size) as cache:
        await filled(cache, key(range(16 * page_size)))
        for left in range(15, -1, -1):
            assert await evicted(cache, 1) == page_size
            assert cache.peek(key(range(16 * page_size))) == left * page_size
            cache.check()


async def test_whole_leaves_go_where_asked_for() -> None:
    async with opened(64, evict_unit="node") as cache:
        await filled(cache, key(range(8)), key(range(16)), key(range(100, 104)))
        assert await evicted(cache, 1) == 8
        assert cache.peek(key(range(16))) == 8
        assert await evicted(cache, 9) == 12
        assert cache.stats().free == 64


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "fifo", "mru", "filo", "priority"])
async def test_with_a_frozen_clock_a_chain_goes_from_its_end(policy: str) -> None:
    async with opened(64, eviction_policy=policy, clock=lambda: 0.0) as cache:
        for length in (3, 6, 9):
            await filled(cache, key(range(length)))
        for left in range(8, -1, -1):
            assert await evicted(cache, 1) == 1
            assert cache.peek(key(range(9))) == left
            cache.check()
        assert cache.stats().num_nodes == 0


async def test_with_a_frozen_clock_the_least_recently_used_goes_first() -> None:
    names = {"A": key(range(10, 14)), "B": key(range(20, 24)), "C": key(range(30, 34))}
    for touched in names:
        async with opened(64, clock=lambda: 0.0) as cache:
            await filled(cache, *names.values())
            await cache.match_prefix(MatchPrefixParams(names[touched]))
            order = []
            for _ in names:
                await evicted(cache, 4)
                order += [name for name in names if name not in order and not cache.peek(names[name])]
            assert order == [*(name for name in names if name != touched), touched]


@pytest.mark.parametrize("how", ["match_prefix", "lease"])
async def test_a_partial_hit_does_not_refresh_the_tail_that_it_missed(how: str) -> None:
    async with opened(64) as cache:
        await filled(cache, key(range(1, 9)), key(range(20, 28)))
        if how == "lease":
            (await entered(cache, key(range(1, 5)))).release()
        else:
            await cache.match_prefix(MatchPrefixParams(key(range(1, 5))))
        await evicted(cache, 4)
        assert cache.peek(key(range(1, 9))) == 4
        assert cache.peek(key(range(20, 28))) == 8


async def test_a_release_counts_as_a_use_of_the_whole_path() -> None:
    async with opened(64) as cache:
        await filled(cache, key(range(4)))
        lease = await entered(cache, key(range(4)))
        await filled(cache, key(range(20, 24)))
        lease.release()
        await evicted(cache, 4)
        assert cache.peek(key(range(4))) == 4
        assert cache.peek(key(range(20, 24))) == 0


async def test_higher_priorities_stay_longer() -> None:
    async with opened(64, eviction_policy="priority") as cache:
        await filled(cache, key(range(4)), priority=5)
        await filled(cache, key(range(10, 14)), priority=-1)
        await filled(cache, key(range(20, 24)))
        await evicted(cache, 4)
        assert cache.peek(key(range(10, 14))) == 0
        await evicted(cache, 4)
        assert cache.peek(key(range(20, 24))) == 0
        assert cache.peek(key(range(4))) == 4


@pytest.mark.parametrize("policy", ["slru", "lru"])
async def test_a_hot_prefix_outlives_a_scan_of_one_off_namespaces(policy: str) -> None:
    async with opened(1000, eviction_policy=policy) as cache:
        hot = key(range(200))
        await filled(cache, hot, hot, hot)
        for i in range(1000):
            name = f"user {i}"
            async with cache.lease(key(range(50), namespace=name), store=policy == "slru") as lease:
                await lease.allocate(50)
                lease.commit(key(range(50), namespace=name))
            if i % 20 == 0:
                async with cache.lease(hot) as again:
                    assert again.num_matched == 200
                    again.commit(hot)
        assert cache.stats().num_namespaces <= 1 + 800 // 50
        assert cache.stats().num_nodes <= 1 + 800 // 50


async def test_twenty_thousand_inserts_each_one_token_longer_need_no_recursion() -> None:
    limit = sys.getrecursionlimit()
    async with opened(20_000) as cache:
        whole = key(range(20_000))
        async with cache.lease(whole) as lease:
            for length in range(1, 20_001):
                await lease.allocate(1)
                lease.commit(whole[:length])
            assert len(lease.slots) == 20_000
        assert cache.peek(key(range(20_000))) == 20_000
        assert len(key(range(20_000)).hash_chain(1)) == 20_000
        assert cache.snapshot(tokens=False)["namespaces"]
        cache.check()
        assert await evicted(cache, 20_000) == 20_000
    assert sys.getrecursionlimit() == limit


async def test_a_tree_as_deep_as_a_prompt_is_long_needs_no_recursion(capsys: pytest.CaptureFixture[str]) -> None:
    depth = 1050  # beyond the recursion limit
    async with opened(2 * depth) as cache:
        for length in range(1, depth):
            await filled(cache, key(range(length), 9000 + length))
        assert cache.stats().num_nodes >= depth
        lease = await entered(cache, key(range(depth - 1)))
        assert lease.num_matched == depth - 1
        cache.pretty_print()
        assert len(capsys.readouterr().out.splitlines()) >= depth
        lease.release()
        cache.check()
        assert await evicted(cache, 2 * depth) == 2 * (depth - 1)


async def test_five_thousand_random_operations_keep_every_count() -> None:
    chance = random.Random(7)
    async with opened(200, 2) as cache:
        held: list[Lease] = []
        pins: list[NodeRef] = []
        for i in range(5_000):
            ids = [chance.randrange(3) for _ in range(chance.randrange(1, 14))]
            act = chance.randrange(8)
            if act == 0 and held:
                held.pop(chance.randrange(len(held))).release()
            elif act == 1 and pins:
                cache.dec_lock_ref(pins.pop(chance.randrange(len(pins))))
            elif act == 2:
                await evicted(cache, chance.randrange(8))
            elif act == 3:
                place = (await cache.match_prefix(MatchPrefixParams(key(ids)))).last_device_node
                cache.inc_lock_ref(place)
                pins.append(place)
            elif act == 4 and len(held) < 8:
                held.append(await entered(cache, key(ids)))
            elif act == 5 and (slots := cache._params.allocator.alloc(14)) is not None:
                done = await cache.insert(InsertParams(key(ids), slots))
                cache._params.allocator.free(done.duplicates)
            elif act == 6 and held:
                lease = chance.choice(held)
                if len(lease.key) > lease.num_tokens and cache.stats().free > 20:
                    lease.allocate_nowait(len(lease.key) - lease.num_tokens)
                    lease.commit(lease.key)
            while len(pins) > 6:
                cache.dec_lock_ref(pins.pop(0))
            if i % 100 == 0:
                cache.check()
                assert idle_sum(cache) == 200
        for lease in held:
            lease.release()
        for place in pins:
            cache.dec_lock_ref(place)
        assert cache.protected_size() == 0


async def test_victims_are_those_of_a_full_sort_for_every_policy() -> None:
    for policy, evict_first in itertools.product(("lru", "mru", "fifo", "filo", "lfu"), (1, 3)):
        async with opened(64, eviction_policy=policy) as cache:
            keys = [key(range(100 * i, 100 * i + 4)) for i in range(6)]
            await filled(cache, *keys)
            hits = [0] * 6
            last = list(range(6))
            for tick, i in enumerate((3, 0, 3, 5, 1, 0, 3)):
                async with cache.lease(keys[i]) as lease:
                    await lease.allocate(0)
                hits[i] += 1
                last[i] = 10 + tick
            ranks: dict[str, list[Any]] = {
                "lru": last,
                "mru": [-each for each in last],
                "fifo": list(range(6)),
                "filo": list(range(0, -6, -1)),
                "lfu": list(zip(hits, last, strict=True)),
            }
            rank = ranks[policy].__getitem__
            await evicted(cache, 4 * evict_first)
            gone = {i for i in range(6) if not cache.peek(keys[i])}
            assert gone == set(sorted(range(6), key=rank)[:evict_first]), policy
