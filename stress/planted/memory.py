"""Bugs of the pool: fences that are left out, events that stand for nothing or for something else."""

from __future__ import annotations

from collections.abc import Callable

from aradix import SlotAllocator
from stress.device import VirtualDevice, VirtualEvent
from stress.harness.builder import Builder
from stress.harness.worlds import World
from stress.planted.plant import Plant
from stress.planted_memory import PLANTED, MakeAllocator

__all__ = ["MEMORY"]


class _WorsePool(Builder):
    def __init__(self, make: MakeAllocator) -> None:
        self._make = make

    def allocator(
        self, world: World, device: VirtualDevice, make_event: Callable[[], VirtualEvent] | None
    ) -> SlotAllocator:
        if make_event is None:
            return super().allocator(world, device, make_event)
        return self._make(device, world.num_pages * world.page_size, world.page_size)


_NAMES = {
    "no fence": "free without fence",
    "event not recorded": "event not recorded",
    "one event shared by two batches": "one event object for two batches",
    "only the owner's stream fenced": "only the owner's stream fenced",
    "stream wait left out": "stream wait left out",
}

MEMORY = tuple(Plant(_NAMES[name], "streams", _WorsePool(make)) for name, make in PLANTED.items())
