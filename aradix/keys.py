"""Keys of the radix tree: token ids in a namespace.

A key owns one immutable copy of its token ids as raw int32 bytes. Slices are views of that copy, comparing
is memcmp, and no Python object is ever made for a single token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from aradix.errors import InvalidKeyError
from aradix.short_method import short_method

try:
    from aradix._native import pack_tokens as _pack_fast
except ImportError:  # not compiled, or it does not load; `aradix.tree` says so

    def _pack_fast(token_ids: Any) -> bytes | None:
        return None


__all__ = ["Namespace", "RadixKey"]

_MAX_TOKEN = 2**31 - 1
TOKEN_BYTES = 4
BIGRAM_BYTES = 8


class _NamespaceFields(NamedTuple):
    lora: str | int | None = None
    salt: str | int | None = None
    version: str | int | None = None
    tenant: str | int | None = None
    extra: str | int | None = None


class Namespace(_NamespaceFields):
    """What must never be shared: keys in different namespaces never meet.

    A typed tuple, so `Namespace(lora="x")` and `Namespace(salt="x")` differ, and so do version `1` and `"1"`.

    Args:
        lora: the adapter the KV was computed with.
        salt: isolates users from each other.
        version: of the weights or the adapter; move to a new one when they are reloaded.
        tenant: who pays; quotas count by it.
        extra: anything else; a plain `str` given as `extra_key` lands here.

    Raises:
        InvalidKeyError: a field is neither a `str`, an `int` nor `None`.
    """

    __slots__ = ()

    def __new__(
        cls,
        lora: str | int | None = None,
        salt: str | int | None = None,
        version: str | int | None = None,
        tenant: str | int | None = None,
        extra: str | int | None = None,
    ) -> Self:
        values = (lora, salt, version, tenant, extra)
        for name, value in zip(cls._fields, values, strict=True):
            if value is not None and type(value) not in (str, int):
                raise InvalidKeyError(f"Namespace field {name!r} must be a str, an int or None, got {value!r}")
        return super().__new__(cls, *values)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]
        return cls(*iterable)  # so that `_replace` is checked as well

    @classmethod
    def of(cls, extra_key: str | Namespace | None) -> Namespace:
        """The namespace that an `extra_key` names. Does not wait."""
        if extra_key is None:
            return DEFAULT_NAMESPACE
        if isinstance(extra_key, cls):
            return extra_key
        if isinstance(extra_key, str):
            return cls(extra=extra_key)
        raise InvalidKeyError(f"extra_key must be a str, a Namespace or None, got {type(extra_key).__name__}")

    def digest(self) -> bytes:
        """The seed of this namespace's page hashes: empty for the default one, else 32 bytes."""
        if self == DEFAULT_NAMESPACE:
            return b""
        hasher = hashlib.sha256(b"aradix-namespace")
        for value in self:
            text = b"" if value is None else str(value).encode("utf-8", "surrogatepass")
            hasher.update(type(value).__name__.encode() + len(text).to_bytes(8, "little") + text)
        return hasher.digest()


DEFAULT_NAMESPACE = Namespace()


def _bad_tokens(problem: str) -> InvalidKeyError:
    return InvalidKeyError(f"{problem}; token ids are a flat sequence of ints from 0 to {_MAX_TOKEN}")


def _pack_buffer(token_ids: Any) -> bytes:
    """An array, tensor or buffer of integers as int32 bytes: one check, one copy."""
    try:
        if hasattr(token_ids, "detach"):  # a torch tensor, on whatever device; torch itself is not imported here
            token_ids = token_ids.detach().cpu().numpy()
        ids = np.asarray(token_ids)
    except Exception as error:  # whatever a foreign buffer or tensor type raises
        raise _bad_tokens(f"cannot read token ids from {type(token_ids).__name__}: {error}") from error
    if ids.ndim != 1:
        raise _bad_tokens(f"got an array of {ids.ndim} dimensions and shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise _bad_tokens(f"got an array of {ids.dtype}")
    if len(ids) == 0:
        return b""
    # One reduction finds both faults: seen as unsigned, a negative int32 is above the greatest token id.
    if ids.dtype == np.int32:
        fits = bool(ids.view(np.uint32).max() <= _MAX_TOKEN) if ids.flags.c_contiguous else bool(ids.min() >= 0)
    else:
        fits = bool(ids.min() >= 0) and bool(ids.max() <= _MAX_TOKEN)
    if not fits:
        raise _bad_tokens(f"got ids from {ids.min()} to {ids.max()}")
    return ids.astype(np.int32, copy=False).tobytes()


def _scalar(token: Any) -> int:
    """One id that is no plain int: a numpy or torch scalar, or anything with `__index__`."""
    if getattr(token, "ndim", 0) != 0 or "bool" in str(getattr(token, "dtype", "")):
        raise _bad_tokens(f"got {token!r} among the token ids")
    return index(token)


def _pack_sequence(token_ids: Sequence[Any]) -> bytes:
    """A sequence of Python ints (or things with `__index__`) as int32 bytes."""
    kinds = set(map(type, token_ids))
    if kinds - {int}:
        for kind in kinds:
            if kind in (bool, np.bool_) or not hasattr(kind, "__index__"):
                raise _bad_tokens(f"got a {kind.__name__} among the token ids")
        try:
            token_ids = [_scalar(token) for token in token_ids]
        except TypeError as error:
            raise _bad_tokens(f"a token id is not an integer: {error}") from error
    try:
        packed = array("i", token_ids)
    except OverflowError as error:
        raise _bad_tokens(f"got ids from {min(token_ids)} to {max(token_ids)}") from error
    if len(packed) and min(np.frombuffer(packed, np.int32).min(), 0) < 0:
        raise _bad_tokens(f"got the negative id {min(token_ids)}")
    return packed.tobytes()


def _pack(token_ids: Any) -> bytes:
    if isinstance(token_ids, bytes | bytearray):
        token_ids = memoryview(token_ids)
    if isinstance(token_ids, array | np.ndarray | memoryview) or hasattr(token_ids, "detach"):
        return _pack_buffer(token_ids)
    if isinstance(token_ids, str) or not isinstance(token_ids, Sequence):
        raise _bad_tokens(f"got a {type(token_ids).__name__}, which is not a sequence of ints")
    return _pack_sequence(token_ids)


def _check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise InvalidKeyError(f"page_size must be at least 1, got {page_size}")


class RadixKey:
    """Token ids in a namespace: what a prefix is looked up by.

    Args:
        token_ids: any flat sequence or buffer of ints (list, tuple, range, array, numpy, torch). They are copied, so
            a later change to the caller's list changes nothing.
        extra_key: the namespace, as a `Namespace` or a plain `str`; `None` is the default namespace.

    Raises:
        InvalidKeyError: ids that are negative, over int32, bools, floats, nested, or no sequence at all.

    A slice shares the copy of its parent. `len` is in tokens, or in bigrams after `maybe_to_bigram_view`.
    Source of the shape: SGLang's `RadixKey`.
    """

    __slots__ = ("_bigrams", "_hashes", "data", "item_bytes", "namespace", "num_items", "start", "stop")

    data: bytes
    start: int
    stop: int
    item_bytes: int
    num_items: int
    namespace: Namespace

    @short_method("key", DEFAULT_NAMESPACE)
    def __init__(self, token_ids: Any, extra_key: str | Namespace | None = None) -> None:
        # The compiled reader takes what it knows and finds good; whatever is wrong is found here, and said.
        self.data = data = _pack_fast(token_ids) or _pack(token_ids)
        self.start = 0
        self.stop = size = len(data)
        self.item_bytes = TOKEN_BYTES
        self.num_items = size // TOKEN_BYTES
        self.namespace = DEFAULT_NAMESPACE if extra_key is None else Namespace.of(extra_key)
        self._hashes: tuple[int, list[bytes]] | None = None
        self._bigrams: RadixKey | None = None

    def _view(self, start: int, stop: int) -> RadixKey:
        return self._make(self.data, start, stop, self.item_bytes)

    def _make(self, data: bytes, start: int, stop: int, item_bytes: int) -> RadixKey:
        key = RadixKey.__new__(RadixKey)
        key.data, key.start, key.stop = data, start, stop
        key.item_bytes, key.namespace = item_bytes, self.namespace
        key.num_items = (stop - start) // item_bytes
        key._hashes = key._bigrams = None
        return key

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, item: slice) -> RadixKey:
        """A contiguous slice, sharing this key's buffer: no copy. Does not wait."""
        if not isinstance(item, slice):
            raise TypeError("a RadixKey is sliced, not indexed; use token_ids() to look at single ids")
        first, last, step = item.indices(len(self))
        if step != 1:
            raise InvalidKeyError(f"a RadixKey slice must be contiguous, got step {step}")
        begin = self.start + first * self.item_bytes
        return self._view(begin, max(begin, self.start + last * self.item_bytes))

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids().tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RadixKey):
            return NotImplemented
        return len(self) == len(other) and self.is_prefix_of(other)

    def __hash__(self) -> int:
        return hash((self.namespace, self.item_bytes, self.data[self.start : self.stop]))

    def __repr__(self) -> str:
        unit = "bigrams" if self.is_bigram else "tokens"
        return f"RadixKey({len(self)} {unit}, {self.namespace!r})"

    @property
    def is_bigram(self) -> bool:
        """Whether the items are pairs of neighbouring tokens (EAGLE)."""
        return self.item_bytes == BIGRAM_BYTES

    def token_ids(self) -> npt.NDArray[np.int32]:
        """The ids as a read-only int32 array of shape `[len]`, for bigrams `[len, 2]`. Shares memory; does not wait."""
        ids = np.frombuffer(self.data, np.int32, (self.stop - self.start) // TOKEN_BYTES, self.start)
        return ids.reshape(-1, 2) if self.is_bigram else ids

    def is_prefix_of(self, other: RadixKey) -> bool:
        """Whether `other` starts with this key, in the same namespace. One memcmp; does not wait."""
        if self.namespace != other.namespace or self.item_bytes != other.item_bytes:
            return False
        size = self.stop - self.start
        if size > other.stop - other.start:
            return False
        if self.data is other.data and self.start == other.start:
            return True
        if size == len(self.data):
            return other.data.startswith(self.data, other.start)
        return other.data.startswith(memoryview(self.data)[self.start : self.stop], other.start)

    def page_aligned(self, page_size: int) -> RadixKey:
        """The key cut down to whole pages of `page_size` tokens. Shares memory; does not wait."""
        _check_page_size(page_size)
        return self[: len(self) // page_size * page_size]

    def maybe_to_bigram_view(self, is_eagle: bool) -> RadixKey:
        """For EAGLE the N-1 bigrams of the N tokens, else (or when it is one already) the key itself.

        A new key, made once: the caller's is never changed, and asking again costs nothing. Does not wait.
        """
        if not is_eagle or self.is_bigram:
            return self
        if self._bigrams is None:
            ids = self.token_ids()
            pairs = b"" if len(ids) < 2 else np.stack((ids[:-1], ids[1:]), axis=1).tobytes()
            self._bigrams = self._make(pairs, 0, len(pairs), BIGRAM_BYTES)
        return self._bigrams

    def hash_chain(self, page_size: int) -> list[bytes]:
        """The chained SHA-256 digest (32 bytes) of each whole page of this key.

        A page's digest is SHA-256 of the digest before it and the page's tokens as u32 little-endian; the first page
        follows the namespace's own digest, which is empty in the default namespace. Computed once; does not wait.
        Source: SGLang's page hash, with the namespace hashed as well.
        """
        _check_page_size(page_size)
        if self._hashes is None or self._hashes[0] != page_size:
            tokens = memoryview(self.data)[self.start : self.stop]
            self._hashes = (page_size, extend_hash_chain(self.namespace.digest(), tokens, page_size * self.item_bytes))
        return list(self._hashes[1])


def extend_hash_chain(previous: bytes, tokens: bytes | bytearray | memoryview, page_bytes: int) -> list[bytes]:
    """The digests of the whole pages in `tokens`, chained after `previous`."""
    digests = []
    for begin in range(0, len(tokens) - page_bytes + 1, page_bytes):
        previous = hashlib.sha256(previous + bytes(tokens[begin : begin + page_bytes])).digest()
        digests.append(previous)
    return digests
