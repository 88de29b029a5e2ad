"""Frames prove that a page is the one asked for."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from aradix.errors import StorageCorruptError
from aradix.memory.storage.frame import HEADER_BYTES, pack, unpack


@given(st.text("0123456789abcdef/", max_size=100), st.binary(max_size=200))
def test_a_page_comes_out_as_it_went_in(name: str, page: bytes) -> None:
    frame = pack(name, page)
    assert len(frame) == HEADER_BYTES + len(page)
    assert unpack(name, frame) == page


@given(st.binary(max_size=50), st.data())
def test_no_flipped_bit_goes_unseen(page: bytes, data: st.DataObject) -> None:
    frame = bytearray(pack("a/b/c", page))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StorageCorruptError):
        unpack("a/b/c", bytes(frame))


@given(st.binary(max_size=50), st.data())
def test_no_missing_or_added_byte_goes_unseen(page: bytes, data: st.DataObject) -> None:
    frame = pack("a/b/c", page)
    cut = frame[: data.draw(st.integers(0, len(frame) - 1))]
    for wrong in (cut, frame + data.draw(st.binary(min_size=1, max_size=5))):
        with pytest.raises(StorageCorruptError):
            unpack("a/b/c", wrong)


def test_a_page_of_another_name_is_refused() -> None:
    with pytest.raises(StorageCorruptError, match="another name"):
        unpack("a/b/d", pack("a/b/c", b"page"))


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(StorageCorruptError):
        unpack("a/b/c", data)
