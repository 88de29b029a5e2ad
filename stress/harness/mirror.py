"""The mirror oracle: what is cached, rebuilt from the events alone, is what the history says and the cache counts.

It is a sink, so it is called between two steps, when all that happened has been told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aradix import Namespace, RadixCache
from aradix.events import HOST_MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from stress.harness.book import Book

__all__ = ["Mirror"]


class _Page:
    __slots__ = ("content", "epoch", "gone", "namespace", "parent", "tokens")

    def __init__(self, parent: bytes | None, namespace: Namespace, tokens: tuple[int, ...]) -> None:
        self.parent = parent
        self.namespace = namespace
        self.tokens = tokens
        self.gone = False
        self.epoch = -1
        self.content = 0


class Mirror:
    """The pages that are cached, by their hash.

    Args:
        book: the history.
        cache: whose events they are.
        is_struck: whether a planned fault has come; then nothing is certain any more.
    """

    def __init__(self, book: Book, cache: RadixCache, is_struck: Callable[[], bool]) -> None:
        self._book = book
        self._cache = cache
        self._is_struck = is_struck
        self._pages: dict[bytes, _Page] = {}
        self._on_host: set[bytes] = set()
        self._names: dict[bytes, tuple[bytes | None, Namespace, tuple[int, ...]]] = {}

    def __call__(self, events: Sequence[KVCacheEvent]) -> None:
        """Takes the events of a turn, and looks whether they tell the truth."""
        if self._is_struck():
            return
        fresh: list[_Page] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._forget(list(self._pages))
                self._on_host.clear()
            elif event.medium == HOST_MEDIUM:
                self._note_on_host(event)
            elif isinstance(event, BlockStored):
                self._store(event, fresh)
            elif isinstance(event, BlockRemoved):
                self._forget(event.block_hashes)
        for page in fresh:
            if not page.gone:
                self._compare(page)
        self.look()

    def look(self) -> None:
        """Raises where what is told is not what is."""
        book, page_size = self._book, self._book.page_size
        for page in self._pages.values():
            if page.parent is not None and page.parent not in self._pages:
                raise book.fail(
                    "mirror", f"{book.contents.name(page.content)} is there, and what comes before it is not"
                )
            if page.epoch != book.epoch(page.namespace):
                raise book.fail("mirror", f"{book.contents.name(page.content)} was flushed, and nobody was told")
        counted = self._cache.evictable_size() + self._cache.protected_size()
        if counted != len(self._pages) * page_size:
            raise book.fail("mirror", f"{counted} tokens are cached; the events make {len(self._pages) * page_size}")
        # Not from `stats()`, which would first hear of copies that nobody was told of yet.
        on_host = getattr(self._cache._core, "host_tokens", 0)
        if on_host != len(self._on_host) * page_size:
            raise book.fail(
                "mirror", f"{on_host} tokens are on the host; the events make {len(self._on_host) * page_size}"
            )
        told = {page.content for page in self._pages.values()}
        for record in book.records.values():
            if record.published and not record.stale and record.epoch == book.epoch(record.namespace):
                content = record.contents[record.published - 1]
                if content not in told:
                    raise book.fail(
                        "mirror", f"{record} stands on {book.contents.name(content)}, of which the events know nothing"
                    )

    def _note_on_host(self, event: BlockStored | BlockRemoved) -> None:
        """What is on the host are pages that were on the device once, each below one that is there too."""
        parent = event.parent_block_hash if isinstance(event, BlockStored) else None
        for block in event.block_hashes:
            is_there, name = block in self._on_host, repr(self._names.get(block, block))
            if isinstance(event, BlockRemoved):
                if not is_there:
                    raise self._book.fail("mirror", f"{name} was removed from the host, and is not there")
                self._on_host.discard(block)
                continue
            if is_there or (parent is not None and parent not in self._on_host):
                raise self._book.fail("mirror", f"{name} came to the host twice, or before what it follows")
            self._on_host.add(block)
            parent = block

    def _store(self, event: BlockStored, fresh: list[_Page]) -> None:
        book, page_size = self._book, self._book.page_size
        parent = event.parent_block_hash
        if event.block_size != page_size or len(event.token_ids) != page_size * len(event.block_hashes):
            raise book.fail("mirror", f"{event} does not have a page of {page_size} tokens for each hash")
        for index, block in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[index * page_size : (index + 1) * page_size])
            name = (parent, event.namespace, tokens)
            if self._names.setdefault(block, name) != name:
                raise book.fail("mirror", f"one hash stands for two pages: {self._names[block]} and {name}")
            if block in self._pages or (parent is not None and parent not in self._pages):
                raise book.fail("mirror", f"{name} was stored twice, or before what it follows")
            page = self._pages[block] = _Page(*name)
            fresh.append(page)
            parent = block

    def _forget(self, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            page = self._pages.pop(block, None)
            if page is None:
                raise self._book.fail("mirror", f"{self._names.get(block, block)} was removed, and is not there")
            page.gone = True

    def _compare(self, page: _Page) -> None:
        """A page that was stored and is still there is one that somebody published since the last flush."""
        book = self._book
        epoch = page.epoch = book.epoch(page.namespace)
        if page.parent is None:
            contents = book.contents.of(page.namespace, epoch, page.tokens)
        elif page.parent in self._pages:
            contents = book.contents.after(self._pages[page.parent].content, page.tokens)
        else:
            raise book.fail("mirror", f"{page.tokens} stands there, and what comes before it is gone")
        page.content = contents[-1]
        if not book.was_published(page.content):
            raise book.fail("mirror", f"{book.contents.name(page.content)} is told of, but nobody published it")
