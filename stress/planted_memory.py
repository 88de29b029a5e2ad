"""Allocators with a planted bug each, and a workload under which the oracle must find it.

Each planted allocator is the product with one rule broken from outside. `hunt` runs one seed; `survey` runs many and
counts in how many the oracle found something: nearly all of them where a bug is planted, none where none is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from aradix.memory.allocator import SlotAllocator
from aradix.memory.fences import EventFence, Fence, FutureFence, Stream
from stress.device import Race, VirtualDevice, VirtualEvent, VirtualStream

__all__ = ["PLANTED", "Kernels", "SlotWorkload", "clean", "hunt", "survey"]

Kernels = Literal["short", "long", "mixed"]
MakeAllocator = Callable[[VirtualDevice, int, int], SlotAllocator]

# Virtual seconds. The workload takes a few steps a second: short kernels last as long as a step, long ones span many.
_DURATIONS: Mapping[Kernels, tuple[float, float]] = {"short": (0.01, 0.5), "long": (10.0, 40.0), "mixed": (0.01, 20.0)}


class _Planted(SlotAllocator):
    """An allocator that is lied to: about who used the slots that come back, or who will use those that go out."""

    def users(self, streams: Iterable[Stream]) -> Iterable[Stream]:
        return streams

    def consumer(self, stream: Stream | None) -> Stream | None:
        return stream

    def alloc(self, n: int, stream: Stream | None = None, host_visible: bool = False) -> torch.Tensor | None:
        return super().alloc(n, self.consumer(stream), host_visible)

    def alloc_held(self, n: int, stream: Stream | None = None, host_visible: bool = False) -> Any:
        return super().alloc_held(n, self.consumer(stream), host_visible)

    def free(self, slots: Any, streams: Iterable[Stream] = (), *, fence: Fence | None = None) -> None:
        super().free(slots, self.users(streams), fence=fence)

    def free_held(self, slots: Any, streams: Iterable[Stream] = (), *, fence: Fence | None = None) -> None:
        super().free_held(slots, self.users(streams), fence=fence)

    def retire(self, slots: Any, streams: Iterable[Stream] = (), *, fence: Fence | None = None) -> None:
        super().retire(slots, self.users(streams), fence=fence)


class _NoFence(_Planted):
    """Frees without a fence."""

    def users(self, streams: Iterable[Stream]) -> Iterable[Stream]:
        return ()


class _OwnerOnly(_Planted):
    """Fences only the stream that the slots were allocated for."""

    def users(self, streams: Iterable[Stream]) -> Iterable[Stream]:
        return tuple(streams)[:1]


class _Deaf:
    """A stream that is told to wait and does not."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def wait_event(self, event: Any, /) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return self._stream == (other._stream if isinstance(other, _Deaf) else other)

    def __hash__(self) -> int:
        return hash(self._stream)


class _NoWait(_Planted):
    """Leaves the stream wait out when it hands a slot to another stream."""

    def consumer(self, stream: Stream | None) -> Stream | None:
        return None if stream is None else _Deaf(stream)


class _Unrecorded(VirtualEvent):
    """An event whose record does nothing. It queries True."""

    def record(self, stream: VirtualStream | None = None) -> None:
        pass


def clean(device: VirtualDevice, num_slots: int, page_size: int) -> SlotAllocator:
    """The product, as it is."""
    return SlotAllocator(num_slots, page_size, event_factory=device.event)


def _no_fence(device: VirtualDevice, num_slots: int, page_size: int) -> SlotAllocator:
    return _NoFence(num_slots, page_size, event_factory=device.event)


def _unrecorded(device: VirtualDevice, num_slots: int, page_size: int) -> SlotAllocator:
    return SlotAllocator(num_slots, page_size, event_factory=lambda: _Unrecorded(device))


def _shared_event(device: VirtualDevice, num_slots: int, page_size: int) -> SlotAllocator:
    event = device.event()
    return SlotAllocator(num_slots, page_size, event_factory=lambda: event)


def _owner_only(device: VirtualDevice, num_slots: int, page_size: int) -> SlotAllocator:
    return _OwnerOnly(num_slots, page_size, event_factory=device.event)


def _no_wait(device: VirtualDevice, num_slots: int, page_size: int) -> SlotAllocator:
    return _NoWait(num_slots, page_size, event_factory=device.event)


PLANTED: Mapping[str, MakeAllocator] = {
    "no fence": _no_fence,
    "event not recorded": _unrecorded,
    "one event shared by two batches": _shared_event,
    "only the owner's stream fenced": _owner_only,
    "stream wait left out": _no_wait,
}


@dataclass(eq=False)
class _Block:
    """Slots in use, every stream that touched them (the owner first), and the event behind which they are written."""

    slots: torch.Tensor
    users: list[VirtualStream] = field(default_factory=list)
    ready: VirtualEvent | None = None


class SlotWorkload:
    """A well-behaved user of an allocator on a virtual device: whatever races is the allocator's doing.

    It allocates for streams and for the host, writes, reads on other streams behind a ready event, copies in a thread,
    frees behind whatever used the slots, cancels what it never used, and polls now and then.
    """

    def __init__(self, device: VirtualDevice, allocator: SlotAllocator, seed: int) -> None:
        self.device = device
        self.allocator = allocator
        self._random = random.Random(seed)
        self._streams = [device.stream(name) for name in ("prefill", "decode", "copy")]
        self._blocks: list[_Block] = []

    def run(self, num_steps: int) -> None:
        """Takes `num_steps` seeded steps, or fewer: ends at the first race."""
        actions = (
            self._allocate,
            self._allocate,
            self._read,
            self._free,
            self._free,
            self._cancel,
            self._host,
            self._copy,
            self._poll,
        )
        for _ in range(num_steps):
            self._random.choice(actions)()
            if self.device.races:
                return
            # Steps come in bursts, within which not even a short kernel ends.
            if self._random.random() < 0.25:
                self.device.advance(self._random.uniform(0, 2))

    def drain(self) -> None:
        """Gives everything back and lets all kernels end; the pool is whole again, or `AssertionError`."""
        while self._blocks:
            self._free()
        self.device.run_until_idle()
        self.allocator.reclaim()
        self.allocator.check()
        if self.allocator.available_size() != self.allocator.num_slots:
            raise AssertionError(f"slots are missing: {self.allocator!r}")

    def _size(self) -> int:
        return self.allocator.page_size * self._random.randint(1, 6)

    def _allocate(self) -> None:
        stream = self._random.choice(self._streams)
        slots = self.allocator.alloc(self._size(), stream)
        if slots is None:
            self._free()
            return
        stream.launch(writes=slots, label="prefill")
        block = _Block(slots, [stream])
        block.ready = stream.record_event()
        self._blocks.append(block)

    def _read(self) -> None:
        if not self._blocks:
            return
        block = self._random.choice(self._blocks)
        stream = self._random.choice(self._streams)
        if block.ready is not None:
            stream.wait_event(block.ready)
        stream.launch(reads=block.slots, label="attention")
        if stream not in block.users:
            block.users.append(stream)

    def _free(self) -> None:
        if not self._blocks:
            return
        block = self._blocks.pop(self._random.randrange(len(self._blocks)))
        # Half of the time the pages part ways: a tail goes, as an eviction by pages would have it.
        page_size = self.allocator.page_size
        num_pages = len(block.slots) // page_size
        if num_pages > 1 and self._random.random() < 0.5:
            cut = page_size * self._random.randrange(1, num_pages)
            self._blocks.append(_Block(block.slots[:cut], block.users.copy(), block.ready))
            block.slots = block.slots[cut:]
        if len(block.users) == 1 and self._random.random() < 0.2:
            self.allocator.free(block.slots, fence=EventFence(self.device.event(), block.users[0]))
        else:
            self.allocator.free(block.slots, block.users)

    def _copy(self) -> None:
        written = [block for block in self._blocks if block.ready is None or block.ready.query()]
        if written:
            block = self._random.choice(written)
            self._blocks.remove(block)
            copy = self.device.start_copy(reads=block.slots)
            self.allocator.free(block.slots, block.users, fence=FutureFence(copy))

    def _cancel(self) -> None:
        slots = self.allocator.alloc(self._size(), self._random.choice(self._streams))
        if slots is not None:
            self.allocator.free(slots)

    def _host(self) -> None:
        slots = self.allocator.alloc(self._size(), self._random.choice([None, *self._streams]), host_visible=True)
        if slots is not None:
            self.device.host_write(slots)
            self._blocks.append(_Block(slots))

    def _poll(self) -> None:
        self.allocator.reclaim()


def hunt(make: MakeAllocator, seed: int, kernels: Kernels = "mixed", num_steps: int = 600) -> list[Race]:
    """The races of one seeded run. Takes no real time to wait."""
    rng = random.Random(f"{seed} {kernels}")
    device = VirtualDevice(rng.randrange(2**32), _DURATIONS[kernels])
    page_size = rng.choice((1, 4))
    allocator = make(device, 16 * page_size, page_size)
    SlotWorkload(device, allocator, rng.randrange(2**32)).run(num_steps)
    return device.races


def survey(seeds: Iterable[int], kernels: Kernels = "mixed") -> dict[str, int]:
    """By bug, and under "clean" for none: in how many of `seeds` the oracle found a race."""
    seeds = list(seeds)
    candidates: dict[str, MakeAllocator] = {**PLANTED, "clean": clean}
    return {name: sum(bool(hunt(make, seed, kernels)) for seed in seeds) for name, make in candidates.items()}
