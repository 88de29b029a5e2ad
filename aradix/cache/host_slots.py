"""`HostSlots`: the one door between a cache and its host pool, as `SlotPool` is to the device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aradix.errors import AradixError, TransferError
from aradix.tree.protocol import NO_SLOTS, Slots
from aradix.tree.tiered import TieredCore

if TYPE_CHECKING:
    from aradix.memory.fences import Fence
    from aradix.memory.host_pool import HostKVPool

__all__ = ["HostSlots"]


class HostSlots:
    """A cache's part of a `HostKVPool`. No call waits.

    `num_held` counts what passes the door, apart from what the tree says; the audit compares the two.

    Args:
        pool: that the slots come from.
        core: gives up host copies where there is no room.
        on_failure: told when a fence turned out broken; the slots behind it are in quarantine then.
    """

    def __init__(self, pool: HostKVPool, core: TieredCore, on_failure: Callable[[BaseException], None]) -> None:
        self.allocator = pool.allocator
        self.num_held = 0
        self.num_evicted = 0
        self._core = core
        self._on_failure = on_failure

    def take(self, num_slots: int) -> Slots:
        """So many slots, in whole pages; or as many as can be had, host copies being evicted for them."""
        try:
            num_free = self.allocator.takeable(host_visible=True)
            if num_free < num_slots:
                for freed in self._core.evict_host(num_slots - num_free):
                    self.num_evicted += len(freed.host_slots)
                    self.give_back(freed.host_slots)
                num_free = self.allocator.available_size()
            taken = self.allocator.alloc_held(min(num_slots, num_free), host_visible=True)
        except TransferError as error:
            self._on_failure(error)
            return NO_SLOTS
        if taken is None:
            return NO_SLOTS
        self.num_held += len(taken)
        return taken

    def give_back(self, slots: Slots, fence: Fence | None = None) -> None:
        """Free slots, behind a fence if there is one. Never raises: a failure goes to `on_failure`."""
        if not len(slots):
            return
        self.num_held -= len(slots)
        try:
            self.allocator.free_held(slots, fence=fence)
        except AradixError as error:
            self._on_failure(error)
