"""Caches for tests, audited when the test is done with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aradix import CacheInitParams, RadixCache, SlotAllocator
from tests.support.core import TREE_CORE

__all__ = ["idle_sum", "opened"]


def idle_sum(cache: RadixCache) -> int:
    """Slots that `stats()` accounts for; with nobody using the allocator directly, all there are."""
    stats = cache.stats()
    return stats.free + stats.fenced + stats.evictable + stats.protected + stats.leased


@asynccontextmanager
async def opened(
    num_slots: int = 64,
    page_size: int = 1,
    *,
    allocator: SlotAllocator | None = None,
    cache_class: type[RadixCache] = RadixCache,
    **params: Any,
) -> AsyncIterator[RadixCache]:
    """Open a cache over a pool of its own, and audit it before and after it closes.

    Watermarks default to 0, so that only demand evicts and a test sees no background work unless it asks for some. A
    test that fails inside is not audited: its own failure says more. Waits where the cache's own enter and exit do.

    Args:
        num_slots: of the pool; ignored where `allocator` is given.
        page_size: of the pool and the cache; ignored where `allocator` is given.
        allocator: a pool made by the test.
        cache_class: the class to open.
        params: for `CacheInitParams`.

    Raises:
        InvariantError: the audit found that a counter or an invariant does not hold.
    """
    if allocator is None:
        allocator = SlotAllocator(num_slots, page_size)
    params = {"low_watermark": 0.0, "high_watermark": 0.0, "tree_core": TREE_CORE, **params}
    async with cache_class(CacheInitParams(allocator=allocator, page_size=allocator.page_size, **params)) as cache:
        yield cache
        cache.check()
    cache.check()
    allocator.check()
