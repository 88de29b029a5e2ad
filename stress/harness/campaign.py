"""Many seeds, on as many processes as asked for."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from stress.harness.outcome import Failure
from stress.harness.play import play
from stress.harness.seeds import world_of
from stress.schedules import Backend

__all__ = ["Campaign", "Found", "run_campaign", "spread"]

_BATCH = 20
_Task = TypeVar("_Task")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Found:
    """A seed that failed."""

    seed: int
    failure: Failure
    history: tuple[str, ...]


@dataclass(slots=True)
class Campaign:
    """What came of some seeds: how many, the acts and steps in them, and the failures by seed.

    `interrupted`: somebody pressed Ctrl-C, and what is told is of the seeds up to there.
    """

    num_seeds: int = 0
    num_acts: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    found: list[Found] = field(default_factory=list)
    interrupted: bool = False

    def add(self, other: Campaign) -> None:
        """Counts another one in."""
        self.num_seeds += other.num_seeds
        self.num_acts += other.num_acts
        self.num_steps += other.num_steps
        self.found = sorted([*self.found, *other.found], key=lambda found: found.seed)

    @property
    def ms_per_seed(self) -> float:
        """Wall-clock milliseconds."""
        return 1e3 * self.seconds / max(1, self.num_seeds)


def _run_seeds(task: tuple[Sequence[int], Backend | None]) -> Campaign:
    seeds, backend = task
    campaign = Campaign()
    for seed in seeds:
        done = play(world_of(seed, backend))
        campaign.num_seeds += 1
        campaign.num_acts += done.num_acts
        campaign.num_steps += done.num_steps
        if done.failure is not None:
            campaign.found.append(Found(seed, done.failure, done.history))
            break
    return campaign


@contextmanager
def spread(num_jobs: int) -> Iterator[Callable[[Callable[[_Task], _Answer], Iterator[_Task]], Iterator[_Answer]]]:
    """A `map` over processes, in order of completion, that takes tasks only as they are needed."""
    # What was imported is not garbage: without this every collection would walk all of it.
    gc.freeze()
    if num_jobs <= 1:
        yield lambda function, tasks: map(function, tasks)
        return
    # A terminal sends Ctrl-C to all of them: the first process ends the run, the others end their tasks.
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_jobs, mp_context=context, initializer=ignore) as pool:

        def over(function: Callable[[_Task], _Answer], tasks: Iterator[_Task]) -> Iterator[_Answer]:
            running: set[Future[_Answer]] = set()
            for task in tasks:
                running.add(pool.submit(function, task))
                if len(running) > num_jobs:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in running)

        yield over


def run_campaign(
    first_seed: int,
    num_seeds: int | None,
    seconds: float | None,
    *,
    num_jobs: int = 1,
    backend: Backend | None = None,
    on_progress: Callable[[Campaign], None] = lambda campaign: None,
) -> Campaign:
    """Runs seeds from the first on, until there are enough, or the time is over, one failed, or Ctrl-C was pressed.

    Args:
        first_seed: the others follow.
        num_seeds: `None` for as many as there is time.
        seconds: of real time; `None` for no limit.
        num_jobs: processes.
        backend: instead of each world's own.
        on_progress: called now and then.
    """
    total = Campaign()
    began = time.monotonic()

    def batches() -> Iterator[tuple[Sequence[int], Backend | None]]:
        for start in itertools.count(0, _BATCH):
            size = _BATCH if num_seeds is None else min(_BATCH, num_seeds - start)
            if size <= 0 or total.found or (seconds is not None and time.monotonic() - began >= seconds):
                return
            yield range(first_seed + start, first_seed + start + size), backend

    try:
        with spread(num_jobs) as over:
            for part in over(_run_seeds, batches()):
                total.add(part)
                total.seconds = time.monotonic() - began
                on_progress(total)
    except KeyboardInterrupt:
        total.interrupted = True
    return total
