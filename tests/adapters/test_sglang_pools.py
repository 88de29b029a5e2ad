"""The pools in SGLang's shape, and requests at the edges of what a table can say."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from aradix.adapters import sglang
from aradix.adapters.sglang import PagedTokenToKVPoolAllocator, ReqToTokenPool, TokenToKVPoolAllocator
from aradix.errors import DoubleFreeError, UsageError
from tests.adapters.scheduler import Request


def lens(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def taken(slots: torch.Tensor | None) -> torch.Tensor:
    assert slots is not None
    return slots


# ---- slots ----


def test_slots_are_handed_out_and_taken_back() -> None:
    allocator = TokenToKVPoolAllocator(8, torch.float16, "cpu", "buffers")
    slots = taken(allocator.alloc(5))
    assert (slots.dtype, slots.device, allocator.available_size()) == (torch.int64, torch.device("cpu"), 3)
    assert 0 not in slots.tolist()
    assert allocator.alloc(4) is None
    allocator.free(slots[:2])
    with pytest.raises(DoubleFreeError):
        allocator.free(slots[:1])
    allocator.free(slots[:0])
    assert (allocator.available_size(), allocator.size, allocator.page_size) == (5, 8, 1)
    assert (allocator.get_kvcache(), allocator.dtype) == ("buffers", torch.float16)
    allocator.clear()
    assert allocator.available_size() == 8
    assert "num_slots=8" in allocator.debug_print()
    allocator.merge_and_sort_free()


def test_a_group_is_freed_at_its_end_with_the_slots_of_then() -> None:
    """What is freed may be a view of a row that is rewritten before the group ends."""
    allocator = PagedTokenToKVPoolAllocator(32, 4)
    slots = taken(allocator.alloc(16))
    row = slots.clone()
    allocator.free_group_begin()
    allocator.free(row[:6])
    allocator.free_segment(row[6:8], start_pos=6)
    row.fill_(0)
    assert allocator.available_size() == 16
    allocator.free_group_end()
    assert allocator.available_size() == 24  # two pages, the shared one once
    allocator.free(slots[8:])
    assert allocator.available_size() == 32
    allocator.free_group_end()
    allocator.slots.check()


def test_allocations_since_a_backup_can_be_undone() -> None:
    allocator = PagedTokenToKVPoolAllocator(32, 4)
    first = taken(allocator.alloc(8))
    state = allocator.backup_state()
    taken(allocator.alloc(12))
    allocator.restore_state(state)
    assert allocator.available_size() == 24
    allocator.restore_state(state)
    allocator.free(first)
    with pytest.raises(UsageError, match="2 pages were freed"):
        allocator.restore_state(state)


def test_requests_grow_through_their_last_page_first() -> None:
    allocator = PagedTokenToKVPoolAllocator(64, 4)
    rows: list[list[int]] = [[], [], []]
    source = random.Random("grow")
    for _ in range(12):
        before = [len(row) for row in rows]
        after = [length + source.choice((0, 1, 1, 2)) for length in before]
        last = lens(*(row[-1] if row else -1 for row in rows))
        slots = allocator.alloc_extend(
            lens(*before), lens(*before), lens(*after), lens(*after), last, sum(after) - sum(before)
        )
        made = taken(slots).tolist()
        for row, start, stop in zip(rows, before, after, strict=True):
            row += [made.pop(0) for _ in range(stop - start)]
        assert made == []
    after = [len(row) + 1 for row in rows]
    decoded = taken(allocator.alloc_decode(lens(*after), lens(*after), lens(*(row[-1] for row in rows))))
    for row, slot in zip(rows, decoded.tolist(), strict=True):
        row.append(slot)
        assert len(set(row)) == len(row)
        for place, slot_there in enumerate(row):
            assert slot_there % 4 == place % 4
            assert slot_there // 4 == row[place // 4 * 4] // 4
    for row in rows:
        allocator.free(lens(*row))
    assert allocator.available_size() == 64


def test_growth_is_all_or_nothing() -> None:
    allocator = PagedTokenToKVPoolAllocator(8, 4)
    taken(allocator.alloc(4))
    assert allocator.alloc_extend(lens(0, 0), lens(0, 0), lens(4, 4), lens(4, 4), lens(-1, -1), 8) is None
    assert allocator.available_size() == 4
    with pytest.raises(UsageError, match="extend_num_tokens=7"):
        allocator.alloc_extend(lens(0), lens(0), lens(4), lens(4), lens(-1), 7)
    with pytest.raises(UsageError, match="whole pages"):
        allocator.alloc(3)


# ---- rows ----


def test_rows_are_handed_out_and_taken_back() -> None:
    table = ReqToTokenPool(3, 8)
    assert table.req_to_token.shape == (3, 8)
    first, second = Request([1]), Request([2])
    assert table.alloc([first, second]) == [first.req_pool_idx, second.req_pool_idx]
    assert table.alloc(2) is None
    table.write((first.req_pool_idx, slice(0, 3)), lens(7, 8, 9))
    assert table.req_to_token[first.req_pool_idx, :3].tolist() == [7, 8, 9]
    row = first.req_pool_idx
    table.free(first)
    assert (first.req_pool_idx, table.available_size()) == (None, 2)
    for wrong in (row, 3, [row]):
        with pytest.raises(UsageError, match="free already"):
            table.free(wrong)
    table.clear()
    assert table.available_size() == 3


# ---- requests ----


def serving(page_size: int = 1, **params: Any) -> tuple[sglang.RadixCache, ReqToTokenPool, PagedTokenToKVPoolAllocator]:
    table, allocator = ReqToTokenPool(4, 32), PagedTokenToKVPoolAllocator(64, page_size)
    return sglang.RadixCache(sglang.CacheInitParams(False, table, allocator, page_size, **params)), table, allocator


def started(cache: Any, table: ReqToTokenPool, allocator: Any, prompt: list[int], num_slots: int) -> Request:
    """A request that has matched, and has so many slots in its row."""
    req = Request(prompt)
    table.alloc([req])
    found = cache.match_prefix(sglang.MatchPrefixParams(sglang.RadixKey(prompt)))
    cache.inc_lock_ref(found.last_device_node)
    num_matched = len(found.device_indices)
    req.last_node, req.cache_protected_len = found.last_device_node, num_matched
    fresh = taken(allocator.alloc(num_slots - num_matched))
    table.write((req.req_pool_idx, slice(0, num_slots)), torch.cat((found.device_indices, fresh)))
    req.fill_ids, req.kv_committed_len = list(prompt), len(prompt)
    return req


def test_the_partial_page_stays_the_requests_until_it_ends() -> None:
    cache, table, allocator = serving(4)
    req = started(cache, table, allocator, list(range(6)), 8)
    cache.cache_unfinished_req(req)
    assert (req.cache_protected_len, len(req.prefix_indices), cache.protected_size()) == (4, 6, 4)
    assert req.prefix_indices.tolist() == table.req_to_token[req.req_pool_idx, :6].tolist()
    sglang.release_kv_cache(req, cache)
    assert (cache.evictable_size(), cache.protected_size(), allocator.available_size()) == (4, 0, 60)
    cache.check()


def test_of_two_that_computed_the_same_one_is_re_pointed() -> None:
    cache, table, allocator = serving()
    first, second = (started(cache, table, allocator, [1, 2, 3], 3) for _ in range(2))
    cache.cache_unfinished_req(first)
    cache.cache_unfinished_req(second)
    assert second.prefix_indices.tolist() == first.prefix_indices.tolist()
    assert (allocator.available_size(), cache.protected_size(), cache.root_node.children[1].lock_ref) == (61, 3, 2)
    for req in (first, second):
        sglang.release_kv_cache(req, cache)
    assert cache.evict(sglang.EvictParams(9)).num_tokens_evicted == 3
    assert allocator.available_size() == 64


@pytest.mark.parametrize("is_insert", [False, True])
@pytest.mark.parametrize("is_eagle", [False, True])
def test_over_allocated_drafts_come_back(is_eagle: bool, is_insert: bool) -> None:
    cache, table, allocator = serving(4, is_eagle=is_eagle)
    req = started(cache, table, allocator, list(range(9)), 16)
    req.kv_allocated_len = 14
    sglang.release_kv_cache(req, cache, is_insert)
    assert cache.total_size() == (8 if is_insert else 0)
    assert allocator.available_size() == 64 - cache.total_size()
    assert table.available_size() == 4


def test_a_request_says_itself_what_is_committed() -> None:
    class Popping(Request):
        def pop_committed_kv_cache(self) -> int:
            return 3

        def pop_overallocated_kv_cache(self) -> tuple[int, int]:
            return 3, 5

    cache, table, allocator = serving()
    req = started(cache, table, allocator, [1, 2, 3, 4, 5], 5)
    popping = Popping(req.origin_input_ids)
    vars(popping).update(vars(req))
    sglang.release_kv_cache(popping, cache)
    assert (cache.total_size(), allocator.available_size()) == (3, 61)


def test_a_request_that_computed_nothing_keeps_off_the_trees_slots() -> None:
    """Under EAGLE its key is shorter than what it matched, and the last matched slot is not its own."""
    cache, table, allocator = serving(is_eagle=True)
    sglang.release_kv_cache(started(cache, table, allocator, [1, 2, 3, 4], 4), cache)
    req = started(cache, table, allocator, [1, 2, 3, 4], 3)
    req.kv_committed_len = req.cache_protected_len
    req.fill_ids = req.fill_ids[: req.kv_committed_len]
    cache.cache_unfinished_req(req)
    sglang.release_kv_cache(req, cache)
    assert (cache.evictable_size(), allocator.available_size()) == (3, 61)
    cache.check()


def test_finished_requests_are_not_inserted_where_that_is_switched_off() -> None:
    cache, table, allocator = serving(disable_finished_insert=True)
    sglang.release_kv_cache(started(cache, table, allocator, [1, 2, 3], 3), cache)
    assert (cache.total_size(), allocator.available_size()) == (0, 64)


def test_a_disabled_cache_frees_all_that_a_request_has() -> None:
    table, allocator = ReqToTokenPool(4, 32), PagedTokenToKVPoolAllocator(64, 4)
    cache = sglang.RadixCache(sglang.CacheInitParams(True, table, allocator, 4))
    req = started(cache, table, allocator, [1, 2, 3, 4, 5], 8)
    cache.cache_unfinished_req(req)
    sglang.release_kv_cache(req, cache)
    assert allocator.available_size() == 64


def test_a_chunk_cache_shares_nothing() -> None:
    table, allocator = ReqToTokenPool(4, 32), PagedTokenToKVPoolAllocator(64, 4)
    cache = sglang.ChunkCache(sglang.CacheInitParams(False, table, allocator, 4))
    req = started(cache, table, allocator, [1, 2, 3, 4, 5], 8)
    cache.cache_unfinished_req(req)
    assert req.prefix_indices.tolist() == table.req_to_token[req.req_pool_idx, :5].tolist()
    assert cache.insert(sglang.InsertParams(sglang.RadixKey([1]))).prefix_len == 0
    assert cache.evict(sglang.EvictParams(9)).num_tokens_evicted == 0
    assert cache.dec_lock_ref(None).delta == cache.total_size() == cache.evictable_size() == cache.protected_size() == 0
    assert (cache.is_chunk_cache(), cache.is_tree_cache(), cache.disable, cache.take_events()) == (
        True,
        False,
        True,
        [],
    )
    sglang.release_kv_cache(req, cache)
    cache.reset()
    cache.pretty_print()
    assert (allocator.available_size(), table.available_size()) == (64, 4)
