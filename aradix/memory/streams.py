"""Streams and events of the host: what torch's are on CUDA, on a thread, or at once.

With these one `Transfer` serves every device: on a CPU a copy is a step on a `HostStream`.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from aradix.errors import UsageError

__all__ = ["HostEvent", "HostStream", "InlineStream", "Marker", "Steps", "call_back"]

_log = logging.getLogger("aradix.memory")

_Step = Callable[[], object]


class Steps(Protocol):
    """A queue of what a stream was given; None is its end."""

    def put(self, step: _Step | None, /) -> None:
        """Queues a step, from any thread."""
        ...

    def get(self) -> _Step | None:
        """The next step, for the thread of the stream; blocks until there is one."""
        ...


def call_back(marker: Any, callbacks: Iterable[Callable[[Any], object]]) -> None:
    """Tells that a marker is reached."""
    for callback in callbacks:
        try:
            callback(marker)
        except Exception:
            _log.exception("a callback of a marker raised")


class Marker:
    """A point that is reached once, in the shape of a future; a `Future` does the same in several times the time."""

    __slots__ = ("_callbacks", "_done", "_gate", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        self._gate.acquire()
        self._done = False
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        """Whether it is reached."""
        return self._done

    def reach(self) -> None:
        """Says that it is reached, once."""
        with self._lock:
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
        self._gate.release()
        call_back(self, callbacks)

    def wait(self) -> None:
        """Blocks the calling thread until it is reached."""
        if not self._done:
            self._gate.acquire()
            self._gate.release()  # lets the next one through

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Calls `callback(anything)` once it is reached: on the thread that says so, or now."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)


class HostStream:
    """An in-order queue of steps on a thread of its own, which starts with the first step. No call but `close` waits.

    A step that raises is logged and the next one runs: what depends on it must look for itself.
    """

    def __init__(self, name: str = "aradix stream", steps: Steps | None = None) -> None:
        self.name = name
        self._steps: Steps = queue.SimpleQueue() if steps is None else steps
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        # A stream that is dropped unclosed takes its thread along: the thread knows the queue, never the stream.
        self._finalizer = weakref.finalize(self, self._steps.put, None)

    def launch(self, step: _Step) -> None:
        """Queues `step` behind all that this stream was given. `UsageError` once it is closed."""
        self._queue(self._steps.put, step)

    def _queue(self, put: Callable[..., None], *what: Any) -> None:
        """Has `put` queue something, the thread being there."""
        with self._lock:
            if self._closed:
                raise UsageError(f"{self.name} is closed")
            if self._thread is None:
                self._start()
            put(*what)

    def _start(self) -> None:
        thread = threading.Thread(target=_run, args=(self._steps,), name=self.name, daemon=True)
        thread.start()
        self._thread = thread  # only now: where it cannot be started, the next step tries again

    def mark(self) -> Marker:
        """A point that is reached once all that this stream was given so far has run."""
        marker = Marker()
        self.launch(marker.reach)
        return marker

    def wait_event(self, event: HostEvent) -> None:
        """Orders what comes next on this stream after the event's last record; nothing where that is reached."""
        marker = event.marker
        if not marker.done():
            self.launch(marker.wait)

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Records `event`, or a new one, and returns it."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether nothing is queued or running."""
        return self._thread is None or self.mark().done()

    def synchronize(self) -> None:
        """Blocks the calling thread until all that was queued so far has run."""
        if self._thread is not None:
            self.mark().wait()

    def close(self) -> None:
        """Runs what is queued, ends the thread and waits for it. Twice is once."""
        with self._lock:
            self._closed = True
            self._finalizer()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __repr__(self) -> str:
        return f"HostStream({self.name!r})"


class InlineStream:
    """A stream on which each step runs at once, in the calling thread: for books and simulations."""

    def launch(self, step: _Step) -> None:
        """Runs `step`."""
        step()

    def mark(self) -> Marker:
        """A point that is reached."""
        marker = Marker()
        marker.reach()
        return marker

    def wait_event(self, event: HostEvent) -> None:
        """Nothing, where the event is reached; `UsageError` where it is not: waiting would stop the caller."""
        if not event.marker.done():
            raise UsageError("an inline stream cannot wait for what another thread has yet to do")

    def close(self) -> None:
        """Nothing: there is no thread."""


class HostEvent:
    """A point in the order of a `HostStream`. Never recorded, it has not been reached."""

    __slots__ = ("_marker",)

    def __init__(self) -> None:
        self._marker: Marker | None = None

    @property
    def marker(self) -> Marker:
        """The point of the last record. `UsageError` where there was none."""
        if self._marker is None:
            raise UsageError("this event was never recorded: there is nothing to wait for")
        return self._marker

    def record(self, stream: HostStream | InlineStream) -> None:
        """Stands from now on for all that `stream` was given so far."""
        self._marker = stream.mark()

    def query(self) -> bool:
        """Whether the point is reached; False without a record."""
        return self._marker is not None and self._marker.done()

    def wait(self, stream: Any) -> None:
        """Has `stream` wait for this event."""
        stream.wait_event(self)

    def synchronize(self) -> None:
        """Blocks the calling thread until the point is reached."""
        self.marker.wait()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Calls `callback(anything)` once the point is reached: on the stream's thread, or now if it has been."""
        self.marker.add_done_callback(callback)


def _run(steps: Steps) -> None:
    while (step := steps.get()) is not None:
        try:
            step()
        except Exception:
            _log.exception("a step on a stream raised")
        del step
