"""`EventSinks`: who is handed a cache's events, and when.

The tree says when a step records the first event since they were last taken; a step of its own, later in that turn of
the loop, takes them all and hands them on. So a turn of many steps costs one delivery, and no sink runs inside a step.
To ask the loop for that step is most of what a delivery costs, so sinks that can wait let many turns be one delivery.
What is handed on is what was recorded: the compiled tree hashes pages and makes records when a sink looks at them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from aradix.cache.base_prefix_cache import BasePrefixCache
from aradix.errors import UsageError
from aradix.events import HOST_MEDIUM, BlockStored, KVCacheEvent, event_tokens
from aradix.params import CacheInitParams

if TYPE_CHECKING:
    from aradix.cache.calls import Calls
    from aradix.cache.home import Home
    from aradix.tree.protocol import TreeCore

__all__ = ["EventCalls", "EventSink", "EventSinks", "stored_now"]

EventSink = Callable[[Sequence[KVCacheEvent]], None]


class EventSinks:
    """The event sinks of one cache. Nothing here waits.

    Args:
        core: that records the events.
        fail: told what a sink raised.
    """

    def __init__(self, core: TreeCore, fail: Callable[[BaseException], None]) -> None:
        self._core = core
        self._fail = fail
        self._sinks: dict[int, EventSink] = {}
        self._delays: dict[int, float] = {}
        self._delay = 0.0
        self._lists: deque[tuple[Sequence[KVCacheEvent], list[int]]] = deque()
        self._num_added = 0
        self._home: Home

    def __len__(self) -> int:
        return len(self._sinks)

    def add(self, sink: EventSink, home: Home, delay: float) -> Callable[[], None]:
        """Hand a sink what later steps record; gives what removes it, which may be called again."""
        self._take()  # what was recorded before is not for it
        self._home = home
        self._num_added += 1
        order = self._num_added
        self._sinks[order] = sink
        self._delays[order] = delay
        self._listen()
        if self._lists:
            self._ask()
        return lambda: self._remove(order)

    def _remove(self, order: int) -> None:
        if self._sinks.pop(order, None) is not None:
            del self._delays[order]
            self._listen()

    def _listen(self) -> None:
        """As soon as the most impatient of them wants it."""
        self._delay = min(self._delays.values(), default=0.0)
        self._core.on_event = (self._ask_for_later if self._delay else self._ask) if self._sinks else None

    def _ask(self) -> None:
        try:
            self._home.call_next(self.deliver)
        except RuntimeError:  # the loop has ended: a lease was collected after it, and nobody is left to be told
            return

    def _ask_for_later(self) -> None:
        try:
            self._home.call_later(self._delay, self.deliver)
        except RuntimeError:
            return

    def _take(self) -> None:
        """Set aside what was recorded up to now, for the sinks of now."""
        events = self._core.take_recorded()
        if events and self._sinks:
            self._lists.append((events, list(self._sinks)))

    def deliver(self) -> None:
        """Hand over what there is, now: a step of its own."""
        if len(self._sinks) == 1 and not self._lists:  # as nearly always
            ((order, only),) = self._sinks.items()
            if fresh := self._core.take_recorded():
                self._call(order, only, fresh)
            return
        if self._sinks:  # else what there is stays for `take_events`
            self._take()
        while self._lists:
            events, orders = self._lists.popleft()
            for order in orders:
                sink = self._sinks.get(order)
                if sink is not None:
                    self._call(order, sink, events)

    def _call(self, order: int, sink: EventSink, events: Sequence[KVCacheEvent]) -> None:
        try:
            sink(events)
        except Exception as error:
            self._remove(order)
            self._fail(error)

    def close(self) -> None:
        """Deliver what is left; there will be no more."""
        self.deliver()
        self._core.on_event = None
        self._sinks.clear()


def stored_now(core: TreeCore, page_size: int) -> list[KVCacheEvent]:
    """What `current_events` promises; nothing where no events are recorded."""
    ends: dict[int, bytes | None] = {}
    events: list[KVCacheEvent] = []
    for view in core.walk():
        parent_hash = ends.get(view.parent_id)
        ends[view.node_id] = view.hashes[-1] if view.hashes else parent_hash
        if view.hashes:
            tokens = event_tokens(view.tokens, len(view.tokens) // view.num_tokens)
            stored = BlockStored(b"".join(view.hashes), parent_hash, tokens, page_size, view.namespace)
            if view.residency != "host":
                events.append(stored)
            if view.residency != "device":
                events.append(msgspec.structs.replace(stored, medium=HOST_MEDIUM))
    return events


class EventCalls(BasePrefixCache):
    """The part of `RadixCache` that hands events over."""

    _params: CacheInitParams
    _core: TreeCore
    _home: Home | None
    _event_sinks: EventSinks
    _calls: Calls

    def take_events(self) -> list[KVCacheEvent]:
        self._calls.begin()
        if self._event_sinks:
            raise UsageError(f"{len(self._event_sinks)} event sinks take the events; remove them first")
        return self._core.take_events()

    def current_events(self) -> list[KVCacheEvent]:
        self._calls.begin()
        return stored_now(self._core, self._params.page_size)

    def add_event_sink(self, sink: EventSink, *, delay: float = 0.0) -> Callable[[], None]:
        self._calls.begin_open()
        if not callable(sink):
            raise UsageError(f"an event sink is called with a list of events, got {sink!r}")
        if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay < math.inf:
            raise UsageError(f"delay is a number of seconds from 0 on, got {delay!r}")
        if not self._params.enable_kv_cache_events:
            raise UsageError("this cache records no events; make it with CacheInitParams(enable_kv_cache_events=True)")
        assert self._home is not None
        remove = self._event_sinks.add(sink, self._home, float(delay))

        def checked() -> None:
            self._calls.begin_release()
            remove()

        return checked
