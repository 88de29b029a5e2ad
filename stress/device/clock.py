"""A clock that moves only when told to, and what is due on it."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

__all__ = ["VirtualClock"]


class VirtualClock:
    """Virtual seconds. `time` fits wherever a `clock=` is asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        """The virtual time, in seconds."""
        return self.now

    def schedule(self, when: float, action: Callable[[], None]) -> None:
        """Has `action` run once the clock reaches `when`; what is due at one time runs in the order of the calls."""
        heapq.heappush(self._due, (when, next(self._order), action))

    def advance(self, seconds: float) -> None:
        """Moves the clock on and runs, in order of time, all that is due by then. `ValueError` if it would go back."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a clock advances by a finite number of seconds, not {seconds}")
        self._run_until(self.now + seconds)

    def advance_to(self, when: float) -> None:
        """As `advance`, up to the time `when`; does nothing where that is past."""
        self._run_until(max(self.now, when))

    def run_until_idle(self) -> None:
        """Moves the clock on until nothing is due any more."""
        while self._due:
            self._run_until(self._due[0][0])

    def _run_until(self, end: float) -> None:
        while self._due and self._due[0][0] <= end:
            when, _, action = heapq.heappop(self._due)
            self.now = max(self.now, when)
            action()
        self.now = max(self.now, end)
