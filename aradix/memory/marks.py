"""Marks: the events that limbo waits for, and the pool that makes them.

A mark is one recorded event and the batches that stand behind it. It outlives its event: once passed, the event may be
recorded again for somebody else, and the mark still reads as passed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from aradix.errors import TransferError, UsageError
from aradix.memory.fences import Event, EventFence, Stream, query_event, record_event

if TYPE_CHECKING:
    from aradix.memory.limbo import Batch

__all__ = ["EventPool", "Mark", "newest_per_stream"]

# How many idle events are kept per device. More are only ever in use at once when thousands of batches are in flight.
_IDLE_LIMIT = 1024


class Mark:
    """One recorded event on one stream. `number` orders the pool's own marks by the time they were recorded."""

    __slots__ = ("batches", "error", "event", "number", "passed", "stream")

    def __init__(self, event: Event, stream: Stream, number: int | None) -> None:
        self.event = event
        self.stream = stream
        self.number = number
        self.passed = False
        self.error: TransferError | None = None
        self.batches: list[Batch] = []

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "passed" if self.passed else "pending"
        return f"Mark({self.stream!r}, {self.number}, {state})"


class EventPool:
    """Makes recorded events out of `factory`, and uses passed ones again. Never waits."""

    __slots__ = ("_factory", "_idle", "_numbers")

    def __init__(self, factory: Callable[[], Any] | None) -> None:
        self._factory = factory
        # Per device: a CUDA event belongs to the device it was first recorded on.
        self._idle: dict[Any, list[Event]] = {}
        self._numbers = itertools.count()

    def require(self) -> None:
        """`UsageError` where there is nothing to make events with."""
        if self._factory is None:
            raise UsageError(
                "streams were named, but this allocator cannot make events for them "
                "(hint: pass event_factory=, or free without streams where the work is already done)"
            )

    def fresh(self, stream: Stream) -> Event:
        """A new event, recorded on `stream`, that never enters the pool. `TransferError` where that fails."""
        event = self._make()
        record_event(event, stream)
        return event

    def mark(self, stream: Stream) -> Mark:
        """A mark recorded on `stream` now. `TransferError` where that fails."""
        idle = self._idle.get(_device_of(stream))
        event = idle.pop() if idle else self._make()
        # An event whose record failed is dropped: nobody knows what it stands for.
        record_event(event, stream)
        return Mark(event, stream, next(self._numbers))

    def adopt(self, fence: EventFence) -> Mark:
        """A mark on the event of a recorded fence; that event stays the fence's own."""
        assert fence.stream is not None
        return Mark(fence.event, fence.stream, None)

    def poll(self, mark: Mark) -> bool:
        """Whether `mark` has passed now; its event, if the pool's own, is then free. Fails into `mark.error`."""
        try:
            mark.passed = query_event(mark.event)
        except TransferError as error:
            mark.error = error
            return False
        if mark.passed and mark.number is not None:
            idle = self._idle.setdefault(_device_of(mark.stream), [])
            if len(idle) < _IDLE_LIMIT:
                idle.append(mark.event)
        return mark.passed

    def _make(self) -> Event:
        self.require()
        assert self._factory is not None
        try:
            event: Event = self._factory()
        except Exception as error:
            raise TransferError(f"the event factory failed: {error}") from error
        return event


def newest_per_stream(marks: Iterable[Mark]) -> list[Mark]:
    """`marks` without those that a later one on the same stream stands for as well: streams run in order.

    The marks of callers' fences carry no number, so nothing is known of their order: all of them stay.
    """
    newest: dict[Stream, Mark] = {}
    kept: dict[Mark, None] = {}
    for mark in marks:
        if mark.number is None:
            kept[mark] = None
            continue
        other = newest.get(mark.stream)
        if other is None or other.number is None or mark.number > other.number:
            newest[mark.stream] = mark
    return [*newest.values(), *kept]


def _device_of(stream: Stream) -> Any:
    return getattr(stream, "device", None)
