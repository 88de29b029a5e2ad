"""A virtual device under a cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aradix import (
    Lease,
    RadixCache,
    SlotAllocator,
)
from stress.device import VirtualDevice, VirtualStream
from tests.memory.faults import FaultyEvents
from tests.support.caches import opened

__all__ = ["LONG_TIME", "Bench", "computed"]

LONG_TIME = 1000.0


class Bench:
    """A virtual device with two engine streams and one that the engine does not name."""

    def __init__(self, num_slots: int = 8, page_size: int = 1) -> None:
        self.device = VirtualDevice()
        self.a, self.b, self.extra = (self.device.stream(name) for name in "abx")
        self.events = FaultyEvents(self.device)
        self.allocator = SlotAllocator(num_slots, page_size, event_factory=self.events)

    @asynccontextmanager
    async def cache(self, **params: Any) -> AsyncIterator[RadixCache]:
        async with opened(allocator=self.allocator, streams=(self.a, self.b), **params) as cache:
            yield cache

    def free_now(self) -> int:
        self.allocator.reclaim()
        return self.allocator.available_size()

    def finish(self) -> None:
        self.device.run_until_idle()


async def computed(bench: Bench, cache: RadixCache, opened_with: Any, stream: VirtualStream) -> Lease:
    """A lease whose tokens a kernel on its stream writes, and which has committed them."""
    lease = cache.lease(opened_with, stream=stream)
    await lease.__aenter__()
    lease.allocate_nowait(len(opened_with) - lease.num_matched)
    stream.launch(lease.slots[: lease.num_matched], lease.slots[lease.num_matched :])
    lease.commit(opened_with)
    return lease
