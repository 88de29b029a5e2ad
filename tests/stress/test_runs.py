"""Runs of the harness: the same seed is the same run, the product passes, and failures are found and made small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stress.harness.campaign import run_campaign
from stress.harness.compare import make_linear, make_sequential
from stress.harness.emphases import EMPHASES
from stress.harness.generate import make_world
from stress.harness.play import play
from stress.harness.reduce import reduce_failure
from stress.harness.script import FailureScript
from stress.harness.seeds import world_of
from stress.harness.worlds import World
from stress.planted.catalog import CATALOG
from stress.planted.plant import Plant
from stress.planted.survey import CLEAN, survey
from stress.schedules import Scripted

CORPUS = sorted((Path(__file__).parents[2] / "stress" / "corpus").glob("*.json"))


@pytest.mark.parametrize("path", CORPUS, ids=[path.stem for path in CORPUS])
def test_what_failed_once_does_not_fail_again(path: Path) -> None:
    script = FailureScript.from_json(path.read_text())
    done = play(script.world, chooser=Scripted(script.choices))
    assert done.failure is None, done.failure
    assert done.num_acts > 0


@pytest.mark.parametrize("seed", range(2 * (len(EMPHASES) + 4)))
def test_the_cache_passes(seed: int) -> None:
    done = play(world_of(seed))
    assert done.failure is None, done.failure


@pytest.mark.parametrize("seed", [3, 7, 15])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first, second = play(world_of(seed)), play(world_of(seed))
    assert first == second
    assert play(world_of(seed + 16)).digest != first.digest


def test_a_schedule_takes_its_way_again() -> None:
    world = make_world(5, "waiting")
    first = play(world)
    assert play(world, chooser=Scripted(first.choices)).digest == first.digest


@pytest.mark.parametrize(
    "world",
    [make_world(3, "churn"), make_world(4, "faults"), make_sequential(1), make_linear(2), make_world(5, "keeping")],
)
def test_a_world_survives_its_file(world: World) -> None:
    script = FailureScript(world, (1, 0, 2), "sum", "words")
    assert FailureScript.from_json(script.to_json()) == script


def test_acts_can_be_left_out() -> None:
    world = make_world(8, "crowd")
    for index in range(len(world.tasks)):
        fewer = tuple(task[::2] if place == index else task for place, task in enumerate(world.tasks))
        assert play(replace(world, tasks=fewer)).failure is None


@pytest.mark.parametrize("plant", CATALOG, ids=[plant.name for plant in CATALOG])
def test_each_planted_fault_is_found(plant: Plant) -> None:
    found = [
        done.failure
        for seed in range(24)
        if (done := play(make_world(seed, plant.emphasis), builder=plant.builder)).failure is not None
    ]
    assert len(found) >= 4


def test_a_failure_is_made_small() -> None:
    plant = next(plant for plant in CATALOG if plant.name == "split that drops lock_ref")
    world = next(
        world
        for seed in range(20)
        if (world := make_world(seed, plant.emphasis)).backend == "asyncio"
        and (done := play(world, builder=plant.builder)).failure is not None
        and done.failure.oracle == "sum"
    )
    failure = play(world, builder=plant.builder).failure
    assert failure is not None
    script = reduce_failure(world, failure, plant.builder, max_runs=150)
    again = play(script.world, chooser=Scripted(script.choices), builder=plant.builder)
    assert again.failure is not None
    assert again.failure.oracle == script.oracle == "sum"
    assert script.world.num_acts < world.num_acts / 4
    assert play(script.world, chooser=Scripted(script.choices)).failure is None


def test_a_survey_counts_bugs_and_the_clean_cache() -> None:
    tallies = survey(1)
    assert set(tallies) == {CLEAN, *(plant.name for plant in CATALOG)}
    assert not tallies[CLEAN].found
    assert sum(len(tally.found) for tally in tallies.values()) > len(CATALOG) / 2


def test_jobs_change_nothing() -> None:
    alone, spread = run_campaign(0, 24, None), run_campaign(0, 24, None, num_jobs=2)
    assert (alone.num_seeds, alone.num_acts, alone.num_steps) == (spread.num_seeds, spread.num_acts, spread.num_steps)
    assert not alone.found
