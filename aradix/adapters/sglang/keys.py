"""`RadixKey` in SGLang's shape, and the page hashes that it makes.

The tree looks up `aradix.keys.RadixKey`s; this one keeps the ids as they were given and turns into one when asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from aradix import keys

__all__ = ["RadixKey", "get_hash_str", "hash_str_to_int64"]

_PREVIEW = 10


def get_hash_str(token_ids: Sequence[Any], prior_hash: str | None = None) -> str:
    """The hex SHA-256 of a page: of the digest before it, then of each id as u32 little-endian, of pairs both ids.

    Does not wait. Source of the scheme: SGLang's page hash.
    """
    hasher = hashlib.sha256(bytes.fromhex(prior_hash) if prior_hash else b"")
    hasher.update(np.asarray(list(token_ids), np.int64).astype("<u4").tobytes())
    return hasher.hexdigest()


def hash_str_to_int64(hash_str: str) -> int:
    """The first 16 hex digits of a page hash as a signed 64-bit integer, as events carry it. Does not wait."""
    value = int(hash_str[:16], 16)
    return value - 2**64 if value >= 2**63 else value


class RadixKey:
    """Token ids and an optional namespace.

    Args:
        token_ids: raw ids: a list, an `array` or anything that can be sliced. They are not copied.
        extra_key: a `str` (or a `Namespace`) that no other key shares anything with.
        is_bigram: the items are the pairs of neighbouring ids (EAGLE): N ids are N-1 items, and neighbouring slices
            share an id.

    Its length, slices and positions are in items. No call of it waits, and none changes it.
    """

    __slots__ = ("extra_key", "is_bigram", "token_ids")

    def __init__(self, token_ids: Any, extra_key: Any = None, is_bigram: bool = False) -> None:
        self.token_ids = token_ids
        self.extra_key = extra_key
        self.is_bigram = is_bigram

    def __len__(self) -> int:
        return max(0, len(self.token_ids) - self.is_bigram)

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(self.token_ids, self.token_ids[1:], strict=False)) if self.is_bigram else iter(self.token_ids)

    def __getitem__(self, item: int | slice) -> RadixKey:
        """A contiguous slice, or the key of one item. IndexError beyond the end, ValueError for another step."""
        if isinstance(item, slice):
            start, stop, step = item.indices(len(self))
            if step != 1:
                raise ValueError(f"a RadixKey slice must be contiguous, got step {step}")
        else:
            start = item + len(self) if item < 0 else item
            stop = start + 1
            if not 0 <= start < len(self):
                raise IndexError(f"item {item} of a RadixKey of {len(self)}")
        if self.is_bigram and start < stop:
            stop += 1
        return RadixKey(self.token_ids[start : max(start, stop)], self.extra_key, self.is_bigram)

    def __repr__(self) -> str:
        more = "..." if len(self.token_ids) > _PREVIEW else ""
        shown = list(self.token_ids[:_PREVIEW])
        return f"RadixKey(extra_key={self.extra_key!r}, token_ids={shown}{more}, is_bigram={self.is_bigram})"

    def page_aligned(self, page_size: int) -> RadixKey:
        """The key cut down to whole pages."""
        return self if page_size == 1 else self[: len(self) // page_size * page_size]

    def maybe_to_bigram_view(
        self, is_eagle: bool, value: torch.Tensor | None = None
    ) -> tuple[RadixKey, torch.Tensor | None]:
        """For EAGLE the key as pairs, and the value cut to their number. A new key: this one stays as it is."""
        if not is_eagle or self.is_bigram:
            return self, value
        pairs = RadixKey(self.token_ids, self.extra_key, is_bigram=True)
        return pairs, None if value is None else value[: len(pairs)]

    def match(self, other: RadixKey, page_size: int = 1) -> int:
        """Items that both keys begin with, in whole pages. ValueError if their `extra_key` differs."""
        if self.extra_key != other.extra_key:
            raise ValueError(f"keys of two namespaces are not compared: {self.extra_key!r} and {other.extra_key!r}")
        num_ids = min(len(self.token_ids), len(other.token_ids))
        differ = np.asarray(self.token_ids[:num_ids]) != np.asarray(other.token_ids[:num_ids])
        num_equal = int(differ.argmax()) if differ.any() else num_ids
        num_items = min(len(self), len(other), max(0, num_equal - self.is_bigram))
        return num_items // page_size * page_size

    def child_key(self, page_size: int = 1) -> Any:
        """What a parent knows the child by that begins with this key: its first item, or a tuple of its first page."""
        items = list(self[:page_size])
        plain = items[0] if page_size == 1 else tuple(items)
        return plain if self.extra_key is None else (self.extra_key, plain)

    def hash_page(self, start: int, end: int, prior_hash: str | None = None, *, strict_compat: bool = False) -> str:
        """The hex digest of the items from `start` to `end`, chained after `prior_hash`.

        The first page follows the digest of the namespace; with `strict_compat` it does not, and the pages of two
        namespaces have equal hashes.
        """
        if prior_hash is None and not strict_compat:
            prior_hash = keys.Namespace.of(self.extra_key).digest().hex()
        return get_hash_str(list(self[start:end]), prior_hash)

    def to_core(self) -> keys.RadixKey:
        """The key that the tree looks up: one copy of the ids. `InvalidKeyError` for what cannot be a token id."""
        return keys.RadixKey(self.token_ids, self.extra_key).maybe_to_bigram_view(self.is_bigram)
