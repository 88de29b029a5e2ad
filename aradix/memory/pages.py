"""Pages: where each page of the pool is, the free list, and how slots become pages.

Page k holds the slots k*P .. k*P+P-1; page 0 is padding and is never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from aradix.errors import DoubleFreeError, InvariantError, UsageError
from aradix.memory.limbo import Pages

__all__ = [
    "FREE", "FRESH", "HELD", "OUT", "PADDING", "PLACES", "QUARANTINED", "RETIRED", "RETIRING", "PageTable", "Slots",
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

_NAMES = {
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


class PageTable:
    """The state of every page and a stack of the free ones. Never waits; not thread-safe.

    Free pages come off the stack in ascending order from a fresh table, and afterwards last in, first out.
    """

    __slots__ = ("_offsets", "_scratch", "_stack", "counts", "num_free", "num_pages", "page_size", "states")

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.states = np.full(num_pages + 1, FRESH, dtype=np.uint8)
        self.states[0] = PADDING
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._scratch = np.empty(num_pages + 1, dtype=np.int32)
        self._offsets = np.arange(page_size, dtype=np.int64)
        self.num_free = num_pages
        # Pages by state, of those that are not free.
        self.counts = [0] * len(_NAMES)

    def pop(self, num_pages: int, state: int) -> Pages:
        """`num_pages` pages off the free list, now in `state`. The caller knows that there are enough."""
        bottom = self.num_free - num_pages
        pages = self._stack[bottom : self.num_free][::-1].astype(np.int64)
        self.num_free = bottom
        self._mark(pages, state)
        self.counts[state] += num_pages
        return pages

    def push(self, pages: Pages, origin: int) -> None:
        """Puts `pages`, now in state `origin`, on the free list, the first of them on top."""
        top = self.num_free + len(pages)
        self._stack[self.num_free : top] = pages[::-1]
        self.num_free = top
        self._mark(pages, FREE)
        self.counts[origin] -= len(pages)

    def move(self, pages: Pages, origin: int, state: int) -> None:
        """Moves `pages` from one state to another; neither is free."""
        self._mark(pages, state)
        self.counts[origin] -= len(pages)
        self.counts[state] += len(pages)

    def claim(self, pages: Pages) -> None:
        """Marks `pages` as on their way to limbo. Touches no counter: it may come in the middle of another step."""
        self._mark(pages, RETIRING)

    def slots_of(self, pages: Pages) -> Slots:
        """The slots of `pages`, in their order."""
        if self.page_size == 1:
            return pages.copy()
        first = pages * self.page_size
        return (first[:, None] + self._offsets).reshape(-1)

    def parse(self, slots: Any, state: int, *, ordered: bool = False, repeated: type[UsageError]) -> Pages:
        """The pages of `slots`, all of them whole, distinct and in `state`; raises before anything is changed.

        With `ordered`, each page's slots must stand together and ascend. `repeated` is raised for a page named twice.
        """
        array = as_slots(slots)
        pages = self._whole_pages(array, ordered, repeated)
        if len(pages) == 1:
            # The step of decoding. A plain integer is several times faster than array operations.
            page = int(pages[0])
            if not 0 < page <= self.num_pages or self.states.item(page) != state:
                self._refuse(pages, state)
            return pages
        if not len(pages):
            return pages
        if pages.min() < 1 or pages.max() > self.num_pages or (self.states.take(pages) != state).any():
            self._refuse(pages, state)
        if not (pages[1:] > pages[:-1]).all():
            # A page written twice keeps only one of its two places. Cheaper than sorting. A finaliser may retire other
            # pages while this runs; what it writes concerns only pages of its own.
            places = np.arange(len(pages), dtype=np.int32)
            self._scratch[pages] = places
            twice = self._scratch.take(pages) != places
            if twice.any():
                page = int(pages[twice][0])
                raise repeated(
                    f"page {page} (slots {self._span(page)}) is named twice in one call of {len(array)} slots"
                )
        return pages

    def pages_in(self, states: Iterable[int]) -> Pages:
        """The pages in any of `states`, ascending."""
        return _in_states(self.states, states)

    def check(self, states: NDArray[np.uint8]) -> None:
        """Recounts; `InvariantError` naming what differs.

        `states` is a copy of the table's, in which pages that were claimed are still out: the counters have them there.
        """
        counted = np.bincount(states, minlength=len(_NAMES)).tolist()
        if counted[PADDING] != 1 or states[0] != PADDING:
            raise InvariantError(f"page 0 alone must be padding; {counted[PADDING]} pages are")
        for state in (OUT, HELD, RETIRED, QUARANTINED):
            if counted[state] != self.counts[state]:
                raise InvariantError(
                    f"pages {_NAMES[state]}: kept as {self.counts[state]} and count to {counted[state]} "
                    f"(of {self.num_pages} pages)"
                )
        listed = np.sort(self._stack[: self.num_free])
        if not np.array_equal(listed, _in_states(states, (FRESH, FREE))):
            raise InvariantError(
                f"the free list holds {self.num_free} pages, {len(np.unique(listed))} of them distinct; "
                f"{counted[FRESH] + counted[FREE]} pages are free by their state"
            )

    def _mark(self, pages: Pages, state: int) -> None:
        if len(pages) == 1:
            self.states[pages[0]] = state
        else:
            self.states[pages] = state

    def _whole_pages(self, slots: Slots, ordered: bool, repeated: type[UsageError]) -> Slots:
        size = self.page_size
        if size == 1:
            # Never the caller's own memory: limbo keeps what it is given.
            return slots.copy()
        if len(slots) % size == 0:
            pages = self._ascending(slots)
            if pages is not None:
                return pages
            if not ordered:
                slots = np.sort(slots)
                pages = self._ascending(slots)
                if pages is not None:
                    return pages
                twice = slots[1:][np.diff(slots) == 0]
                if len(twice):
                    raise repeated(f"slot {int(twice[0])} is named twice in one call of {len(slots)} slots")
        hint = "each page's slots must stand together and ascend" if ordered else "keep a partly used page whole"
        raise UsageError(f"{len(slots)} slots do not make whole pages of {size} (hint: {hint})")

    def _ascending(self, slots: Slots) -> Slots | None:
        """The pages of `slots` where these are runs of whole pages, else None."""
        if len(slots) == self.page_size:
            # One page, the step of decoding: as above, plain integers.
            values = slots.tolist()
            page, rest = divmod(values[0], self.page_size)
            ascending = not rest and values == list(range(values[0], values[0] + self.page_size))
            return np.array([page], dtype=np.int64) if ascending else None
        grid = slots.reshape(-1, self.page_size)
        first = grid[:, 0]
        pages: Slots = first // self.page_size
        if (pages * self.page_size == first).all() and (grid == first[:, None] + self._offsets).all():
            return pages
        return None

    def _refuse(self, pages: Slots, wanted: int) -> NoReturn:
        """Says what is wrong with the first page that is not in the state `wanted`."""
        outside = pages[(pages < 1) | (pages > self.num_pages)]
        if len(outside):
            page = int(outside[0])
            what = "page 0 is padding" if page == 0 else f"the pool's slots are {self._pool_span()}"
            raise UsageError(f"slots {self._span(page)} were never handed out: {what}")
        wrong = pages[self.states[pages] != wanted]
        page, state = int(wrong[0]), int(self.states[wrong[0]])
        message = (
            f"page {page} (slots {self._span(page)}) is {_NAMES[state]}; {len(wrong)} of {len(pages)} pages are not "
        )
        message += _NAMES[wanted]
        if state in (FREE, RETIRING, RETIRED, QUARANTINED):
            raise DoubleFreeError(message)
        if state == HELD:
            message += " (hint: the cache frees what it holds; free only what it gave back, as duplicates are)"
        raise UsageError(message)

    def _span(self, page: int) -> str:
        first = page * self.page_size
        return str(first) if self.page_size == 1 else f"{first}..{first + self.page_size - 1}"

    def _pool_span(self) -> str:
        return f"{self.page_size}..{(self.num_pages + 1) * self.page_size - 1}"


def _in_states(states: NDArray[np.uint8], wanted: Iterable[int]) -> Pages:
    # A table of the few states; `np.isin` takes several times as long.
    table = np.zeros(len(_NAMES), np.bool_)
    table[list(wanted)] = True
    return np.flatnonzero(table[states])


def as_slots(slots: Any) -> Slots:
    """`slots`, a tensor, array or sequence of integers, as an int64 array; `UsageError` for anything else."""
    if isinstance(slots, torch.Tensor):
        if not slots.is_cpu:
            raise UsageError(
                f"slots are CPU tensors, these are on {slots.device} (hint: keep the CPU tensor that alloc gave; "
                "reading one back from a device would make the host wait)"
            )
        if slots.dtype == torch.int64 and slots.dim() == 1:
            array: Slots = slots.numpy()
            return array
    try:
        array = np.asarray(slots.detach() if isinstance(slots, torch.Tensor) else slots)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"slots must be a flat run of integers: {error}") from error
    if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
        return array.astype(np.int64, copy=False)
    raise UsageError(f"slots must be a flat run of integers, not {array.ndim}-d {array.dtype}")
