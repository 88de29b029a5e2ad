"""Fences: what must have happened before retired slots may be handed out again.

A fence answers one question, `passed()`, without waiting. The answer may go from False to True and never back.
Streams and events are duck-typed after torch, so that any device, a virtual one too, can stand behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from aradix.errors import TransferError, UsageError

__all__ = [
    "CudaFence",
    "Event",
    "EventFence",
    "Fence",
    "FutureFence",
    "ReadyFence",
    "Stream",
    "query_event",
    "record_event",
]


class Event(Protocol):
    """A point in the order of a stream: `torch.cuda.Event`, or anything of its shape."""

    def record(self, stream: Any, /) -> object: ...

    def query(self) -> bool: ...


class Stream(Protocol):
    """An in-order queue of device work: `torch.cuda.Stream`, or anything of its shape. Must be hashable."""

    def wait_event(self, event: Any, /) -> object: ...


@runtime_checkable
class Fence(Protocol):
    """Anything with `passed()`.

    A fence that can say when it completes also has `add_done_callback(callback)`: it calls `callback(anything)` once,
    on any thread, at once where it has completed already.
    """

    def passed(self) -> bool: ...


class ReadyFence:
    """The fence that has passed: nothing touches the slots any more. Does not wait."""

    __slots__ = ()

    def passed(self) -> bool:
        """True."""
        return True

    def __repr__(self) -> str:
        return "ReadyFence()"


class EventFence:
    """An event recorded on a stream: passes when the stream has done all that was queued on it before. Does not wait.

    With a `stream`, the event is recorded now; without one, `record` must follow before the fence is of use. The event
    then belongs to the fence: recording it again elsewhere would overwrite what the fence stands for. Raises
    `TransferError` where the event cannot be recorded.
    """

    __slots__ = ("_passed", "event", "stream")

    def __init__(self, event: Event, stream: Stream | None = None) -> None:
        self.event = event
        self.stream: Stream | None = None
        self._passed = False
        if stream is not None:
            self.record(stream)

    @property
    def recorded(self) -> bool:
        """Whether a record succeeded."""
        return self.stream is not None

    def record(self, stream: Stream) -> None:
        """Records the event on `stream`, once. `UsageError` for a second time; `TransferError` if the record fails."""
        if self.stream is not None:
            raise UsageError(
                "this fence is already recorded; recording its event again would overwrite what it stands for "
                "(hint: make a new fence)"
            )
        record_event(self.event, stream)
        self.stream = stream

    def passed(self) -> bool:
        """Whether the recorded point is reached; False without a successful record, whatever the event itself says."""
        if not self._passed and self.stream is not None:
            self._passed = query_event(self.event)
        return self._passed

    def __repr__(self) -> str:
        return f"EventFence({self.event!r}, {self.stream!r})"


# The same object serves every device that has events; the name says what it stands for on CUDA.
CudaFence = EventFence


class FutureFence:
    """A copy that runs in a thread, or in a network card, seen through its future. Does not wait.

    `future` is a `concurrent.futures.Future` or anything with `done()` and `add_done_callback()`. The fence passes when
    the future is done in any way: with a result, with an error or cancelled. So the future must not be done while
    anything still touches the slots: give the future of the copy itself, not one that only waits for it.
    """

    __slots__ = ("_future",)

    def __init__(self, future: Any) -> None:
        for name in ("done", "add_done_callback"):
            if not callable(getattr(future, name, None)):
                raise UsageError(f"a FutureFence needs a future with {name}(), not {type(future).__name__}")
        self._future = future

    def passed(self) -> bool:
        """Whether the future is done."""
        return bool(self._future.done())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls `callback(future)` once the future is done, where the future calls its callbacks."""
        self._future.add_done_callback(callback)

    def __repr__(self) -> str:
        return f"FutureFence({self._future!r})"


def record_event(event: Event, stream: Stream) -> None:
    """Records `event` on `stream` and makes sure that it took. `TransferError` if not. Does not wait for the stream."""
    try:
        event.record(stream)
    except Exception as error:
        raise TransferError(f"an event could not be recorded on {stream!r}: {error}") from error
    if _is_hollow(event):
        raise TransferError(f"recording {event!r} on {stream!r} did nothing (hint: is the accelerator available?)")


def query_event(event: Event) -> bool:
    """Whether the point that `event` stands for is reached. `TransferError` where it cannot be asked. Does not wait."""
    if _is_hollow(event):
        raise TransferError(f"{event!r} stands for nothing: it was never recorded on a device")
    try:
        return bool(event.query())
    except Exception as error:
        raise TransferError(f"an event could not be queried: {error}") from error


def _is_hollow(event: Event) -> bool:
    """Whether torch would answer `query()` with True though the event was never recorded on a device."""
    # torch.cuda.Event makes its handle at the first record. (It may be a torch.Event as well: ask this first.)
    if isinstance(event, torch.cuda.Event):
        return not event.cuda_event
    # torch.Event() without an accelerator silently becomes a cpu event, which nothing can record.
    if isinstance(event, torch.Event):
        return event.device is None or event.device.type == "cpu"
    return False
