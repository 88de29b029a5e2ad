"""`Sizes`: how many slots of a pool are where. The counting half of `SlotAllocator`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aradix.memory.limbo import Limbo
from aradix.memory.page_table import HELD, OUT, QUARANTINED, PageTable

__all__ = ["Sizes"]


class Sizes:
    """What an allocator counts, in slots. No call waits, and none polls: `reclaim` does."""

    _table: PageTable
    _limbo: Limbo
    _returned: Any
    _busy: bool
    _drain_step: Callable[[], None]

    def _settle(self) -> None:
        if self._returned and not self._busy:
            self._drain_step()

    def _num_slots_in(self, state: int) -> int:
        if self._returned:
            self._settle()
        return self._table.count(state) * self._table.page_size

    def available_size(self) -> int:
        """Slots that are known to be free."""
        if self._returned:
            self._settle()
        return self._table.free_slots

    def fenced_size(self) -> int:
        """Slots that are retired: given back, and behind a fence that is not known to have passed."""
        if self._returned:
            self._settle()
        return self._limbo.num_pages * self._table.page_size

    def outside_size(self) -> int:
        """Slots handed out to callers, and not held by a cache."""
        return self._num_slots_in(OUT)

    def held_size(self) -> int:
        """Slots held by caches."""
        return self._num_slots_in(HELD)

    def quarantined_size(self) -> int:
        """Slots whose fence broke; they are never handed out again."""
        return self._num_slots_in(QUARANTINED)

    def usable_size(self) -> int:
        """Slots that can be handed out at all: those that are not in quarantine."""
        return self._table.num_pages * self._table.page_size - self.quarantined_size()
