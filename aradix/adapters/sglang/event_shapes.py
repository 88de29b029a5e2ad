"""What the tree's events become: one `BlockStored` a page, with the integer hashes that SGLang sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from aradix import events
from aradix.adapters.sglang.keys import hash_str_to_int64
from aradix.adapters.sglang.records import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from aradix.keys import DEFAULT_NAMESPACE, extend_hash_chain
from aradix.keys import RadixKey as CoreKey

__all__ = ["EventShapes"]

_MEDIA = {events.DEVICE_MEDIUM: MEDIUM_GPU, events.HOST_MEDIUM: MEDIUM_CPU}


class EventShapes:
    """Turns the tree's events into SGLang's.

    Args:
        is_eagle: whether the ids of a page are pairs.
        strict_compat: hash the ids alone, so that the pages of two namespaces have equal hashes.
    """

    def __init__(self, is_eagle: bool, strict_compat: bool) -> None:
        self._is_eagle = is_eagle
        self._strict = strict_compat
        self._plain: dict[bytes, bytes] = {}
        self._copies: Counter[bytes] = Counter()

    def digest_of(self, digest: bytes) -> bytes:
        """The digest shown for one of the tree's."""
        return self._plain.get(digest, digest)

    def _hash_of(self, digest: bytes) -> int:
        return hash_str_to_int64(self.digest_of(digest).hex())

    def shaped(self, event: events.KVCacheEvent) -> Iterator[KVCacheEvent]:
        """The events that one of the tree's stands for, in order. Does not wait."""
        if isinstance(event, events.BlockStored):
            if self._strict and event.namespace != DEFAULT_NAMESPACE:
                self._note_plain(event)
            yield from self._stored(event)
        elif isinstance(event, events.BlockRemoved):
            yield BlockRemoved([self._hash_of(digest) for digest in event.block_hashes], _MEDIA[event.medium])
            if self._plain:
                self._forget_plain(event)
        else:
            self._plain.clear()
            self._copies.clear()
            yield AllBlocksCleared()

    def _stored(self, event: events.BlockStored) -> Iterator[BlockStored]:
        parent = None if event.parent_block_hash is None else self._hash_of(event.parent_block_hash)
        ids = event.token_ids
        items = list(pairwise(ids)) if self._is_eagle else ids
        for page, digest in enumerate(event.block_hashes):
            block_hash = self._hash_of(digest)
            begin = page * event.block_size
            tokens = items[begin : begin + event.block_size]
            yield BlockStored([block_hash], parent, tokens, len(tokens), None, _MEDIA[event.medium])
            parent = block_hash

    def _note_plain(self, event: events.BlockStored) -> None:
        """Remember what the pages of a namespace hash to without it."""
        key = CoreKey(event.token_ids).maybe_to_bigram_view(self._is_eagle)
        before = b"" if event.parent_block_hash is None else self.digest_of(event.parent_block_hash)
        page_bytes = event.block_size * key.item_bytes
        plain = extend_hash_chain(before, key.data[key.start : key.stop], page_bytes)
        self._plain.update(zip(event.block_hashes, plain, strict=True))
        self._copies.update(event.block_hashes)

    def _forget_plain(self, event: events.BlockRemoved) -> None:
        """A page is remembered until it is gone from every tier."""
        for digest in event.block_hashes:
            self._copies[digest] -= 1
            if self._copies[digest] <= 0:
                del self._copies[digest]
                self._plain.pop(digest, None)
