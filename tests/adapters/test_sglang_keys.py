"""Keys and strategies in SGLang's shape."""

from __future__ import annotations

import hashlib
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aradix import Namespace
from aradix.adapters import sglang
from aradix.adapters.sglang import RadixKey, TreeNode, get_hash_str, hash_str_to_int64
from aradix.errors import ConfigError, InvalidKeyError

IDS = st.lists(st.integers(0, 2), max_size=9)
CONTAINERS: list[Any] = [list, tuple, lambda ids: array("q", ids), np.array, torch.tensor]


@pytest.mark.parametrize("made", CONTAINERS)
def test_ids_come_in_any_container_and_stay_what_they_were(made: Any) -> None:
    ids = made([1, 2, 3, 4])
    key = RadixKey(ids, "tenant")
    assert key.token_ids is ids
    assert [int(token) for token in key] == [1, 2, 3, 4]
    part = key[1:3]
    assert ([int(token) for token in part.token_ids], part.extra_key) == ([2, 3], "tenant")
    assert key.to_core().token_ids().tolist() == [1, 2, 3, 4]
    assert key.match(RadixKey(made([1, 2, 9, 4]), "tenant")) == 2


def test_items_and_slices() -> None:
    key = RadixKey([10, 20, 30])
    assert (key[0].token_ids, key[-1].token_ids, key[3:].token_ids) == ([10], [30], [])
    for beyond in (3, -4):
        with pytest.raises(IndexError, match="3"):
            key[beyond]
    with pytest.raises(ValueError, match="step 2"):
        key[::2]
    pairs = RadixKey([1, 2, 3, 4], is_bigram=True)
    assert list(pairs) == [(1, 2), (2, 3), (3, 4)]
    assert list(pairs[1]) == [(2, 3)]
    assert (list(pairs[:2]), pairs[:2].token_ids) == ([(1, 2), (2, 3)], [1, 2, 3])  # neighbours share an id
    assert (len(pairs[2:2]), pairs[2:2].token_ids) == (0, [])
    assert len(RadixKey([1], is_bigram=True)) == len(RadixKey([], is_bigram=True)) == 0


@given(ids=IDS, other=IDS, page_size=st.integers(1, 3), bigrams=st.booleans())
def test_a_match_is_what_both_begin_with_in_whole_pages(
    ids: list[int], other: list[int], page_size: int, bigrams: bool
) -> None:
    first, second = RadixKey(ids, is_bigram=bigrams), RadixKey(other, is_bigram=bigrams)
    count = 0
    for one, two in zip(first, second, strict=False):
        if one != two:
            break
        count += 1
    assert first.match(second, page_size) == count // page_size * page_size
    aligned = first.page_aligned(page_size)
    assert list(aligned) == list(first)[: len(first) // page_size * page_size]


def test_keys_of_two_namespaces_are_not_compared() -> None:
    with pytest.raises(ValueError, match="'a' and 'b'"):
        RadixKey([1], "a").match(RadixKey([1], "b"))


def test_what_a_parent_knows_a_child_by() -> None:
    key = RadixKey([1, 2, 3, 4], None)
    assert (key.child_key(), key.child_key(2)) == (1, (1, 2))
    assert RadixKey([1, 2, 3], "x").child_key(2) == ("x", (1, 2))
    pairs = RadixKey([1, 2, 3], "x", is_bigram=True)
    assert (pairs.child_key(), pairs.child_key(2)) == (("x", (1, 2)), ("x", ((1, 2), (2, 3))))


def test_a_bigram_view_leaves_the_key_alone() -> None:
    key = RadixKey([1, 2, 3], "x")
    pairs, value = key.maybe_to_bigram_view(True, torch.tensor([7, 8, 9]))
    assert value is not None
    assert (list(pairs), pairs.extra_key, value.tolist()) == ([(1, 2), (2, 3)], "x", [7, 8])
    assert not key.is_bigram
    assert key.maybe_to_bigram_view(False, value) == (key, value)
    assert pairs.maybe_to_bigram_view(True)[0] is pairs


def test_a_page_hash_is_sha256_over_u32_after_the_digest_before() -> None:
    first = hashlib.sha256(b"\1\0\0\0\2\0\0\0").hexdigest()
    assert RadixKey([1, 2, 3, 4]).hash_page(0, 2) == first == get_hash_str([1, 2])
    second = hashlib.sha256(bytes.fromhex(first) + b"\3\0\0\0\4\0\0\0").hexdigest()
    assert RadixKey([1, 2, 3, 4]).hash_page(2, 4, first) == second
    pair = hashlib.sha256(b"\1\0\0\0\2\0\0\0").hexdigest()
    assert RadixKey([1, 2], is_bigram=True).hash_page(0, 1) == pair
    assert hash_str_to_int64("f" * 64) == -1
    assert hash_str_to_int64("0" * 15 + "1" + "f" * 48) == 1


def test_the_namespace_is_hashed_unless_told_otherwise() -> None:
    hashes = [RadixKey([1, 2], extra_key).hash_page(0, 2) for extra_key in (None, "", "a", Namespace(lora="a"))]
    assert len(set(hashes)) == 4
    assert RadixKey([1, 2], "a").hash_page(0, 2, strict_compat=True) == hashes[0]


def test_its_text_shows_the_beginning() -> None:
    assert repr(RadixKey([1, 2, 3], "t")) == "RadixKey(extra_key='t', token_ids=[1, 2, 3], is_bigram=False)"
    assert "9]..." in repr(RadixKey(list(range(15))))


def test_what_cannot_be_a_token_is_refused_when_it_is_looked_up() -> None:
    cache = sglang.RadixCache.create_simulated()
    for ids in ([-1], [2**31], [1.5]):
        with pytest.raises(InvalidKeyError):
            cache.match_prefix(sglang.MatchPrefixParams(RadixKey(ids)))


# ---- strategies ----


def node(**figures: float) -> Any:
    return SimpleNamespace(**{"last_access_time": 1.0, "creation_time": 2.0, "hit_count": 3, "priority": 4, **figures})


@pytest.mark.parametrize(
    ("name", "priority"),
    [
        ("lru", 1.0),
        ("mru", -1.0),
        ("fifo", 2.0),
        ("filo", -2.0),
        ("lfu", (3, 1.0)),
        ("priority", (4, 1.0)),
        ("SLRU", (1, 1.0)),
    ],
)
def test_a_strategy_ranks_by_its_figures(name: str, priority: Any) -> None:
    assert sglang.get_eviction_strategy(name).get_priority(node()) == priority


def test_slru_protects_from_a_threshold_on() -> None:
    strategy = sglang.get_eviction_strategy("slru", {"protected_threshold": 5})
    assert [strategy.get_priority(node(hit_count=hits))[0] for hits in (4, 5)] == [0, 1]
    assert sglang.SLRUStrategy().protected_threshold == 2


def test_a_strategy_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="Unknown eviction policy: 'arc'"):
        sglang.get_eviction_strategy("arc")
    with pytest.raises(ConfigError, match="EvictionStrategy"):
        sglang.RadixCache(sglang.CacheInitParams(eviction_policy=7))


# ---- nodes that stand for themselves ----


def test_a_plain_node_is_numbered_and_empty() -> None:
    TreeNode.counter = 0
    made = TreeNode()
    assert (made.id, made.children, made.parent, made.key, made.value) == (0, {}, None, None, None)
    assert (made.lock_ref, made.hit_count, made.host_ref_counter, made.host_value) == (0, 0, 0, None)
    assert (TreeNode(id=42).id, TreeNode().id, TreeNode(priority=3).priority) == (42, 2, 3)
    assert (made.evicted, made.backuped) == (True, False)
    made.value, made.host_value = [1], [2]
    assert (made.evicted, made.backuped) == (False, True)
    made.last_access_time, later = 1.0, TreeNode()
    assert made < later


def test_host_copies_are_protected_as_often_as_released() -> None:
    made = TreeNode()
    made.protect_host()
    made.release_host()
    with pytest.raises(RuntimeError, match="protect_host"):
        made.release_host()


def test_the_hashes_above_a_node_are_a_new_list() -> None:
    above: TreeNode | None = None
    for name in ("a", "b", "c"):
        made = TreeNode()
        made.parent, made.hash_value = above, [name]
        above = made
    assert above is not None
    assert above.get_last_hash_value() == "c"
    assert TreeNode().get_last_hash_value() is None
    found = above.get_prefix_hash_values(above.parent)
    assert found == ["a", "b"]
    found.append("z")
    assert above.get_prefix_hash_values(above.parent) == ["a", "b"]
