"""Parameters and results in SGLang's shapes, and the KV events as it sends them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from aradix.adapters.sglang.keys import RadixKey
from aradix.adapters.sglang.nodes import TreeNode
from aradix.errors import ConfigError

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheInitParams",
    "DecLockRefParams",
    "DecLockRefResult",
    "EvictParams",
    "EvictResult",
    "IncLockRefResult",
    "InitLoadBackParams",
    "InsertParams",
    "InsertResult",
    "KVCacheEvent",
    "MatchPrefixParams",
    "MatchResult",
    "StorageMedium",
]

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU_PINNED"


class StorageMedium(StrEnum):
    """Where a block lies."""

    GPU = MEDIUM_GPU
    CPU = MEDIUM_CPU


@dataclass
class CacheInitParams:
    """How a cache is set up.

    Args:
        disable: match nothing, insert nothing.
        req_to_token_pool: the table of requests, for `cache_unfinished_req` and `cache_finished_req`.
        token_to_kv_pool_allocator: gets what is evicted through its `free`; `None` where nobody wants it.
        page_size: tokens a page.
        is_eagle: keys are looked up by pairs of ids.
        eviction_policy: the name of a strategy, or an `EvictionStrategy`.
        eviction_policy_config: keyword arguments of that strategy.
        disable_finished_insert: `cache_finished_req` inserts nothing.
        enable_kv_cache_events: record events for `take_events`.
        enable_metrics, chunked_prefill_size and the groups and ranks: taken and not looked at.
        enable_mamba_extra_buffer, sliding_window_size, enable_session_radix_cache: refused where set.
        strict_compat: their faults too; the module says which.
        evict_unit: `"page"` evicts as many pages as asked; `"node"` whole leaves, and a hit on a part of a leaf
            refreshes all of it. `None` is `"node"` with `strict_compat`, else `"page"`.
        tree_core: `"auto"`, `"python"` or `"cpp"`.

    Raises:
        ConfigError: a value that cannot work.
    """

    disable: bool = False
    req_to_token_pool: Any = None
    token_to_kv_pool_allocator: Any = None
    page_size: int = 1
    is_eagle: bool = False
    tp_cache_group: Any = None
    attn_cp_cache_group: Any = None
    attn_tp_cache_group: Any = None
    pp_cache_group: Any = None
    eviction_policy: Any = "lru"
    eviction_policy_config: dict[str, Any] | None = None
    disable_finished_insert: bool = False
    enable_metrics: bool = False
    enable_kv_cache_events: bool = False
    enable_session_radix_cache: bool = False
    enable_mamba_extra_buffer: bool = False
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dp_rank: int | None = None
    chunked_prefill_size: int | None = None
    sliding_window_size: int | None = None
    strict_compat: bool = False
    evict_unit: Literal["page", "node"] | None = None
    tree_core: Literal["auto", "python", "cpp"] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.page_size, bool) or not isinstance(self.page_size, int) or self.page_size < 1:
            raise ConfigError(f"page_size must be an int of at least 1, got {self.page_size!r}")
        if self.evict_unit not in (None, "page", "node"):
            raise ConfigError(f"evict_unit must be 'page', 'node' or None, got {self.evict_unit!r}")
        if self.tree_core not in ("auto", "python", "cpp"):
            raise ConfigError(f"tree_core must be 'auto', 'python' or 'cpp', got {self.tree_core!r}")
        for name in ("enable_mamba_extra_buffer", "sliding_window_size", "enable_session_radix_cache"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: this cache holds full attention's KV and nothing else"
                )


@dataclass
class MatchPrefixParams:
    """What to look up."""

    key: RadixKey
    cow_mamba: bool = False
    req: Any = None


class MatchResult(NamedTuple):
    """The longest cached prefix, not locked.

    Args:
        device_indices: int64, shape `[num_matched]`, on the cache's device.
        last_device_node: where it ends on the device; the root where nothing matched.
        last_host_node: where it ends on the host.
        best_match_node: the deeper of the two.
        host_hit_length: tokens beyond it that only the host holds.
    """

    device_indices: torch.Tensor
    last_device_node: Any
    last_host_node: Any
    best_match_node: Any
    host_hit_length: int = 0

    @property
    def prefix_len(self) -> int:
        """Tokens matched on the device."""
        return len(self.device_indices)


@dataclass
class InsertParams:
    """What to insert: a key, and the slot of each of its tokens. Without a value the ids stand for slots, for tests.

    `priority` is the least that the path has afterwards; with `chunked` the insert counts no hits.
    """

    key: RadixKey
    value: torch.Tensor | None = None
    priority: int | None = 0
    chunked: bool = False


@dataclass
class InsertResult:
    """What the tree held already, in tokens: the caller frees its own slots of that part. And where the key ends."""

    prefix_len: int
    last_device_node: TreeNode | None = None


@dataclass
class EvictParams:
    """How many tokens to evict."""

    num_tokens: int = 0


@dataclass
class EvictResult:
    """How many tokens were evicted."""

    num_tokens_evicted: int = 0


@dataclass
class IncLockRefResult:
    """By how much the evictable tokens changed: not above 0."""

    delta: int = 0

    def to_dec_params(self) -> DecLockRefParams:
        """What `dec_lock_ref` takes to undo it."""
        return DecLockRefParams()


@dataclass
class DecLockRefParams:
    """Nothing has to be said to undo a lock here."""


@dataclass
class DecLockRefResult:
    """By how much the evictable tokens changed: not below 0."""

    delta: int = 0


@dataclass
class InitLoadBackParams:
    """What to bring back from the host: where the match ended, how many tokens of it, and at most how many in all."""

    best_match_node: Any
    host_hit_length: int
    mem_quota: int | None = None
    req: Any = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """What happened to blocks."""


class BlockStored(KVCacheEvent):
    """One page that can be matched from now on; hashes are signed 64-bit integers, and the ids of bigrams are pairs."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(KVCacheEvent):
    """Pages that are gone from a medium."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """Everything is gone."""
