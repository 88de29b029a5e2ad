"""Who decides what runs next, and the record of the decisions."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Protocol

__all__ = ["Chooser", "Recorder", "Scripted", "Seeded"]


class Chooser(Protocol):
    """Decides which of the tasks that could run next does."""

    def choose(self, n: int) -> int:
        """One of 0 .. n-1; `n` is at least 2, and 0 is what has been ready longest."""


class Seeded:
    """Chooses evenly at random; the same seed chooses the same.

    Args:
        seed: of the generator.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed).random

    def choose(self, n: int) -> int:
        return int(self._random() * n)

    def __repr__(self) -> str:
        return f"Seeded({self._seed})"


class Scripted:
    """Answers from a list, then 0 for ever.

    An answer too large for its question becomes the largest that fits: a script stays runnable while it is being
    shrunk, and after the code under test changed.

    Args:
        choices: the answers, in order.
    """

    def __init__(self, choices: Iterable[int]) -> None:
        self._choices = list(choices)
        self._next = 0

    def choose(self, n: int) -> int:
        if self._next >= len(self._choices):
            return 0
        answer = self._choices[self._next]
        self._next += 1
        return min(answer, n - 1)

    def __repr__(self) -> str:
        return f"Scripted({self._choices})"


class Recorder:
    """Passes questions to a chooser and keeps its answers; while stopped, or after the chooser failed, it says 0.

    So what runs before or after the part of interest, such as the unwinding of a failed run, takes the plainest order
    and is no part of the record. A recorder starts started.

    Args:
        chooser: who answers.

    Raises:
        ValueError: from `choose`, where an answer is out of range.
    """

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._started = True
        self.choices: list[int] = []
        self.widths: list[int] = []
        self.failure: BaseException | None = None
        """What the chooser raised."""

    def start(self) -> None:
        """Ask the chooser from now on."""
        self._started = True

    def stop(self) -> None:
        """Ask and record no more."""
        self._started = False

    def choose(self, n: int) -> int:
        if not self._started or self.failure is not None:
            return 0
        try:
            answer = self._chooser.choose(n)
            if not 0 <= answer < n:
                raise ValueError(f"{self._chooser!r} chose {answer} of {n}")
        except BaseException as failure:
            self.failure = failure
            raise
        self.choices.append(answer)
        self.widths.append(n)
        return answer

    def __repr__(self) -> str:
        return f"Recorder({self._chooser!r})"
