"""Pages: how slots become pages, what is wrong with those that do not, and the audit of a page table.

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
from aradix.memory.page_table import (
    FREE,
    FRESH,
    HELD,
    OUT,
    PADDING,
    QUARANTINED,
    RETIRED,
    RETIRING,
    STATE_NAMES,
    PageTable,
    Slots,
)

__all__ = ["PageReader", "as_slots"]


class PageReader:
    """Reads slots as pages of a table, and audits it. Never waits; not thread-safe."""

    __slots__ = ("_offsets", "_scratch", "_table", "page_size")

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._scratch = np.empty(table.num_pages + 1, dtype=np.int32)
        self._offsets = np.arange(table.page_size, dtype=np.int64)
        self.page_size = table.page_size

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
            if not 0 < page <= self._table.num_pages or self._table.states.item(page) != state:
                self._refuse(pages, state)
            return pages
        if not len(pages):
            return pages
        if pages.min() < 1 or pages.max() > self._table.num_pages or (self._table.states.take(pages) != state).any():
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
        return np.flatnonzero(np.isin(self._table.states, list(states)))

    def check(self, states: NDArray[np.uint8]) -> None:
        """Recounts; `InvariantError` naming what differs.

        `states` is a copy of the table's, in which pages that were claimed are still out: the counters have them there.
        """
        counted = np.bincount(states, minlength=len(STATE_NAMES)).tolist()
        if counted[PADDING] != 1 or states[0] != PADDING:
            raise InvariantError(f"page 0 alone must be padding; {counted[PADDING]} pages are")
        for state in (OUT, HELD, RETIRED, QUARANTINED):
            if counted[state] != self._table.count(state):
                raise InvariantError(
                    f"pages {STATE_NAMES[state]}: kept as {self._table.count(state)} and count to {counted[state]} "
                    f"(of {self._table.num_pages} pages)"
                )
        listed = np.sort(self._table.stack[: self._table.num_free])
        if not np.array_equal(listed, np.flatnonzero(np.isin(states, (FRESH, FREE)))):
            raise InvariantError(
                f"the free list holds {self._table.num_free} pages, {len(np.unique(listed))} of them distinct; "
                f"{counted[FRESH] + counted[FREE]} pages are free by their state"
            )

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
        outside = pages[(pages < 1) | (pages > self._table.num_pages)]
        if len(outside):
            page = int(outside[0])
            what = "page 0 is padding" if page == 0 else f"the pool's slots are {self._pool_span()}"
            raise UsageError(f"slots {self._span(page)} were never handed out: {what}")
        wrong = pages[self._table.states[pages] != wanted]
        page, state = int(wrong[0]), int(self._table.states[wrong[0]])
        message = f"page {page} (slots {self._span(page)}) is {STATE_NAMES[state]}; "
        message += f"{len(wrong)} of {len(pages)} pages are not "
        message += STATE_NAMES[wanted]
        if state in (FREE, RETIRING, RETIRED, QUARANTINED):
            raise DoubleFreeError(message)
        if state == HELD:
            message += " (hint: the cache frees what it holds; free only what it gave back, as duplicates are)"
        raise UsageError(message)

    def _span(self, page: int) -> str:
        first = page * self.page_size
        return str(first) if self.page_size == 1 else f"{first}..{first + self.page_size - 1}"

    def _pool_span(self) -> str:
        return f"{self.page_size}..{(self._table.num_pages + 1) * self.page_size - 1}"


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
