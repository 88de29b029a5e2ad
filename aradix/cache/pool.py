"""`SlotPool`: the one door between a cache and its allocator.

All slots that the cache owns come in and go out here, so that `num_held` is a second count of what leases and the
tree hold, kept apart from them; the audit compares the two. Fences are made here as well.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from aradix.errors import AradixError, ConfigError, TransferError, UsageError
from aradix.tree.protocol import Freed, Ready, Slots

if TYPE_CHECKING:
    from aradix.cache.host_slots import HostSlots
    from aradix.memory.allocator import SlotAllocator
    from aradix.memory.fences import Fence

__all__ = ["SlotPool"]


class SlotPool:
    """A cache's part of a `SlotAllocator`. No call waits.

    Args:
        allocator: that the slots come from.
        streams: the engine's; slots without a known user retire behind all of them.
        on_failure: told when a fence could not be recorded, after the allocator has quarantined the slots.

    `is_busy` while the allocator works for this cache, so that news of it can be told from news of others.
    """

    # `num_held` stands where compiled code counts it; see `short_calls.py`.
    __slots__ = ("__dict__", "__weakref__", "num_held")

    def __init__(
        self, allocator: SlotAllocator, streams: tuple[Any, ...], on_failure: Callable[[BaseException], None]
    ) -> None:
        self.allocator = allocator
        self.streams = streams
        self.host: HostSlots | None = None
        """Where host slots go that the tree lets go; none where there is no host tier."""
        self.num_held = 0
        self.is_busy = False
        self._on_failure = on_failure
        self._sequence = count(1)
        self._pending: dict[Any, deque[Ready]] = {}
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        for stream in streams:
            try:
                self.check_stream(stream)
            except UsageError as error:
                raise ConfigError(f"streams: {error}") from error

    @property
    def capacity(self) -> int:
        """The most slots that one request can ever hold."""
        return self.allocator.usable_size()

    @property
    def num_coming(self) -> int:
        """Slots that are free, or will be once their fence has passed."""
        return self.allocator.available_size() + self.allocator.fenced_size()

    def take(self, num_slots: int, stream: Any) -> Slots | None:
        """So many slots (whole pages), or `None`, and then nothing was taken. A broken fence goes to `on_failure`."""
        was_busy, self.is_busy = self.is_busy, True
        try:
            slots = self.allocator.alloc_held(num_slots, stream)
        except TransferError as error:
            self._on_failure(error)
            return None
        finally:
            self.is_busy = was_busy
        if slots is not None:
            self.num_held += num_slots
        return slots

    def note_given(self, num_slots: int) -> None:
        """Slots of this cache came back by way of `SlotAllocator.table`."""
        self.num_held -= num_slots
        was_busy, self.is_busy = self.is_busy, True
        try:
            self.allocator.note_given()
        finally:
            self.is_busy = was_busy

    def adopt(self, slots: Slots) -> None:
        """Take over slots that a caller was handed out. UsageError if they are not his to give."""
        self.allocator.adopt(slots)
        self.num_held += len(slots)

    def disown(self, slots: Slots) -> None:
        """Undo an `adopt`: the slots are their caller's again."""
        self.num_held -= len(slots)
        self.allocator.disown(slots)

    def give_back(self, slots: Slots, streams: Collection[Any], fence: Fence | None = None) -> int:
        """Retire slots behind what these streams are doing now, and behind a fence; how many come back.

        Never raises: a failure, after which none do, goes to `on_failure`.
        """
        if not len(slots):
            return 0
        self.num_held -= len(slots)
        was_busy, self.is_busy = self.is_busy, True
        try:
            self.allocator.free_held(slots, tuple(streams), fence=fence)
        except Exception as error:
            self._on_failure(error)
            return 0
        finally:
            self.is_busy = was_busy
        return len(slots)

    def give_back_all(self, freed: Iterable[Freed], fence: Fence | None = None) -> int:
        """Retire what the tree let go, one batch for each set of streams; how many slots come back."""
        batches: dict[frozenset[Hashable], list[Slots]] = {}
        for one in freed:
            if self.host is not None and len(one.host_slots):
                self.host.give_back(one.host_slots, fence)
            batches.setdefault(one.streams, []).append(one.slots)
        total = 0
        for streams, parts in batches.items():
            slots = np.concatenate(parts) if len(parts) > 1 else parts[0]
            extra = (stream for stream in streams if stream not in self.streams)
            total += self.give_back(slots, (*self.streams, *extra), fence)
        return total

    def ready_after(self, streams: Iterable[Any]) -> tuple[Ready, ...]:
        """Events behind what these streams are doing now: when they pass, what was written so far can be read.

        Raises:
            TransferError: an event could not be recorded.
        """
        return tuple(self._record(stream) for stream in streams)

    def _record(self, stream: Any) -> Ready:
        ready = Ready(stream, self.allocator.record(stream), next(self._sequence))
        pending = self._pending.setdefault(stream, deque())
        pending.append(ready)
        # A stream is in order, so what passed stands in front; its event is let go wherever it is referred to.
        while pending and self._has_passed(pending[0]):
            pending.popleft()
        return ready

    def _has_passed(self, ready: Ready) -> bool:
        if ready.event is not None and self.allocator.passed(ready.event):
            ready.event = None
        return ready.event is None

    def check_stream(self, stream: Any) -> None:
        """Does not wait.

        Raises:
            UsageError: nothing can be fenced behind this stream, or ordered on it.
        """
        try:
            if hash(stream) is not None and stream in self._known:
                return
            self.allocator.record(stream)
            if not callable(getattr(stream, "wait_event", None)):
                raise UsageError("it has no wait_event()")
            self._known.add(stream)
        except (AradixError, TypeError) as error:
            raise UsageError(f"{stream!r} cannot be used as a stream here: {error}") from error

    def order_after(self, stream: Any, ready: Iterable[Ready]) -> None:
        """Make a stream wait, on the device, for what other streams write. The host does not wait.

        Raises:
            TransferError: it could not be made to.
        """
        for known in ready:
            if known.stream is stream or self._has_passed(known):
                continue
            try:
                stream.wait_event(known.event)
            except Exception as error:
                raise TransferError(f"{stream!r} could not be made to wait for {known.stream!r}: {error}") from error
