"""In how many seeds each planted fault is found, and whether the clean cache is found guilty in the same worlds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from stress.harness.campaign import spread
from stress.harness.generate import make_world
from stress.harness.play import play
from stress.planted.catalog import CATALOG

__all__ = ["CLEAN", "Tally", "survey"]

CLEAN = "clean"
_WORLDS = 6
"""Small worlds that a seed stands for, for a planted fault as for the clean cache."""


@dataclass(slots=True)
class Tally:
    """What was found of one bug.

    Args:
        seeds: that were tried.
        found: those in which something was found.
        oracles: what found it.
        acts: how many had begun by then, for each.
    """

    seeds: int = 0
    found: list[int] = field(default_factory=list)
    oracles: Counter[str] = field(default_factory=Counter)
    acts: list[int] = field(default_factory=list)

    @property
    def median_seeds(self) -> float | None:
        """Seeds to try, one after the other, until the next that finds it."""
        found = sorted(self.found)
        return median(after - before for before, after in zip([-1, *found], found, strict=False)) if found else None

    @property
    def median_acts(self) -> float | None:
        """Acts that began in a seed's worlds until it is found."""
        return median(self.acts) if self.acts else None


class _Task(NamedTuple):
    name: str
    place: int | None
    emphasis: str
    seed: int


class _Answer(NamedTuple):
    name: str
    seed: int
    oracle: str | None
    num_acts: int


def _try(task: _Task) -> _Answer:
    builder = None if task.place is None else CATALOG[task.place].builder
    num_acts = 0
    for turn in range(_WORLDS):
        done = play(make_world(_WORLDS * task.seed + turn, task.emphasis), builder=builder)
        num_acts += done.num_acts
        if done.failure is not None:
            return _Answer(task.name, task.seed, done.failure.oracle, num_acts)
    return _Answer(task.name, task.seed, None, num_acts)


def survey(
    num_seeds: int, *, num_jobs: int = 1, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Tally]:
    """Every planted fault, and `CLEAN`, over seeds 0 .. num_seeds-1. A clean seed counts once for all emphases."""
    tasks = [
        _Task(plant.name, index, plant.emphasis, seed)
        for index, plant in enumerate(CATALOG)
        for seed in range(num_seeds)
    ]
    emphases = dict.fromkeys(plant.emphasis for plant in CATALOG)
    tasks += [_Task(CLEAN, None, emphasis, seed) for emphasis in emphases for seed in range(num_seeds)]
    tallies = {name: Tally(num_seeds) for name in (*(plant.name for plant in CATALOG), CLEAN)}
    with spread(num_jobs) as over:
        for count, answer in enumerate(over(_try, iter(tasks)), 1):
            tally = tallies[answer.name]
            if answer.oracle is not None and answer.seed not in tally.found:
                tally.found.append(answer.seed)
                tally.oracles[answer.oracle] += 1
                tally.acts.append(answer.num_acts)
            if count % 20 == 0 or count == len(tasks):
                on_progress(count, len(tasks))
    return tallies
