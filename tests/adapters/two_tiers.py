"""A small `HiRadixCache` in SGLang's shape, and what a scheduler does with it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from aradix.adapters import sglang
from aradix.adapters.sglang import (
    EvictParams,
    HiRadixCache,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    PagedTokenToKVPoolAllocator,
    RadixKey,
)
from aradix.memory.kv_pool import MHAKVPool

Make = Callable[..., HiRadixCache]


def make(
    num_slots: int = 64, page_size: int = 4, policy: str = "write_through", ratio: float = 2.0, **params: Any
) -> HiRadixCache:
    """A cache over a small pool with KV in it."""
    pool = MHAKVPool(num_slots, page_size, 2, 1, 2, torch.float64)
    allocator = PagedTokenToKVPoolAllocator(num_slots, page_size, kvcache=pool)
    args = SimpleNamespace(hicache_write_policy=policy, hicache_ratio=ratio)
    threshold = params.pop("load_back_threshold", 4)
    init = sglang.CacheInitParams(False, None, allocator, page_size, **params)
    return HiRadixCache(init, args, load_back_threshold=threshold)


def drain(cache: HiRadixCache) -> None:
    """Let every store end."""
    cache.check_hicache_events()
    while cache.ongoing_write_through:
        for copy in cache.ongoing_write_through.values():
            copy.synchronize()
        cache.check_hicache_events()


def assert_all_slots_are_somewhere(cache: HiRadixCache) -> None:
    allocator, host = cache.token_to_kv_pool_allocator, cache.token_to_kv_pool_host
    assert allocator.available_size() + cache.total_size() + allocator.slots.quarantined_size() == allocator.size
    assert host.available_size() + cache.core.host_tokens + host.allocator.quarantined_size() == host.num_slots


def content(ids: list[int]) -> torch.Tensor:
    """What stands for the KV of each token: a number that tells all tokens up to it."""
    return torch.tensor(
        [float(hash(tuple(ids[: place + 1])) % 2**40) for place in range(len(ids))], dtype=torch.float64
    )


def insert(cache: HiRadixCache, ids: Any, extra_key: Any = None) -> bool:
    """Compute and insert ids; False where there was no room. What the cache held already is freed."""
    ids = list(ids)
    num_items = (len(ids) - cache.is_eagle) // cache.page_size * cache.page_size
    allocator = cache.token_to_kv_pool_allocator
    slots = allocator.alloc(num_items)
    if slots is None:
        cache.evict(EvictParams(num_items))
        slots = allocator.alloc(num_items)
    if slots is None:
        return False
    for rows in allocator.get_kvcache().get_kv(1):
        rows[slots] = content(ids)[:num_items, None, None].expand(-1, 1, 2)
    done = cache.insert(InsertParams(RadixKey(ids, extra_key), slots))
    allocator.free(slots[: done.prefix_len])
    return True


def match(cache: HiRadixCache, ids: Any, extra_key: Any = None) -> sglang.MatchResult:
    return cache.match_prefix(MatchPrefixParams(RadixKey(list(ids), extra_key)))


def assert_right(cache: HiRadixCache, ids: Any, slots: torch.Tensor) -> None:
    """These slots hold the KV of the first of these ids."""
    for rows in cache.token_to_kv_pool_allocator.get_kvcache().get_kv(1):
        assert torch.equal(rows[slots][:, 0, 0], content(list(ids))[: len(slots)])


def loaded(cache: HiRadixCache, ids: Any, extra_key: Any = None, **params: Any) -> tuple[torch.Tensor, Any]:
    """Match, lock, bring back what the host has, as a scheduler does: all slots, and the node to lock."""
    found = match(cache, ids, extra_key)
    cache.inc_lock_ref(found.last_device_node)
    slots, node = cache.init_load_back(InitLoadBackParams(found.best_match_node, found.host_hit_length, **params))
    cache.dec_lock_ref(found.last_device_node)
    return torch.cat((found.device_indices, slots)), node
