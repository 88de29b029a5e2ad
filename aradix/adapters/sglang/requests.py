"""What a cache does with the rows of a table of requests.

Who owns which part of a row, in token order; `key` is the whole pages of what is computed:

    0 ............ protected ............ key ............ committed ............ allocated
    |  the tree's,  |  the request's:     |  the request's:   |  over-allocated, for   |
    |  locked       |  goes to the tree   |  fills no page    |  drafts: never read    |
                    |  prefix_len                             |
                    |..|  held by the tree already: these slots of the request are freed, its row is re-pointed

After `cache_unfinished_req` `protected` is at `key`. `cache_finished_req` frees from `key` (without insert: from
`protected`) to `committed`, and `release_kv_cache` the whole pages beyond. EAGLE's key has one item less than there are
tokens, so the last token's slot is always the request's.
"""

from __future__ import annotations

from typing import Any

import torch

from aradix.adapters.sglang.base import BasePrefixCache
from aradix.adapters.sglang.keys import RadixKey
from aradix.adapters.sglang.records import InsertParams, MatchPrefixParams
from aradix.errors import UsageError

__all__ = ["RequestTable", "committed_len", "computed_ids", "free_slots", "release_kv_cache", "row_of"]


def committed_len(req: Any, given: int | None) -> int:
    """How many tokens of a request have their KV: as told, or as the request says. Does not wait."""
    if given is not None:
        return given
    pop = getattr(req, "pop_committed_kv_cache", None)
    if callable(pop):
        return int(pop())
    length = getattr(req, "kv_committed_len", None)
    return len(req.origin_input_ids) + len(req.output_ids) if length is None else int(length)


def computed_ids(req: Any) -> Any:
    """The ids whose KV was computed by the prefill so far. Does not wait."""
    ids = getattr(req, "fill_ids", None)
    return req.get_fill_ids() if ids is None else ids


def row_of(cache: BasePrefixCache, req: Any, start: int, stop: int) -> torch.Tensor:
    """A part of a request's row, as an int64 copy: the row may be rewritten before it is used. Does not wait."""
    row: torch.Tensor = cache.req_to_token_pool.req_to_token[req.req_pool_idx, start : max(start, stop)]
    return row.to(torch.int64, copy=True)


def free_slots(cache: BasePrefixCache, slots: torch.Tensor) -> None:
    """Give slots back to the allocator. Does not wait."""
    if len(slots):
        cache.token_to_kv_pool_allocator.free(slots)


class RequestTable(BasePrefixCache):
    """The two calls of a scheduler that keeps a table of requests."""

    is_eagle: bool
    disable_finished_insert: bool

    def _key_of(self, req: Any, ids: Any) -> RadixKey:
        return RadixKey(ids, req.extra_key, is_bigram=self.is_eagle).page_aligned(self.page_size)

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int | None = None) -> None:
        num_committed = committed_len(req, kv_len_to_handle)
        row = row_of(self, req, 0, num_committed)
        protected = req.cache_protected_len
        if self.disable:
            free_slots(self, row[protected:])
            return
        if is_insert and not self.disable_finished_insert:
            ids = _joined(req.origin_input_ids, req.output_ids)[:num_committed]
            key = self._key_of(req, ids)
            values = row[: len(key)]
            done = self.insert(InsertParams(key, values, priority=getattr(req, "priority", 0)))
            free_slots(self, row[protected : done.prefix_len])
            free_slots(self, row[len(key) :])
        else:
            free_slots(self, row[protected:])
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        if self.disable:
            return
        ids = computed_ids(req)
        row = row_of(self, req, 0, len(ids))
        protected = req.cache_protected_len
        key = self._key_of(req, ids)
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


def _joined(prompt: Any, output: Any) -> Any:
    return prompt + output if type(prompt) is type(output) else [*prompt, *output]


def release_kv_cache(req: Any, tree_cache: BasePrefixCache, is_insert: bool = True) -> None:
    """End a request: `cache_finished_req`, then what was over-allocated, then its row. Does not wait."""
    pop = getattr(req, "pop_overallocated_kv_cache", None)
    committed = committed_len(req, None)
    tree_cache.cache_finished_req(req, is_insert, kv_len_to_handle=committed)
    start, stop = pop() if callable(pop) else (committed, getattr(req, "kv_allocated_len", committed))
    page_size = tree_cache.page_size
    free_slots(tree_cache, row_of(tree_cache, req, -(-start // page_size) * page_size, stop))
    tree_cache.req_to_token_pool.free(req)
