"""From pages to blocks: what a cache tells of its pages, cut to the block size that routers count in.

A block is listed on a medium as long as a page there ends at or behind its last token. Where pages are blocks, a page's
digest is the block's hash. Elsewhere a block's hash is chained from the block before it and its own tokens, so that
pages that differ only behind a block's end share it; then the last of them to go takes it along.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from aradix.errors import InvariantError
from aradix.events import BlockRemoved, BlockStored, KVCacheEvent
from aradix.keys import TOKEN_BYTES, Namespace
from aradix.observe.wire import HASH_BYTES, Cleared, Removed, Stored, WireEvent, pack_hashes, unpack_hashes

__all__ = ["BlockBook", "CutBlocks", "PageBlocks", "make_blocks"]


class _Block(NamedTuple):
    parent: int | None
    tokens: bytes
    namespace: Namespace


def _short(digest: bytes) -> int:
    return int.from_bytes(digest[:HASH_BYTES], "big")


def _shorts(digests: bytes) -> bytes:
    """The first 64 bits of each digest of a run."""
    return np.frombuffer(digests, np.uint64)[::4].tobytes()


class BlockBook(abc.ABC):
    """Which blocks are listed where, kept only as far as somebody may ask for it all.

    Args:
        block_size: tokens a block.
        keeps: whether `listed()` will be asked for. It costs some 400 bytes a block and 4 a token.
    """

    def __init__(self, block_size: int, keeps: bool) -> None:
        self.block_size = block_size
        self._keeps = keeps
        self._blocks: dict[int, _Block] = {}
        self._media: dict[str, dict[int, int]] = {}

    def apply(self, event: KVCacheEvent) -> list[WireEvent]:
        """What an event of the cache comes to in blocks: perhaps nothing. Does not wait.

        Raises:
            InvariantError: pages after a page that was never heard of.
        """
        if isinstance(event, BlockStored):
            return self._stored(event)
        if isinstance(event, BlockRemoved):
            return self._removed(event)
        self._clear()
        return [Cleared()]

    @abc.abstractmethod
    def _stored(self, event: BlockStored) -> list[WireEvent]: ...
    @abc.abstractmethod
    def _removed(self, event: BlockRemoved) -> list[WireEvent]: ...

    def _clear(self) -> None:
        self._blocks.clear()
        self._media.clear()

    def _list(self, block_hash: int, medium: str, count: int = 1) -> bool:
        """One more page stands for a block; whether it was not listed before."""
        counts = self._media.setdefault(medium, {})
        before = counts.get(block_hash, 0)
        counts[block_hash] = before + count
        return before == 0

    def _unlist(self, block_hash: int, medium: str) -> bool:
        """One page less stands for a block; whether it is not listed any more."""
        counts = self._media[medium]
        counts[block_hash] -= 1
        if counts[block_hash]:
            return False
        del counts[block_hash]
        if self._keeps and not any(block_hash in others for others in self._media.values()):
            del self._blocks[block_hash]
        return True

    def listed(self) -> list[WireEvent]:
        """All that is listed now, for a reader who knows nothing: a parent before its children, medium by medium."""
        events: list[WireEvent] = [Cleared()]
        for medium, counts in self._media.items():
            chosen = ((block_hash, block) for block_hash, block in self._blocks.items() if block_hash in counts)
            events.extend(_chains(chosen, medium))
        return events


def _chains(blocks: Iterable[tuple[int, _Block]], medium: str) -> Iterator[Stored]:
    """Blocks that follow one another, as one event."""
    chain: list[tuple[int, _Block]] = []
    for block_hash, block in blocks:
        if chain and (block.parent != chain[-1][0] or block.namespace != chain[-1][1].namespace):
            yield _chain(chain, medium)
            chain = []
        chain.append((block_hash, block))
    if chain:
        yield _chain(chain, medium)


def _chain(chain: list[tuple[int, _Block]], medium: str) -> Stored:
    first = chain[0][1]
    tokens = b"".join(block.tokens for _, block in chain)
    return Stored(pack_hashes([block_hash for block_hash, _ in chain]), first.parent, tokens, first.namespace, medium)


class PageBlocks(BlockBook):
    """Pages are blocks: nothing is cut, and nothing has to be known of what came before."""

    def _stored(self, event: BlockStored) -> list[WireEvent]:
        hashes = _shorts(event.digests)
        parent = None if event.parent_block_hash is None else _short(event.parent_block_hash)
        if self._keeps:
            self._keep(unpack_hashes(hashes), parent, event)
        return [Stored(hashes, parent, event.tokens, event.namespace, event.medium)]

    def _keep(self, hashes: list[int], parent: int | None, event: BlockStored) -> None:
        tokens, size = event.tokens, self.block_size * TOKEN_BYTES
        counts = self._media.setdefault(event.medium, {})
        for index, block_hash in enumerate(hashes):
            counts[block_hash] = 1
            if block_hash not in self._blocks:
                self._blocks[block_hash] = _Block(parent, tokens[index * size : (index + 1) * size], event.namespace)
            parent = block_hash

    def _removed(self, event: BlockRemoved) -> list[WireEvent]:
        hashes = _shorts(event.digests)
        if self._keeps:
            counts = self._media.get(event.medium, {})
            for block_hash in unpack_hashes(hashes):
                if block_hash in counts:
                    self._unlist(block_hash, event.medium)
        return [Removed(hashes, event.medium)]


class _Page(NamedTuple):
    """Of a page: the last block that ends in it or before it, the tokens since then, and all blocks that end in it."""

    last: int | None
    rest: bytes
    ends: tuple[int, ...]


class CutBlocks(BlockBook):
    """Pages and blocks of different sizes, in whatever relation. It costs some 300 bytes a page to know where one is.

    Of bigram keys the first token of each pair counts, so that blocks are cut from the tokens that routers see.
    """

    def __init__(self, page_size: int, block_size: int, keeps: bool) -> None:
        super().__init__(block_size, keeps)
        self._page_size = page_size
        self._pages: dict[int, _Page] = {}
        self._pages_on: dict[str, set[int]] = {}

    def _clear(self) -> None:
        super()._clear()
        self._pages.clear()
        self._pages_on.clear()

    def _stored(self, event: BlockStored) -> list[WireEvent]:
        if event.parent_block_hash is None:
            page = _Page(None, b"", ())
        else:
            found = self._pages.get(_short(event.parent_block_hash))
            if found is None:
                raise InvariantError(f"pages were stored after {event.parent_block_hash.hex()}, which nobody told of")
            page = found
        size = self._page_size * TOKEN_BYTES
        tokens = event.tokens
        here = self._pages_on.setdefault(event.medium, set())
        fresh: list[tuple[int, _Block]] = []
        for index, key in enumerate(unpack_hashes(_shorts(event.digests))):
            known = self._pages.get(key)
            page, blocks = self._cut(page, tokens[index * size : (index + 1) * size], event.namespace)
            if known is None:
                self._pages[key] = page
            if key in here:
                continue
            here.add(key)
            for block_hash, block in blocks:
                if self._list(block_hash, event.medium):
                    fresh.append((block_hash, block))
                    if self._keeps and block_hash not in self._blocks:
                        self._blocks[block_hash] = block
        return list(_chains(fresh, event.medium))

    def _cut(self, before: _Page, tokens: bytes, namespace: Namespace) -> tuple[_Page, list[tuple[int, _Block]]]:
        """The page that follows another, and the blocks that end in it."""
        size = self.block_size * TOKEN_BYTES
        rest, last = before.rest + tokens, before.last
        blocks = []
        start = 0
        while start + size <= len(rest):
            block = _Block(last, rest[start : start + size], namespace)
            previous = namespace.digest() if last is None else last.to_bytes(8, "big")
            last = _short(hashlib.sha256(previous + block.tokens).digest())
            blocks.append((last, block))
            start += size
        return _Page(last, rest[start:], tuple(block_hash for block_hash, _ in blocks)), blocks

    def _removed(self, event: BlockRemoved) -> list[WireEvent]:
        here = self._pages_on.get(event.medium, set())
        gone: list[int] = []
        for key in unpack_hashes(_shorts(event.digests)):
            if key not in here:
                continue
            here.remove(key)
            gone += [block_hash for block_hash in self._pages[key].ends if self._unlist(block_hash, event.medium)]
            if not any(key in others for others in self._pages_on.values()):
                del self._pages[key]
        return [Removed(pack_hashes(gone), event.medium)] if gone else []


def make_blocks(page_size: int, block_size: int, *, is_bigram: bool, keeps: bool) -> BlockBook:
    """The book for a cache's page size and a router's block size."""
    if page_size == block_size and not is_bigram:
        return PageBlocks(block_size, keeps)
    return CutBlocks(page_size, block_size, keeps)
