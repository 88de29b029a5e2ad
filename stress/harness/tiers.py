"""The tiers below the device in a run: copies that are slow and fail, a page store that is slow and forgets.

What a copy moves is known by content, as what kernels write is. Where a copy into the device ends, the book is told
which slots hold what, and objects if somebody has them; a match on them must then be of just that prefix.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from aradix import HostKVPool
from aradix.errors import TierError
from aradix.memory.copiers import Job
from aradix.memory.kv_pool import BookKVPool
from aradix.memory.storage.protocol import PageSpace, StoreFault, StoreStats
from stress.device import HOST_SLOTS, VirtualCopier
from stress.harness.book import Book
from stress.harness.kernels import Kernels
from stress.harness.worlds import World

__all__ = ["TierParts", "make_tiers"]

_NOTHING = -1


class HarnessCopier(VirtualCopier):
    """Copies of a world: every so many of them fails after some of its pages."""

    def __init__(self, kernels: Kernels, world: World) -> None:
        super().__init__(kernels.device, self._break_sometimes)
        self._kernels = kernels
        self._random = random.Random(world.seed + 2)
        self._fails_every = world.copy_faults

    def _break_sometimes(self, job: Job) -> tuple[int, Exception] | None:
        if not self._fails_every or self._random.randrange(self._fails_every):
            return None
        return self._random.randrange(len(job.source_pages)), RuntimeError("the copy engine gave up")

    def launch(self, stream: Any, job: Job, layer: int | None) -> None:
        try:
            super().launch(stream, job, layer)
        finally:
            self._kernels.busy_with(stream)


class HarnessHostPool(HostKVPool):
    """A host pool without memory, whose pages are, as bytes, what the run knows them to hold."""

    def __init__(self, num_slots: int, page_size: int, kv_pool: BookKVPool, kernels: Kernels) -> None:
        super().__init__(num_slots, page_size, kv_pool)
        self._kernels = kernels

    def get_page(self, page: int) -> bytes:
        contents = self._kernels.contents_of(self._slots(page))
        return struct.pack(f"{len(contents)}q", *(_NOTHING if each is None else each for each in contents))

    def set_page(self, page: int, data: bytes | bytearray | memoryview) -> None:
        self._kernels.put(self._slots(page), struct.unpack(f"{self.page_size}q", data))

    def _slots(self, page: int) -> list[int]:
        return [HOST_SLOTS + page * self.page_size + i for i in range(self.page_size)]


class HarnessStore:
    """A page store that takes its time, and every so often answers as if it had nothing."""

    def __init__(self, world: World, book: Book) -> None:
        self._book = book
        self._random = random.Random(world.seed + 3)
        self._fails_every = world.copy_faults
        self._pages: dict[tuple[str, bytes], bytes] = {}
        self._clearings = 0

    async def _answers(self) -> bool:
        for _ in range(self._random.randrange(4)):
            await anyio.sleep(self._random.random() * 0.002)
        return not self._fails_every or self._random.randrange(self._fails_every) > 0

    async def exists(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bool]:
        answers = await self._answers()
        return [answers and (space.prefix(), one) in self._pages for one in hashes]

    async def get(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bytes | None]:
        if not await self._answers():
            return [None] * len(hashes)
        return [self._pages.get((space.prefix(), one)) for one in hashes]

    async def put(self, space: PageSpace, hashes: Sequence[bytes], pages: Sequence[bytes]) -> list[bool]:
        clearings = self._clearings
        if not await self._answers() or self._clearings != clearings:
            return [False] * len(hashes)
        self._pages.update(((space.prefix(), one), page) for one, page in zip(hashes, pages, strict=True))
        return [True] * len(hashes)

    async def delete(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bool]:
        for one in hashes:
            self._pages.pop((space.prefix(), one), None)
        return [True] * len(hashes)

    async def clear(self, space: PageSpace) -> bool:
        # The cache clears the store in the very step in which it flushes itself, and waits only then.
        self._book.flushed(space.namespace)
        self._clearings += 1
        prefix = space.prefix()
        self._pages = {name: page for name, page in self._pages.items() if not name[0].startswith(prefix)}
        await self._answers()
        return True

    def take_faults(self) -> list[StoreFault]:
        return [StoreFault("get", TierError("as if"), ())]

    def stats(self) -> StoreStats:
        return StoreStats()

    async def aclose(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class TierParts:
    """What a cache with tiers is built from, beside its allocator."""

    kv_pool: BookKVPool
    host: HarnessHostPool
    copier: HarnessCopier
    store: HarnessStore | None

    def params(self, world: World) -> dict[str, Any]:
        """For `CacheInitParams`."""
        return {
            "kv_pool": self.kv_pool,
            "host": self.host,
            "copier": self.copier,
            "storage": self.store,
            "write_policy": world.write_policy,
            "load_back_threshold": world.load_back_threshold,
            "prefetch_timeout_s": 0.004,
        }


def make_tiers(world: World, kernels: Kernels, book: Book) -> TierParts | None:
    """The tiers of a world, where it has any."""
    if not world.num_host_pages:
        return None
    kv_pool = BookKVPool(world.num_pages * world.page_size, world.page_size)
    host = HarnessHostPool(world.num_host_pages * world.page_size, world.page_size, kv_pool, kernels)
    store = HarnessStore(world, book) if world.has_store else None
    return TierParts(kv_pool, host, HarnessCopier(kernels, world), store)
