"""Streams, events, kernels and copies of the virtual device, in the shape of torch's, traps included."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stress.device.oracle import Actor, Clock, join

if TYPE_CHECKING:
    from stress.device.virtual import VirtualDevice

__all__ = ["Kernel", "Slots", "VirtualCopy", "VirtualEvent", "VirtualStream", "slot_list"]

# A tensor, an array or a sequence of ints.
Slots = Any


def slot_list(slots: Slots) -> list[int]:
    """`slots` as plain ints."""
    return [int(slot) for slot in (slots.tolist() if hasattr(slots, "tolist") else slots)]


class Kernel:
    """A launched kernel. It writes as it starts and reads as it ends: the worst case for a missing fence.

    `stamp` is what it leaves in the slots that it writes; `seen` is, once `done`, what it found in those it reads.
    """

    def __init__(self, stamp: int, start: float, end: float) -> None:
        self.stamp = stamp
        self.start = start
        self.end = end
        self.seen: dict[int, int | None] = {}
        self.done = False


class VirtualStream:
    """An in-order queue of kernels, as `torch.cuda.Stream`. The host never waits in any call but `synchronize`."""

    def __init__(self, device: VirtualDevice, actor: Actor) -> None:
        self._device = device
        self._actor = actor
        self._idle_at = 0.0

    @property
    def name(self) -> str:
        return self._actor.name

    def launch(
        self,
        reads: Slots = (),
        writes: Slots = (),
        duration: float | None = None,
        *,
        stamp: int | None = None,
        label: str = "kernel",
    ) -> Kernel:
        """Queues a kernel of `duration` virtual seconds (seeded by default) behind all that this stream was given."""
        device = self._device
        read, written = slot_list(reads), slot_list(writes)
        self._follow(device.host.clock)
        start = max(self._idle_at, device.clock.now)
        self._idle_at = start + device.duration(duration)
        kernel = Kernel(device.next_stamp() if stamp is None else stamp, start, self._idle_at)
        device.oracle.access(self._actor, read, written, label)
        device.perform(kernel, read, written)
        return kernel

    def copy(self, reads: Slots, writes: Slots, duration: float | None = None, *, label: str = "copy") -> Kernel:
        """Queues a kernel as `launch` does; at its end each slot of `writes` has the stamp of its one of `reads`."""
        kernel = self.launch(reads, writes, duration, label=label)
        self._device.carry_over(kernel, slot_list(reads), slot_list(writes))
        return kernel

    def wait_event(self, event: VirtualEvent) -> None:
        """Orders what comes next on this stream after the event's last record; nothing where there was none."""
        self._follow(self._device.host.clock)
        mark = event.last_record
        if mark is not None:
            when, clock = mark
            self._idle_at = max(self._idle_at, when)
            self._follow(clock)

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """Records `event`, or a new one, and returns it."""
        event = self._device.event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all that this stream was given is done. A True orders the host after it."""
        done = self._idle_at <= self._device.clock.now
        if done:
            join(self._device.host.clock, self._actor.clock)
        return done

    def synchronize(self) -> None:
        """Moves the clock on until this stream is idle, and orders the host after it."""
        self._device.clock.advance_to(self._idle_at)
        join(self._device.host.clock, self._actor.clock)

    def mark(self) -> tuple[float, Clock]:
        """When all that was queued so far is done, and what it knows."""
        self._follow(self._device.host.clock)
        return max(self._idle_at, self._device.clock.now), dict(self._actor.clock)

    def _follow(self, clock: Clock) -> None:
        join(self._actor.clock, clock)

    def __repr__(self) -> str:
        return f"<stream {self.name}>"


class VirtualEvent:
    """A point on a stream, as `torch.cuda.Event`. Never recorded, it queries True; recorded again, it forgets."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.last_record: tuple[float, Clock] | None = None

    def record(self, stream: VirtualStream | None = None) -> None:
        """Stands from now on for all that `stream` (by default the device's default stream) was given so far."""
        self.last_record = (self._device.default_stream if stream is None else stream).mark()

    def query(self) -> bool:
        """Whether the point is reached. A True orders the host after it, where there is a point at all."""
        if self.last_record is None:
            return True
        when, clock = self.last_record
        done = when <= self._device.clock.now
        if done:
            join(self._device.host.clock, clock)
        return done

    def wait(self, stream: VirtualStream | None = None) -> None:
        """Has `stream` wait for this event."""
        (self._device.default_stream if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        """Moves the clock on until the point is reached, and orders the host after it."""
        if self.last_record is not None:
            self._device.clock.advance_to(self.last_record[0])
            self.query()


class VirtualCopy:
    """A copy by a thread or a network card: no stream orders it, and it completes as a future does.

    It knows what the host knew when it started. `done()` is True once it ended, which orders the host after it.
    """

    def __init__(self, device: VirtualDevice, actor: Actor, kernel: Kernel) -> None:
        self._device = device
        self._actor = actor
        self._callbacks: list[Callable[[VirtualCopy], object]] = []
        self._observed = False
        self.kernel = kernel
        device.clock.schedule(kernel.end, self._complete)

    def done(self) -> bool:
        """Whether the copy has ended."""
        if self.kernel.done and not self._observed:
            self._observed = True
            join(self._device.host.clock, self._actor.clock)
            self._device.give_back(self._actor)
        return self.kernel.done

    def add_done_callback(self, callback: Callable[[VirtualCopy], object]) -> None:
        """Calls `callback(copy)` when the copy ends, or now if it has."""
        if self.kernel.done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def _complete(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        if callbacks:
            self.done()  # to be called back is to see that it ended
        for callback in callbacks:
            callback(self)
