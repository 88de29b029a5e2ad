"""Carried marks: what is still pending on pages that were handed out by stream order.

Such a page is in a caller's hands while an earlier use of it still runs. If it comes back unused, nothing of the new
owner's says when that earlier use ends; so its marks come back with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from aradix.errors import InvariantError
from aradix.memory.fences import Stream
from aradix.memory.limbo import Pages
from aradix.memory.marks import Mark

__all__ = ["CarryTable", "Group"]


class Group(NamedTuple):
    """Pages that are behind the same carried marks (none, for clean pages)."""

    pages: Pages
    marks: list[Mark]


class _Carried:
    """What one share of one batch carries. `stream` is ordered after all of `marks`."""

    __slots__ = ("marks", "num_pages", "stream")

    def __init__(self, marks: list[Mark], stream: Stream, num_pages: int) -> None:
        self.marks = marks
        self.stream = stream
        self.num_pages = num_pages


class CarryTable:
    """Which handed-out page carries which marks. Never waits; not thread-safe."""

    __slots__ = ("_carried", "_free_ids", "_ids")

    def __init__(self, num_pages: int) -> None:
        # Page -> id of what it carries; 0 is nothing. Ids are used again, so that they stay as few as the shares alive.
        self._ids = np.zeros(num_pages + 1, dtype=np.int32)
        self._carried: dict[int, _Carried] = {}
        self._free_ids: list[int] = []

    def __bool__(self) -> bool:
        """Whether any page carries any."""
        return bool(self._carried)

    def put(self, pages: Pages, marks: list[Mark], stream: Stream) -> None:
        """Has `pages` carry `marks`, which `stream` has been ordered after."""
        key = self._free_ids.pop() if self._free_ids else len(self._carried) + 1
        self._carried[key] = _Carried(marks, stream, len(pages))
        self._ids[pages] = key

    def take(self, pages: Pages, streams: Collection[Stream]) -> Iterator[Group]:
        """Splits `pages` by the marks they still carry, and forgets them; for pages that retire behind `streams` now.

        What a page carries is dropped where it passed, and where it was handed to one of `streams`: that stream is
        ordered after all of it, so a mark recorded there now stands for it as well.
        """
        if not self._carried:
            yield Group(pages, [])
            return
        ids = self._ids.take(pages)
        keys = [int(ids[0])] if len(ids) == 1 else np.unique(ids).tolist()
        if keys == [0]:
            yield Group(pages, [])
            return
        self._ids[pages] = 0
        clean = []
        groups: dict[tuple[Mark, ...], list[Pages]] = {}
        for key in keys:
            part = pages if len(keys) == 1 else pages[ids == key]
            marks: list[Mark] = []
            if key:
                carried = self._carried[key]
                carried.num_pages -= len(part)
                if not carried.num_pages:
                    del self._carried[key]
                    self._free_ids.append(key)
                if carried.stream not in streams:
                    marks = [mark for mark in carried.marks if not mark.passed]
            if marks:
                groups.setdefault(tuple(marks), []).append(part)
            else:
                clean.append(part)
        if clean:
            yield Group(np.concatenate(clean), [])
        for shared, parts in groups.items():
            yield Group(np.concatenate(parts), list(shared))

    def carriers(self) -> Pages:
        """Every page that carries something, ascending."""
        return np.flatnonzero(self._ids)

    def check(self) -> None:
        """Recounts; `InvariantError` naming what differs."""
        keys, counts = np.unique(self._ids[self._ids > 0], return_counts=True)
        counted = dict(zip(keys.tolist(), counts.tolist(), strict=True))
        kept = {key: carried.num_pages for key, carried in self._carried.items()}
        if counted != kept:
            raise InvariantError(f"carried marks: kept for {kept} pages by id, counted {counted}")
