"""`ChunkCache` in SGLang's shape: nothing is shared, every request frees its own."""

from __future__ import annotations

from typing import Any

import torch

from aradix.adapters.sglang.base import BasePrefixCache, device_of
from aradix.adapters.sglang.records import (
    CacheInitParams,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from aradix.adapters.sglang.requests import free_slots
from aradix.cache.request_rows import committed_len, computed_ids, row_slots

__all__ = ["ChunkCache"]


class ChunkCache(BasePrefixCache):
    """For engines with prefix caching switched off. `BasePrefixCache` says what each call does."""

    def __init__(self, params: CacheInitParams) -> None:
        self.disable = True
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.device = device_of(params.token_to_kv_pool_allocator)

    def reset(self) -> None:
        """There is nothing to forget."""

    def is_chunk_cache(self) -> bool:
        return True

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        return MatchResult(torch.empty(0, dtype=torch.int64, device=self.device), None, None, None)

    def insert(self, params: InsertParams) -> InsertResult:
        return InsertResult(prefix_len=0)

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int | None = None) -> None:
        protected = getattr(req, "cache_protected_len", 0)
        free_slots(self, row_slots(self.req_to_token_pool, req, protected, committed_len(req, kv_len_to_handle)))

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        req.prefix_indices = row_slots(self.req_to_token_pool, req, 0, len(computed_ids(req)))

    def evict(self, params: EvictParams) -> EvictResult:
        return EvictResult()

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        return IncLockRefResult(delta=0)

    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> DecLockRefResult:
        return DecLockRefResult(delta=0)
