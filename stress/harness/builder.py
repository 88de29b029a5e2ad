"""Who builds the cache of a run: the product as it is, or with something planted in it."""

from __future__ import annotations

from collections.abc import Callable

from aradix import CacheInitParams, HiRadixCache, RadixCache, SlotAllocator
from stress.device import VirtualDevice, VirtualEvent
from stress.harness.worlds import World

__all__ = ["Builder"]


class Builder:
    """Makes the parts of a run. A planted fault is a builder that makes one part worse."""

    def allocator(
        self, world: World, device: VirtualDevice, make_event: Callable[[], VirtualEvent] | None
    ) -> SlotAllocator:
        """The pool; `make_event` makes its events, where it has any."""
        return SlotAllocator(world.num_pages * world.page_size, world.page_size, event_factory=make_event)

    def cache(self, params: CacheInitParams) -> RadixCache:
        """The cache under test."""
        return RadixCache(params) if params.host is None else HiRadixCache(params)
