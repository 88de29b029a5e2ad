"""The virtual device as the tasks use it: what they compute is stamped, and what they read is compared.

A kernel leaves one stamp in all slots it writes; the table here says what each slot holds for that stamp. A read
remembers what it should find, and is compared when its kernel has run.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from stress.device import HOST_SLOTS, Kernel, VirtualCopy, VirtualDevice, VirtualEvent, VirtualStream
from stress.device.oracle import Actor
from stress.harness.book import Book
from stress.harness.worlds import World

__all__ = ["HarnessDevice", "Kernels"]

_TICK_SECONDS = 0.001


class _NumberedStream(VirtualStream):
    """A stream that hashes to its number: sets of streams then have the same order in every run."""

    def __hash__(self) -> int:
        return self._actor.number


class HarnessDevice(VirtualDevice):
    """A virtual device whose runs can be repeated, and that tells where the KV of each copied slot has come from.

    Args:
        on_moved: called with the slots and stamps of a move, source and target; gives the stamp to leave there.
    """

    def __init__(
        self, seed: int, durations: tuple[float, float], on_moved: Callable[[int, int | None, int], int | None]
    ) -> None:
        super().__init__(seed, durations)
        self._on_moved = on_moved

    def carry_over(self, kernel: Kernel, reads: list[int], writes: list[int]) -> None:
        def move() -> None:
            for source, target in zip(reads, writes, strict=True):
                stamp = self._on_moved(source, kernel.seen[source], target)
                if stamp is None:
                    self._memory.pop(target, None)
                else:
                    self._memory[target] = stamp

        self.clock.schedule(kernel.end, move)

    def stream(self, name: str = "") -> VirtualStream:
        number = next(self._numbers)
        return _NumberedStream(self, Actor(number, name or f"stream {number}"))


class Kernels:
    """The streams of a world, and everything that runs on them.

    Args:
        world: says how many streams there are, and how slow kernels can be.
        book: knows contents by name.
    """

    def __init__(self, world: World, book: Book) -> None:
        self.device = HarnessDevice(world.seed, (0.2, max(0.3, float(world.slow))), self._moved)
        self.streams = [self.device.stream(f"stream {index}") for index in range(world.num_streams)]
        self.extra = self.device.stream("extra") if world.extra_stream and world.num_streams else None
        self._book = book
        self._random = random.Random(world.seed + 1)
        self._stamps = itertools.count(1)
        self._written: dict[tuple[int, int], int] = {}
        self._stamp_of: dict[int, int] = {}
        self._reads: deque[tuple[Kernel, list[int], list[int], str]] = deque()
        self._busy_until = 0.0
        self._work = anyio.Event()
        self._is_over = False

    def stream(self, index: int) -> VirtualStream | None:
        """The stream of that number, the extra one last; `None` where everything is computed on the host."""
        choices = [*self.streams, *([self.extra] if self.extra is not None else [])]
        return choices[index % len(choices)] if choices else None

    def event_factory(self) -> Callable[[], VirtualEvent] | None:
        """What makes the allocator's events; nothing where there are no streams."""
        return self.device.event if self.streams else None

    # ---- work

    def write(
        self,
        stream: VirtualStream | None,
        reads: Sequence[int],
        expected: Sequence[int],
        writes: Sequence[int],
        contents: Sequence[int],
        who: str,
        long: bool = False,
    ) -> None:
        """Computes `contents` into slots, reading those before them."""
        stamp = next(self._stamps)
        for slot, content in zip(writes, contents, strict=True):
            self._written[stamp, slot] = content
            self._stamp_of[slot] = stamp
        if stream is None:
            self.device.host_write(writes, stamp)
            self._see(self.device.host_read(reads), reads, expected, who)
        else:
            kernel = stream.launch(reads, writes, self._duration(long), stamp=stamp, label=who)
            self._launched(kernel, reads, expected, who)

    def read(
        self, stream: VirtualStream | None, slots: Sequence[int], expected: Sequence[int], who: str, long: bool = False
    ) -> None:
        """Reads slots, as attention over a prefix does."""
        if not slots:
            return
        if stream is None:
            self._see(self.device.host_read(slots), slots, expected, who)
        else:
            self._launched(stream.launch(slots, (), self._duration(long), label=who), slots, expected, who)

    def copy_out(
        self, slots: Sequence[int], expected: Sequence[int], who: str, seconds: tuple[float, float] | None
    ) -> VirtualCopy:
        """A copy that no stream orders reads slots."""
        copy = self.device.start_copy(slots, (), self._between(seconds))
        self._launched(copy.kernel, slots, expected, who)
        return copy

    def copy_in(
        self, slots: Sequence[int], contents: Sequence[int], seconds: tuple[float, float] | None
    ) -> VirtualCopy:
        """A copy that no stream orders writes slots; without contents it leaves nothing in them."""
        stamp = next(self._stamps)
        self._written.update(((stamp, slot), content) for slot, content in zip(slots, contents, strict=False))
        self._stamp_of.update(dict.fromkeys(slots, stamp))
        copy = self.device.start_copy((), slots, self._between(seconds), stamp=stamp)
        self._launched(copy.kernel, (), (), "copy")
        return copy

    def busy_with(self, stream: VirtualStream) -> None:
        """Something else was launched on a stream: time has to pass for it too."""
        self._busy_until = max(self._busy_until, stream.mark()[0])
        self._work.set()

    def contents_of(self, slots: Sequence[int]) -> list[int | None]:
        """The host reads slots now: what each holds."""
        seen = self.device.host_read(slots)
        return [None if (stamp := seen[slot]) is None else self._written.get((stamp, slot)) for slot in slots]

    def put(self, slots: Sequence[int], contents: Sequence[int]) -> None:
        """The host writes slots now."""
        stamp = next(self._stamps)
        for slot, content in zip(slots, contents, strict=True):
            self._written[stamp, slot] = content
        self.device.host_write(slots, stamp)

    def _moved(self, source: int, stamp: int | None, target: int) -> int | None:
        """A copy has ended: what the target holds from now on, under a stamp of its own."""
        content = None if stamp is None else self._written.get((stamp, source))
        if content is None:
            return None
        moved = next(self._stamps)
        self._written[moved, target] = content
        if target < HOST_SLOTS:
            self._book.loaded(target, content)
        return moved

    def relabel(self, slots: Sequence[int], contents: Sequence[int]) -> None:
        """What these slots hold counts as something else from now on."""
        for slot, content in zip(slots, contents, strict=True):
            self._written[self._stamp_of[slot], slot] = content

    def order(self, earlier: VirtualStream | None, later: VirtualStream | None) -> None:
        """Has one stream wait for what another was given."""
        if earlier is not None and later is not None and earlier is not later:
            later.wait_event(earlier.record_event())

    def _duration(self, long: bool) -> float | None:
        return self._between((15.0, 40.0)) if long else None

    def _between(self, seconds: tuple[float, float] | None) -> float | None:
        return None if seconds is None else self._random.uniform(*seconds)

    def _launched(self, kernel: Kernel, slots: Sequence[int], expected: Sequence[int], who: str) -> None:
        self._busy_until = max(self._busy_until, kernel.end)
        self._work.set()
        if slots:
            self._reads.append((kernel, list(slots), list(expected), who))

    # ---- what was found

    def look(self) -> None:
        """Raises the first race, and the first read that found something else than it should."""
        races = self.device.races
        if races:
            raise self._book.fail("race", str(races[0]))
        while self._reads and self._reads[0][0].done:
            kernel, slots, expected, who = self._reads.popleft()
            self._see(kernel.seen, slots, expected, who)

    def _see(self, seen: dict[int, Any], slots: Sequence[int], expected: Sequence[int], who: str) -> None:
        for slot, content in zip(slots, expected, strict=True):
            stamp = seen[slot]
            found = self._written.get((stamp, slot)) if stamp is not None else None
            if found != content:
                name = self._book.contents.name
                raise self._book.fail(
                    "garbled", f"{who} read {name(found)} from slot {slot} instead of {name(content)}"
                )

    # ---- time

    def advance(self, seconds: float) -> None:
        """Lets device time pass."""
        self.device.advance(seconds)

    async def run_clock(self) -> None:
        """Moves device time on as loop time passes; rests while the device does, so that a deadlock shows."""
        while not self._is_over:
            await self._work.wait()
            self._work = anyio.Event()
            while not self._is_over and self.device.clock.now < self._busy_until:
                await anyio.sleep(_TICK_SECONDS)
                self.device.advance(self._random.uniform(1.0, 6.0))
                self.look()

    def stop_clock(self) -> None:
        """Ends `run_clock`: nobody waits for the device any more."""
        self._is_over = True
        self._work.set()

    def finish(self) -> None:
        """Runs the device until it is idle, and compares all that was read."""
        self.device.run_until_idle()
        self.look()
        assert not self._reads
