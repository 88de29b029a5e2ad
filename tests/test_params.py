"""Everything that can be wrong with the settings of a cache is said when they are made."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from aradix.errors import AradixError, ConfigError, UsageError
from aradix.memory.allocator import SlotAllocator
from aradix.params import (
    CacheInitParams,
    CacheStats,
    EvictParams,
    EvictResult,
    FlushResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    NodeRef,
)


def params(**changes: Any) -> CacheInitParams:
    return CacheInitParams(**{"allocator": SlotAllocator(16, changes.get("page_size", 1)), **changes})


class MyPolicy:
    def rank(self, node: object, /) -> int:
        return 0


def test_the_defaults() -> None:
    made = params()
    assert (made.page_size, made.disable, made.is_eagle, made.eviction_policy) == (1, False, False, "lru")
    assert (made.low_watermark, made.high_watermark, made.evict_unit) == (0.05, 0.10, "page")
    assert (made.streams, made.enable_kv_cache_events, made.tree_core) == ((), False, "auto")
    assert isinstance(made.clock(), float)


def test_the_first_eight_are_given_by_position() -> None:
    allocator = SlotAllocator(16, 4)
    made = CacheInitParams(allocator, 4, True, True, "fifo", 0.1, 0.2)
    assert made == CacheInitParams(
        allocator=allocator,
        page_size=4,
        disable=True,
        is_eagle=True,
        eviction_policy="fifo",
        low_watermark=0.1,
        high_watermark=0.2,
    )


@pytest.mark.parametrize(
    "good",
    [
        {"low_watermark": 0, "high_watermark": 0},
        {"low_watermark": 1, "high_watermark": 1.0},
        {"low_watermark": 0.5, "high_watermark": 0.5},
        {"streams": [object(), object()]},
        {"streams": iter([object()])},
        {"eviction_policy": MyPolicy()},
        *({"eviction_policy": name} for name in ("lru", "lfu", "slru", "fifo", "mru", "filo", "priority")),
        *({"evict_unit": unit} for unit in ("page", "node")),
        *({"tree_core": core} for core in ("auto", "python")),
    ],
)
def test_what_can_work_is_taken(good: dict[str, Any]) -> None:
    made = params(**good)
    assert isinstance(made.streams, tuple)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"page_size": 0}, ("page_size", "0")),
        ({"page_size": -16}, ("page_size", "-16")),
        ({"page_size": True}, ("page_size", "True")),
        ({"page_size": 1.0}, ("page_size", "1.0")),
        ({"page_size": "1"}, ("page_size", "'1'")),
        ({"low_watermark": -0.1}, ("low_watermark", "-0.1")),
        ({"high_watermark": 1.1}, ("high_watermark", "1.1")),
        ({"high_watermark": 10}, ("high_watermark", "10")),
        ({"low_watermark": float("nan")}, ("low_watermark", "nan")),
        ({"high_watermark": float("inf")}, ("high_watermark", "inf")),
        ({"low_watermark": "0.1"}, ("low_watermark", "'0.1'")),
        ({"low_watermark": False}, ("low_watermark", "False")),
        ({"low_watermark": None}, ("low_watermark", "None")),
        ({"low_watermark": 0.3, "high_watermark": 0.2}, ("low_watermark", "0.3", "0.2")),
        ({"evict_unit": "token"}, ("evict_unit", "'token'", "page, node")),
        ({"evict_unit": []}, ("evict_unit", "[]")),
        ({"tree_core": "rust"}, ("tree_core", "'rust'", "auto, python, cpp")),
        ({"disable": 1}, ("disable", "1")),
        ({"is_eagle": None}, ("is_eagle", "None")),
        ({"waiters_keep_pins": "yes"}, ("waiters_keep_pins", "'yes'")),
        ({"enable_kv_cache_events": 0}, ("enable_kv_cache_events", "0")),
        ({"clock": 3.0}, ("clock", "3.0")),
        ({"req_to_token_pool": [[0]]}, ("req_to_token_pool", "list")),
        ({"eviction_policy": "lruu"}, ("eviction_policy", "'lruu'", "lru")),
        ({"eviction_policy": object()}, ("eviction_policy", "rank")),
        ({"eviction_policy": MyPolicy}, ("eviction_policy", "rank")),
        ({"eviction_policy": None}, ("eviction_policy", "rank")),
        ({"streams": 5}, ("streams", "5")),
        ({"streams": None}, ("streams", "None")),
        ({"streams": "ab"}, ("streams", "'ab'")),
        ({"allocator": None}, ("allocator", "NoneType")),
        ({"allocator": object()}, ("allocator", "object")),
        ({"allocator": SlotAllocator}, ("allocator",)),
        ({"allocator": SlotAllocator(16, 4), "page_size": 2}, ("2", "4")),
        ({"allocator": SlotAllocator(16, 4)}, ("1", "4")),
    ],
)
def test_what_cannot_work_is_refused_with_its_value(bad: dict[str, Any], said: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        CacheInitParams(**{"allocator": SlotAllocator(16), **bad})
    assert all(text in str(caught.value) for text in said), str(caught.value)


def test_on_cuda_the_streams_must_be_named() -> None:
    pool = SlotAllocator(16)
    on_cuda = SimpleNamespace(
        num_slots=16, page_size=1, device="cuda:0", alloc_held=pool.alloc_held, free_held=pool.free_held
    )
    with pytest.raises(ConfigError, match="streams="):
        CacheInitParams(allocator=on_cuda)
    assert CacheInitParams(allocator=on_cuda, streams=(1,)).streams == (1,)


def test_a_config_error_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(ConfigError, UsageError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, AradixError)


@pytest.mark.parametrize(
    "record",
    [
        *(CacheInitParams, CacheStats, EvictParams, EvictResult, FlushResult),
        *(InsertParams, InsertResult, MatchPrefixParams, MatchResult),
    ],
)
def test_records_are_frozen(record: Any) -> None:
    assert issubclass(record, tuple) or record.__dataclass_params__.frozen
    made = EvictResult(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.num_freed_tokens = 4  # type: ignore[misc]


def test_a_place_is_a_node_and_a_depth() -> None:
    assert NodeRef(3, 4) == (3, 4)
    assert NodeRef(3, 4) != NodeRef(3, 5)
