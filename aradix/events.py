"""Records of what became cached and what is no longer: what a router needs to know of a worker.

The tree appends them in the order in which they happen, a parent before its children; `cache.take_events()` hands
them over. How they travel is not decided here.
"""

from __future__ import annotations

import msgspec

from aradix.keys import Namespace

__all__ = ["DEVICE_MEDIUM", "HOST_MEDIUM", "AllBlocksCleared", "BlockRemoved", "BlockStored", "KVCacheEvent"]

DEVICE_MEDIUM = "GPU"
HOST_MEDIUM = "CPU"


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Pages that can be matched from now on.

    Args:
        block_hashes: the chained SHA-256 digest of each page, in token order.
        parent_block_hash: the digest of the page before them, `None` at a root.
        token_ids: of all the pages, flat (for bigram keys: the first token of each pair, then the last pair's second).
        block_size: tokens a page.
        namespace: they were cached in.
        medium: the tier: `DEVICE_MEDIUM`, or `HOST_MEDIUM` once a copy to the host is complete.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    namespace: Namespace
    medium: str = DEVICE_MEDIUM


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Pages that are gone from a medium, the deepest last."""

    block_hashes: list[bytes]
    medium: str = DEVICE_MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Everything is gone: the whole cache was flushed."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
