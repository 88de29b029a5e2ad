"""Transfer: batches of pages copied between the device and the host, on streams of their own.

A copy is ordered after the streams that wrote what it reads, and whoever reads what it writes is ordered after it; on
a device by events, so that the host waits for nothing. Source of the shape: SGLang's HiCache controller.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from aradix.errors import ConfigError, TransferError, UsageError
from aradix.memory.copiers import BookCopier, Copier, CudaCopier, Job
from aradix.memory.fences import Event, FutureFence, Stream, query_event, record_event
from aradix.memory.host_pool import HostKVPool
from aradix.memory.kv_pool import KVPool
from aradix.memory.lines import host_copier

__all__ = ["Copy", "Transfer"]

_log = logging.getLogger("aradix.memory")


class Copy:
    """A batch on its way. It has the shape of a future, so `FutureFence(copy)` retires slots behind it.

    No call waits but `synchronize`. Every call may come from any thread.
    """

    def __init__(self, transfer: Transfer, job: Job) -> None:
        self._transfer = transfer
        self._job = job
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Copy], object]] | None = []
        self._event: Any = None
        self._layer_events: list[Any] = []
        self._lost: TransferError | None = None
        self._error: TransferError | None = None

    # ---- how it went

    def done(self) -> bool:
        """Whether nothing touches the slots of either side any more: copied or failed. Raises where `is_lost`.

        Raises:
            TransferError: the device cannot be asked any more; the slots must never be used again.
        """
        if self._callbacks is not None:
            self._ask()
        if self._lost is not None:
            raise self._lost
        return self._callbacks is None

    @property
    def is_lost(self) -> bool:
        """Whether it will never be known when the copy ends: its event could not be recorded, or not be asked."""
        return self._lost is not None

    @property
    def error(self) -> TransferError | None:
        """What went wrong with all or a part of the batch, once it is done (or lost); else None."""
        if self._lost is not None:
            return self._lost
        if self._callbacks is None and self._error is None and self._job.cause is not None:
            job = self._job
            self._error = TransferError(
                f"{job.what} of {len(job.source_pages)} pages failed after {job.num_pages_done}: {job.cause}"
            )
            self._error.__cause__ = job.cause
        return self._error

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return len(self._job.source_pages) * self._job.source.page_size

    @property
    def num_tokens_done(self) -> int:
        """Once it is done: tokens from the first one on that were copied, all of them where there is no `error`."""
        return 0 if self._lost is not None else self._job.num_pages_done * self._job.source.page_size

    def add_done_callback(self, callback: Callable[[Copy], object]) -> None:
        """Calls `callback(copy)` once it is done or lost: on whatever thread sees it first, or now."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback(self)

    def fence(self) -> FutureFence:
        """A fence that passes when it is done; asking it raises `TransferError` where it is lost."""
        return FutureFence(self)

    # ---- who comes after it

    def wait_on(self, stream: Stream, layer: int | None = None) -> None:
        """Orders what comes next on `stream` after the copy, or after that of one layer (of a copy by layer).

        A copy that fails orders as well: look at `error` before what was computed from it is used.
        """
        if self._callbacks is not None or self._lost is not None:
            stream.wait_event(self._event_of(layer))

    def layer_done(self, layer: int) -> bool:
        """Whether one layer (of a copy by layer) is there, or failed."""
        return self._callbacks is None or query_event(self._event_of(layer))

    def synchronize(self, layer: int | None = None) -> None:
        """Blocks the calling thread until the copy, or that of one layer, is done: for worker threads only."""
        event = self._event_of(layer)
        if self._callbacks is not None:
            event.synchronize()

    def _event_of(self, layer: int | None) -> Any:
        if self._lost is not None:
            raise self._lost
        if layer is None:
            return self._event
        if not self._layer_events:
            raise UsageError("this copy does not go by layer (hint: load(..., by_layer=True))")
        return self._layer_events[self._job.source.check_layer(layer)]

    # ---- for Transfer

    def _ask(self) -> None:
        """Looks whether it is done, where nobody will call."""
        if self._event is None:
            return
        try:
            passed = query_event(self._event)
        except TransferError as error:
            self._finish(error)
        else:
            if passed:
                self._finish()

    def _finish(self, lost: TransferError | None = None) -> None:
        with self._lock:
            callbacks = self._callbacks
            if callbacks is None:
                return
            self._lost = lost  # before it reads as done
            self._callbacks = None
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                _log.exception("a callback of %r raised", self)
        self._transfer._finished(self)

    def __repr__(self) -> str:
        state = "lost" if self._lost else "under way" if self._callbacks is not None else "done"
        return f"<{self._job.what} of {self.num_tokens} tokens, {state}>"


class Transfer:
    """Copies pages between a device pool and a host pool; one stream for each direction.

    A call of `store` or `load` is one batch. Batches of one direction run in order. `on_done` is called, from whatever
    thread, when the first batch is done after `take_done()` was last called: once, however many follow.

    `store` and `load` come from one thread; no call waits but `close`.

    Args:
        copier: how the device copies; by default that of the pool's device. A virtual device brings its own.

    Raises:
        ConfigError: pools that do not fit together, or a device that needs a `copier`.
    """

    def __init__(
        self,
        kv_pool: KVPool,
        host_pool: HostKVPool,
        *,
        copier: Copier | None = None,
        on_done: Callable[[], object] | None = None,
    ) -> None:
        if kv_pool.format_id != host_pool.format_id:
            raise ConfigError(f"pages of {kv_pool.format_id} do not fit a host pool of {host_pool.format_id}")
        self.kv_pool = kv_pool
        self.host_pool = host_pool
        self.on_done = on_done
        self._copier = _copier_for(kv_pool) if copier is None else copier
        self.store_stream: Any = self._copier.new_stream("store")
        self.load_stream: Any = self._copier.new_stream("load")
        self._lock = threading.Lock()
        self._running: dict[Copy, None] = {}
        self._done: deque[Copy] = deque()
        self._closed = False

    def store(self, device_slots: Any, host_slots: Any, *, after: Iterable[Stream | Event] = ()) -> Copy:
        """Starts copying whole pages from the device to the host, in token order.

        Args:
            device_slots: int64, runs of whole pages, pinned or retired behind the copy until it is done.
            host_slots: int64, as many.
            after: the streams that wrote the pages, as they are now, or events recorded behind those writes.

        Raises:
            UsageError: slots that are no whole pages, not as many, or the transfer is closed. Nothing was started.
            TransferError: an event could not be recorded, and nothing was started.
        """
        source, target = self.kv_pool.page_ids(device_slots), self.host_pool.page_ids(host_slots)
        return self._start(Job(self.kv_pool, self.host_pool, source, target, "store"), self.store_stream, after, False)

    def load(
        self, host_slots: Any, device_slots: Any, *, after: Iterable[Stream | Event] = (), by_layer: bool = False
    ) -> Copy:
        """Starts copying whole pages from the host to the device, in token order.

        Take the device slots with `alloc(n, stream=transfer.load_stream)`: then the copy is behind whoever used them
        before. Order readers behind it with `copy.wait_on(stream)`.

        Args:
            host_slots: int64, runs of whole pages, kept until the copy is done.
            device_slots: int64, as many.
            after: streams, as they are now, or events that the copy must follow.
            by_layer: copy layer after layer, so that `copy.wait_on(stream, layer)` lets a reader start with the
                first. A page counts as done once its last layer is.

        Raises:
            UsageError: slots that are no whole pages, not as many, or the transfer is closed. Nothing was started.
            TransferError: an event could not be recorded, and nothing was started.
        """
        source, target = self.host_pool.page_ids(host_slots), self.kv_pool.page_ids(device_slots)
        return self._start(Job(self.host_pool, self.kv_pool, source, target, "load"), self.load_stream, after, by_layer)

    @property
    def needs_polling(self) -> bool:
        """Whether the device calls nobody, so that somebody has to `poll`."""
        return self._copier.needs_polling

    def num_running(self) -> int:
        """Batches that are not known to be done."""
        return len(self._running)

    def poll(self) -> None:
        """Looks which batches are done, on devices that call nobody."""
        if self._copier.needs_polling:
            with self._lock:
                running = tuple(self._running)
            for copy in running:
                copy._ask()

    def take_done(self) -> list[Copy]:
        """The batches that ended since the last call, in the order in which they did; polls first."""
        self.poll()
        with self._lock:
            done, self._done = list(self._done), deque()
        return done

    def close(self) -> None:
        """Ends the threads, if there are any; blocks until what was started is done. Twice is once."""
        self._closed = True
        for stream in (self.store_stream, self.load_stream):
            if hasattr(stream, "close"):
                stream.close()
        self._copier.close()

    def _start(self, job: Job, stream: Any, after: Iterable[Stream | Event], by_layer: bool) -> Copy:
        if self._closed:
            raise UsageError(f"a {job.what} was asked of a transfer that is closed")
        if len(job.source_pages) != len(job.target_pages):
            raise UsageError(f"{len(job.source_pages)} pages do not fit into {len(job.target_pages)}")
        if not job.source_pages:
            raise UsageError(f"a {job.what} of no pages")
        for point in after:
            self._order(stream, point)
        copy = Copy(self, job)
        self._running[copy] = None
        try:
            for layer in range(job.source.num_layers) if by_layer else (None,):
                try:
                    if job.cause is None:
                        self._copier.launch(stream, job, layer)
                except Exception as error:
                    job.cause = error
                if layer is not None:
                    copy._layer_events.append(self._record(stream))
            copy._event = copy._layer_events[-1] if by_layer else self._record(stream)
            if not self._copier.needs_polling:
                self._copier.when_done(copy._event, lambda _: copy._ask())
        except TransferError as error:
            copy._finish(error)
        return copy

    def _order(self, stream: Any, point: Any) -> None:
        """Has `stream` wait for an event, or for what another stream was given so far."""
        stream.wait_event(self._record(point) if hasattr(point, "wait_event") else point)

    def _record(self, stream: Any) -> Any:
        try:
            event = self._copier.new_event()
        except Exception as error:
            raise TransferError(f"no event for a copy: {error}") from error
        record_event(event, stream)
        return event

    def _finished(self, copy: Copy) -> None:
        with self._lock:
            self._running.pop(copy, None)
            self._done.append(copy)
            first = len(self._done) == 1
        if first and self.on_done is not None:
            self.on_done()


def _copier_for(kv_pool: KVPool) -> Copier:
    if kv_pool.pages is None:
        return BookCopier()
    if kv_pool.device.type == "cuda":
        return CudaCopier(kv_pool.device)
    if kv_pool.device.type == "cpu":
        return host_copier()
    raise ConfigError(f"no copies for device {kv_pool.device} (hint: give Transfer a copier=)")
