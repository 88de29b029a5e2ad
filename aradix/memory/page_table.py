"""`PageTable`: the state of every page and a stack of the free ones; in Python here, and compiled where that is there.

Both do the same in the same order. What is slow and rare, reading slots and saying what is wrong with them, is in
`pages.py`, on the arrays that both work on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aradix.memory.limbo import Pages

try:
    from aradix import _native
except ImportError:  # not compiled, or it does not load; `aradix.tree` says so
    _native = None  # type: ignore[assignment]

__all__ = [
    "FREE", "FRESH", "HELD", "OUT", "PADDING", "PLACES", "QUARANTINED", "RETIRED", "RETIRING", "STATE_NAMES",
    "PageTable", "PythonPageTable", "Slots", "make_page_table", "table_makers",
]  # fmt: skip

Slots = NDArray[np.int64]

PADDING = 0
FRESH = 1  # free, and never handed out yet: freeing it is a wild free, not a second one
FREE = 2
OUT = 3  # in the hands of the caller who allocated it
HELD = 4  # in the hands of a cache
RETIRING = 5  # given to retire(), and on its way to limbo
RETIRED = 6
QUARANTINED = 7  # its fence broke: nobody will ever know when it is safe

STATE_NAMES = {
    PADDING: "padding",
    FRESH: "never handed out",
    FREE: "free already",
    OUT: "handed out to a caller",
    HELD: "held by a cache",
    RETIRING: "retired already",
    RETIRED: "retired already",
    QUARANTINED: "in quarantine",
}

# What a finaliser retires in the middle of a step is out until the next one: the counters know nothing of it before.
PLACES = {
    "free": (FRESH, FREE),
    "out": (OUT, RETIRING),
    "held": (HELD,),
    "retired": (RETIRED,),
    "quarantined": (QUARANTINED,),
}


class PageTable(Protocol):
    """Pages in, pages out. Never waits; not thread-safe.

    Free pages come off the stack in ascending order from a fresh table, and afterwards last in, first out.
    """

    quiet: bool
    """Whether free slots are all there is to look at: nothing is retired, and no call of the allocator under way."""

    @property
    def num_free(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def free_slots(self) -> int: ...
    @property
    def states(self) -> NDArray[np.uint8]: ...
    @property
    def stack(self) -> NDArray[np.int32]: ...
    def counts(self) -> list[int]:
        """Pages by state, of those that are not free."""

    def count(self, state: int) -> int:
        """Pages in a state that is not free."""

    def take(self, num_slots: int, state: int) -> Slots | None:
        """So many slots, now in `state`; `None`, and then nothing was changed, if fewer are free or a page is cut."""

    def give(self, slots: Slots, origin: int) -> bool:
        """Free slots in `origin`, the first page on top. False, and then nothing was changed, unless they are whole
        pages, each in ascending order, and distinct."""

    def pop(self, num_pages: int, state: int) -> Pages:
        """`num_pages` pages off the free list, now in `state`. The caller knows that there are enough."""

    def push(self, pages: Pages, origin: int) -> None:
        """Put `pages`, now in state `origin`, on the free list, the first of them on top."""

    def move(self, pages: Pages, origin: int, state: int) -> None:
        """Move `pages` from one state to another; neither is free."""

    def claim(self, pages: Pages, state: int) -> None:
        """Mark `pages`. Touches no counter: it may come in the middle of another step."""


class PythonPageTable:
    """The reference. See `PageTable`."""

    __slots__ = ("_counts", "_free", "_offsets", "num_free", "num_pages", "page_size", "quiet", "stack", "states")

    def __init__(self, states: NDArray[np.uint8], stack: NDArray[np.int32], page_size: int, free: int) -> None:
        self.states = states
        self.stack = stack
        self.page_size = page_size
        self.num_free = self.num_pages = len(stack)
        self.quiet = True
        self._free = free
        self._counts = [0] * len(STATE_NAMES)
        self._offsets = np.arange(page_size, dtype=np.int64)

    @property
    def free_slots(self) -> int:
        return self.num_free * self.page_size

    def counts(self) -> list[int]:
        return list(self._counts)

    def count(self, state: int) -> int:
        return self._counts[state]

    def take(self, num_slots: int, state: int) -> Slots | None:
        num_pages, rest = divmod(num_slots, self.page_size)
        if rest or not 0 <= num_pages <= self.num_free:
            return None
        return self.slots_of(self.pop(num_pages, state))

    def give(self, slots: Slots, origin: int) -> bool:
        if not isinstance(slots, np.ndarray) or slots.dtype != np.int64 or len(slots) % self.page_size:
            return False
        pages = slots[:: self.page_size] // self.page_size
        good = np.array_equal(self.slots_of(pages), slots) and len(np.unique(pages)) == len(pages)
        good = good and bool(((pages > 0) & (pages <= self.num_pages)).all())
        if not good or (self.states[pages] != origin).any():
            return False
        self.push(pages, origin)
        return True

    def pop(self, num_pages: int, state: int) -> Pages:
        bottom = self.num_free - num_pages
        pages = self.stack[bottom : self.num_free][::-1].astype(np.int64)
        self.num_free = bottom
        self.states[pages] = state
        self._counts[state] += num_pages
        return pages

    def push(self, pages: Pages, origin: int) -> None:
        top = self.num_free + len(pages)
        self.stack[self.num_free : top] = pages[::-1]
        self.num_free = top
        self.states[pages] = self._free
        self._counts[origin] -= len(pages)

    def move(self, pages: Pages, origin: int, state: int) -> None:
        self.states[pages] = state
        self._counts[origin] -= len(pages)
        self._counts[state] += len(pages)

    def claim(self, pages: Pages, state: int) -> None:
        self.states[pages] = state

    def slots_of(self, pages: Pages) -> Slots:
        """The slots of `pages`, in their order."""
        return ((pages * self.page_size)[:, None] + self._offsets).reshape(-1)


def table_makers() -> dict[str, Callable[..., PageTable]]:
    """Every table that is there, the one in use last."""
    makers: dict[str, Callable[..., PageTable]] = {"python": PythonPageTable}
    if _native is not None:
        makers["native"] = _native.PageTable
    return makers


def make_page_table(num_pages: int, page_size: int, maker: Callable[..., PageTable] | None = None) -> PageTable:
    """A table in which every page is free, and was never handed out."""
    if maker is None:
        maker = list(table_makers().values())[-1]
    states = np.full(num_pages + 1, FRESH, dtype=np.uint8)
    states[0] = PADDING
    return maker(states, np.arange(num_pages, 0, -1, dtype=np.int32), page_size, FREE)
