"""What left the device comes back from the host: residency, write policies, and what the cache says of them."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aradix import (
    CacheInitParams,
    ChunkCache,
    EvictParams,
    HiRadixCache,
    HostKVPool,
    MatchPrefixParams,
    RadixCache,
    SlotAllocator,
)
from aradix.errors import ConfigError, OutOfSlotsError, UsageError
from aradix.events import BlockRemoved, BlockStored
from aradix.memory.kv_pool import BookKVPool
from tests.cache.acts import key, settled
from tests.support.stores import MemoryStore
from tests.support.tiers import TieredScene, opened_tiers

pytestmark = pytest.mark.anyio


async def evicted(scene: TieredScene, num_tokens: int) -> int:
    return (await scene.cache.evict(EvictParams(num_tokens))).num_freed_tokens


async def matched(scene: TieredScene, *parts: Any, **options: Any) -> int:
    """What a lease on a key matches, its KV being right."""
    async with scene.cache.lease(key(*parts), **options) as lease:
        scene.assert_right(lease, key(*parts))
        return int(lease.num_matched)


async def test_a_prefix_that_left_the_device_comes_back_with_the_right_kv() -> None:
    async with opened_tiers() as scene:
        await scene.fill(key(range(1, 9)))
        assert await evicted(scene, 8) == 8
        assert scene.cache.peek(key(range(1, 9))) == 0
        assert scene.cache.peek_tiers(key(range(1, 9))) == (0, 8)
        found = await scene.cache.match_prefix(MatchPrefixParams(key(range(1, 9))))
        assert (len(found.device_indices), found.host_hit_length) == (0, 8)
        assert found.last_device_node.depth == 0
        assert found.last_host_node == found.best_match_node
        assert found.best_match_node.depth == 8
        assert await matched(scene, range(1, 9)) == 8
        stats = scene.cache.stats()
        assert (stats.load_backs, stats.load_back_tokens, stats.backups, stats.backuped_tokens) == (1, 8, 1, 8)
        assert (stats.host_slots, stats.host_used, stats.host_free, stats.evictable) == (64, 8, 56, 8)


@pytest.mark.parametrize("page_size", [1, 4])
async def test_only_the_part_that_left_is_copied_and_only_whole_pages(page_size: int) -> None:
    async with opened_tiers(page_size=page_size) as scene:
        await scene.fill(key(range(1, 17)))
        assert await evicted(scene, 8) == 8
        assert scene.cache.peek_tiers(key(range(1, 17))) == (8, 8)
        assert await matched(scene, range(1, 15), 99) == (14 if page_size == 1 else 12)
        assert scene.cache.stats().load_back_tokens == (6 if page_size == 1 else 4)
        assert await matched(scene, range(1, 17)) == 16


async def test_fewer_tokens_than_the_threshold_are_not_worth_a_copy() -> None:
    async with opened_tiers(load_back_threshold=10) as scene:
        await scene.fill(key(range(1, 21)))
        await evicted(scene, 9)
        assert await matched(scene, range(1, 21)) == 11
        await evicted(scene, 1)
        assert await matched(scene, range(1, 21)) == 20


async def test_a_lease_may_forgo_what_the_host_holds() -> None:
    async with opened_tiers() as scene:
        await scene.fill(key(range(1, 9)))
        await evicted(scene, 8)
        assert await matched(scene, range(1, 9), load_back=False) == 0
        assert scene.copier.num_launched == 1
        with pytest.raises(UsageError, match="load_back must be a bool"):
            scene.cache.lease(key(1), load_back=1)  # type: ignore[arg-type]


async def test_one_token_is_left_to_compute_where_that_is_asked_for() -> None:
    async with opened_tiers(page_size=4) as scene:
        await scene.fill(key(range(1, 9)))
        await evicted(scene, 8)
        assert await matched(scene, range(1, 9), leave_last=1) == 4
        assert scene.cache.stats().load_back_tokens == 4


async def test_what_is_computed_anew_beside_a_host_copy_is_adopted() -> None:
    async with opened_tiers() as scene:
        await scene.fill(key(range(1, 9)))
        await evicted(scene, 8)
        await scene.fill(key(range(1, 9)), load_back=False)
        assert scene.cache.stats().host_used == 8
        assert await matched(scene, range(1, 9)) == 8
        assert scene.cache.stats().load_backs == 0


async def test_the_snapshot_says_on_which_tier_a_node_is() -> None:
    async with opened_tiers() as scene:
        await scene.fill(key(range(1, 9)))
        await evicted(scene, 4)
        (namespace,) = scene.cache.snapshot()["namespaces"]
        (upper,) = namespace["root"]["children"]
        (lower,) = upper["children"]
        assert (upper["residency"], upper["num_tokens"]) == ("both", 4)
        assert (lower["residency"], lower["num_tokens"], lower["tokens"]) == ("host", 4, [5, 6, 7, 8])


async def test_the_events_name_the_medium() -> None:
    async with opened_tiers(enable_kv_cache_events=True) as scene:
        await scene.fill(key(range(1, 5)))
        scene.cache.stats()  # hears that the copy has ended
        await evicted(scene, 4)
        assert await matched(scene, range(1, 5)) == 4
        told = [(type(event), getattr(event, "medium", None)) for event in scene.cache.take_events()]
        assert told == [
            (BlockStored, "GPU"),
            (BlockStored, "CPU"),
            (BlockRemoved, "GPU"),
            (BlockStored, "GPU"),
        ]


# ---- write policies ----


async def test_write_through_stores_what_is_published_at_once() -> None:
    async with opened_tiers(write_policy="write_through") as scene:
        await scene.fill(key(range(1, 9)))
        assert scene.cache.stats().backuped_tokens == 8


async def test_write_through_selective_stores_what_was_found_again() -> None:
    async with opened_tiers(write_policy="write_through_selective") as scene:
        await scene.fill(key(range(1, 9)))
        assert scene.cache.stats().backuped_tokens == 0
        await scene.fill(key(range(1, 5), 50, 51))
        assert scene.cache.stats().backuped_tokens == 4
        await evicted(scene, 10)
        assert scene.cache.peek_tiers(key(range(1, 9))) == (0, 4)


async def test_write_back_stores_what_is_evicted() -> None:
    async with opened_tiers(write_policy="write_back") as scene:
        await scene.fill(key(range(1, 9)), key(range(21, 29)))
        assert scene.cache.stats().backuped_tokens == 0
        assert await evicted(scene, 8) == 8
        assert scene.cache.peek_tiers(key(range(1, 9))) == (0, 8)
        assert scene.cache.peek_tiers(key(range(21, 29))) == (8, 0)
        assert await matched(scene, range(1, 9)) == 8


async def test_an_eviction_that_writes_back_waits_for_its_copies() -> None:
    async with opened_tiers(write_policy="write_back", at_once=False) as scene:
        await scene.fill(key(range(1, 9)))
        freed = []
        async with anyio.create_task_group() as tasks:

            async def evict() -> None:
                freed.append(await evicted(scene, 8))

            tasks.start_soon(evict)
            await settled()
            assert freed == []
            assert scene.cache.evictable_size() == 0
            scene.copier.next("store").finish()
        assert freed == [8]
        assert scene.cache.peek_tiers(key(range(1, 9))) == (0, 8)


async def test_growth_under_write_back_waits_for_the_copy_that_makes_room() -> None:
    async with opened_tiers(8, write_policy="write_back", at_once=False) as scene:
        await scene.fill(key(range(1, 9)))
        async with anyio.create_task_group() as tasks:

            async def compute() -> None:
                async with scene.cache.lease(key(range(21, 29))) as lease:
                    await lease.allocate(8)
                    scene.compute(lease, key(range(21, 29)))
                    lease.commit(key(range(21, 29)))

            tasks.start_soon(compute)
            await settled()
            assert scene.cache.stats().num_slot_waiters == 1
            scene.copier.next("store").finish()
        assert scene.cache.peek_tiers(key(range(1, 9))) == (0, 8)
        assert scene.cache.peek_tiers(key(range(21, 29))) == (8, 0)
        scene.copier.finish_all()


async def test_who_cannot_wait_evicts_without_a_copy() -> None:
    async with opened_tiers(8, write_policy="write_back", at_once=False) as scene:
        await scene.fill(key(range(1, 9)))
        async with scene.cache.lease(key(range(21, 29))) as lease:
            lease.allocate_nowait(8)
            async with scene.cache.lease(key(1)) as other:
                with pytest.raises(OutOfSlotsError):
                    other.allocate_nowait(1)
        assert scene.cache.peek_tiers(key(range(1, 9))) == (0, 0)


# ---- host eviction ----


async def test_the_host_gives_up_what_was_used_longest_ago() -> None:
    async with opened_tiers(16, 16) as scene:
        await scene.fill(key(range(1, 9)), key(range(21, 29)))
        await evicted(scene, 16)
        await scene.fill(key(range(41, 49)))
        assert scene.cache.stats().host_evicted == 8
        assert scene.cache.peek_tiers(key(range(1, 9))) == (0, 0)
        assert scene.cache.peek_tiers(key(range(21, 29))) == (0, 8)
        assert await matched(scene, range(21, 29)) == 8


async def test_a_host_that_has_room_for_a_part_keeps_that_part() -> None:
    async with opened_tiers(16, 5) as scene:
        await scene.fill(key(range(1, 9)))
        await evicted(scene, 8)
        assert scene.cache.peek_tiers(key(range(1, 9))) == (0, 5)
        assert await matched(scene, range(1, 9)) == 5


# ---- what cannot be set up ----


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"host": None}, "needs host="),
        ({"kv_pool": None}, "needs kv_pool="),
        ({"kv_pool": BookKVPool(8)}, "too few"),
        ({"kv_pool": BookKVPool(64, 2)}, "must be equal"),
        ({"kv_pool": BookKVPool(64, 1, 7)}, "do not fit"),
        ({"write_policy": "sometimes"}, "write_policy"),
        ({"load_back_threshold": 0}, "load_back_threshold"),
        ({"host": 5}, "HostKVPool"),
    ],
)
async def test_pools_that_do_not_fit_are_refused(wrong: dict[str, Any], says: str) -> None:
    kv_pool = BookKVPool(64)
    params = {"kv_pool": kv_pool, "host": HostKVPool(64, 1, kv_pool), **wrong}
    with pytest.raises(ConfigError, match=says):
        HiRadixCache(CacheInitParams(SlotAllocator(64), **params))


@pytest.mark.parametrize("cache_class", [RadixCache, ChunkCache])
async def test_a_cache_without_a_host_tier_refuses_a_host(cache_class: type[RadixCache]) -> None:
    kv_pool = BookKVPool(64)
    params = CacheInitParams(SlotAllocator(64), kv_pool=kv_pool, host=HostKVPool(64, 1, kv_pool))
    with pytest.raises(ConfigError, match="no host tier"):
        cache_class(params)


async def test_a_store_behind_no_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="storage= needs host="):
        CacheInitParams(SlotAllocator(64), storage=MemoryStore())
