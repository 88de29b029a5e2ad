"""The compiled reader of token ids either says what the Python one says, or nothing."""

from __future__ import annotations

import io
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aradix import keys
from aradix.errors import InvalidKeyError

native: Any = pytest.importorskip("aradix._native", reason="needs the compiled module")

SMALL = st.integers(0, 2**31 - 1)
ANY = st.one_of(SMALL, st.integers(-(2**31), 2**33), st.sampled_from([2**63, -(2**63), 2**70, True, 1.0, "1", None]))


def _reference(token_ids: Any) -> bytes | None:
    try:
        return keys._pack(token_ids)
    except InvalidKeyError:
        return None


@pytest.mark.parametrize("kind", [list, tuple])
@given(ids=st.lists(SMALL, max_size=70))
def test_good_lists_and_tuples_are_read(kind: Any, ids: list[int]) -> None:
    assert native.pack_tokens(kind(ids)) == _reference(ids)


@given(ids=st.lists(ANY, max_size=6))
def test_whatever_is_wrong_in_a_list_is_left_to_the_reference(ids: list[Any]) -> None:
    plain = all(type(each) is int and 0 <= each < 2**31 for each in ids)
    assert native.pack_tokens(ids) == (_reference(ids) if plain else None)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@given(ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=70))
def test_arrays_are_read_unless_an_id_is_negative(dtype: Any, ids: list[int]) -> None:
    assert native.pack_tokens(np.array(ids, dtype)) == _reference(np.array(ids, dtype))


def test_an_id_beyond_int32_is_not_cut() -> None:
    assert native.pack_tokens(np.array([2**31], np.int64)) is None
    assert native.pack_tokens(np.array([2**32 + 1], np.int64)) is None


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(8, dtype=np.int32)[::2],
        np.arange(4, dtype=np.uint32),
        np.arange(4, dtype=">i4"),
        np.arange(4, dtype=np.int16),
        np.arange(4, dtype=np.int32).reshape(2, 2),
        np.array([True, False]),
        np.array([1.0, 2.0]),
        np.array(3, np.int32),
        b"\0\0\0\1",
        bytearray(8),
        memoryview(b"abcd"),
        "1234",
        {1: 2},
        {1, 2},
        io.BytesIO(),
        None,
        range(4),
        7,
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_all_else_is_left_to_the_reference(ids: Any) -> None:
    assert native.pack_tokens(ids) is None


@pytest.mark.parametrize("ids", [array("i", [1, 2, 3]), array("q", [1, 2, 3]), memoryview(array("i", [1, 2, 3]))])
def test_flat_buffers_of_ints_are_read(ids: Any) -> None:
    assert native.pack_tokens(ids) == array("i", [1, 2, 3]).tobytes()


def test_what_was_read_shares_nothing_with_its_source() -> None:
    ids = array("i", [1, 2, 3])
    packed = native.pack_tokens(ids)
    ids.append(4)  # a buffer still exported could not grow
    ids[0] = 9
    assert packed == array("i", [1, 2, 3]).tobytes()
