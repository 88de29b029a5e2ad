"""Copies of the host that need no GIL: the compiled twin of `HostCopier`, where the core is compiled.

A thread in Python needs the GIL after each copy to take the next one, and beside a busy loop it gets it when the
interpreter's interval of 5 ms ends. Here a stream is a compiled queue. One thread does what is queued, copies and the
marks behind them, without Python; a second one tells who wants to know of the marks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from aradix.memory.copiers import HostCopier, Job, as_words
from aradix.memory.kv_pool import KVPool
from aradix.memory.streams import HostStream, call_back

try:
    from aradix import _native
except ImportError:  # not compiled, or it does not load; `aradix.tree` says so
    _native = None  # type: ignore[assignment]

__all__ = ["LineStream", "NativeCopier", "host_copier"]

if _native is not None:

    class _LineMarker(_native.Marker):
        """As `Marker`, but reached without the GIL."""

        __slots__ = ()

        def add_done_callback(self, callback: Callable[[Any], object]) -> None:
            """Calls `callback(anything)` once it is reached: on a thread of the stream, or now."""
            if not self.add(callback):
                callback(self)

        def wait(self) -> None:
            """Blocks the calling thread until it is reached."""
            if self.done():
                return
            gate = threading.Lock()
            gate.acquire()
            self.add_done_callback(lambda _: gate.release())
            gate.acquire()


class _Line:
    """A compiled queue, in the shape of the one in Python."""

    def __init__(self) -> None:
        self._line = line = _native.CopyLine()
        self.put = line.put
        self.put_copy = line.put_copy
        self.put_mark = line.put_mark
        self.get = functools.partial(_native.run_line, line)
        self.next_reached = functools.partial(_native.next_reached, line)


def _tell(line: _Line) -> None:
    while (marker := line.next_reached()) is not None:
        call_back(marker, marker.take())
        del marker


class LineStream(HostStream):
    """A `HostStream` that copies pages, and reaches marks, without the GIL. Callbacks come on a thread of their own."""

    def __init__(self, name: str = "aradix stream") -> None:
        self._line = _Line()
        self._teller: threading.Thread | None = None
        super().__init__(name, self._line)

    def _start(self) -> None:
        if self._teller is None:  # else it is there, and the other one could not be started
            teller = threading.Thread(target=_tell, args=(self._line,), name=f"{self.name} told", daemon=True)
            teller.start()
            self._teller = teller
        super()._start()

    def launch_copy(self, views: _native.PageViews, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        """Queues the copy of pages. `UsageError` once the stream is closed, `IndexError` for pages that are none."""
        self._queue(self._line.put_copy, views, source_pages, target_pages)

    def mark(self) -> Any:
        """As `HostStream.mark`."""
        marker = _LineMarker()
        self._queue(self._line.put_mark, marker)
        return marker

    def close(self) -> None:
        """As `HostStream.close`; who was to be told of what ran has been told."""
        super().close()
        if self._thread is None and self._teller is not None:
            self._line.get()  # the end, which nobody else would come to
        if self._teller is not None and self._teller is not threading.current_thread():
            self._teller.join()


class NativeCopier(HostCopier):
    """As `HostCopier`, on compiled streams."""

    def __init__(self) -> None:
        super().__init__()
        # As the views of `HostCopier`.
        self._pairs: dict[tuple[int, int, int | None], tuple[KVPool, KVPool, _native.PageViews]] = {}

    def new_stream(self, name: str) -> LineStream:
        """A stream with threads of its own."""
        return LineStream(f"aradix {name}")

    def launch(self, stream: Any, job: Job, layer: int | None) -> None:
        """Queues the copy, which cannot fail."""
        key = (id(job.source), id(job.target), layer)
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._pairs[key] = (job.source, job.target, _native.PageViews(*as_words(job, layer)))
        stream.launch_copy(pair[2], job.source_pages, job.target_pages)
        if layer is None or layer == job.source.num_layers - 1:
            job.num_pages_done = len(job.source_pages)


def host_copier() -> HostCopier:
    """The copier between pools in host memory, the compiled one where it is there."""
    return HostCopier() if _native is None else NativeCopier()
