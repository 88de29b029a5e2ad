"""The happens-before oracle: which accesses to a slot are ordered by what was said, not by how long things took.

Vector clocks after Lamport and Mattern, kept per slot as in FastTrack (Flanagan and Freund, 2009): the last write, and
the reads since. An access that is not ordered after what it conflicts with is a race, even where timing hid it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Access", "Actor", "Clock", "Oracle", "Race", "join"]

# Actor number -> how many of its steps are known to have happened.
Clock = dict[int, int]


def join(clock: Clock, other: Clock) -> None:
    """Adds to `clock` all that `other` knows."""
    for actor, step in other.items():
        if clock.get(actor, 0) < step:
            clock[actor] = step


class Actor:
    """Whoever acts in an order of its own: the host, a stream or a running copy."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.clock: Clock = {}

    def step(self) -> int:
        """Begins the actor's next step."""
        step = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = step
        return step

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Access:
    """One access to a slot: by whom, at which of its steps, and for what."""

    kind: Literal["read", "write"]
    actor: Actor
    step: int
    label: str

    def __str__(self) -> str:
        return f"{self.kind} by {self.label or 'step'} {self.step} on {self.actor}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to one slot, at least one of them a write, that nothing orders."""

    slot: int
    first: Access
    second: Access

    def __str__(self) -> str:
        return f"slot {self.slot}: {self.second} is not ordered after {self.first}"


class _Shadow:
    """What the oracle remembers of one slot."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: Access | None = None
        self.reads: dict[int, Access] = {}


class Oracle:
    """Watches every access. `races` lists what it found, in order."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._shadows: dict[int, _Shadow] = {}

    def access(self, actor: Actor, reads: Iterable[int], writes: Iterable[int], label: str) -> None:
        """One step of `actor` that reads and writes these slots, ordered after all that its clock knows."""
        step = actor.step()
        read = Access("read", actor, step, label)
        write = Access("write", actor, step, label)
        for slot in reads:
            shadow = self._shadow(slot)
            self._compare(slot, shadow.write, read)
            shadow.reads[actor.number] = read
        for slot in writes:
            shadow = self._shadow(slot)
            self._compare(slot, shadow.write, write)
            for earlier in shadow.reads.values():
                self._compare(slot, earlier, write)
            shadow.write = write
            shadow.reads = {}

    def _shadow(self, slot: int) -> _Shadow:
        shadow = self._shadows.get(slot)
        if shadow is None:
            shadow = self._shadows[slot] = _Shadow()
        return shadow

    def _compare(self, slot: int, earlier: Access | None, later: Access) -> None:
        if earlier is None or later.actor.clock.get(earlier.actor.number, 0) >= earlier.step:
            return
        self.races.append(Race(slot, earlier, later))
