"""What the tests of the allocator share: a bench with a virtual device, and the count of where every slot is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from aradix.memory.allocator import SlotAllocator
from stress.device import VirtualDevice, VirtualEvent, VirtualStream
from tests.memory.faults import FaultyEvents


def sizes(allocator: SlotAllocator) -> dict[str, int]:
    return {
        "free": allocator.available_size(),
        "out": allocator.outside_size(),
        "held": allocator.held_size(),
        "retired": allocator.fenced_size(),
        "quarantined": allocator.quarantined_size(),
    }


def assert_sizes(allocator: SlotAllocator, **expected: int) -> None:
    """`expected` in slots; what is not named is 0, and the audit agrees."""
    everything = {"free": 0, "out": 0, "held": 0, "retired": 0, "quarantined": 0} | expected
    assert sizes(allocator) == everything
    counted = {state: len(allocator.pages_in(state)) * allocator.page_size for state in everything}
    assert counted == everything
    assert sum(everything.values()) == allocator.num_slots
    allocator.check()


def taken(allocator: SlotAllocator, n: int) -> torch.Tensor:
    slots = allocator.alloc(n)
    assert slots is not None
    return slots


@dataclass
class Bench:
    """An allocator of 8 slots on a virtual device with three streams."""

    device: VirtualDevice = field(default_factory=VirtualDevice)

    def __post_init__(self) -> None:
        self.events = FaultyEvents(self.device)
        self.allocator = SlotAllocator(8, event_factory=self.events)
        self.a, self.b, self.c = (self.device.stream(name) for name in "abc")

    def busy(self, stream: VirtualStream, duration: float) -> VirtualStream:
        stream.launch(duration=duration)
        return stream

    def taken_by(self, stream: VirtualStream, n: int) -> torch.Tensor:
        slots = self.allocator.alloc(n, stream)
        assert slots is not None
        return slots

    def num_queries(self) -> int:
        return sum(event.num_queries for event in self.events.made)


class Counting:
    """A stream that writes down what it was told to wait for, and then waits."""

    def __init__(self, stream: VirtualStream) -> None:
        self.stream = stream
        self.waits: list[VirtualEvent] = []

    def wait_event(self, event: VirtualEvent, /) -> None:
        self.waits.append(event)
        self.stream.wait_event(event)

    def mark(self) -> Any:
        return self.stream.mark()


class RecordsThrough(VirtualEvent):
    """An event for `Counting` streams."""

    def record(self, stream: Any = None) -> None:
        super().record(stream.stream if isinstance(stream, Counting) else stream)
