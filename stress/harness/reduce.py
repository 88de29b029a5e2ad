"""Makes a failing world small: fewer tasks, fewer acts, a plainer schedule, and still the same oracle's finding."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import replace

from stress.harness.builder import Builder
from stress.harness.outcome import Failure
from stress.harness.play import play
from stress.harness.script import FailureScript
from stress.harness.worlds import Act, World
from stress.schedules import Scripted, shrink

__all__ = ["reduce_failure"]


def reduce_failure(
    world: World, failure: Failure, builder: Builder | None = None, *, max_runs: int = 400
) -> FailureScript:
    """The smallest world and schedule that were found to fail alike, and what is said of it.

    A smaller world has another schedule, so each is tried under the plain order and under a few seeded ones. What is
    left is shrunk as `stress.schedules.shrink` does. Takes up to `max_runs` runs for either part.

    Args:
        world: that fails under the schedule of its own seed.
        failure: what it was.
        builder: of the cache that failed.
    """
    gc.freeze()  # every failing run is followed by a collection, which need not walk what was imported
    try:
        return _reduce(world, failure, builder, max_runs)
    finally:
        gc.unfreeze()


def _reduce(world: World, failure: Failure, builder: Builder | None, max_runs: int) -> FailureScript:
    choices = _failing(world, failure, builder, seeds=(world.seed,)) or ()
    runs = 0
    better = True
    while better and runs < max_runs:
        better = False
        for smaller in _smaller(world):
            runs += 3
            found = _failing(smaller, failure, builder, seeds=(world.seed, world.seed + 1))
            if found is not None:
                world, choices, better = smaller, found, True
                break
            if runs >= max_runs:
                break

    def fails(script: list[int]) -> bool:
        done = play(world, chooser=Scripted(script), builder=builder)
        return done.failure is not None and done.failure.oracle == failure.oracle

    if fails(list(choices)):
        choices = tuple(shrink(choices, fails, max_runs=max_runs))
    last = play(world, chooser=Scripted(choices), builder=builder)
    found_failure = last.failure or failure
    return FailureScript(world, choices, found_failure.oracle, found_failure.message)


def _failing(world: World, failure: Failure, builder: Builder | None, seeds: tuple[int, ...]) -> tuple[int, ...] | None:
    """A schedule under which a world fails alike."""
    for chooser in (Scripted(()), *(None if seed == world.seed else Scripted(_answers(seed)) for seed in seeds)):
        done = play(world, chooser=chooser, builder=builder)
        if done.failure is not None and done.failure.oracle == failure.oracle:
            return done.choices
    return None


def _answers(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4) for _ in range(400)]


def _smaller(world: World) -> Iterator[World]:
    """Worlds with less in them, boldest first."""
    tasks = world.tasks
    if world.check_every > 1:
        yield replace(world, check_every=1)  # or acts would be kept only to bring the next audit about
    half = len(tasks) // 2
    if half and len(tasks) > 2:
        yield replace(world, tasks=tasks[:half])
        yield replace(world, tasks=tasks[half:])
    for index in range(len(tasks)):
        if len(tasks) > 1:
            yield replace(world, tasks=tasks[:index] + tasks[index + 1 :])
    for index, task in enumerate(tasks):
        for fewer in _fewer(task):
            yield replace(world, tasks=(*tasks[:index], fewer, *tasks[index + 1 :]))
    if world.num_streams > 1:
        yield replace(world, num_streams=1, extra_stream=False)
    if world.low_watermark:
        yield replace(world, low_watermark=0.0, high_watermark=0.0)


def _fewer(acts: tuple[Act, ...]) -> Iterator[tuple[Act, ...]]:
    size = len(acts)
    while size > 1:
        size = (size + 1) // 2
        for start in range(0, len(acts), size):
            yield acts[:start] + acts[start + size :]
        if size == 1:
            break
    if len(acts) == 1:
        yield ()
    for index, act in enumerate(acts):
        for steps in _fewer(act.steps):
            yield (*acts[:index], act._replace(steps=steps), *acts[index + 1 :])
