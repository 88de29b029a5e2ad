"""Runs side by side, each in a process of its own.

A process a run, so that a run gives back all its memory, one that dies says which it was, and Ctrl-C ends them at once.
They come from a fork server, which imports what they need once; what they tell comes over a pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, NamedTuple, Protocol

import anyio

from aradix.replay.driver import Observed, ReplayResult, ReplaySetup, replay
from aradix.replay.request import ReplayError, Request, Trace
from aradix.replay.reuse import LookedUpTrace, ReuseDistances, reuse_distances

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

__all__ = ["BoundJob", "Excerpt", "Job", "Outcome", "ReplayJob", "run_jobs"]

_TOLD_EVERY = 64
OnProgress = Callable[[int], None]


class Excerpt(NamedTuple):
    """The first `limit` requests of a trace, or all."""

    trace: Trace
    limit: int | None

    def requests(self) -> Iterator[Request]:
        """The requests, from the first."""
        return islice(self.trace.requests(), self.limit)


class Outcome(NamedTuple):
    """What came of a job: runs with the capacity each was asked for, and maybe more."""

    results: tuple[tuple[str, ReplayResult], ...]
    distances: ReuseDistances | None = None


class Job(Protocol):
    """One thing to do; it can be pickled."""

    @property
    def name(self) -> str:
        """For what is said of it."""

    @property
    def num_steps(self) -> int:
        """For the progress bar."""

    @property
    def num_bytes(self) -> int:
        """Memory it may take."""

    def run(self, on_progress: OnProgress | None) -> Outcome:
        """Do it. Blocks until it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """One replay; `observed` only where it stays in this process."""

    excerpt: Excerpt
    capacity: str
    setup: ReplaySetup
    num_steps: int
    num_bytes: int
    observed: Observed | None = None

    @property
    def name(self) -> str:
        return f"--policy {self.setup.policy} --capacity {self.capacity}"

    def run(self, on_progress: OnProgress | None) -> Outcome:
        try:
            result = anyio.run(replay, self.excerpt.requests(), self.setup, on_progress, self.observed)
        except MemoryError as error:
            # What a process may take can be less than what the machine has.
            raise ReplayError(f"--capacity {self.capacity}: out of memory; give fewer tokens, or a --limit") from error
        return Outcome(((self.capacity, result),))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundJob:
    """The clairvoyant bound at each capacity, and reuse distances, if asked: all from one reading of the trace."""

    excerpt: Excerpt
    setups: tuple[tuple[str, ReplaySetup], ...]
    with_bound: bool
    with_distances: bool
    num_requests: int
    num_bytes: int

    @property
    def name(self) -> str:
        return "--policy optimal"

    @property
    def num_steps(self) -> int:
        return self.num_requests * (1 + self.with_bound * len(self.setups) + self.with_distances)

    def run(self, on_progress: OnProgress | None) -> Outcome:
        num_passed = 0

        def tell(done: int) -> None:
            if on_progress is not None:
                on_progress(num_passed + done)

        def reading() -> Iterator[Request]:
            for number, request in enumerate(self.excerpt.requests(), 1):
                yield request
                tell(number)

        setup = self.setups[0][1]
        try:
            paged = LookedUpTrace(reading(), setup.page_size, outputs=setup.outputs)
            num_passed += self.num_requests
            results = []
            for capacity, each in self.setups if self.with_bound else ():
                results.append((capacity, paged.result(each, tell)))
                num_passed += self.num_requests
            distances = None
            if self.with_distances:
                distances = reuse_distances(
                    paged.lookups(),
                    setup.page_size,
                    num_requests=self.num_requests,
                    num_pages=paged.num_pages,
                    capacities=[each.num_pages * each.page_size for _, each in self.setups],
                    on_progress=tell,
                )
        except MemoryError as error:
            raise ReplayError(f"{self.name}: out of memory; give a --limit or a larger --page-size") from error
        return Outcome(tuple(results), distances)


def run_jobs(
    jobs: Sequence[Job], *, num_processes: int, on_progress: OnProgress | None = None
) -> Iterator[tuple[int, Outcome]]:
    """Do all of them, and give each one's number and outcome when it is done. Blocks in between.

    Args:
        jobs: begun in their order, the longest first.
        num_processes: at most so many at a time, as far as this machine's memory goes; 1 runs them here, one by one.
        on_progress: told how many steps are done, of the sum of all `num_steps`.

    Raises:
        ReplayError: a job's own, or its process died.
        ConfigError: likewise.
        InvariantError: likewise.
    """
    if num_processes == 1:
        passed = 0
        for number, job in enumerate(jobs):
            tell = None if on_progress is None else _shifted(on_progress, passed)
            yield number, job.run(tell)
            passed += job.num_steps
        return
    crew = _Crew(jobs, num_processes)
    try:
        yield from crew.work(on_progress)
    finally:
        crew.dismiss()


def _shifted(on_progress: OnProgress, by: int) -> OnProgress:
    return lambda done: on_progress(by + done)


class _Crew:
    """The processes at work, and the pipe from each."""

    def __init__(self, jobs: Sequence[Job], num_processes: int) -> None:
        self._jobs = jobs
        self._num_processes = num_processes
        self._waiting = sorted(range(len(jobs)), key=lambda number: -jobs[number].num_steps)
        self._running: dict[Connection, tuple[int, BaseProcess]] = {}
        self._memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # Not forks of this process: a bar, torch and numpy may have threads here.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def work(self, on_progress: OnProgress | None) -> Iterator[tuple[int, Outcome]]:
        done = [0] * len(self._jobs)
        while self._waiting or self._running:
            while self._waiting and self._has_room():
                self._start(self._waiting.pop(0))
            for pipe in wait(list(self._running)):
                assert isinstance(pipe, Connection)
                number, _ = self._running[pipe]
                told = self._hear(pipe)
                done[number] = told if isinstance(told, int) else self._jobs[number].num_steps
                if on_progress is not None:
                    on_progress(sum(done))
                if isinstance(told, Outcome):
                    yield number, told

    def dismiss(self) -> None:
        """End whoever is still at work."""
        for _, process in self._running.values():
            process.terminate()
        for pipe, (_, process) in self._running.items():
            process.join()
            pipe.close()

    def _has_room(self) -> bool:
        if not self._running:
            return True
        if len(self._running) == self._num_processes:
            return False
        taken = sum(self._jobs[number].num_bytes for number, _ in self._running.values())
        return taken + self._jobs[self._waiting[0]].num_bytes <= self._memory_bytes

    def _start(self, number: int) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(self._jobs[number], theirs), daemon=True)
        process.start()
        # Whatever ends the process must end the pipe.
        theirs.close()
        self._running[ours] = number, process

    def _hear(self, pipe: Connection) -> int | Outcome:
        """What a process has to say: steps, or its outcome, after which it is gone."""
        number, process = self._running[pipe]
        try:
            told = pipe.recv()
        except EOFError:
            told = None
        if isinstance(told, int):
            return told
        del self._running[pipe]
        pipe.close()
        process.join()
        if isinstance(told, Outcome):
            return told
        if isinstance(told, BaseException):
            raise told
        raise ReplayError(
            f"{self._jobs[number].name}: its process ended with {process.exitcode}, maybe for want of memory; "
            "give fewer tokens, --jobs 1 or a --limit"
        )


def _work(job: Job, pipe: Connection) -> None:
    """What a process does: a job, telling of it."""
    # Ctrl-C goes to all of them; the one that started them ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def tell(done: int) -> None:
        if done % _TOLD_EVERY == 0:
            pipe.send(done)

    try:
        told: Outcome | Exception = job.run(tell)
    except Exception as error:
        told = error
    pipe.send(told)
