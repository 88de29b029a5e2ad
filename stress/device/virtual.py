"""VirtualDevice: streams with seeded durations, a memory of stamps, and the oracle that watches both."""

from __future__ import annotations

import itertools
import random

from stress.device.clock import VirtualClock
from stress.device.oracle import Actor, Oracle, Race
from stress.device.streams import Kernel, Slots, VirtualCopy, VirtualEvent, VirtualStream, slot_list

__all__ = ["VirtualDevice"]


class VirtualDevice:
    """A device whose time passes only in `advance`, `run_until_idle` and the synchronising calls.

    `durations` are the shortest and the longest kernel, in virtual seconds, by default; the seed draws between them.
    `device.event` is an event factory. Every access to a slot goes past `oracle`; `races` is what it found. The host is
    ordered after device work only by what it saw: an event or a stream that queried True, a copy that was done.
    """

    def __init__(self, seed: int = 0, durations: tuple[float, float] = (1.0, 10.0)) -> None:
        self.clock = VirtualClock()
        self.oracle = Oracle()
        self._random = random.Random(seed)
        self._durations = durations
        self._numbers = itertools.count()
        self._stamps = itertools.count(1)
        self._memory: dict[int, int] = {}
        self._copiers: list[Actor] = []
        self.host = Actor(next(self._numbers), "host")
        self.default_stream = self.stream("default")

    @property
    def races(self) -> list[Race]:
        """What the oracle found so far, in order."""
        return self.oracle.races

    def stream(self, name: str = "") -> VirtualStream:
        """A new stream."""
        number = next(self._numbers)
        return VirtualStream(self, Actor(number, name or f"stream {number}"))

    def event(self) -> VirtualEvent:
        """A new event, not recorded yet."""
        return VirtualEvent(self)

    def start_copy(
        self, reads: Slots = (), writes: Slots = (), duration: float | None = None, *, stamp: int | None = None
    ) -> VirtualCopy:
        """Starts, now, a copy that no stream orders; it knows what the host knows."""
        # The number of a copy that the host saw end may serve again: whoever starts the next copy knows all it did.
        actor = self._copiers.pop() if self._copiers else Actor(next(self._numbers), "")
        actor.name = f"copier {actor.number}"
        actor.clock.update({number: step for number, step in self.host.clock.items() if number != actor.number})
        read, written = slot_list(reads), slot_list(writes)
        now = self.clock.now
        end = now + self.duration(duration)
        kernel = Kernel(self.next_stamp() if stamp is None else stamp, now, end)
        self.oracle.access(actor, read, written, "copy")
        self.perform(kernel, read, written)
        return VirtualCopy(self, actor, kernel)

    def host_read(self, slots: Slots) -> dict[int, int | None]:
        """The host reads `slots` now: the stamp in each."""
        read = slot_list(slots)
        self.oracle.access(self.host, read, (), "host access")
        return self.peek(read)

    def host_write(self, slots: Slots, stamp: int | None = None) -> int:
        """The host writes `slots` now; the stamp that it left there."""
        written = slot_list(slots)
        self.oracle.access(self.host, (), written, "host access")
        stamp = self.next_stamp() if stamp is None else stamp
        self._memory.update(dict.fromkeys(written, stamp))
        return stamp

    def peek(self, slots: Slots) -> dict[int, int | None]:
        """The stamp in each slot, for a test to look at: no access, so nothing that could race."""
        return {slot: self._memory.get(slot) for slot in slot_list(slots)}

    def advance(self, seconds: float) -> None:
        """Lets virtual time pass."""
        self.clock.advance(seconds)

    def run_until_idle(self) -> None:
        """Lets virtual time pass until nothing runs. The host sees none of it: it has to ask."""
        self.clock.run_until_idle()

    # ---- for streams and copies

    def duration(self, asked: float | None) -> float:
        """The duration asked for, or a seeded one, in virtual seconds. `ValueError` unless it is above 0."""
        seconds = self._random.uniform(*self._durations) if asked is None else asked
        if not seconds > 0:
            raise ValueError(f"device work takes more than {seconds} seconds: none is done as it is queued")
        return seconds

    def next_stamp(self) -> int:
        """A stamp that nothing wrote yet."""
        return next(self._stamps)

    def perform(self, kernel: Kernel, reads: list[int], writes: list[int]) -> None:
        """Has the clock write the kernel's stamp at its start and look at what it reads at its end."""

        def begin() -> None:
            self._memory.update(dict.fromkeys(writes, kernel.stamp))

        def finish() -> None:
            kernel.seen = self.peek(reads)
            kernel.done = True

        self.clock.schedule(kernel.start, begin)
        self.clock.schedule(kernel.end, finish)

    def carry_over(self, kernel: Kernel, reads: list[int], writes: list[int]) -> None:
        """Has the clock move, as the kernel ends, what it found in each of `reads` to its one of `writes`."""

        def move() -> None:
            for source, target in zip(reads, writes, strict=True):
                stamp = kernel.seen[source]
                if stamp is None:
                    self._memory.pop(target, None)
                else:
                    self._memory[target] = stamp

        self.clock.schedule(kernel.end, move)

    def give_back(self, actor: Actor) -> None:
        """Takes back the number of a copy that the host saw end."""
        self._copiers.append(actor)
