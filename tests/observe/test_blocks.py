"""Pages cut to blocks: every block once, with its own tokens, until the last page that stands for it is gone."""

from __future__ import annotations

from typing import Any

import pytest

from aradix.errors import InvariantError
from aradix.events import AllBlocksCleared, BlockRemoved, BlockStored
from aradix.keys import Namespace, RadixKey
from aradix.observe.blocks import BlockBook, CutBlocks, PageBlocks, make_blocks
from aradix.observe.wire import HASH_BYTES, Cleared, Removed, Stored, unpack_hashes


def packed(ids: list[int]) -> bytes:
    return RadixKey(ids).token_ids().tobytes()


def behind(hashes: bytes, num_blocks: int) -> bytes:
    return hashes[num_blocks * HASH_BYTES :]


def stored(ids: list[int], page_size: int, start: int = 0, **options: Any) -> BlockStored:
    """The event of the pages of some tokens, from page `start` on."""
    namespace = options.pop("namespace", Namespace())
    hashes = RadixKey(ids, namespace).hash_chain(page_size)
    parent = hashes[start - 1] if start else None
    tokens = packed(ids[start * page_size : len(hashes) * page_size])
    return BlockStored(b"".join(hashes[start:]), parent, tokens, page_size, namespace, **options)


def removed(ids: list[int], page_size: int, start: int = 0, **options: Any) -> BlockRemoved:
    return BlockRemoved(b"".join(RadixKey(ids).hash_chain(page_size)[start:]), **options)


def book(page_size: int, block_size: int) -> BlockBook:
    return make_blocks(page_size, block_size, is_bigram=False, keeps=True)


def test_where_pages_are_blocks_their_digests_are_the_hashes() -> None:
    blocks = book(2, 2)
    assert isinstance(blocks, PageBlocks)
    (event,) = blocks.apply(stored([1, 2, 3, 4], 2))
    digests = RadixKey([1, 2, 3, 4]).hash_chain(2)
    hashes = b"".join(digest[:HASH_BYTES] for digest in digests)
    assert event == Stored(hashes, None, packed([1, 2, 3, 4]), Namespace(), "GPU")
    (event,) = blocks.apply(stored([1, 2, 3, 4, 5, 6], 2, 2))
    assert isinstance(event, Stored)
    assert event.parent == unpack_hashes(hashes)[1]
    assert blocks.apply(removed([1, 2, 3, 4], 2, 1)) == [Removed(behind(hashes, 1), "GPU")]


@pytest.mark.parametrize(("page_size", "num_first"), [(1, 7), (2, 3)])
def test_a_block_of_several_pages_is_told_when_its_last_page_is_there(page_size: int, num_first: int) -> None:
    ids = list(range(12))
    blocks = book(page_size, 4)
    (first,) = blocks.apply(stored(ids[: num_first * page_size], page_size))
    assert isinstance(first, Stored)
    assert first.tokens == packed(ids[:4])
    (second,) = blocks.apply(stored(ids, page_size, num_first))
    assert isinstance(second, Stored)
    assert (second.parent, second.tokens) == (unpack_hashes(first.hashes)[0], packed(ids[4:]))
    assert blocks.apply(removed(ids, page_size, 11 // page_size)) == [Removed(behind(second.hashes, 1), "GPU")]
    assert blocks.apply(removed(ids[: 12 - page_size], page_size, 8 // page_size)) in ([], [Removed(b"", "GPU")])
    assert blocks.apply(removed(ids[:8], page_size, num_first)) == [Removed(second.hashes[:HASH_BYTES], "GPU")]


def test_blocks_that_two_pages_share_are_told_once_and_go_with_the_last() -> None:
    one, two = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9]
    blocks = book(6, 2)
    (first,) = blocks.apply(stored(one, 6))
    (second,) = blocks.apply(stored(two, 6))
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    shared, last = first.hashes[: 2 * HASH_BYTES], behind(first.hashes, 2)
    assert len(last) == HASH_BYTES
    assert (second.parent, second.tokens) == (unpack_hashes(shared)[1], packed([5, 9]))
    assert blocks.apply(removed(one, 6)) == [Removed(last, "GPU")]
    assert blocks.apply(removed(two, 6)) == [Removed(shared + second.hashes, "GPU")]
    assert blocks.listed() == [Cleared()]


def test_sizes_that_do_not_divide_each_other_are_cut_all_the_same() -> None:
    ids = list(range(12))
    blocks = book(4, 3)
    events = [blocks.apply(stored(ids[: 4 * (page + 1)], 4, page)) for page in range(3)]
    tokens = [event.tokens for part in events for event in part if isinstance(event, Stored)]
    assert tokens == [packed(ids[:3]), packed(ids[3:6]), packed(ids[6:])]


def test_each_medium_is_told_of_by_itself() -> None:
    ids = [1, 2, 3, 4]
    for page_size in (1, 2):
        blocks = book(page_size, 2)
        (device,) = blocks.apply(stored(ids, page_size))
        (host,) = blocks.apply(stored(ids, page_size, medium="CPU"))
        assert isinstance(device, Stored)
        assert host == device._replace(medium="CPU")
        assert blocks.listed() == [Cleared(), device, host]
        assert blocks.apply(removed(ids, page_size)) == [Removed(device.hashes, "GPU")]
        assert blocks.listed() == [Cleared(), host]
        (again,) = blocks.apply(stored(ids, page_size))
        assert again == device
        assert blocks.apply(removed(ids, page_size)) == [Removed(device.hashes, "GPU")]
        assert blocks.apply(removed(ids, page_size, medium="CPU")) == [Removed(device.hashes, "CPU")]
        assert blocks.listed() == [Cleared()]


def test_what_is_listed_says_a_parent_before_its_children() -> None:
    for page_size in (1, 2):
        blocks = book(page_size, 2)
        for ids, start in (
            ([1, 2, 3, 4, 5, 6], 0),
            ([1, 2, 7, 8], 2 // page_size),
            ([1, 2, 3, 4, 9, 9], 4 // page_size),
        ):
            blocks.apply(stored(ids, page_size, start))
        blocks.apply(stored([1, 2], page_size, namespace=Namespace(salt="x")))
        cleared, *events = blocks.listed()
        assert cleared == Cleared()
        known: set[int | None] = {None}
        for event in events:
            assert isinstance(event, Stored)
            assert event.parent in known
            known.update(unpack_hashes(event.hashes))
        assert len(known) == 1 + 6
        assert blocks.apply(AllBlocksCleared()) == [Cleared()]
        assert blocks.listed() == [Cleared()]


def test_of_bigrams_the_first_tokens_count() -> None:
    view = RadixKey([1, 2, 3, 4, 5]).maybe_to_bigram_view(True)
    other = RadixKey([1, 2, 3, 4, 9]).maybe_to_bigram_view(True)
    blocks = make_blocks(2, 2, is_bigram=True, keeps=True)
    assert isinstance(blocks, CutBlocks)
    first, second = view.hash_chain(2), other.hash_chain(2)
    (event,) = blocks.apply(BlockStored(b"".join(first), None, packed([1, 2, 3, 4, 5]), 2, Namespace()))
    assert isinstance(event, Stored)
    assert event.tokens == packed([1, 2, 3, 4])
    # To a router, which sees tokens, the last block is the same: it is there until both are gone.
    assert blocks.apply(BlockStored(second[1], first[0], packed([3, 4, 9]), 2, Namespace())) == []
    assert blocks.apply(BlockRemoved(first[1])) == []
    assert blocks.apply(BlockRemoved(second[1])) == [Removed(behind(event.hashes, 1), "GPU")]


def test_a_page_after_one_that_nobody_told_of_is_our_bug() -> None:
    with pytest.raises(InvariantError, match="nobody told of"):
        book(1, 2).apply(stored([1, 2, 3], 1, 2))


def test_hearing_of_pages_twice_changes_nothing() -> None:
    blocks = book(1, 2)
    blocks.apply(stored([1, 2, 3, 4], 1))
    before = blocks.listed()
    assert blocks.apply(stored([1, 2, 3, 4], 1)) == []
    assert blocks.apply(removed([7, 8], 1)) == []
    assert blocks.listed() == before
