"""A page store in memory, which a test can hold up, break and spoil."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from aradix.errors import TierError
from aradix.memory.storage.protocol import PageSpace, StoreFault, StoreStats

__all__ = ["MemoryStore"]


class MemoryStore:
    """Pages in a dict. `held` makes every call wait; `broken` makes it find and store nothing."""

    def __init__(self) -> None:
        self.pages: dict[tuple[str, bytes], bytes] = {}
        self.calls: list[str] = []
        self.held: anyio.Event | None = None
        self.broken = False
        self._faults: list[StoreFault] = []

    async def _begin(self, operation: str, hashes: Sequence[bytes]) -> bool:
        self.calls.append(operation)
        if self.held is not None:
            await self.held.wait()
        if self.broken:
            self._faults.append(StoreFault(operation, TierError("the store is out"), tuple(hashes)))
        return not self.broken

    async def exists(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bool]:
        if not await self._begin("exists", hashes):
            return [False] * len(hashes)
        return [(space.prefix(), one) in self.pages for one in hashes]

    async def get(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bytes | None]:
        if not await self._begin("get", hashes):
            return [None] * len(hashes)
        return [self.pages.get((space.prefix(), one)) for one in hashes]

    async def put(self, space: PageSpace, hashes: Sequence[bytes], pages: Sequence[bytes]) -> list[bool]:
        if not await self._begin("put", hashes):
            return [False] * len(hashes)
        for one, page in zip(hashes, pages, strict=True):
            self.pages[space.prefix(), one] = page
        return [True] * len(hashes)

    async def delete(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bool]:
        for one in hashes:
            self.pages.pop((space.prefix(), one), None)
        return [True] * len(hashes)

    async def clear(self, space: PageSpace) -> bool:
        self.calls.append("clear")
        for name in [name for name in self.pages if name[0].startswith(space.prefix())]:
            del self.pages[name]
        return True

    def take_faults(self) -> list[StoreFault]:
        faults, self._faults = self._faults, []
        return faults

    def stats(self) -> StoreStats:
        return StoreStats()

    async def aclose(self) -> None:
        pass
