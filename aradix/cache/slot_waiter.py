"""`SlotWaiter`: one place in a queue for slots; `Pressure` says who is served when."""

from __future__ import annotations

from typing import Protocol

import anyio

from aradix.cache.hold import Hold

__all__ = ["Load", "SlotWaiter"]


class SlotWaiter:
    """One who waits: a lease that grows by `num_tokens`, or (`reserve`) one that waits to be entered; or a `load`.

    A load waits among the admissions, with a hold that is nobody's lease: it has the pin of the lease that began it.
    """

    __slots__ = (
        "began",
        "blocked",
        "error",
        "event",
        "granted",
        "hold",
        "keeps_pins",
        "load",
        "num_before",
        "num_tokens",
        "reserve",
        "task_id",
        "version",
    )

    def __init__(
        self, hold: Hold, num_tokens: int, *, reserve: bool, keeps_pins: bool = True, load: Load | None = None
    ) -> None:
        self.hold = hold
        self.num_tokens = num_tokens
        self.reserve = reserve
        self.keeps_pins = keeps_pins
        self.load = load
        self.version = -1
        self.began = 0.0
        self.blocked = False
        self.granted = False
        self.num_before = 0
        self.error: BaseException | None = None
        self.event = anyio.Event()
        self.task_id = 0 if load is not None else anyio.get_current_task().id

    def settle(self, error: BaseException | None = None) -> None:
        """Decide this waiter's fate, then wake it."""
        self.granted = error is None
        self.error = error
        self.event.set()


class Load(Protocol):
    """A copy from the host that waits for device slots; no task waits in its stead."""

    def take_off(self) -> bool:
        """Take the slots and begin to copy; False where they cannot be had."""

    def give_up(self) -> None:
        """Bring nothing: whoever shares this load goes on without it."""
