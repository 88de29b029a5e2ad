"""Records of what became cached and what is no longer: what a router needs to know of a worker.

The tree appends them in the order in which they happen, a parent before its children; `cache.take_events()` hands
them over. How they travel is not decided here.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from aradix.errors import TierError
from aradix.keys import TOKEN_BYTES, Namespace

__all__ = [
    "DEVICE_MEDIUM",
    "HOST_MEDIUM",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "KVCacheEvent",
    "TierFault",
    "event_tokens",
]

DEVICE_MEDIUM = "GPU"
HOST_MEDIUM = "CPU"


_DIGEST_BYTES = 32


def _digests(packed: bytes) -> list[bytes]:
    return [packed[begin : begin + _DIGEST_BYTES] for begin in range(0, len(packed), _DIGEST_BYTES)]


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Pages that can be matched from now on. Hashes and tokens are kept packed, so that a record costs little to make.

    Args:
        digests: the chained SHA-256 digest of each page, in token order, 32 bytes each.
        parent_block_hash: the digest of the page before them, `None` at a root.
        tokens: the ids of all the pages as int32 (for bigram keys: the first token of each pair, then the last pair's
            second).
        block_size: tokens a page.
        namespace: they were cached in.
        medium: the tier: `DEVICE_MEDIUM`, or `HOST_MEDIUM` once a copy to the host is complete.
    """

    digests: bytes
    parent_block_hash: bytes | None
    tokens: bytes
    block_size: int
    namespace: Namespace
    medium: str = DEVICE_MEDIUM

    @property
    def block_hashes(self) -> list[bytes]:
        """The digest of each page."""
        return _digests(self.digests)

    @property
    def token_ids(self) -> list[int]:
        """The ids of all the pages, flat."""
        ids: list[int] = np.frombuffer(self.tokens, np.int32).tolist()
        return ids


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Pages that are gone from a medium, the deepest last; `digests` as in `BlockStored`."""

    digests: bytes
    medium: str = DEVICE_MEDIUM

    @property
    def block_hashes(self) -> list[bytes]:
        """The digest of each page."""
        return _digests(self.digests)


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Everything is gone: the whole cache was flushed."""


class TierFault(NamedTuple):
    """Something between two tiers that failed, and became a miss.

    Args:
        operation: `"load"` from the host, `"store"` to it; `"exists"`, `"get"`, `"put"` and `"clear"` of the storage
            tier.
        error: what went wrong.
        num_tokens: that were not moved.
    """

    operation: str
    error: TierError
    num_tokens: int


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def event_tokens(tokens: bytes | bytearray, item_bytes: int) -> bytes:
    """What `BlockStored.tokens` is for the bytes of a run of tokens or bigrams."""
    if item_bytes == TOKEN_BYTES:
        return bytes(tokens)
    ids = np.frombuffer(bytes(tokens), np.int32)
    return np.append(ids[::2], ids[-1]).tobytes()
