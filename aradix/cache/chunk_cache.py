"""`ChunkCache`: the interface of a prefix cache with nothing shared."""

from __future__ import annotations

from dataclasses import replace

from aradix.cache.radix_cache import RadixCache
from aradix.errors import UsageError
from aradix.params import CacheInitParams

__all__ = ["ChunkCache"]


class ChunkCache(RadixCache):
    """Matches nothing, publishes nothing, and frees everything at release; waiting and fencing are the same.

    For engines with prefix caching switched off. It is `RadixCache` with `disable=True`.
    """

    def __init__(self, params: CacheInitParams) -> None:
        if not isinstance(params, CacheInitParams):
            raise UsageError(f"ChunkCache takes CacheInitParams(allocator=...), got {type(params).__name__}")
        super().__init__(replace(params, disable=True))
