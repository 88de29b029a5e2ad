"""PageStore: what the cache asks of a place where pages outlive the process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from aradix.errors import TierError
from aradix.keys import Namespace

__all__ = ["PageSpace", "PageStore", "StoreFault", "StoreStats"]


class PageSpace(NamedTuple):
    """Whose pages, and what their bytes mean: pages of different spaces never meet.

    Args:
        model_id: names the weights, down to the revision: KV of other weights is wrong KV.
        format_id: `KVPool.format_id`, which says how a page is laid out.
        namespace: that the pages were cached in; None stands for all of them, which only `clear` takes.
    """

    model_id: str
    format_id: str
    namespace: Namespace | None = Namespace()

    def prefix(self) -> str:
        """The start of the names of all pages of this space: hex digits and slashes, one slash a part."""
        scope = hashlib.sha256(b"aradix-pages-1")
        for text in (self.model_id, self.format_id):
            data = text.encode("utf-8", "surrogatepass")
            scope.update(len(data).to_bytes(8, "little") + data)
        if self.namespace is None:
            return f"{scope.hexdigest()[:32]}/"
        return f"{scope.hexdigest()[:32]}/{hashlib.sha256(self.namespace.digest()).hexdigest()[:32]}/"


class StoreFault(NamedTuple):
    """Something that a store turned into a miss, or into a page not stored.

    Args:
        operation: `"exists"`, `"get"`, `"put"`, `"delete"` or `"clear"`.
        error: `StorageCorruptError` for bytes that are not the page asked for, else a `TierError`.
        hashes: of the pages concerned.
    """

    operation: str
    error: TierError
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of a store since it was made, in pages unless named otherwise.

    Args:
        hits: pages that `get` found.
        misses: pages that it did not, for whatever reason.
        stored: pages that `put` stored, or found there already.
        refused: pages that the store had no room for.
        corrupt: pages found that were not what they should be.
        failed_calls: that the store did not answer, in time or at all.
        skipped_calls: answered at once without asking a store that did not answer before.
        bytes_read: of pages.
        bytes_written: of pages.
        is_reachable: False from the failure that stopped the calls until one succeeds again.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    corrupt: int = 0
    failed_calls: int = 0
    skipped_calls: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    is_reachable: bool = True


@runtime_checkable
class PageStore(Protocol):
    """Pages by chained hash (`RadixKey.hash_chain`), in batches. Every call of a batch waits at most once.

    No call raises for what the store does: what fails is a miss, or is not stored, and `take_faults` says why. A call
    may be cancelled at any time; what it began goes on or not, and never leaves a wrong page.
    """

    async def exists(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bool]:
        """Which pages are there, as far as the store knows without reading them."""
        ...

    async def get(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bytes | None]:
        """The bytes of each page, exactly as they were put; None for what is not there or not right."""
        ...

    async def put(self, space: PageSpace, hashes: Sequence[bytes], pages: Sequence[bytes]) -> list[bool]:
        """Stores pages; True for each that is there afterwards. Pages are `bytes`: nobody changes them meanwhile."""
        ...

    async def delete(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bool]:
        """Deletes pages; True for each that is not there afterwards. A store may refuse one that is being read."""
        ...

    async def clear(self, space: PageSpace) -> bool:
        """Deletes all pages of a space, or with no namespace of all of a model and format.

        From the call on nothing put before it is found through this object, even where the answer is False: then it
        has not reached the store yet, and is repeated before anything else is asked of that space.
        """
        ...

    def take_faults(self) -> list[StoreFault]:
        """What went wrong since the last call, the oldest first; the latest thousand. Does not wait."""
        ...

    def stats(self) -> StoreStats:
        """The counters. Does not wait."""
        ...

    async def aclose(self) -> None:
        """Gives up connections and files, and waits for that; calls from then on find nothing."""
        ...
