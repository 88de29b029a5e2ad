"""`BasePrefixCache` in SGLang's shape: what a scheduler may call on any cache."""

from __future__ import annotations

import abc
from typing import Any

import torch

from aradix.adapters.sglang.records import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    KVCacheEvent,
    MatchPrefixParams,
    MatchResult,
)

__all__ = ["BasePrefixCache", "available_and_evictable_str", "device_of"]


def device_of(allocator: Any) -> torch.device:
    """The device of an allocator's slots; the CPU where it does not say."""
    device = getattr(allocator, "device", None)
    return torch.device(device) if isinstance(device, str | torch.device) else torch.device("cpu")


class BasePrefixCache(abc.ABC):
    """A synchronous prefix cache. No call waits."""

    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    page_size: int
    disable: bool

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget everything; what was locked too. The allocator is cleared by whoever clears the cache."""

    @abc.abstractmethod
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix, in whole pages. It is not locked: lock it before anything evicts."""

    @abc.abstractmethod
    def insert(self, params: InsertParams) -> InsertResult:
        """Insert the whole pages of a key. The values are copied; the caller frees its slots of what was there."""

    @abc.abstractmethod
    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int | None = None) -> None:
        """Insert what a request has computed, free the rest, and unlock."""

    @abc.abstractmethod
    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        """Insert what a request has computed so far, and move its lock there."""

    @abc.abstractmethod
    def evict(self, params: EvictParams) -> EvictResult:
        """Evict tokens, least valuable first, into the allocator."""

    @abc.abstractmethod
    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """Lock the path to a node."""

    @abc.abstractmethod
    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Undo one lock of this node."""

    def evictable_size(self) -> int:
        """Cached tokens that nobody locks."""
        return 0

    def protected_size(self) -> int:
        """Cached tokens that somebody locks."""
        return 0

    def total_size(self) -> int:
        """Cached tokens."""
        return 0

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        return []

    def pretty_print(self) -> None:
        """Print the tree, a line a node."""
        print(f"{type(self).__name__}: nothing is shared")

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, Any]:
        """Bring back what only the host holds: the slots, and where they end. Without a host tier there is nothing."""
        return torch.empty(0, dtype=torch.int64), params.best_match_node

    def ready_to_load_host_cache(self) -> int:
        """Start what `init_load_back` prepared; -1 where there is nothing to wait for."""
        return -1

    def check_hicache_events(self) -> None:
        """Take note of finished copies. Without a host tier there are none."""
        return

    def is_chunk_cache(self) -> bool:
        """Whether nothing is ever shared."""
        return False

    def is_tree_cache(self) -> bool:
        """Whether prefixes are shared."""
        return not self.is_chunk_cache()

    def supports_swa(self) -> bool:
        """Whether sliding windows are cached: no."""
        return False

    def supports_mamba(self) -> bool:
        """Whether recurrent states are cached: no."""
        return False

    def available_and_evictable_str(self) -> str:
        """A line for logs: how much room there is."""
        available, evictable = self.token_to_kv_pool_allocator.available_size(), self.evictable_size()
        return f"Available tokens: {available + evictable} ({available=} + {evictable=})\n"


def available_and_evictable_str(tree_cache: BasePrefixCache) -> str:
    """A line for logs: how much room a cache has. Does not wait."""
    return tree_cache.available_and_evictable_str()
