"""The cache in SGLang's shape: trees, locks, eviction, events, on both tree cores."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aradix import Namespace
from aradix.adapters import sglang
from aradix.adapters.sglang import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
)
from aradix.errors import ConfigError, UsageError
from tests.tree.lockstep import CORES

Make = Callable[..., RadixCache]


@pytest.fixture(params=CORES)
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a cache on each of the tree cores; its allocator is a mock."""

    def made(**params: Any) -> RadixCache:
        allocator = unittest.mock.Mock(device=torch.device("cpu"))
        return RadixCache.create_simulated(mock_allocator=allocator, tree_core=request.param, **params)

    return made


def insert(cache: RadixCache, ids: Any, extra_key: Any = None, **params: Any) -> int:
    """Insert ids whose slots are ten times they themselves."""
    value = torch.tensor([10 * token for token in ids], dtype=torch.int64)
    return cache.insert(InsertParams(RadixKey(list(ids), extra_key), value, **params)).prefix_len


def match(cache: RadixCache, ids: Any, extra_key: Any = None) -> sglang.MatchResult:
    return cache.match_prefix(MatchPrefixParams(RadixKey(list(ids), extra_key)))


def freed(cache: RadixCache) -> list[list[int]]:
    """What the allocator was given, call by call."""
    return [call.args[0].tolist() for call in cache.token_to_kv_pool_allocator.free.call_args_list]


# ---- looking up and inserting ----


def test_what_was_inserted_is_found(make: Make) -> None:
    cache = make()
    assert insert(cache, [1, 2, 3]) == 0
    assert insert(cache, [1, 2, 3, 4]) == 3
    found = match(cache, [1, 2, 3, 9])
    assert found.device_indices.tolist() == [10, 20, 30]
    assert found.device_indices.dtype == torch.int64
    assert found.last_device_node is found.last_host_node is found.best_match_node
    assert (found.host_hit_length, found.prefix_len) == (0, 3)
    assert (cache.total_size(), cache.evictable_size(), cache.protected_size()) == (4, 4, 0)
    nothing = match(cache, [7])
    assert (nothing.device_indices.tolist(), nothing.last_device_node) == ([], cache.root_node)
    cache.check()


def test_values_are_copied_in_and_out(make: Make) -> None:
    cache = make()
    value = torch.tensor([5, 6], dtype=torch.int64)
    cache.insert(InsertParams(RadixKey([1, 2]), value))
    value.fill_(0)
    match(cache, [1, 2]).device_indices.fill_(0)
    assert match(cache, [1, 2]).device_indices.tolist() == [5, 6]
    with pytest.raises(UsageError, match="1 slots, but the key has 3"):
        cache.insert(InsertParams(RadixKey([4, 5, 6]), value[:1]))


def test_without_a_value_the_ids_stand_for_slots(make: Make) -> None:
    cache = make(page_size=2)
    cache.insert(InsertParams(RadixKey([3, 4, 5])))
    assert cache.all_values_flatten().tolist() == [3, 4]


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_only_whole_pages_are_held(make: Make, page_size: int) -> None:
    cache = make(page_size=page_size)
    insert(cache, range(7))
    assert len(match(cache, range(7)).device_indices) == 7 // page_size * page_size == cache.total_size()


def test_siblings_that_differ_within_a_page_are_apart(make: Make) -> None:
    """Three of four equal tokens are no page."""
    cache = make(page_size=4)
    insert(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert insert(cache, [1, 2, 9, 9, 5, 6, 7, 8]) == 0
    assert len(match(cache, [1, 2, 3, 7]).device_indices) == 0
    assert insert(cache, [1, 2, 3]) == 0
    assert set(cache.root_node.children) == {(1, 2, 3, 4), (1, 2, 9, 9)}
    cache.check()


def test_namespaces_share_nothing(make: Make) -> None:
    cache = make()
    spaces: list[Any] = ["a", "b", None, Namespace(lora="a"), Namespace(salt="a")]
    for number, space in enumerate(spaces):
        cache.insert(InsertParams(RadixKey([1, 2], space), torch.tensor([number, number])))
    for number, space in enumerate(spaces):
        assert match(cache, [1, 2], space).device_indices.tolist() == [number, number]
    assert len(match(cache, [1, 2], "c").device_indices) == 0
    assert [child.key.extra_key for child in cache.root_node.children.values()] == spaces
    cache.check()


def test_a_disabled_cache_holds_nothing(make: Make) -> None:
    cache = make(disable=True)
    assert insert(cache, [1, 2]) == cache.total_size() == 0
    assert len(match(cache, [1, 2]).device_indices) == 0
    assert cache.evict(EvictParams(5)).num_tokens_evicted == cache.inc_lock_ref(cache.root_node).delta == 0


def test_reset_forgets_and_old_nodes_are_gone(make: Make) -> None:
    cache = make(enable_kv_cache_events=True)
    insert(cache, [1, 2])
    node, root = match(cache, [1, 2]).last_device_node, cache.root_node
    cache.inc_lock_ref(node)
    cache.reset()
    assert (cache.total_size(), cache.protected_size(), root.children) == (0, 0, {})
    assert node.evicted
    for use in (cache.inc_lock_ref, cache.dec_lock_ref, lambda gone: gone.lock_ref):
        with pytest.raises(UsageError, match="match again"):
            use(node)
    with pytest.raises(UsageError):
        cache.inc_lock_ref(root)
    kinds = [type(event) for event in cache.take_events()]
    assert kinds == [AllBlocksCleared, BlockStored, BlockStored, AllBlocksCleared]
    insert(cache, [1, 2])
    assert match(cache, [1, 2]).last_device_node is not node


# ---- nodes ----


def test_a_split_makes_a_head_and_leaves_the_node_the_tail(make: Make) -> None:
    cache = make(page_size=2)
    insert(cache, range(1, 9), priority=3)
    tail = match(cache, range(1, 9)).last_device_node
    cache.inc_lock_ref(tail)
    head = match(cache, [1, 2, 3, 4, 99, 99]).last_device_node
    assert (head.key.token_ids, tail.key.token_ids) == ([1, 2, 3, 4], [5, 6, 7, 8])
    assert (head.value.tolist(), tail.value.tolist()) == ([10, 20, 30, 40], [50, 60, 70, 80])
    assert (tail.parent, head.parent, head.children) == (head, cache.root_node, {(5, 6): tail})
    assert (head.lock_ref, head.hit_count, head.priority) == (tail.lock_ref, tail.hit_count, 3) == (1, 1, 3)
    assert cache.root_node.children == {(1, 2): head}
    assert match(cache, range(1, 9)).last_device_node is tail
    assert (cache.protected_size(), cache.total_size()) == (8, 8)
    cache.check()


def test_the_root_is_always_locked_and_of_the_lowest_priority(make: Make) -> None:
    cache = make()
    root = cache.root_node
    assert (root.lock_ref, len(root.key), root.value, root.hash_value) == (1, 0, [], [])
    insert(cache, [1], priority=-5)
    (child,) = root.children.values()
    assert root.priority < child.priority
    assert cache.inc_lock_ref(root).delta == cache.dec_lock_ref(root).delta == 0


def test_only_inserts_count_hits_and_chunks_of_one_prompt_do_not(make: Make) -> None:
    cache = make()
    insert(cache, [1, 2])
    node = match(cache, [1, 2]).last_device_node
    assert node.hit_count == 1
    insert(cache, [1, 2, 3], chunked=True)
    assert (node.hit_count, match(cache, [1, 2, 3]).last_device_node.hit_count) == (1, 0)
    insert(cache, [1, 2, 3])
    assert node.hit_count == 2


def test_priority_goes_up_along_the_path(make: Make) -> None:
    cache = make(eviction_policy="priority")
    insert(cache, [1, 2, 3], priority=1)
    insert(cache, [1, 2, 9], priority=5)
    insert(cache, [7], priority=2)
    head = cache.root_node.children[1]
    assert (head.priority, head.children[3].priority, head.children[9].priority) == (5, 1, 5)
    cache.evict(EvictParams(1))
    assert freed(cache) == [[30]]
    insert(cache, [8], priority=None)
    cache.evict(EvictParams(1))
    assert freed(cache)[-1] == [80]


def test_views_are_the_same_while_somebody_has_them_and_cannot_be_written(make: Make) -> None:
    cache = make()
    insert(cache, [1, 2])
    node = cache.root_node.children[1]
    assert node is match(cache, [1, 2]).last_device_node
    assert cache.evictable_leaves == {node}
    with pytest.raises(AttributeError):
        node.lock_ref = 7
    older = cache.root_node.children[1]
    insert(cache, [3])
    assert older < cache.root_node.children[3]


# ---- locks ----


def test_a_lock_moves_sizes_and_keeps_the_path(make: Make) -> None:
    cache = make()
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 3, 4])
    node = match(cache, [1, 2, 3]).last_device_node
    assert cache.inc_lock_ref(node).delta == -3
    assert cache.inc_lock_ref(node).delta == 0
    assert (cache.protected_size(), cache.evictable_size(), cache.protected_size_, cache.evictable_size_) == (
        3,
        1,
        3,
        1,
    )
    assert cache.evict(EvictParams(10)).num_tokens_evicted == 1
    assert cache.dec_lock_ref(node).delta == 0
    assert cache.dec_lock_ref(node).delta == 3
    cache.check()
    assert cache.evict(EvictParams(10)).num_tokens_evicted == 3


def test_an_unlock_too_many_raises(make: Make) -> None:
    cache = make()
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3])
    upper, lower = (match(cache, ids).last_device_node for ids in ([1, 2], [1, 2, 3]))
    cache.inc_lock_ref(lower)
    with pytest.raises(UsageError, match="inc_lock_ref"):
        cache.dec_lock_ref(upper)
    cache.dec_lock_ref(lower)
    with pytest.raises(UsageError, match="inc_lock_ref"):
        cache.dec_lock_ref(lower)
    cache.check()


def test_with_strict_compat_an_unlock_too_many_is_owed(make: Make) -> None:
    cache = make(strict_compat=True)
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3])
    upper, lower = (match(cache, ids).last_device_node for ids in ([1, 2], [1, 2, 3]))
    assert cache.dec_lock_ref(lower).delta == 0
    assert (upper.lock_ref, lower.lock_ref) == (-1, -1)
    assert cache.inc_lock_ref(lower).delta == 0
    assert (lower.lock_ref, cache.protected_size()) == (0, 0)
    assert cache.inc_lock_ref(lower).delta == -3
    cache.check()


def test_a_node_that_is_gone_cannot_be_locked(make: Make) -> None:
    cache = make()
    insert(cache, [1, 2])
    node = match(cache, [1, 2]).last_device_node
    cache.evict(EvictParams(2))
    with pytest.raises(UsageError, match="match again"):
        cache.inc_lock_ref(node)
    other = make()
    insert(other, [1, 2])
    with pytest.raises(UsageError, match="no node of this cache"):
        cache.inc_lock_ref(match(other, [1, 2]).last_device_node)


# ---- eviction ----


def test_as_many_pages_as_asked_go_from_the_tail(make: Make) -> None:
    cache = make(page_size=2)
    insert(cache, range(1, 9))
    assert cache.evict(EvictParams(3)).num_tokens_evicted == 4
    assert freed(cache) == [[50, 60, 70, 80]]
    assert match(cache, range(1, 9)).device_indices.tolist() == [10, 20, 30, 40]
    assert cache.evict(EvictParams(0)).num_tokens_evicted == 0


@pytest.mark.parametrize("params", [{"evict_unit": "node"}, {"strict_compat": True}])
def test_whole_leaves_go_where_asked_for(make: Make, params: dict[str, Any]) -> None:
    cache = make(**params)
    insert(cache, range(1, 9))
    assert cache.evict(EvictParams(1)).num_tokens_evicted == 8
    assert cache.total_size() == 0


def test_a_parent_follows_once_it_is_childless(make: Make) -> None:
    cache = make(evict_unit="node")
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3])
    insert(cache, [5])
    assert cache.evict(EvictParams(3)).num_tokens_evicted == 3
    assert freed(cache) == [[30], [10, 20]]


def test_a_hit_on_a_part_refreshes_the_rest_only_where_leaves_are_units(make: Make) -> None:
    for params, victim in (({}, [50, 60, 70, 80]), ({"evict_unit": "node"}, [200, 210, 220, 230])):
        cache = make(**params)
        insert(cache, range(1, 9))
        insert(cache, range(20, 24))
        match(cache, range(1, 5))
        cache.evict(EvictParams(4))
        assert freed(cache) == [victim]


def test_a_strategy_of_the_users_decides(make: Make) -> None:
    class Shortest(sglang.EvictionStrategy):
        def get_priority(self, node: Any) -> Any:
            return node.num_tokens, node.last_access_time

    cache = make(eviction_policy=Shortest())
    insert(cache, [1, 2, 3])
    insert(cache, [7])
    cache.evict(EvictParams(1))
    assert freed(cache) == [[70]]


def test_slru_protects_what_was_inserted_twice(make: Make) -> None:
    cache = make(eviction_policy="slru")
    insert(cache, [1])
    insert(cache, [1])
    insert(cache, [2])
    cache.evict(EvictParams(1))
    assert freed(cache) == [[20]]


# ---- bigrams ----


def test_five_raw_tokens_are_a_page_of_four_pairs(make: Make) -> None:
    cache = make(page_size=4, is_eagle=True)
    assert insert(cache, [1, 2, 3, 4]) == cache.total_size() == 0
    insert(cache, [1, 2, 3, 4, 5])
    assert match(cache, [1, 2, 3, 4, 5, 6]).device_indices.tolist() == [10, 20, 30, 40]
    assert len(match(cache, [1, 2, 3, 4, 6]).device_indices) == 0
    (node,) = cache.root_node.children.values()
    assert (node.key.token_ids, len(node.key)) == ([1, 2, 3, 4, 5], 4)
    assert list(cache.root_node.children) == [((1, 2), (2, 3), (3, 4), (4, 5))]


@pytest.mark.parametrize("strict_compat", [False, True])
def test_only_strict_compat_changes_the_callers_key(make: Make, strict_compat: bool) -> None:
    cache = make(is_eagle=True, strict_compat=strict_compat)
    key = RadixKey([1, 2, 3])
    cache.match_prefix(MatchPrefixParams(key))
    assert key.is_bigram == strict_compat
    with pytest.raises(UsageError, match="is_eagle"):
        make().match_prefix(MatchPrefixParams(RadixKey([1, 2], is_bigram=True)))


# ---- events ----


def test_a_page_is_an_event(make: Make) -> None:
    cache = make(page_size=2, enable_kv_cache_events=True)
    insert(cache, [1, 2, 1, 2, 5])
    cleared, first, second = cache.take_events()
    assert isinstance(cleared, AllBlocksCleared)
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.token_ids, first.block_size, first.parent_block_hash) == ([1, 2], 2, None)
    assert (first.lora_id, first.medium) == (None, "GPU")
    assert second.parent_block_hash == first.block_hashes[0] != second.block_hashes[0]
    assert first.block_hashes == [sglang.hash_str_to_int64(RadixKey([1, 2]).hash_page(0, 2))]
    insert(cache, [1, 2, 7, 8])
    (third,) = cache.take_events()
    assert isinstance(third, BlockStored)
    assert third.parent_block_hash == first.block_hashes[0]
    cache.evict(EvictParams(100))
    removed = [
        block for event in cache.take_events() if isinstance(event, BlockRemoved) for block in event.block_hashes
    ]
    assert sorted(removed) == sorted(first.block_hashes + second.block_hashes + third.block_hashes)


def test_without_events_there_are_none(make: Make) -> None:
    cache = make()
    insert(cache, [1])
    assert cache.take_events() == []
    assert cache.root_node.children[1].hash_value is None


def test_hashes_stay_with_their_pages_in_a_split(make: Make) -> None:
    cache = make(page_size=2, enable_kv_cache_events=True)
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 5, 6])
    head = cache.root_node.children[1, 2]
    tail = head.children[3, 4]
    key = RadixKey([1, 2, 3, 4])
    assert head.hash_value == [key.hash_page(0, 2)]
    assert tail.hash_value == [key.hash_page(2, 4, head.get_last_hash_value())]
    assert tail.get_prefix_hash_values(tail) == head.hash_value + tail.hash_value


@pytest.mark.parametrize("is_eagle", [False, True])
def test_pages_of_two_namespaces_are_told_apart_but_with_strict_compat(make: Make, is_eagle: bool) -> None:
    ids = [1, 2, 3, 4, 5]
    seen = {}
    for strict_compat in (False, True):
        cache = make(page_size=2, enable_kv_cache_events=True, strict_compat=strict_compat, is_eagle=is_eagle)
        for space in (None, "a", "b"):
            insert(cache, ids[:3], space)
            insert(cache, ids, space)
        stored = [event for event in cache.take_events() if isinstance(event, BlockStored)]
        assert [event.token_ids for event in stored[:2]] == (
            [[(1, 2), (2, 3)], [(3, 4), (4, 5)]] if is_eagle else [[1, 2], [3, 4]]
        )
        seen[strict_compat] = [event.block_hashes[0] for event in stored]
        for event, parent in zip(stored[1::2], stored[::2], strict=True):
            assert event.parent_block_hash == parent.block_hashes[0]
        child = next(iter(cache.root_node.children.values()))
        assert sglang.hash_str_to_int64(child.get_last_hash_value() or "") in seen[strict_compat]
        cache.evict(EvictParams(1000))
        removed = [
            block for event in cache.take_events() if isinstance(event, BlockRemoved) for block in event.block_hashes
        ]
        assert sorted(removed) == sorted(seen[strict_compat])
    assert len(set(seen[False])) == 6
    assert seen[True] == seen[False][:2] * 3


# ---- the rest ----


def test_what_is_printed_shows_every_node(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    cache = make()
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 9], "a")
    cache.pretty_print()
    shown = capsys.readouterr().out
    assert "3 [1, 2, 3] r=0" in shown
    assert "3 [1, 2, 9] r=0" in shown
    assert "#tokens: 6" in shown
    cache.token_to_kv_pool_allocator.available_size.return_value = 10
    assert "available=10" in sglang.available_and_evictable_str(cache)


def test_parameters_are_checked() -> None:
    for params in (
        {"page_size": 0},
        {"evict_unit": "leaf"},
        {"sliding_window_size": 128},
        {"enable_mamba_extra_buffer": True},
        {"enable_session_radix_cache": True},
        {"tree_core": "cobol"},
    ):
        with pytest.raises(ConfigError, match=next(iter(params))):
            sglang.CacheInitParams(**params)


def test_without_a_host_tier_there_is_nothing_to_bring_back(make: Make) -> None:
    cache = make()
    slots, node = cache.init_load_back(sglang.InitLoadBackParams(cache.root_node, 0))
    assert (len(slots), node, cache.ready_to_load_host_cache()) == (0, cache.root_node, -1)
    cache.check_hicache_events()
    assert (cache.is_tree_cache(), cache.is_chunk_cache(), cache.supports_swa(), cache.supports_mamba()) == (
        True,
        False,
        False,
        False,
    )
