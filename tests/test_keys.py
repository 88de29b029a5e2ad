"""Keys: what they take, what they refuse, and that nobody can change one afterwards."""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
import sys
import tracemalloc
from array import array
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aradix.errors import AradixError, InvalidKeyError, UsageError
from aradix.keys import Namespace, RadixKey

IDS = [5, 0, 2**31 - 1, 7]
SMALL = [5, 0, 127, 7]


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        deque,
        lambda ids: array("i", ids),
        lambda ids: array("q", ids),
        lambda ids: array("Q", ids),
        lambda ids: memoryview(array("i", ids)),
        lambda ids: memoryview(array("L", ids)),
        lambda ids: [np.int64(i) for i in ids],
        lambda ids: [np.uint32(ids[0]), *ids[1:]],
        lambda ids: [torch.tensor(i) for i in ids],
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.int64),
        lambda ids: np.array(ids, np.uint32),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.array(ids, ">i4"),
        lambda ids: np.array(ids, ">i8"),
        lambda ids: np.array(ids[::-1], np.int32)[::-1],
        lambda ids: np.array([[i, -1] for i in ids], np.int32)[:, 0],
        lambda ids: np.array([[i, -1] for i in ids], np.int64)[:, 0],
        lambda ids: memoryview(array("i", [each for i in ids for each in (i, -1)]))[::2],
        lambda ids: np.frombuffer(np.array(ids, np.int32).tobytes(), np.int32),
        lambda ids: torch.tensor(ids),
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        lambda ids: torch.tensor([[i, -1] for i in ids])[:, 0],
    ],
)
def test_any_flat_sequence_or_buffer_of_ids_makes_the_same_key(make: Callable[[list[int]], Any]) -> None:
    key = RadixKey(make(IDS))
    assert key == RadixKey(IDS)
    assert list(key) == IDS
    assert key.token_ids().dtype == np.int32
    assert len(key) == 4


@pytest.mark.parametrize(
    "make",
    [
        bytes,
        bytearray,
        lambda ids: memoryview(bytes(ids)),
        lambda ids: array("b", ids),
        lambda ids: np.array(ids, np.int8),
        lambda ids: np.array(ids, np.uint8),
        lambda ids: np.array(ids, np.int16),
        lambda ids: torch.tensor(ids, dtype=torch.uint8),
        lambda ids: torch.tensor(ids, dtype=torch.int8),
    ],
)
def test_narrow_ids_are_ids_not_raw_memory(make: Callable[[list[int]], Any]) -> None:
    assert list(RadixKey(make(SMALL))) == SMALL
    assert list(RadixKey(make(SMALL[:3]))) == SMALL[:3]


def test_a_range_makes_a_key() -> None:
    assert list(RadixKey(range(9, 0, -3))) == [9, 6, 3]


@pytest.mark.parametrize(
    "empty", [[], (), range(0), array("i"), b"", np.empty(0, np.int64), torch.empty(0, dtype=torch.int64)]
)
def test_nothing_makes_an_empty_key(empty: Any) -> None:
    key = RadixKey(empty)
    assert len(key) == 0
    assert list(key) == []
    assert key.hash_chain(1) == []
    assert list(key[0:5]) == []
    assert key.page_aligned(4) == key
    assert len(key.maybe_to_bigram_view(True)) == 0
    assert key.maybe_to_bigram_view(True).token_ids().shape == (0, 2)


@pytest.mark.parametrize(
    ("bad", "numbers"),
    [
        ([1, -2, 3], "-2"),
        ((-(2**40),), str(-(2**40))),
        ([1, 2**31], str(2**31)),
        ([2**70], str(2**70)),
        (range(-3, 3), "-3"),
        (range(2**31 - 1, 2**31 + 1), str(2**31)),
        (array("q", [4, -7]), "-7"),
        (np.array([1, -5], np.int8), "-5"),
        (np.array([1, -5], np.int32), "-5"),
        (np.array([[-5, 1], [2, 1]], np.int32)[:, 0], "-5"),
        (np.array([2**31], np.uint32), str(2**31)),
        (np.array([2**63], np.uint64), str(2**63)),
        (np.array([2**32 + 1], np.int64), str(2**32 + 1)),
        (torch.tensor([0, -9]), "-9"),
        (torch.tensor([2**31]), str(2**31)),
        (np.zeros((2, 3), np.int64), "(2, 3)"),
        (torch.zeros((1, 4), dtype=torch.int64), "(1, 4)"),
        (torch.tensor(3), "0 dimensions"),
        (np.array(3), "0 dimensions"),
    ],
)
def test_ids_that_do_not_fit_are_refused_with_their_numbers(bad: Any, numbers: str) -> None:
    with pytest.raises(InvalidKeyError) as caught:
        RadixKey(bad)
    assert numbers in str(caught.value)
    assert str(2**31 - 1) in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ([1.0], "float"),
        ([1, 2.5], "float"),
        ([True], "bool"),
        ([1, False, 2], "bool"),
        ([np.True_], "bool"),
        ([torch.tensor(True)], "True"),
        ([torch.tensor([1])], "[1]"),
        ([torch.tensor(1.5)], "integer"),
        ([np.array([1])], "[1]"),
        ([[1, 2], [3]], "list"),
        (["1"], "str"),
        ([None], "NoneType"),
        ("123", "str"),
        (None, "NoneType"),
        (7, "int"),
        ({1, 2}, "set"),
        ({1: 2}, "dict"),
        ((i for i in (1, 2)), "generator"),
        (RadixKey([1]), "RadixKey"),
        (object(), "object"),
        (np.array([1.5]), "float64"),
        (np.array([]), "float64"),
        (np.array([True]), "bool"),
        (np.array(["a"]), "<U1"),
        (np.array([1], object), "object"),
        (np.array([1], "m8[s]"), "timedelta64"),
        (array("d", [1.0]), "float64"),
        (memoryview(array("f", [1.0])), "float32"),
        (torch.tensor([1.0]), "float32"),
        (torch.tensor([True]), "bool"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "BFloat16"),
        (torch.tensor([1j]).conj(), "Tensor"),
        (torch.tensor([0, 1]).to_sparse(), "Sparse"),
        (torch.empty(3, dtype=torch.int64, device="meta"), "meta"),
        (io.BytesIO(b"abcd"), "BytesIO"),
    ],
)
def test_what_is_no_flat_sequence_of_ints_is_refused_by_name(bad: Any, what: str) -> None:
    with pytest.raises(InvalidKeyError) as caught:
        RadixKey(bad)
    assert what in str(caught.value)


def test_an_invalid_key_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(InvalidKeyError, UsageError)
    assert issubclass(InvalidKeyError, ValueError)
    assert issubclass(InvalidKeyError, AradixError)


@pytest.mark.parametrize(
    "owner",
    [
        [1, 2, 3],
        array("i", [1, 2, 3]),
        bytearray([1, 2, 3]),
        np.array([1, 2, 3], np.int32),
        np.array([1, 2, 3], np.int64),
        torch.tensor([1, 2, 3], dtype=torch.int32),
    ],
)
def test_a_later_change_of_the_callers_ids_changes_nothing(owner: Any) -> None:
    key = RadixKey(owner)
    part, pairs = key[1:], key.maybe_to_bigram_view(True)
    before = (hash(key), hash(part), key.hash_chain(1))
    owner[0] = owner[1] = owner[2] = 9
    assert list(key) == [1, 2, 3]
    assert list(part) == [2, 3]
    assert pairs.token_ids().tolist() == [[1, 2], [2, 3]]
    assert (hash(key), hash(part), key.hash_chain(1)) == before


def test_nobody_writes_through_what_a_key_shows() -> None:
    key = RadixKey([1, 2, 3])
    with pytest.raises(ValueError, match="read-only"):
        key.token_ids()[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        key.maybe_to_bigram_view(True).token_ids()[0, 0] = 9
    chain = key.hash_chain(1)
    chain.clear()
    assert len(key.hash_chain(1)) == 3


BOUNDS = st.none() | st.integers(-12, 12)


@given(ids=st.lists(st.integers(0, 3), max_size=9), first=BOUNDS, last=BOUNDS, again=BOUNDS, bigrams=st.booleans())
def test_slices_are_those_of_the_list(
    ids: list[int], first: int | None, last: int | None, again: int | None, bigrams: bool
) -> None:
    key = RadixKey(ids, "n").maybe_to_bigram_view(bigrams)
    plain: list[Any] = [list(pair) for pair in pairwise(ids)] if bigrams else ids
    part, expected = key[first:last], plain[first:last]
    assert part.token_ids().tolist() == expected
    assert part[again:].token_ids().tolist() == expected[again:]
    assert part[:again].token_ids().tolist() == expected[:again]
    assert len(part) == len(expected)
    assert part.namespace == Namespace(extra="n")
    assert part.is_bigram == bigrams
    for page_size in (1, 2, 3, 20):
        assert len(part.page_aligned(page_size)) == len(expected) // page_size * page_size
    fresh = RadixKey([3, *ids, 3], "n")[1 : len(ids) + 1].maybe_to_bigram_view(bigrams)[first:last]
    assert fresh == part
    assert hash(fresh) == hash(part)
    assert fresh.hash_chain(2) == part.hash_chain(2)


@given(ids=st.lists(st.integers(0, 1), max_size=6), other=st.lists(st.integers(0, 1), max_size=6))
def test_prefixes_are_those_of_the_list(ids: list[int], other: list[int]) -> None:
    key, longer = RadixKey(ids), RadixKey([1, *other])[1:]
    assert key.is_prefix_of(longer) == (other[: len(ids)] == ids)
    assert (key == longer) == (ids == other)
    assert not key.is_prefix_of(RadixKey(other, "elsewhere"))
    assert key != RadixKey(ids, "elsewhere")
    assert key.maybe_to_bigram_view(True) != key
    assert key != ids


def test_a_key_is_sliced_not_indexed_and_only_contiguously() -> None:
    key = RadixKey([1, 2, 3])
    with pytest.raises(TypeError, match="slice"):
        key[0]  # type: ignore[index]
    for step in (2, -1):
        with pytest.raises(InvalidKeyError, match=f"step {step}"):
            key[::step]


@pytest.mark.parametrize("page_size", [0, -1, -4])
def test_pages_of_no_tokens_are_refused(page_size: int) -> None:
    key = RadixKey([1, 2, 3])
    with pytest.raises(InvalidKeyError, match=f"at least 1, got {page_size}"):
        key.page_aligned(page_size)
    with pytest.raises(InvalidKeyError, match=f"at least 1, got {page_size}"):
        key.hash_chain(page_size)


def test_slices_and_views_share_memory_and_make_no_objects_for_tokens() -> None:
    key = RadixKey(np.arange(1_000_000, dtype=np.int64))
    tracemalloc.start()
    before = sys.getallocatedblocks()
    parts = [key[begin : begin + 900_000] for begin in range(100)]
    aligned = [part.page_aligned(16) for part in parts]
    same = [part.is_prefix_of(key) for part in parts]
    equal = [part == again for part, again in zip(parts, aligned, strict=True)]
    shown = [part.token_ids() for part in parts]
    blocks, peak = sys.getallocatedblocks() - before, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(part.data is key.data for part in parts + aligned)
    assert all(np.shares_memory(ids, key.token_ids()) for ids in shown)
    assert same == [True] + [False] * 99
    assert all(equal)
    assert blocks < 3_000
    assert peak < 500_000


def test_a_big_key_costs_one_copy() -> None:
    ids = np.arange(1_000_000, dtype=np.int64)
    before = sys.getallocatedblocks()
    tracemalloc.start()
    key = RadixKey(ids)
    blocks, held = sys.getallocatedblocks() - before, tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(key) == 1_000_000
    assert blocks < 100
    assert 4_000_000 <= held < 4_100_000


# ---- bigrams ----


def test_n_tokens_are_n_minus_one_bigrams() -> None:
    key = RadixKey([1, 2, 3, 4, 5], "n")
    pairs = key.maybe_to_bigram_view(True)
    assert pairs.token_ids().tolist() == [[1, 2], [2, 3], [3, 4], [4, 5]]
    assert (len(key), len(pairs), key.is_bigram, pairs.is_bigram) == (5, 4, False, True)
    assert pairs.namespace == key.namespace
    assert pairs[1:3].token_ids().tolist() == [[2, 3], [3, 4]]
    assert len(pairs.page_aligned(4)) == 4
    assert len(key[:4].maybe_to_bigram_view(True).page_aligned(4)) == 0
    assert len(RadixKey([1]).maybe_to_bigram_view(True)) == 0


def test_a_bigram_view_is_taken_once() -> None:
    key = RadixKey([1, 2, 3])
    assert key.maybe_to_bigram_view(False) is key
    pairs = key.maybe_to_bigram_view(True)
    assert pairs.maybe_to_bigram_view(True) is pairs
    assert pairs.maybe_to_bigram_view(False) is pairs
    assert list(key) == [1, 2, 3]
    assert key[1:].maybe_to_bigram_view(True).token_ids().tolist() == [[2, 3]]


# ---- hashes ----


def chain_by_hand(seed: bytes, ids: list[int], page_size: int) -> list[bytes]:
    chain, previous = [], seed
    for end in range(page_size, len(ids) + 1, page_size):
        page = ids[end - page_size : end]
        previous = hashlib.sha256(previous + struct.pack(f"<{page_size}I", *page)).digest()
        chain.append(previous)
    return chain


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 17])
def test_a_pages_hash_is_sha256_of_the_hash_before_and_its_ids(page_size: int) -> None:
    ids = list(range(2**31 - 16, 2**31))
    assert RadixKey(ids).hash_chain(page_size) == chain_by_hand(b"", ids, page_size)
    assert RadixKey([0, *ids])[1:].hash_chain(page_size) == chain_by_hand(b"", ids, page_size)
    assert RadixKey(ids)[:5].hash_chain(page_size) == chain_by_hand(b"", ids[:5], page_size)


def test_a_chain_asked_for_again_with_other_pages_is_another_one() -> None:
    key = RadixKey([1, 2, 3, 4])
    assert key.hash_chain(2) == chain_by_hand(b"", [1, 2, 3, 4], 2)
    assert key.hash_chain(1) == chain_by_hand(b"", [1, 2, 3, 4], 1)
    assert key.hash_chain(2) == chain_by_hand(b"", [1, 2, 3, 4], 2)


def test_the_hash_of_bigrams_is_of_pairs() -> None:
    pairs = RadixKey([1, 2, 3, 4]).maybe_to_bigram_view(True)
    assert pairs.hash_chain(1) == chain_by_hand(b"", [1, 2, 2, 3, 3, 4], 2)
    assert pairs.hash_chain(3) == chain_by_hand(b"", [1, 2, 2, 3, 3, 4], 6)


def test_a_namespace_is_hashed_before_the_first_page() -> None:
    def field(kind: str, text: bytes) -> bytes:
        return kind.encode() + struct.pack("<Q", len(text)) + text

    nothing = field("NoneType", b"")
    by_hand = b"aradix-namespace" + field("str", "ü".encode()) + nothing + field("int", b"3") + nothing * 2
    space = Namespace(lora="ü", version=3)
    assert space.digest() == hashlib.sha256(by_hand).digest()
    assert Namespace().digest() == b""
    assert RadixKey([1, 2], space).hash_chain(2) == chain_by_hand(space.digest(), [1, 2], 2)


FIELD = st.none() | st.integers(-2, 2) | st.sampled_from(["", "a", "ab", "b", "0", "1", "None", "\ud800"])


@given(one=st.tuples(*[FIELD] * 5), other=st.tuples(*[FIELD] * 5))
def test_two_namespaces_share_a_digest_only_if_they_are_one(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    same = [(type(a), a) for a in one] == [(type(b), b) for b in other]
    assert (Namespace(*one) == Namespace(*other)) == same
    assert (Namespace(*one).digest() == Namespace(*other).digest()) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Namespace(lora="x"), Namespace(salt="x")),
        (Namespace(lora="ab", salt="c"), Namespace(lora="a", salt="bc")),
        (Namespace(version=1), Namespace(version="1")),
        (Namespace(lora=""), Namespace()),
        (Namespace(lora="None"), Namespace()),
        (Namespace(extra="x"), Namespace(tenant="x")),
    ],
)
def test_namespaces_that_look_alike_never_meet(one: Namespace, other: Namespace) -> None:
    assert RadixKey([1, 2], one) != RadixKey([1, 2], other)
    assert not RadixKey([1], one).is_prefix_of(RadixKey([1, 2], other))
    assert set(RadixKey([1, 2], one).hash_chain(1)).isdisjoint(RadixKey([1, 2], other).hash_chain(1))


def test_a_plain_string_is_the_extra_field() -> None:
    assert RadixKey([1], "x").namespace == Namespace(extra="x") == Namespace.of("x")
    assert RadixKey([1]).namespace == Namespace() == Namespace.of(None)
    assert RadixKey([1], "").namespace != Namespace()


@pytest.mark.parametrize("bad", [1, 1.5, b"x", ("x",), (None,) * 5, ["x"], Namespace])
def test_what_names_no_namespace_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidKeyError, match=type(bad).__name__):
        RadixKey([1], bad)


@pytest.mark.parametrize("bad", [True, 1.0, b"x", ("x",), [], np.int64(1)])
@pytest.mark.parametrize("field", ["lora", "salt", "version", "tenant", "extra"])
def test_a_namespace_holds_strings_and_ints_only(field: str, bad: Any) -> None:
    with pytest.raises(InvalidKeyError, match=field):
        Namespace(**{field: bad})
    with pytest.raises(InvalidKeyError, match=field):
        Namespace()._replace(**{field: bad})


def test_keys_and_namespaces_survive_pickling() -> None:
    key = RadixKey([1, 2, 3], Namespace(lora="x", version=2))[1:]
    again = pickle.loads(pickle.dumps(key))
    assert again == key
    assert hash(again) == hash(key)
    assert again.hash_chain(1) == key.hash_chain(1)


def test_a_key_says_how_long_it_is_and_where() -> None:
    assert "3 tokens" in repr(RadixKey([1, 2, 3], Namespace(salt="pepper")))
    assert "pepper" in repr(RadixKey([1, 2, 3], Namespace(salt="pepper")))
    assert "2 bigrams" in repr(RadixKey([1, 2, 3]).maybe_to_bigram_view(True))
