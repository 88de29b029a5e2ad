"""`HiRadixCache` in SGLang's shape: copies to the host and back hold the right bytes, and no slot is lost."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from aradix.adapters import sglang
from aradix.adapters.sglang import (
    BlockRemoved,
    BlockStored,
    EvictParams,
    HiRadixCache,
    InitLoadBackParams,
    InsertParams,
    PagedTokenToKVPoolAllocator,
    RadixKey,
)
from aradix.errors import ConfigError, UsageError
from tests.adapters.two_tiers import (
    Make,
    assert_right,
    drain,
    insert,
    loaded,
    match,
)

# ---- there and back ----


def test_what_was_evicted_comes_back_with_its_bytes(make_tiered: Make) -> None:
    cache = make_tiered()
    insert(cache, range(20))
    drain(cache)
    assert cache.evict(EvictParams(12)).num_tokens_evicted == 12
    found = match(cache, range(20))
    assert (len(found.device_indices), found.host_hit_length) == (8, 12)
    assert found.last_host_node is found.best_match_node is not found.last_device_node
    host_node = found.best_match_node
    assert (host_node.evicted, host_node.backuped, len(host_node.host_value)) == (True, True, 12)
    assert (host_node.parent, found.last_device_node.backuped) == (found.last_device_node, True)
    assert (cache.total_size(), cache.core.host_tokens) == (8, 20)
    with pytest.raises(UsageError, match="on the host alone"):
        cache.inc_lock_ref(host_node)
    slots, node = loaded(cache, range(20))
    assert_right(cache, range(20), slots)
    again = match(cache, range(20))
    assert (again.device_indices.tolist(), again.host_hit_length, again.last_device_node) == (slots.tolist(), 0, node)
    cache.inc_lock_ref(node)
    assert cache.protected_size() == 20
    cache.dec_lock_ref(node)


def test_all_of_it_is_on_the_host_alone(make_tiered: Make) -> None:
    cache = make_tiered()
    insert(cache, range(8), "a")
    drain(cache)
    cache.evict(EvictParams(8))
    found = match(cache, range(8), "a")
    assert (found.last_device_node, found.host_hit_length, cache.total_size()) == (cache.root_node, 8, 0)
    slots, _ = loaded(cache, range(8), "a")
    assert_right(cache, range(8), slots)


@pytest.mark.parametrize(("policy", "copied"), [("write_through", [8, 8]), ("write_through_selective", [0, 8])])
def test_a_policy_says_after_how_many_inserts_it_is_copied(make_tiered: Make, policy: str, copied: list[int]) -> None:
    cache = make_tiered(policy=policy)
    for num_tokens in copied:
        insert(cache, range(8))
        drain(cache)
        assert cache.core.host_tokens == num_tokens
    assert cache.write_through_threshold == (1 if policy == "write_through" else 2)


def test_write_back_copies_what_is_evicted_and_not_before(make_tiered: Make) -> None:
    cache = make_tiered(policy="write_back")
    insert(cache, range(16))
    insert(cache, range(16))
    drain(cache)
    assert cache.core.host_tokens == 0
    assert cache.evict(EvictParams(16)).num_tokens_evicted == 16
    assert (cache.total_size(), cache.core.host_tokens) == (0, 16)
    slots, _ = loaded(cache, range(16))
    assert_right(cache, range(16), slots)


def test_write_back_drops_what_the_host_has_no_room_for(make_tiered: Make) -> None:
    cache = make_tiered(policy="write_back", ratio=0.125)
    insert(cache, range(16))
    insert(cache, range(50, 66))
    assert cache.evict(EvictParams(32)).num_tokens_evicted == 32
    assert cache.total_size() == 0
    assert cache.core.host_tokens <= cache.token_to_kv_pool_host.num_slots == 8


def test_the_host_makes_room_for_what_is_new(make_tiered: Make) -> None:
    cache = make_tiered(ratio=0.25)
    for start in range(0, 400, 100):
        insert(cache, range(start, start + 16))
        drain(cache)
        cache.evict(EvictParams(64))
        assert match(cache, range(start, start + 16)).host_hit_length == 16
        assert match(cache, range(start - 100, start - 84) if start else [7]).host_hit_length == 0


# ---- limits ----


def test_too_little_or_too_much_is_not_brought_back(make_tiered: Make) -> None:
    cache = make_tiered(load_back_threshold=10)
    insert(cache, range(8))
    insert(cache, range(50, 66))
    drain(cache)
    cache.evict(EvictParams(64))
    slots, node = loaded(cache, range(8))
    assert (len(slots), node) == (0, cache.root_node)
    for quota, num_loaded in ((0, 0), (15, 0), (16, 16)):
        slots, _ = loaded(cache, range(50, 66), mem_quota=quota)
        assert len(slots) == num_loaded
    found = match(cache, range(50, 66))
    assert cache.load_back(found.best_match_node) is None  # there already
    assert cache.init_load_back(InitLoadBackParams(cache.root_node, 0))[1] is cache.root_node


def test_a_load_makes_room_and_keeps_its_source(make_tiered: Make) -> None:
    """Device and host are full: what is loaded is held first, and the victims are dropped."""
    cache = make_tiered(num_slots=16, ratio=1.0, policy="write_through_selective")
    insert(cache, range(16))
    cache.insert(InsertParams(RadixKey(list(range(16))), cache.all_values_flatten()))
    drain(cache)
    cache.evict(EvictParams(16))
    assert insert(cache, range(50, 66))
    slots, _ = loaded(cache, range(16))
    assert_right(cache, range(16), slots)
    assert len(slots) == 16


def test_without_room_on_the_device_nothing_is_brought_back(make_tiered: Make) -> None:
    cache = make_tiered(num_slots=16)
    insert(cache, range(8))
    drain(cache)
    cache.evict(EvictParams(8))
    held = cache.token_to_kv_pool_allocator.alloc(12)
    slots, node = loaded(cache, range(8))
    assert (len(slots), node) == (0, cache.root_node)
    assert match(cache, range(8)).host_hit_length == 8
    cache.token_to_kv_pool_allocator.free(held)
    assert len(loaded(cache, range(8))[0]) == 8


def test_what_is_protected_stays_on_the_host(make_tiered: Make) -> None:
    cache = make_tiered()
    insert(cache, range(8))
    insert(cache, range(50, 58))
    drain(cache)
    cache.evict(EvictParams(64))
    node = match(cache, range(8)).best_match_node
    node.protect_host()
    assert node.host_ref_counter == 1
    assert cache.evict_host(64) == 8
    node.release_host()
    with pytest.raises(RuntimeError, match="protect_host"):
        node.release_host()
    assert cache.evict_host(64) == 8
    assert cache.core.host_tokens == 0
    insert(cache, range(8))
    with pytest.raises(UsageError, match="gone"):
        node.protect_host()


def test_a_split_under_a_store_takes_part_in_it(make_tiered: Make) -> None:
    cache = make_tiered()
    insert(cache, range(16))
    insert(cache, [*range(8), *range(70, 78)])
    drain(cache)
    cache.evict(EvictParams(64))
    for ids in (list(range(16)), [*range(8), *range(70, 78)]):
        slots, _ = loaded(cache, ids)
        assert_right(cache, ids, slots)
        assert len(slots) == 16


# ---- events, reset, parameters ----


def test_events_tell_the_tier_in_order(make_tiered: Make) -> None:
    cache = make_tiered(enable_kv_cache_events=True, page_size=8)
    insert(cache, range(8))
    drain(cache)
    cache.evict(EvictParams(8))
    loaded(cache, range(8))
    cache.evict(EvictParams(8))
    cache.evict_host(8)
    told = [
        (type(event), event.medium) for event in cache.take_events() if isinstance(event, BlockStored | BlockRemoved)
    ]
    gpu, cpu = sglang.MEDIUM_GPU, sglang.MEDIUM_CPU
    assert told == [
        (BlockStored, gpu),
        (BlockStored, cpu),
        (BlockRemoved, gpu),
        (BlockStored, gpu),
        (BlockRemoved, gpu),
        (BlockRemoved, cpu),
    ]


def test_strict_hashes_last_as_long_as_the_page_is_on_a_tier(make_tiered: Make) -> None:
    cache = make_tiered(enable_kv_cache_events=True, page_size=8, strict_compat=True)
    insert(cache, range(8), "a")
    drain(cache)
    cache.evict(EvictParams(8))
    cache.evict_host(8)
    hashes = {event.block_hashes[0] for event in cache.take_events() if isinstance(event, BlockStored | BlockRemoved)}
    plain = RadixKey(list(range(8))).hash_page(0, 8)
    assert hashes == {sglang.hash_str_to_int64(plain)}


def test_reset_forgets_both_tiers(make_tiered: Make) -> None:
    cache = make_tiered()
    insert(cache, range(16))
    insert(cache, range(50, 58))
    kept = cache.all_values_flatten()
    cache.reset()
    cache.token_to_kv_pool_allocator.free(kept)
    assert (cache.total_size(), cache.core.host_tokens) == (0, 0)
    assert cache.token_to_kv_pool_host.available_size() == cache.token_to_kv_pool_host.num_slots
    assert match(cache, range(16)).host_hit_length == 0


def test_a_disabled_one_copies_nothing(make_tiered: Make) -> None:
    cache = make_tiered(num_slots=16)
    cache.disable = True
    slots = cache.token_to_kv_pool_allocator.alloc(8)
    cache.insert(InsertParams(RadixKey(list(range(8))), slots))
    assert (len(match(cache, range(8)).device_indices), cache.evict(EvictParams(8)).num_tokens_evicted) == (0, 0)
    cache.token_to_kv_pool_allocator.free(slots)


def test_without_buffers_it_keeps_books() -> None:
    allocator = PagedTokenToKVPoolAllocator(64, 4)
    cache = HiRadixCache(sglang.CacheInitParams(False, None, allocator, 4), load_back_threshold=1)
    slots = allocator.alloc(8)
    cache.insert(InsertParams(RadixKey(list(range(8))), slots))
    drain(cache)
    cache.evict(EvictParams(8))
    assert match(cache, range(8)).host_hit_length == 8
    assert len(loaded(cache, range(8))[0]) == 8
    cache.check()
    cache.shutdown()


def test_parameters_are_checked() -> None:
    allocator = PagedTokenToKVPoolAllocator(8, 4)
    params = sglang.CacheInitParams(False, None, allocator, 4)
    for args, name in (
        ({"hicache_write_policy": "never"}, "write_policy"),
        ({"hicache_storage_backend": "file"}, "storage_backend"),
        ({"hicache_ratio": 0.1}, "hicache_ratio"),
    ):
        with pytest.raises(ConfigError, match=name):
            HiRadixCache(params, SimpleNamespace(**args))
    sized = HiRadixCache(params, SimpleNamespace(hicache_size=1e-6))
    assert sized.token_to_kv_pool_host.size_bytes <= 1000
    sized.shutdown()
    with pytest.raises(ConfigError, match="KVPool"):
        HiRadixCache(sglang.CacheInitParams(False, None, PagedTokenToKVPoolAllocator(8, 4, kvcache="buffers"), 4))
    with pytest.raises(ConfigError, match="tree_core"):
        HiRadixCache(sglang.CacheInitParams(False, None, allocator, 4, tree_core="cpp"))


# ---- random lives ----


@pytest.mark.parametrize("params", [{}, {"evict_unit": "node"}, {"is_eagle": True}, {"eviction_policy": "lfu"}])
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_whatever_happens_what_is_matched_is_right(make_tiered: Make, policy: str, params: dict[str, Any]) -> None:
    source = random.Random(f"{policy} {params}")
    cache = make_tiered(num_slots=96, policy=policy, ratio=1.5, **params)
    locked: list[Any] = []
    num_loaded = 0
    for number in range(400):
        ids = [source.randint(0, 2)] * 5 + [source.randint(0, 1) for _ in range(source.randint(0, 24))]
        space = source.choice((None, None, "a"))
        chance = source.random()
        if chance < 0.4:
            insert(cache, ids, space)
        elif chance < 0.75:
            before = len(match(cache, ids, space).device_indices)
            slots, node = loaded(cache, ids, space)
            num_loaded += len(slots) - before
            if cache.is_eagle and len(slots) == len(ids):
                slots = slots[:-1]
            assert_right(cache, ids, slots)
            if chance < 0.45 and len(locked) < 2:
                cache.inc_lock_ref(node)
                locked.append(node)
        elif chance < 0.8 and locked:
            cache.dec_lock_ref(locked.pop())
        elif chance < 0.95:
            cache.evict(EvictParams(source.randint(1, 40)))
        else:
            cache.evict_host(source.randint(1, 20))
        if number % 20 == 0:
            drain(cache)
            cache.check()
    while locked:
        cache.dec_lock_ref(locked.pop())
    assert num_loaded > 0
