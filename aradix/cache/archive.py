"""`Archive`: the storage tier, behind the host: pages that outlive the process.

Pages come by way of the host: what a lease misses on the device and the host is looked up by its hashes, read into
host slots, and loaded from there as ever. They go the same way, behind the request: what has reached the host is put
into the store by a task of the cache. A lease waits for the store only until its deadline; whatever fails is a miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from aradix.errors import StorageCorruptError
from aradix.events import TierFault
from aradix.keys import Namespace, RadixKey
from aradix.memory.storage.protocol import PageSpace
from aradix.tree.protocol import NO_SLOTS, Slots
from aradix.tree.tiered import HostRead, Landed, StoreJob

if TYPE_CHECKING:
    from aradix.cache.hold import Hold
    from aradix.cache.tiering import Tiers
    from aradix.params import CacheInitParams

__all__ = ["Archive"]

_BATCH_PAGES = 64
_BATCH_BYTES = 16 << 20
"""Of the pages in one call of the store, unless one has more: its calls have a time limit, however large pages are."""
_MAX_FAULTS = 1000
_MAX_HELD = 2
"""A part of the host, one in so many slots, that may wait to be put into the store; more is not put there."""


class _Fetch:
    """Pages on their way from the store to the host, for whoever waits."""

    __slots__ = ("event", "namespace", "slots", "stale")

    def __init__(self, namespace: Namespace, slots: Slots) -> None:
        self.namespace = namespace
        self.slots = slots
        self.stale = False
        """Whether what it reads was flushed meanwhile."""
        self.event = anyio.Event()


class _Put:
    """Pages on the host, held until they are in the store."""

    __slots__ = ("hashes", "namespace", "read", "stale")

    def __init__(self, namespace: Namespace, read: HostRead, hashes: list[bytes]) -> None:
        self.namespace = namespace
        self.read = read
        self.hashes = hashes
        self.stale = False


class Archive:
    """The storage tier of one cache. `prefetch`, `clear` and `wait_idle` wait.

    Args:
        params: of the cache, with a `storage`.
        tiers: of the cache.
    """

    def __init__(self, params: CacheInitParams, tiers: Tiers) -> None:
        self.store = params.storage
        self.num_fetched_tokens = 0
        self.num_put_tokens = 0
        self.num_skipped_tokens = 0
        self._params = params
        self._tiers = tiers
        self._core = tiers.core
        self._pool = params.host
        self._page_size = params.page_size
        self._batch_pages = max(1, min(_BATCH_PAGES, _BATCH_BYTES // self._pool.page_bytes))
        self._faults: deque[TierFault] = deque(maxlen=_MAX_FAULTS)
        self._fetches: dict[bytes, _Fetch] = {}
        self._puts: deque[_Put] = deque()
        self._putting: _Put | None = None
        self._num_held = 0
        self._bell = self._idle = anyio.Event()
        self._tasks: TaskGroup | None = None
        tiers.backups.on_landed = self._on_landed

    @property
    def is_fetching(self) -> bool:
        """Whether somebody may wait for the store, with pins that will go by themselves."""
        return bool(self._fetches)

    @property
    def targets(self) -> list[Slots]:
        """The host slots that are being read into."""
        return [fetch.slots for fetch in self._fetches.values()]

    @property
    def job_ids(self) -> set[int]:
        """The jobs of the tree that are to be ended here."""
        puts = [*self._puts, *([self._putting] if self._putting is not None else [])]
        return {put.read.job_id for put in puts}

    def _space(self, namespace: Namespace | None) -> PageSpace:
        return PageSpace(self._params.model_id, self._pool.format_id, namespace)

    # ---- up: from the store to the host ----

    def wants(self, hold: Hold) -> bool:
        """Whether a lease lacks enough tokens that they are worth a look into the store."""
        found = hold.num_matched + hold.host_hit
        missing = (hold.limit - found) // self._page_size * self._page_size
        return hold.load_back and hold.node_id != 0 and missing >= self._params.load_back_threshold

    def deadline(self) -> float:
        """The time of the event loop up to which a lease that comes now waits for the store."""
        return anyio.current_time() + self._params.prefetch_timeout_s

    async def prefetch(self, hold: Hold, deadline: float) -> bool:
        """Bring to the host what the store has of a lease's key beyond device and host. Waits until the deadline, a
        time of the event loop.

        The lease keeps its pin meanwhile. What comes later than the deadline is there for the next one. True where
        somebody else's key is being fetched, of which this one's begins with the same page.
        """
        start = hold.num_matched + hold.host_hit
        hashes = hold.key.hash_chain(self._page_size)[start // self._page_size : hold.limit // self._page_size]
        fetch = self._fetches.get(hashes[0])
        joined = fetch is not None
        if fetch is None:
            if self._tasks is None:
                return False
            fetch = self._fetches[hashes[0]] = _Fetch(hold.key.namespace, NO_SLOTS)
            self._tiers.begin_store(hold.node_id)  # a host copy needs one of all above it
            self._tasks.start_soon(self._fetch, fetch, hold.key, start, hashes, name="aradix prefetch")
        with anyio.CancelScope(deadline=deadline):
            await fetch.event.wait()
        return joined

    async def _fetch(self, fetch: _Fetch, key: RadixKey, start: int, hashes: list[bytes]) -> None:
        try:
            await self._bring(fetch, key, start, hashes)
        finally:
            del self._fetches[hashes[0]]
            self._tiers.host.give_back(fetch.slots)
            fetch.event.set()
            self._tiers.changed()

    async def _bring(self, fetch: _Fetch, key: RadixKey, start: int, hashes: list[bytes]) -> None:
        size, space = self._page_size, self._space(key.namespace)
        num_pages = _num_leading(await self.store.exists(space, hashes))
        if num_pages * size < self._params.load_back_threshold:
            return
        fetch.slots = self._tiers.host.take(num_pages * size)
        num_pages = len(fetch.slots) // size
        num_read = 0
        for first, last in self._batches(num_pages):
            found = self._whole_pages(hashes[first:last], await self.store.get(space, hashes[first:last]))
            targets = (fetch.slots[first * size : (first + len(found)) * size : size] // size).tolist()
            if self._pool.pages is None:
                self._write(targets, found)
            else:
                await anyio.to_thread.run_sync(self._write, targets, found)
            num_read += len(found)
            if num_read < last:
                break
        while not fetch.stale and num_read:
            given = fetch.slots[: num_read * size]
            landed = self._core.insert_host(key, start, given)
            if landed.num_tokens or not self._tiers.backups.running:
                rest, fetch.slots = fetch.slots[num_read * size :], NO_SLOTS
                self._tiers.host.give_back(landed.unused)
                self._tiers.host.give_back(rest)
                self.num_fetched_tokens += landed.num_tokens
                return
            await self._tiers.wait_for_backup()  # of what stands above

    def _whole_pages(self, hashes: list[bytes], pages: list[bytes | None]) -> list[bytes]:
        """The pages up to the first that is not there, or is none of this pool's."""
        size = 0 if self._pool.pages is None else self._pool.page_bytes
        found: list[bytes] = []
        for page_hash, page in zip(hashes, pages, strict=False):
            if page is None:
                break
            if len(page) != size:
                error = StorageCorruptError(f"page {page_hash.hex()[:16]} has {len(page)} bytes and not {size}")
                self._faults.append(TierFault("get", error, self._page_size))
                break
            found.append(page)
        return found

    def _write(self, targets: list[int], pages: list[bytes]) -> None:
        for page_id, page in zip(targets, pages, strict=True):
            self._pool.set_page(page_id, page)

    # ---- down: from the host to the store ----

    def _on_landed(self, job: StoreJob, landed: Landed) -> None:
        """Tokens have reached the host: they are to be put into the store."""
        if not landed.num_tokens or not landed.last.node_id or self._tasks is None:
            return
        if self._num_held + landed.num_tokens > self._pool.num_slots // _MAX_HELD:
            self.num_skipped_tokens += landed.num_tokens
            return
        read = self._core.begin_read(landed.last, job.start)
        self._num_held += read.end - read.start
        self._puts.append(_Put(job.namespace, read, self._core.hashes_of(landed.last, job.start)))
        self._bell.set()

    def open(self, tasks: TaskGroup) -> None:
        """Begin: what reaches the host goes on to the store. Does not wait."""
        self._tasks = tasks
        self._bell, self._idle = anyio.Event(), anyio.Event()
        tasks.start_soon(self._run, name="aradix archive")

    async def _run(self) -> None:
        while True:
            await self._bell.wait()
            self._bell = anyio.Event()
            while self._puts:
                put = self._putting = self._puts.popleft()
                try:
                    await self._put(put)
                finally:
                    self._putting = None
                    self._end(put)
                    self._tiers.changed()
            self._idle.set()
            self._idle = anyio.Event()

    async def _put(self, put: _Put) -> None:
        size, space = self._page_size, self._space(put.namespace)
        page_ids = (put.read.host_slots[::size] // size).tolist()
        for first, last in self._batches(len(page_ids)):
            if self._pool.pages is None:  # it only keeps books, and there is nothing to copy
                pages = self._read(page_ids[first:last])
            else:
                pages = await anyio.to_thread.run_sync(self._read, page_ids[first:last])
            if put.stale:  # flushed since: it must not come after the clearing
                return
            stored = await self.store.put(space, put.hashes[first:last], pages)
            self.num_put_tokens += sum(stored) * size

    def _read(self, page_ids: list[int]) -> list[bytes]:
        return [self._pool.get_page(page_id) for page_id in page_ids]

    def _end(self, put: _Put) -> None:
        self._num_held -= put.read.end - put.read.start
        self._tiers.give_back(self._core.end_read(put.read.job_id))

    async def wait_idle(self) -> None:
        """Wait until all that has reached the host by now is in the store, or was refused there."""
        while self._puts or self._putting is not None:
            await self._idle.wait()

    # ---- clearing and closing ----

    def forget(self, is_concerned: Callable[[Namespace], bool]) -> None:
        """What is under way for some namespaces is of the past: it arrives nowhere."""
        waiting, self._puts = self._puts, deque()
        for put in waiting:
            if is_concerned(put.namespace):
                self._end(put)
            else:
                self._puts.append(put)
        for moving in (*self._fetches.values(), self._putting):
            if moving is not None and is_concerned(moving.namespace):
                moving.stale = True

    async def clear(self, namespace: Namespace | None) -> None:
        """Clear a namespace of the store, or all of this model and format. Waits for the store."""
        await self.store.clear(self._space(namespace))

    def close(self) -> None:
        """Begin nothing more, and put nothing more. What a task is at ends with its task."""
        self._tasks = None
        self.forget(lambda namespace: True)

    def take_faults(self) -> list[TierFault]:
        """What the store reports since the last call, and what was wrong with what it gave."""
        faults = [
            TierFault(fault.operation, fault.error, len(fault.hashes) * self._page_size)
            for fault in self.store.take_faults()
        ]
        faults += self._faults
        self._faults.clear()
        return faults

    def _batches(self, num_pages: int) -> Iterator[tuple[int, int]]:
        for first in range(0, num_pages, self._batch_pages):
            yield first, min(first + self._batch_pages, num_pages)


def _num_leading(present: list[bool]) -> int:
    return present.index(False) if False in present else len(present)
