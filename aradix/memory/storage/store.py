"""BackedStore: the async shell around a blocking backend, the same for every kind of store.

The backend knows names and bytes. The shell frames and checks pages, runs the backend in worker threads of its own
limit, gives up on it in time, and turns whatever goes wrong into a miss, a fault and a counter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from aradix.errors import ConfigError, StorageCorruptError, TierError, UsageError
from aradix.memory.storage.breaker import Breaker
from aradix.memory.storage.clear_gate import ClearGate, Ticket
from aradix.memory.storage.frame import pack, unpack
from aradix.memory.storage.protocol import PageSpace, StoreFault, StoreStats

__all__ = ["BackedStore", "Backend"]

_log = logging.getLogger("aradix.memory")
_T = TypeVar("_T")

_MAX_FAILURES = 3
_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_MAX_FAULTS = 1000


class Backend(Protocol):
    """A store that blocks, called from several threads at a time. What it cannot do raises `TierError`.

    Names are hex digits and slashes; a prefix ends with a slash.
    """

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which names are there."""
        ...

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """What is stored under each name."""
        ...

    def put(self, names: Sequence[str], frames: Sequence[bytes]) -> list[bool]:
        """Stores each frame whole or not at all; False where there is no room."""
        ...

    def delete(self, names: Sequence[str], *, force: bool = False) -> list[bool]:
        """Deletes; False for what is refused because it is being read, unless forced."""
        ...

    def clear(self, prefix: str) -> None:
        """Deletes all names that start with `prefix`, whoever reads them."""
        ...

    def close(self) -> None:
        """Gives up what it holds. Twice is once."""
        ...


class BackedStore:
    """A `PageStore` over a `Backend`. Belongs to one event loop at a time; see `PageStore` for its calls.

    Args:
        name: for messages.
        timeout_s: after which a call is given up; its thread may go on for as long as the backend's own limits allow.
        num_threads: the most that work for this store at a time.
        clock: seconds; for the pauses between tries of a store that does not answer.

    Raises:
        ConfigError: a timeout or a number of threads that is not above 0.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        *,
        timeout_s: float = 2.0,
        num_threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be above 0, got {timeout_s!r}")
        if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
            raise ConfigError(f"num_threads must be an int of at least 1, got {num_threads!r}")
        self.name = name
        self._backend = backend
        self._timeout_s = timeout_s
        self._num_threads = num_threads
        self._breaker = Breaker(_MAX_FAILURES, _RETRY_S, _MAX_RETRY_S, clock)
        self._lock = threading.Lock()
        self._stats = StoreStats()
        self._faults: deque[StoreFault] = deque(maxlen=_MAX_FAULTS)
        self._told_full = False
        self._gate = ClearGate(backend.clear)
        self._places: anyio.CapacityLimiter | None = None
        self._places_token: object = None
        self._given_up: set[_Job[Any]] = set()
        self._closed = False

    async def exists(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bool]:
        """As `PageStore.exists`. Waits for a thread, `timeout_s` at most."""
        names = _names(space, hashes)
        return await self._call("exists", space, hashes, partial(self._backend.exists, names), [False] * len(names))

    async def get(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bytes | None]:
        """As `PageStore.get`. Waits for a thread, `timeout_s` at most."""
        names = _names(space, hashes)
        missing: list[bytes | None] = [None] * len(names)
        pages = await self._call("get", space, hashes, partial(self._get, hashes, names), missing)
        found = [page for page in pages if page is not None]
        self._count(hits=len(found), misses=len(pages) - len(found), bytes_read=sum(map(len, found)))
        return pages

    async def put(self, space: PageSpace, hashes: Sequence[bytes], pages: Sequence[bytes]) -> list[bool]:
        """As `PageStore.put`. Waits for a thread, `timeout_s` at most."""
        names = _names(space, hashes)
        if len(pages) != len(names):
            raise UsageError(f"{len(pages)} pages for {len(names)} hashes")
        for page in pages:
            if not isinstance(page, bytes):
                raise UsageError(
                    f"a page to store is bytes, which nobody can change meanwhile, not {type(page).__name__}"
                )
        # Taken now: a clear from here on is later than this put.
        ticket = self._gate.ticket(space.prefix())
        step = partial(self._put, ticket, hashes, names, pages)
        stored = await self._call("put", space, hashes, step, [False] * len(names), ticket)
        written = sum(len(page) for page, done in zip(pages, stored, strict=True) if done)
        self._count(stored=sum(stored), bytes_written=written)
        return stored

    async def delete(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bool]:
        """As `PageStore.delete`. Waits for a thread, `timeout_s` at most."""
        names = _names(space, hashes)
        return await self._call("delete", space, hashes, partial(self._backend.delete, names), [False] * len(names))

    async def clear(self, space: PageSpace) -> bool:
        """As `PageStore.clear`. Waits for a thread, `timeout_s` at most."""
        self._gate.close(space.prefix())
        return await self._call("clear", space, (), lambda: True, False)

    def take_faults(self) -> list[StoreFault]:
        """As `PageStore.take_faults`. Does not wait."""
        with self._lock:
            faults = list(self._faults)
            self._faults.clear()
        return faults

    def stats(self) -> StoreStats:
        """As `PageStore.stats`. Does not wait."""
        with self._lock:
            return replace(self._stats, is_reachable=not self._breaker.is_open)

    async def aclose(self) -> None:
        """Gives up what the backend holds; later calls find nothing. Waits `timeout_s` at most. Twice is once."""
        if not self._closed:
            self._closed = True
            with anyio.move_on_after(self._timeout_s), suppress(TierError):
                await anyio.to_thread.run_sync(self._backend.close, abandon_on_cancel=True)

    # ---- a call

    async def _call(
        self,
        operation: str,
        space: PageSpace,
        hashes: Sequence[bytes],
        step: Callable[[], _T],
        otherwise: _T,
        ticket: Ticket | None = None,
    ) -> _T:
        """Runs `step` in a worker thread; `otherwise` where the store is closed, or does not answer (in time)."""
        if self._closed or not (hashes or operation == "clear"):
            return otherwise
        if not self._breaker.allows():
            self._count(skipped_calls=1)
            if operation == "clear":  # not a miss like any other: somebody may have to be told
                late = TierError(f"{self.name} is left alone for a while, and has not heard yet of what was cleared")
                self._fault(operation, late, ())
            return otherwise
        try:
            with anyio.fail_after(self._timeout_s):
                result = await self._in_thread(partial(self._gate.run, space.prefix(), step, ticket))
        except TimeoutError:
            self._failed(operation, hashes, TierError(f"{self.name}: no answer to {operation} in {self._timeout_s} s"))
            return otherwise
        except TierError as error:
            self._failed(operation, hashes, error)
            return otherwise
        if self._breaker.succeeded():
            _log.info("%s answers again", self.name)
        return result

    async def _in_thread(self, step: Callable[[], _T]) -> _T:
        """Runs `step` in one of the store's threads. A thread that is given up counts until it ends."""
        token: Any = anyio.lowlevel.current_token()
        if self._places is None or self._places_token != token:
            self._places, self._places_token = anyio.CapacityLimiter(self._num_threads), token
            self._given_up.clear()
        places = self._places
        for job in [job for job in self._given_up if not job.runs]:
            self._given_up.discard(job)
            places.release_on_behalf_of(job)
        if len(self._given_up) == self._num_threads:
            raise TierError(f"{self.name}: all {self._num_threads} threads wait for answers that come too late")
        job = _Job(step)
        await places.acquire_on_behalf_of(job)
        try:
            # A limit of run_sync would be given back here on asyncio, though the thread goes on.
            return await anyio.to_thread.run_sync(job.run, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        finally:
            if job.leave():
                self._given_up.add(job)
            else:
                places.release_on_behalf_of(job)

    def _get(self, hashes: Sequence[bytes], names: list[str]) -> list[bytes | None]:
        pages: list[bytes | None] = []
        for page_hash, name, frame in zip(hashes, names, self._backend.get(names), strict=True):
            try:
                pages.append(None if frame is None else unpack(name, frame))
            except StorageCorruptError as error:
                pages.append(None)
                self._count(corrupt=1)
                self._fault("get", error, (page_hash,))
                # Else some stores would keep it for ever: the first to write a name wins there.
                self._backend.delete([name], force=True)
        return pages

    def _put(self, ticket: Ticket, hashes: Sequence[bytes], names: list[str], pages: Sequence[bytes]) -> list[bool]:
        if ticket.is_stale:
            return [False] * len(names)  # cleared since: what was to be put is of the past
        stored = self._backend.put(names, [pack(name, page) for name, page in zip(names, pages, strict=True)])
        refused = tuple(page_hash for page_hash, done in zip(hashes, stored, strict=True) if not done)
        if refused:
            self._count(refused=len(refused))
            self._fault("put", TierError(f"{self.name} has no room for {len(refused)} pages"), refused)
            with self._lock:
                first, self._told_full = not self._told_full, True
            if first:
                _log.warning("%s has no room for more pages; they are not stored (said once)", self.name)
        return stored

    # ---- what went wrong

    def _failed(self, operation: str, hashes: Sequence[bytes], error: TierError) -> None:
        self._count(failed_calls=1)
        self._fault(operation, error, tuple(hashes))
        if self._breaker.failed():
            _log.warning("%s does not answer, so it is left alone for a while: %s", self.name, error)

    def _fault(self, operation: str, error: TierError, hashes: tuple[bytes, ...]) -> None:
        with self._lock:
            self._faults.append(StoreFault(operation, error, hashes))

    def _count(self, **more: int) -> None:
        with self._lock:
            stats = self._stats
            self._stats = replace(stats, **{name: getattr(stats, name) + n for name, n in more.items()})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class _Job(Generic[_T]):
    """One call in a worker thread. `runs`: the thread has begun and not ended."""

    def __init__(self, step: Callable[[], _T]) -> None:
        self._step = step
        self._lock = threading.Lock()
        self._left = False
        self.runs = False

    def run(self) -> _T:
        """In the thread."""
        with self._lock:
            if self._left:
                raise TierError("the caller left before a thread began")
            self.runs = True
        try:
            return self._step()
        finally:
            self.runs = False

    def leave(self) -> bool:
        """The caller has an answer, or waits no more; whether the thread runs all the same."""
        with self._lock:
            self._left = True
            return self.runs


def _names(space: PageSpace, hashes: Sequence[bytes]) -> list[str]:
    if space.namespace is None:
        raise UsageError("pages are of one namespace; only clear() takes all of them")
    prefix = space.prefix()
    return [prefix + page_hash.hex() for page_hash in hashes]
