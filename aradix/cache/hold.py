"""`Hold`: what one lease has in its hands. The cache keeps the holds; a `Lease` is the user's handle to one.

Ownership of the tokens of a lease, in token order:

    0 ............ published ............ published + num_own ........ published + len(own)
    |  the tree's, pinned |  the lease's own, computed |  the rest of its last page  |
                          or being computed               (or given back by truncate)
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice
from types import CodeType
from typing import Any
from weakref import ref

import numpy as np

from aradix.keys import RadixKey
from aradix.params import NodeRef
from aradix.tree.protocol import NO_SLOTS, NOWHERE, Slots

try:
    from aradix import _native
except ImportError:  # not compiled, or it does not load; `aradix.tree` says so
    _native = None  # type: ignore[assignment]

__all__ = ["Hold", "hold_makers", "make_hold"]


class _Shown:
    """What a hold says of itself, whichever way its fields are kept."""

    __slots__ = ()

    node_id: int
    published: int
    stream: Any
    used: set[Hashable] | None
    opened_in: CodeType
    opened_near: int

    @property
    def ref(self) -> NodeRef:
        """The place in the tree that this lease pins; nowhere while nothing of it is there."""
        return NodeRef(self.node_id, self.published) if self.published else NOWHERE

    @property
    def where(self) -> str:
        """File and line that opened the lease."""
        # The line is looked up when somebody asks: only few of many leases are ever spoken of.
        line = next(islice(self.opened_in.co_positions(), self.opened_near // 2, None))[0]
        return f"{self.opened_in.co_filename}:{line}"

    def touching(self, streams: tuple[Any, ...]) -> tuple[Any, ...]:
        """The streams that may touch these slots: those named by `used_on`, else the engine's and the lease's."""
        if self.used is not None:
            return tuple(self.used)
        if self.stream is None or self.stream in streams:
            return streams
        return (*streams, self.stream)


class Hold(_Shown):
    """The state of a lease. `order` grows, so the youngest lease has the highest; `version` counts changes.

    `given` is the user's key; `key` is what the tree looks up, its bigrams under EAGLE. `held` is true from the step
    that enters the lease to the one that releases it. `host_hit` is what the last match found on the host alone.
    `task` is a weak reference to the task that entered the lease, or is entering it, and `joins` whether it waits for
    others and others for it.
    """

    __slots__ = (
        "_buffer",
        "_start",
        "_stop",
        "committed",
        "counted",
        "entered",
        "given",
        "held",
        "host_hit",
        "joins",
        "key",
        "limit",
        "load_back",
        "node_id",
        "num_matched",
        "num_opened",
        "num_own",
        "opened_in",
        "opened_near",
        "opened_when",
        "opening",
        "order",
        "page_size",
        "priority",
        "published",
        "released",
        "resume",
        "store",
        "stream",
        "task",
        "used",
        "version",
        "waiting",
    )

    def __init__(
        self,
        order: int,
        key: RadixKey,
        given: RadixKey,
        limit: int,
        priority: int,
        store: bool,
        resume: bool,
        stream: Any,
        opened_in: CodeType,
        opened_near: int,
        opened_when: float,
        page_size: int,
    ) -> None:
        self.order = order
        self.key = key
        self.given = given
        self.num_opened = given.num_items
        self.limit = limit
        self.priority = priority
        self.store = store
        self.resume = resume
        self.stream = stream
        self.used: set[Hashable] | None = None
        self.task: ref[Any] | None = None
        self.joins = False
        self.load_back = True
        self.host_hit = 0
        self.opened_in = opened_in
        self.opened_near = opened_near
        self.opened_when = opened_when
        self.page_size = page_size
        self.node_id = self.num_matched = self.published = self.committed = 0
        # Own slots are those of `_buffer` from `_start` to `_stop`: what goes at the front costs nothing.
        self._buffer = NO_SLOTS
        self._start = self._stop = self.num_own = self.version = 0
        self.opening = self.entered = self.held = self.released = self.counted = self.waiting = False

    @property
    def num_tokens(self) -> int:
        """Tokens with a slot: pinned and own."""
        return self.published + self.num_own

    @property
    def own(self) -> Slots:
        """The own slots, in token order; not to be written to."""
        return self._buffer[self._start : self._stop]

    @property
    def num_own_slots(self) -> int:
        """How many own slots there are, used or not."""
        return self._stop - self._start

    def fresh_slots_for(self, num_tokens: int) -> int:
        """Slots, in whole pages, that so many more tokens need beyond the rest of the last page."""
        missing = self.num_own + num_tokens - (self._stop - self._start)
        return -(-missing // self.page_size) * self.page_size if missing > 0 else 0

    def add(self, slots: Slots, num_tokens: int) -> None:
        """Take slots, and count so many more tokens as held. The array is the hold's from now on."""
        self.num_own += num_tokens
        self.version += 1
        if not len(slots):
            return
        if self._start == self._stop:
            self._buffer, self._start, self._stop = slots, 0, len(slots)
            return
        stop = self._stop + len(slots)
        if stop > len(self._buffer):
            own = self.own
            # Twice the size, so that a long decode copies each slot a few times and not each time.
            self._buffer = np.empty(2 * (len(own) + len(slots)), np.int64)
            self._buffer[: len(own)] = own
            self._start, stop = 0, len(own) + len(slots)
        self._buffer[stop - len(slots) : stop] = slots
        self._stop = stop

    def take_front(self, num_slots: int) -> None:
        """Let go of the first slots, which the tree now has."""
        self._start += num_slots
        self.num_own -= num_slots
        self.version += 1
        self._shrink()

    def cut(self, num_own: int) -> Slots:
        """Keep `num_own` own tokens; the slots of the pages beyond them."""
        keep = self._start - (-num_own // self.page_size) * self.page_size
        self.num_own = num_own
        self.version += 1
        if keep >= self._stop:
            return NO_SLOTS
        freed = self._buffer[keep : self._stop].copy()
        self._stop = keep
        self._shrink()
        return freed

    def _shrink(self) -> None:
        """Keep no block of which little is in use."""
        if self._start == self._stop:
            self._buffer, self._start, self._stop = NO_SLOTS, 0, 0
        elif (self._stop - self._start) * 4 < len(self._buffer):
            self._buffer = self.own.copy()
            self._start, self._stop = 0, len(self._buffer)


def hold_makers() -> dict[str, type[Hold]]:
    """Every kind of hold that is there, the one in use last: they differ in nothing but their cost."""
    makers: dict[str, Any] = {"python": Hold}
    if _native is not None:

        class NativeHold(_Shown, _native.Hold):
            """The compiled twin of `Hold`; `own` is a copy."""

            __slots__ = ()

        makers["native"] = NativeHold
    return makers


make_hold: type[Hold] = list(hold_makers().values())[-1]
