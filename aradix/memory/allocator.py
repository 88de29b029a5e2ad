"""SlotAllocator: hands out KV slots by whole pages, and takes them back behind fences.

A slot that a stream may still touch is *retired*, not free: it waits in limbo behind an event. It may go early to a
stream that is ordered after that use (stream-ordered allocation, as RMM's pools do it); the host never waits.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from operator import index
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from aradix.errors import ConfigError, DoubleFreeError, TransferError, UsageError
from aradix.memory.audit import audit_pages
from aradix.memory.carry import CarryTable
from aradix.memory.fences import Event, EventFence, Fence, ReadyFence, Stream, query_event
from aradix.memory.limbo import Limbo, Pages
from aradix.memory.listeners import Listeners
from aradix.memory.marks import EventPool, Mark, newest_per_stream
from aradix.memory.page_table import (
    HELD,
    OUT,
    PLACES,
    QUARANTINED,
    RETIRED,
    RETIRING,
    PageTable,
    Slots,
    make_page_table,
)
from aradix.memory.pages import PageReader
from aradix.memory.sizes import Sizes

__all__ = ["SlotAllocator"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Self = TypeVar("_Self", bound="SlotAllocator")


class _Return:
    """Pages given to `retire`, on their way to limbo. `deferred`: nobody is there to hear how it went."""

    __slots__ = ("deferred", "error", "fence", "pages", "streams")

    def __init__(self, pages: Pages, streams: tuple[Stream, ...], fence: Fence | None, deferred: bool) -> None:
        self.pages = pages
        self.streams = streams
        self.fence = fence
        self.deferred = deferred
        self.error: TransferError | None = None


def _step(method: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Makes a method one step: alone under the lock, after what was retired meanwhile, listeners called at its end."""

    @functools.wraps(method)
    def step(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            with self._lock:
                if self._busy:
                    raise UsageError(
                        f"{method.__name__}() was called in the middle of another call of the same allocator, from an "
                        "event or a finaliser (hint: retire() is safe there)"
                    )
                self._busy, self._table.quiet = True, False
                try:
                    if self._returned:
                        self._drain()
                    return method(self, *args, **kwargs)
                finally:
                    # What a finaliser retires from here on says so itself.
                    self._table.quiet = not (self._limbo.num_pages or self._carry)
                    self._busy = False
                    if self._returned:
                        self._table.quiet = False
        finally:
            # Whoever is in the middle of a step calls the listeners at its end.
            if self._listeners.changed and not self._busy:
                self._listeners.notify()

    return step


class SlotAllocator(Sizes):
    """A pool of `num_slots` KV slots in pages of `page_size`; hands out whole pages, all that is asked for or nothing.

    Page k holds slots k*P .. k*P+P-1. Page 0 is padding on top of the pool, so the slots run P .. num_slots+P-1.
    `event_factory` makes the events that stand behind retired slots (default: `torch.cuda.Event` on CUDA, none
    elsewhere). Raises `ConfigError`. No call waits; every call may come from any thread, and `retire` from
    finalisers too.
    """

    def __init__(
        self,
        num_slots: int,
        page_size: int = 1,
        device: str | torch.device = "cpu",
        event_factory: Callable[[], Any] | None = None,
    ) -> None:
        self._page_size = _positive("page_size", page_size)
        self._num_slots = _positive("num_slots", num_slots)
        if self._num_slots % self._page_size:
            raise ConfigError(f"num_slots={num_slots} is not a multiple of page_size={page_size}")
        num_pages = self._num_slots // self._page_size
        if num_pages >= np.iinfo(np.int32).max:
            raise ConfigError(f"num_slots={num_slots} makes {num_pages} pages; page ids are int32")
        try:
            self._device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device={device!r} is no torch device: {error}") from error
        if event_factory is None and self._device.type == "cuda":
            if not torch.cuda.is_available():
                raise ConfigError(f"device={device!r}, but CUDA is not available (hint: pass event_factory=)")
            event_factory = torch.cuda.Event
        if event_factory is not None and not callable(event_factory):
            raise ConfigError(f"event_factory={event_factory!r} cannot be called")
        self._events = EventPool(event_factory)
        self._table = make_page_table(num_pages, self._page_size)
        self._pages = PageReader(self._table)
        self._limbo = Limbo(self._events)
        self._carry = CarryTable(num_pages)
        # Reentrant only so that a finaliser may retire() in the middle of a step; `_busy` refuses all else.
        self._lock = threading.RLock()
        self._busy = False
        self._returned: deque[_Return] = deque()
        self._unreported: TransferError | None = None
        self._listeners = Listeners()

    # ---- what it is

    @property
    def num_slots(self) -> int:
        """Slots in the pool, without the padding page."""
        return self._num_slots

    @property
    def page_size(self) -> int:
        """Slots in a page."""
        return self._page_size

    @property
    def device(self) -> torch.device:
        """The device whose memory the slots index; the slots themselves are CPU tensors."""
        return self._device

    # ---- the caller's side

    def alloc(self, n: int, stream: Stream | None = None, host_visible: bool = False) -> torch.Tensor | None:
        """`n` slots as an int64 CPU tensor, or None where so many cannot be had now. Does not wait.

        Pages whose fence has passed go first. With a `stream`, the pages that only this stream still uses follow, and
        then other retired pages once the stream (not the host) was made to wait for their events. Without a stream, or
        with `host_visible` (the consumer is one that no stream orders: host copies, RDMA, another process), only pages
        whose fence has passed. Raises `UsageError` where `n` is negative or not a multiple of the page size, and
        `TransferError` where a fence turns out broken, or the stream cannot be made to wait: nothing is handed out.
        """
        slots = self._alloc(n, stream, host_visible, OUT)
        return None if slots is None else torch.from_numpy(slots)

    def free(self, slots: Any, streams: Iterable[Stream] = (), *, fence: Fence | None = None) -> None:
        """Gives back whole pages, behind the `streams` that may still touch them and behind `fence`. Does not wait.

        `slots` is a tensor, array or sequence of ints, in any order. With neither streams nor fence the pages are free
        at once, but for what was still pending when they were handed out. Everything is validated before anything
        changes: `DoubleFreeError` for a second free, `UsageError` for slots never handed out, for a part of a page, for
        slots that a cache holds, and for a fence that was never recorded. `TransferError`: an event could not be
        recorded; these pages are then in quarantine, for good.
        """
        self._free(slots, streams, fence, OUT)

    def retire(self, slots: Any, streams: Iterable[Stream] = (), *, fence: Fence | None = None) -> None:
        """As `free`, for worker threads and finalisers: safe in the middle of another call too. Does not wait.

        In the middle of another call on the same thread it only validates: the events are recorded at the start of the
        next call, and a `TransferError` is raised by the next one that polls.
        """
        with self._lock:
            users, fence = self._check_users(streams, fence)
            pages = self._pages.parse(slots, OUT, repeated=DoubleFreeError)
            self._table.claim(pages, RETIRING)
            # The lock is ours, so a busy allocator is in a step of this very thread.
            returned = _Return(pages, users, fence, deferred=self._busy)
            self._returned.append(returned)
            self._table.quiet = False
        if not returned.deferred:
            self._drain_step()
            if returned.error is not None:
                raise returned.error

    @_step
    def reclaim(self) -> int:
        """Polls every fence once; the number of slots that became free. Does not wait.

        Raises `TransferError` where a fence turns out broken: its pages are then in quarantine, the others are served.
        """
        return self._poll() * self._page_size

    # ---- for caches

    def alloc_held(self, n: int, stream: Stream | None = None, host_visible: bool = False) -> Slots | None:
        """As `alloc`, but the pages are held by a cache: `free` refuses them. An int64 array. Does not wait."""
        with self._lock:
            if not self._busy and not self._returned:
                slots = self._table.take(n, HELD)
                if slots is not None:
                    return slots
        return self._alloc(n, stream, host_visible, HELD)

    @property
    def table(self) -> PageTable:
        """The page table. A compiled tree takes slots from it and gives them back, in the calls that need them.

        Only while it is `quiet`; `note_given` follows where slots came back.
        """
        return self._table

    @property
    def listening(self) -> dict[object, Callable[[], None]]:
        """Who hears of slots that come back: to be counted, not to be changed."""
        return self._listeners.callbacks

    def note_given(self) -> None:
        """Tell the listeners that slots came back by way of `table`."""
        self._listeners.changed = True
        self._listeners.notify()

    @_step
    def adopt(self, slots: Any) -> None:
        """Takes pages from their caller into a cache. Does not wait.

        Raises `UsageError`, before anything changes, unless each page is whole, with its slots ascending, handed out,
        and not held by a cache yet.
        """
        self._table.move(self._pages.parse(slots, OUT, ordered=True, repeated=UsageError), OUT, HELD)

    @_step
    def disown(self, slots: Any) -> None:
        """Hands pages from a cache back to their caller, who has to free them. `UsageError` unless held."""
        self._table.move(self._pages.parse(slots, HELD, repeated=UsageError), HELD, OUT)

    def free_held(self, slots: Any, streams: Iterable[Stream] = (), *, fence: Fence | None = None) -> None:
        """As `free`, for pages that a cache holds; `UsageError` for a caller's. Does not wait."""
        if streams == () and fence is None:
            with self._lock:
                idle = not self._busy and not self._returned and not self._carry
                given = idle and self._table.give(slots, HELD)
            if given:
                self._listeners.changed = True
                self._listeners.notify()
                return
        self._free(slots, streams, fence, HELD)

    @_step
    def takeable(self, stream: Stream | None = None, host_visible: bool = False) -> int:
        """How many slots `alloc` could hand out now. Polls, does not wait; `TransferError` as in `reclaim`."""
        self._poll()
        num_pages = self._table.num_free
        if stream is not None and not host_visible:
            num_pages += self._limbo.num_waitable_pages
        return num_pages * self._page_size

    def record(self, stream: Stream) -> Event:
        """A new event, recorded on `stream`: what is queued there now. Does not wait.

        Raises `TransferError` where that fails, `UsageError` where the allocator has nothing to make events with.
        """
        self._events.require()
        return self._events.fresh(stream)

    def passed(self, event: Event) -> bool:
        """Whether an event that `record` gave has passed. `TransferError` where it cannot be asked. Does not wait."""
        return query_event(event)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls `callback` after slots came back, retired or were quarantined, or a fence said that it completed.

        It comes with no lock held, on whichever thread caused it; it may call the allocator and must not raise. Changes
        that happen while listeners run bring one more round of calls, not a nested one. A fence that completed gives
        its slots back at the next poll, which the callback may do. Returns the unsubscribe function, which may be
        called twice. Does not wait.
        """
        return self._listeners.add(callback)

    # ---- for audits

    @_step
    def pages_in(self, state: str) -> Pages:
        """The pages, ascending, that are "free", "out", "held", "retired" or "quarantined". O(pages). Does not wait."""
        if state not in PLACES:
            raise UsageError(f"state={state!r} is none of {', '.join(PLACES)}")
        return self._pages.pages_in(PLACES[state])

    @_step
    def check(self) -> None:
        """Recounts everything: `InvariantError` naming what differs. O(pages). Does not wait."""
        audit_pages(
            self._table,
            self._pages,
            self._limbo,
            self._carry,
            lambda: [entry.pages for entry in list(self._returned)],
        )

    def __repr__(self) -> str:
        return (
            f"SlotAllocator(num_slots={self._num_slots}, page_size={self._page_size}, device='{self._device}', "
            f"free={self._table.num_free * self._page_size}, fenced={self._limbo.num_pages * self._page_size})"
        )

    # ---- steps

    @_step
    def _alloc(self, n: int, stream: Stream | None, host_visible: bool, state: int) -> Slots | None:
        num_pages = self._num_pages(n)
        table = self._table
        if num_pages > table.num_free:
            if num_pages > table.num_pages:
                return None
            self._poll()
            missing = num_pages - table.num_free
            if missing > 0:
                if stream is None or host_visible:
                    return None
                return self._alloc_retired(table.num_free, missing, stream, state)
        return self._pages.slots_of(table.pop(num_pages, state))

    def _alloc_retired(self, num_free: int, num_retired: int, stream: Stream, state: int) -> Slots | None:
        take = self._limbo.plan(stream, num_retired)
        if take is None:
            return None
        if take.waits and not callable(getattr(stream, "wait_event", None)):
            raise UsageError(f"{stream!r} has no wait_event(), so it cannot be given slots that others still use")
        try:
            for mark in take.waits:
                stream.wait_event(mark.event)
        except Exception as error:
            raise TransferError(f"{stream!r} could not be made to wait for an event: {error}") from error
        parts = [self._table.pop(num_free, state)]
        for share in take.shares:
            pages, marks = self._limbo.take(share)
            self._table.move(pages, RETIRED, state)
            self._carry.put(pages, marks, stream)
            parts.append(pages)
        return self._pages.slots_of(np.concatenate(parts))

    @_step
    def _free(self, slots: Any, streams: Iterable[Stream], fence: Fence | None, origin: int) -> None:
        users, fence = self._check_users(streams, fence)
        pages = self._pages.parse(slots, origin, repeated=DoubleFreeError)
        error = self._give_back(pages, origin, users, fence)
        if error is not None:
            raise error

    @_step
    def _drain_step(self) -> None:
        """Nothing but what every step begins with: `_drain`."""

    # ---- parts of a step

    def _drain(self) -> None:
        """Sends to limbo what was retired since the last step."""
        while self._returned:
            returned = self._returned.popleft()
            returned.error = self._give_back(returned.pages, OUT, returned.streams, returned.fence)
            if returned.deferred:
                self._unreported = self._unreported or returned.error

    def _give_back(
        self, pages: Pages, origin: int, streams: tuple[Stream, ...], fence: Fence | None
    ) -> TransferError | None:
        """Frees, retires or quarantines `pages`, which are valid and in `origin`; what went wrong, if anything did."""
        if not len(pages):
            return None
        self._listeners.changed = True
        marks: list[Mark] = []
        error: TransferError | None = None
        try:
            for stream in streams:
                mark = self._events.mark(stream)
                self._limbo.enqueue(mark)
                marks.append(mark)
            if fence is not None:
                fence = self._watch(fence, marks)
        except TransferError as failure:
            error = failure
        for group in self._carry.take(pages, streams):
            behind = newest_per_stream(marks + group.marks) if group.marks else marks
            # A carried event that broke meanwhile may be the only witness of an earlier use.
            error = error or next((mark.error for mark in behind if mark.error is not None), None)
            if error is not None:
                self._table.move(group.pages, origin, QUARANTINED)
            elif behind or fence is not None:
                self._table.move(group.pages, origin, RETIRED)
                self._limbo.add(group.pages, behind, fence)
            else:
                self._table.push(group.pages, origin)
        return error

    def _watch(self, fence: Fence, marks: list[Mark]) -> Fence | None:
        """Puts a caller's fence among `marks`, or returns it; neither if it has passed. `TransferError` if broken."""
        if isinstance(fence, EventFence):
            if not fence.passed():
                marks.append(self._events.adopt(fence))
                self._limbo.enqueue(marks[-1])
            return None
        try:
            if fence.passed():
                return None
            add_done_callback = getattr(fence, "add_done_callback", None)
            if add_done_callback is not None:
                add_done_callback(self._completed)
        except Exception as error:
            raise TransferError(f"{fence!r} could not be asked: {error}") from error
        return fence

    def _completed(self, _: object) -> None:
        """A fence says that it completed; any thread, perhaps in the middle of a step."""
        self._listeners.changed = True
        if not self._busy:
            self._listeners.notify()

    def _poll(self) -> int:
        """Lets go of what passed; the number of pages. Raises the first failure, after all others were served."""
        found = self._limbo.poll()
        count = 0
        for pages in found.passed:
            self._table.push(pages, RETIRED)
            count += len(pages)
        for pages in found.broken:
            self._table.move(pages, RETIRED, QUARANTINED)
        if found.passed or found.broken:
            self._listeners.changed = True
        error = self._unreported or found.error
        if error is not None:
            self._unreported = None
            raise error
        return count

    def _num_pages(self, n: int) -> int:
        if isinstance(n, bool):
            raise UsageError(f"alloc takes a number of slots, not {n!r}")
        try:
            num_slots = index(n)
        except TypeError:
            raise UsageError(f"alloc takes a number of slots, not {n!r}") from None
        num_pages, rest = divmod(num_slots, self._page_size)
        if rest or num_slots < 0:
            raise UsageError(
                f"alloc({num_slots}): not a number of whole pages of {self._page_size} slots "
                "(hint: round up, and keep the rest of the last page)"
            )
        return num_pages

    def _check_users(self, streams: Iterable[Stream], fence: Fence | None) -> tuple[tuple[Stream, ...], Fence | None]:
        """Each stream once, and the fence unless it has passed for good. Changes nothing; `UsageError`."""
        users: tuple[Stream, ...] = ()
        if streams != ():
            try:
                users = tuple(dict.fromkeys(streams))
            except TypeError as error:
                raise UsageError(f"streams must be an iterable of hashable streams: {error}") from error
            if users:
                if None in users:
                    raise UsageError("None is no stream (hint: name the default stream by its object)")
                for stream in users:
                    if not callable(getattr(stream, "wait_event", None)):
                        raise UsageError(f"{stream!r} is no stream: it has no wait_event()")
                self._events.require()
        if fence is None or isinstance(fence, ReadyFence):
            return users, None
        if not callable(getattr(fence, "passed", None)):
            hint = " (hint: EventFence(event, stream) records an event and sees that it took)"
            raise UsageError(f"a fence needs passed(); {fence!r} has none" + (hint if hasattr(fence, "query") else ""))
        if isinstance(fence, EventFence) and not fence.recorded:
            raise UsageError(f"{fence!r} was never recorded, so it would never pass (hint: EventFence(event, stream))")
        return users, fence


def _positive(name: str, value: Any) -> int:
    try:
        number = index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise ConfigError(f"{name}={value!r} must be an integer of at least 1")
    return number
