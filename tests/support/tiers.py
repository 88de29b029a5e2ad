"""Caches with a host tier for tests: copies end when the test says so, and slots carry stamps instead of KV."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aradix import CacheInitParams, HiRadixCache, HostKVPool, RadixKey, SlotAllocator
from aradix.errors import TransferError
from aradix.memory.copiers import Job
from aradix.memory.kv_pool import BookKVPool, KVPool
from aradix.memory.streams import InlineStream
from tests.support.core import TREE_CORE

__all__ = ["HandCopier", "HandCopy", "TieredScene", "opened_tiers"]


class _HandEvent:
    """An event that is reached once the copy before it was ended by hand."""

    def __init__(self) -> None:
        self.copy: HandCopy | None = None

    def record(self, stream: Any) -> None:
        self.copy = stream.last

    def query(self) -> bool:
        return self.copy is None or self.copy.is_over


class _HandStream(InlineStream):
    def __init__(self) -> None:
        self.last: HandCopy | None = None

    def wait_event(self, event: Any) -> None:
        """A copy is ended by hand, so the test sees to the order."""


class HandCopy:
    """One copy under way, until `finish` or `fail`."""

    def __init__(self, memory: dict[tuple[str, int], Any], job: Job) -> None:
        self.job = job
        self.is_over = False
        self.callbacks: list[Callable[[Any], object]] = []
        self._memory = memory

    @property
    def what(self) -> str:
        return self.job.what

    def finish(self, num_pages: int | None = None, error: Exception | None = None) -> None:
        """Move the stamps of the first pages, all if not told, and say so."""
        assert not self.is_over
        job, size = self.job, self.job.source.page_size
        num_pages = len(job.source_pages) if num_pages is None else num_pages
        for source, target in list(zip(job.source_pages, job.target_pages, strict=True))[:num_pages]:
            for i in range(size):
                stamp = self._memory.get((_side(job.source), source * size + i))
                self._memory[_side(job.target), target * size + i] = stamp
        job.num_pages_done, job.cause = num_pages, error
        self.is_over = True
        for callback in self.callbacks:
            callback(None)

    def fail(self, num_pages: int = 0) -> None:
        """End in an error after so many pages."""
        self.finish(num_pages, TransferError("the copy engine gave up"))


def _side(pool: KVPool) -> str:
    return "host" if isinstance(pool, HostKVPool) else "device"


class HandCopier:
    """Copies that a test ends by hand, or that are over at once (`at_once`); `memory` has a stamp for each slot.

    `refuse`: an error that the next launch raises.
    """

    needs_polling = False

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.memory: dict[tuple[str, int], Any] = {}
        self.running: list[HandCopy] = []
        self.num_launched = 0
        self.refuse: Exception | None = None

    def new_stream(self, name: str) -> _HandStream:
        return _HandStream()

    def new_event(self) -> _HandEvent:
        return _HandEvent()

    def launch(self, stream: Any, job: Job, layer: int | None) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.num_launched += 1
        stream.last = copy = HandCopy(self.memory, job)
        if self.at_once:
            copy.finish()
        else:
            self.running.append(copy)

    def when_done(self, event: _HandEvent, callback: Callable[[Any], object]) -> None:
        copy = event.copy
        if copy is None or copy.is_over:
            callback(None)
        else:
            copy.callbacks.append(callback)

    def close(self) -> None:
        pass

    def next(self, what: str | None = None) -> HandCopy:
        """The oldest copy under way, of one kind if told; it is no longer listed."""
        copy = next(copy for copy in self.running if what in (None, copy.what))
        self.running.remove(copy)
        return copy

    def finish_all(self) -> None:
        """End all that is under way."""
        while self.running:
            self.next().finish()


class TieredScene:
    """A cache with a host tier, its copies, and the engine's side of it: what stands in which slot."""

    def __init__(self, cache: HiRadixCache, host: HostKVPool, copier: HandCopier) -> None:
        self.cache = cache
        self.host = host
        self.copier = copier
        self.num_fenced_at_close = (0, 0)
        """Slots of the device and of the host that were behind a copy when the cache had closed."""

    def compute(self, lease: Any, key: RadixKey) -> None:
        """Leave in each slot of a lease a stamp that says of which prefix it is the last token."""
        for slot, stamp in list(zip(lease.slots.tolist(), _stamps(key), strict=False))[lease.num_matched :]:
            self.copier.memory["device", slot] = stamp

    def assert_right(self, lease: Any, key: RadixKey) -> None:
        """Each slot of what a lease matched has the stamp of its prefix."""
        num_tokens = lease.num_matched
        found = [self.copier.memory.get(("device", slot)) for slot in lease.slots.tolist()[:num_tokens]]
        assert found == _stamps(key)[:num_tokens]

    async def fill(self, *keys: RadixKey, **options: Any) -> None:
        """Cache some keys as requests would; nobody pins them afterwards."""
        for key in keys:
            async with self.cache.lease(key, **options) as lease:
                lease.allocate_nowait(len(key) - lease.num_matched)
                self.compute(lease, key)
                lease.commit(key)


def _stamps(key: RadixKey) -> list[int]:
    """A number for each prefix of a key, in its namespace."""
    stamps = []
    stamp = hash(key.namespace)
    for token in key.token_ids().tolist():
        stamp = hash((stamp, token))
        stamps.append(stamp)
    return stamps


@asynccontextmanager
async def opened_tiers(
    num_slots: int = 64,
    num_host_slots: int = 64,
    page_size: int = 1,
    *,
    at_once: bool = True,
    cache_class: type[HiRadixCache] = HiRadixCache,
    **params: Any,
) -> AsyncIterator[TieredScene]:
    """Open a cache over pools that only keep books, and audit it before and after it closes.

    Args:
        num_slots: of the device pool.
        num_host_slots: of the host pool.
        page_size: of both.
        at_once: whether copies are over as they begin; else the test ends them.
        cache_class: the class to open.
        params: for `CacheInitParams`; `write_through` from the first token unless told otherwise.
    """
    allocator = SlotAllocator(num_slots, page_size)
    kv_pool = BookKVPool(num_slots, page_size)
    host = HostKVPool(num_host_slots, page_size, kv_pool)
    copier = HandCopier(at_once)
    params = {
        "low_watermark": 0.0,
        "high_watermark": 0.0,
        "tree_core": TREE_CORE,
        "write_policy": "write_through",
        "load_back_threshold": 1,
        **params,
    }
    made = CacheInitParams(allocator, page_size, kv_pool=kv_pool, host=host, copier=copier, **params)
    async with cache_class(made) as cache:
        scene = TieredScene(cache, host, copier)
        yield scene
        cache.check()
    cache.check()
    allocator.check()
    host.allocator.check()
    scene.num_fenced_at_close = (allocator.fenced_size(), host.fenced_size())
    copier.finish_all()
    allocator.reclaim()
    host.allocator.reclaim()
    assert host.available_size() == num_host_slots
    assert allocator.available_size() + allocator.outside_size() == num_slots
