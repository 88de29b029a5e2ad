"""Bugs about copies that no stream orders: what their fences say, and who is given slots that streams still use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from aradix import SlotAllocator
from aradix.memory.fences import Fence, Stream
from stress.device import VirtualDevice, VirtualEvent
from stress.harness.builder import Builder
from stress.harness.worlds import World
from stress.planted.plant import Plant

__all__ = ["COPIES"]


class _WorsePool(Builder):
    def __init__(self, worse: type[SlotAllocator]) -> None:
        self._worse = worse

    def allocator(
        self, world: World, device: VirtualDevice, make_event: Callable[[], VirtualEvent] | None
    ) -> SlotAllocator:
        return self._worse(world.num_pages * world.page_size, world.page_size, event_factory=make_event)


class _NoCopyFence(SlotAllocator):
    """Frees what a copy still touches without its fence."""

    def free(self, slots: Any, streams: Iterable[Stream] = (), *, fence: Fence | None = None) -> None:
        super().free(slots, streams)


class _Credulous:
    """A fence that takes no answer for a yes."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    def passed(self) -> bool:
        try:
            return self._fence.passed()
        except Exception:
            return True


class _BelievesFailedCopies(SlotAllocator):
    """A copy that cannot be asked any more counts as done."""

    def free(self, slots: Any, streams: Iterable[Stream] = (), *, fence: Fence | None = None) -> None:
        super().free(slots, streams, fence=None if fence is None else _Credulous(fence))


class _LosesFailedCopies(SlotAllocator):
    """The slots of a copy that ended badly never come back."""

    def free(self, slots: Any, streams: Iterable[Stream] = (), *, fence: Fence | None = None) -> None:
        super().free(slots, streams, fence=None if fence is None else _Unforgiving(fence))


class _Unforgiving:
    """A fence that passes only with a result."""

    def __init__(self, fence: Any) -> None:
        self._fence = fence

    def passed(self) -> bool:
        return bool(self._fence.passed()) and self._fence._future.exception() is None


class _BlindToHosts(SlotAllocator):
    """Whoever says that no stream orders it is given slots that streams still use."""

    def alloc(self, n: int, stream: Stream | None = None, host_visible: bool = False) -> torch.Tensor | None:
        return super().alloc(n, stream)


COPIES = (
    Plant("copy freed without its fence", "copies", _WorsePool(_NoCopyFence)),
    Plant("lost copy treated as done", "lost copies", _WorsePool(_BelievesFailedCopies)),
    Plant("slots of a failed copy never come back", "copies", _WorsePool(_LosesFailedCopies)),
    Plant("slots in use handed to a copy", "copies", _WorsePool(_BlindToHosts)),
)
