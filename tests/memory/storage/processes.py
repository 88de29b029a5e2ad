"""What other processes do to a store of files, and the pages that the tests put there."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio

from aradix.memory.storage.file_store import FileStore, _FileBackend
from aradix.memory.storage.frame import HEADER_BYTES
from aradix.memory.storage.mooncake_store import MooncakeStore
from aradix.memory.storage.protocol import PageSpace, PageStore

__all__ = [
    "FRAME_BYTES",
    "PROCESSES",
    "SPACE",
    "found",
    "hash_of",
    "lose_master",
    "page_of",
    "put",
    "put_and_be_killed",
    "put_for_ever",
    "put_in",
    "put_what_is_too_large",
    "use_at_random",
]

# Forked from a process that has nothing but this module: as clean as new ones, without the seconds that torch takes.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])

PAGE_BYTES = 1000
FRAME_BYTES = PAGE_BYTES + HEADER_BYTES
SPACE = PageSpace("model", "format")


def hash_of(i: int) -> bytes:
    return i.to_bytes(32, "big")


def page_of(i: int) -> bytes:
    return random.Random(i).randbytes(PAGE_BYTES)


async def put(store: PageStore, *numbers: int, space: PageSpace = SPACE) -> list[bool]:
    return await store.put(space, [hash_of(i) for i in numbers], [page_of(i) for i in numbers])


async def found(store: PageStore, *numbers: int, space: PageSpace = SPACE) -> list[int]:
    """The numbers whose pages are there; each must be right."""
    pages = await store.get(space, [hash_of(i) for i in numbers])
    for i, page in zip(numbers, pages, strict=True):
        assert page in (None, page_of(i))
    return [i for i, page in zip(numbers, pages, strict=True) if page is not None]


def put_in(folder: Path, *numbers: int) -> None:
    """Stores pages."""
    assert anyio.run(put, FileStore(folder, timeout_s=60), *numbers) == [True] * len(numbers)


class _Killed(_FileBackend):
    """Ends the process, as a kill -9 does, when the count is looked at once more than `steps` times."""

    steps = 1_000_000

    def _usage(self) -> Any:
        self.steps -= 1
        if self.steps < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._usage()


def put_and_be_killed(folder: Path, steps: int, *numbers: int) -> None:
    """Stores pages, and does not come far."""
    store = FileStore(folder, timeout_s=60)
    backend = _Killed(folder, 20 * FRAME_BYTES)
    backend.steps = steps
    store._backend = backend
    anyio.run(put, store, *numbers)


def put_for_ever(folder: Path, first: int, tell: Connection) -> None:
    """Stores pages in a full store, four at a time, and tells of each four."""

    async def main() -> None:
        store = FileStore(folder, max_bytes=40 * FRAME_BYTES, timeout_s=60)
        i = first
        while True:
            assert await put(store, i, i + 1, i + 2, i + 3) == [True] * 4
            tell.send(i)
            i += 4

    anyio.run(main)


def use_at_random(folder: Path, seed: int) -> None:
    """Stores, reads, deletes and clears; whatever is read is right."""

    async def main() -> None:
        store = FileStore(folder, max_bytes=20 * FRAME_BYTES, timeout_s=60)
        rng = random.Random(seed)
        for _ in range(100):
            await put(store, *[rng.randrange(60) for _ in range(5)])
            await found(store, *[rng.randrange(60) for _ in range(5)])
            if rng.random() < 0.1:
                assert await store.delete(SPACE, [hash_of(rng.randrange(60))]) == [True]
            if rng.random() < 0.03:
                assert await store.clear(SPACE)
        stats = store.stats()
        assert (stats.corrupt, stats.failed_calls, stats.is_reachable) == (0, 0, True), (stats, store.take_faults())
        assert stats.hits

    anyio.run(main)


def put_what_is_too_large(folder: Path) -> None:
    """Stores a page that fits and one above the limit of this process."""

    async def main() -> None:
        store = FileStore(folder, timeout_s=60)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        assert await put(store, 1) == [True]
        assert await store.put(SPACE, [hash_of(2)], [bytes(8000)]) == [False]
        assert await found(store, 1) == [1]
        assert store.stats().refused == 1
        assert store.stats().is_reachable
        assert list((folder / "new").iterdir()) == []

    anyio.run(main)


def lose_master(address: str, parent: Connection) -> None:
    """Stores and reads, and asks again once the master has gone."""

    async def main() -> None:
        store = MooncakeStore(address, segment_bytes=16 << 20, buffer_bytes=16 << 20, timeout_s=60)
        assert await put(store, 1, 2) == [True] * 2
        assert await found(store, 1, 2) == [1, 2]
        parent.send("joined")
        assert parent.recv() == "gone"
        for _ in range(3):
            assert await found(store, 1, 2) == []
            assert await put(store, 1, 2) == [False] * 2
        assert not store.stats().is_reachable
        await store.aclose()

    anyio.run(main)
