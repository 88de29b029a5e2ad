"""The allocator on real streams: order holds, the host does not wait, and torch's events are seen through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aradix.errors import TransferError, UsageError
from aradix.memory.allocator import SlotAllocator
from aradix.memory.fences import EventFence, query_event

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# GPU clock cycles of a kernel that spins: about 0.2 s, far above the cost of any call below.
SPIN = 300_000_000
NUM_SLOTS = 64


@pytest.fixture
def allocator() -> SlotAllocator:
    return SlotAllocator(NUM_SLOTS, 4, device="cuda")


def new_stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def spin(stream: Any) -> None:
    """Keeps `stream` busy for a while."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN)  # type: ignore[no-untyped-call]


def taken(allocator: SlotAllocator, n: int, stream: Any = None) -> torch.Tensor:
    slots = allocator.alloc(n, stream)
    assert slots is not None
    return slots


def test_slots_retire_behind_a_running_kernel(allocator: SlotAllocator) -> None:
    stream = new_stream()
    slots = taken(allocator, NUM_SLOTS)
    spin(stream)
    allocator.free(slots, streams=(stream,))
    assert allocator.reclaim() == 0
    assert allocator.fenced_size() == NUM_SLOTS
    assert allocator.alloc(4) is None
    stream.synchronize()
    assert allocator.reclaim() == NUM_SLOTS
    allocator.check()


def test_another_object_for_the_same_stream_is_the_same_stream() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        return made[-1]

    allocator = SlotAllocator(NUM_SLOTS, 4, device="cuda", event_factory=make)
    stream = new_stream()
    with torch.cuda.stream(stream):
        same = torch.cuda.current_stream()
    allocator.free(taken(allocator, NUM_SLOTS), streams=(stream, same))
    assert len(made) == 1
    stream.synchronize()
    assert allocator.reclaim() == NUM_SLOTS


def test_the_next_owner_writes_after_the_last_reader(allocator: SlotAllocator) -> None:
    pool = torch.zeros(NUM_SLOTS + 4, device="cuda")
    reader, writer = new_stream(), new_stream()
    # The first launch of a kernel loads it, which may wait for the device.
    pool.index_fill_(0, torch.zeros(1, dtype=torch.int64, device="cuda"), 0.0).index_select(
        0, torch.zeros(1, dtype=torch.int64, device="cuda")
    )
    torch.cuda.synchronize()
    for stamp in range(1, 6):
        slots = taken(allocator, NUM_SLOTS, writer)
        index = slots.to("cuda")
        with torch.cuda.stream(writer):
            pool.index_fill_(0, index, float(stamp))
        ready: Any = allocator.record(writer)
        reader.wait_event(ready)
        spin(reader)
        with torch.cuda.stream(reader):
            seen = pool.index_select(0, index)
        allocator.free(slots, streams=(writer, reader))
        again = taken(allocator, NUM_SLOTS, writer)
        with torch.cuda.stream(writer):
            pool.index_fill_(0, index, -1.0)
        assert not reader.query()
        allocator.free(again, streams=(writer,))
        torch.cuda.synchronize()
        assert seen.eq(stamp).all()
        assert allocator.reclaim() == NUM_SLOTS


def test_events_are_seen_through(allocator: SlotAllocator) -> None:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    assert event.query()
    with pytest.raises(TransferError):
        query_event(event)
    slots = taken(allocator, 4)
    with pytest.raises(UsageError, match="never recorded"):
        allocator.free(slots, fence=EventFence(event))
    stream = new_stream()
    spin(stream)
    allocator.free(slots, fence=EventFence(event, stream))
    assert allocator.reclaim() == 0
    stream.synchronize()
    assert allocator.reclaim() == 4


def test_a_ready_event_passes_with_its_stream(allocator: SlotAllocator) -> None:
    stream = new_stream()
    spin(stream)
    event = allocator.record(stream)
    assert not allocator.passed(event)
    stream.synchronize()
    assert allocator.passed(event)


def test_device_slots_are_refused(allocator: SlotAllocator) -> None:
    slots = taken(allocator, 4)
    with pytest.raises(UsageError, match="CPU"):
        allocator.free(slots.cuda())
