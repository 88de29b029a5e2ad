"""What a cache does with the rows of a table of requests. `aradix/cache/request_rows.py` draws who owns what of a row.

Here `cache_finished_req` gives back what is committed, and `release_kv_cache` the over-allocated pages beyond.
"""

from __future__ import annotations

from typing import Any

import torch

from aradix.adapters.sglang.base import BasePrefixCache
from aradix.adapters.sglang.keys import RadixKey
from aradix.adapters.sglang.records import InsertParams, MatchPrefixParams
from aradix.cache.request_rows import allocated_len, committed_len, computed_ids, joined_ids, row_slots
from aradix.errors import UsageError

__all__ = ["RequestCalls", "free_slots", "release_kv_cache"]


def free_slots(cache: BasePrefixCache, slots: torch.Tensor) -> None:
    """Give slots back to the allocator. Does not wait."""
    if len(slots):
        cache.token_to_kv_pool_allocator.free(slots)


class RequestCalls(BasePrefixCache):
    """The two calls of a scheduler that keeps a table of requests."""

    is_eagle: bool
    disable_finished_insert: bool

    def _key_of(self, req: Any, ids: Any) -> RadixKey:
        return RadixKey(ids, req.extra_key, is_bigram=self.is_eagle).page_aligned(self.page_size)

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int | None = None) -> None:
        num_committed = committed_len(req, kv_len_to_handle)
        row = row_slots(self.req_to_token_pool, req, 0, num_committed)
        protected = req.cache_protected_len
        if self.disable:
            free_slots(self, row[protected:])
            return
        if is_insert and not self.disable_finished_insert:
            ids = joined_ids(req)[:num_committed]
            key = self._key_of(req, ids)
            values = row[: len(key)]
            done = self.insert(InsertParams(key, values, priority=getattr(req, "priority", 0)))
            free_slots(self, row[protected : done.prefix_len])
            # A request may end before it has computed a token: then its key is shorter than what it matched.
            free_slots(self, row[max(protected, len(key)) :])
        else:
            free_slots(self, row[protected:])
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        if self.disable:
            return
        ids = computed_ids(req)
        row = row_slots(self.req_to_token_pool, req, 0, len(ids))
        protected = req.cache_protected_len
        key = self._key_of(req, ids)
        if len(key) <= protected:
            req.prefix_indices = row
            return
        done = self.insert(InsertParams(key, row[: len(key)], getattr(req, "priority", 0), chunked))
        found = self.match_prefix(MatchPrefixParams(key))
        if len(found.device_indices) != len(key):
            raise UsageError(f"{len(key)} tokens were inserted and {len(found.device_indices)} are found again")
        slots = found.device_indices
        # Re-pointed before anything is freed: whoever gets the freed slots must not find them in a row.
        self.req_to_token_pool.write((req.req_pool_idx, slice(protected, len(slots))), slots[protected:])
        self.inc_lock_ref(found.last_device_node)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        free_slots(self, row[protected : done.prefix_len])
        req.last_node = found.last_device_node
        req.cache_protected_len = len(slots)
        req.prefix_indices = torch.cat((slots, row[len(slots) :]))


def release_kv_cache(req: Any, tree_cache: BasePrefixCache, is_insert: bool = True) -> None:
    """End a request: `cache_finished_req`, then what was over-allocated, then its row. Does not wait."""
    pop = getattr(req, "pop_overallocated_kv_cache", None)
    committed = committed_len(req, None)
    tree_cache.cache_finished_req(req, is_insert, kv_len_to_handle=committed)
    start, stop = pop() if callable(pop) else (committed, allocated_len(req, committed))
    page_size = tree_cache.page_size
    free_slots(tree_cache, row_slots(tree_cache.req_to_token_pool, req, -(-start // page_size) * page_size, stop))
    tree_cache.req_to_token_pool.free(req)
