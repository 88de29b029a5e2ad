"""Operations and schedule both drawn by hypothesis, so that both shrink: to fewer acts, and towards the plain order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stress.harness.emphases import EMPHASES
from stress.harness.generate import make_world
from stress.harness.play import play
from stress.harness.worlds import World
from stress.planted.catalog import CATALOG
from stress.schedules import attempt
from tests.support.schedules import Drawn

UNHURRIED = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


@st.composite
def worlds(draw: st.DrawFn, emphases: tuple[str, ...]) -> World:
    """The setting of some seed, with tasks made anew of the acts that were in it."""
    world = make_world(draw(st.integers(0, 10_000)), draw(st.sampled_from(emphases)))
    acts = [act for task in world.tasks for act in task]
    tasks = draw(st.lists(st.lists(st.sampled_from(acts), max_size=4), min_size=1, max_size=4))
    return replace(world, backend="asyncio", fault="", tasks=tuple(map(tuple, tasks)))


EMPHASES_WITHOUT_FAULTS = tuple(name for name in EMPHASES if name != "faults")


@UNHURRIED
@given(world=worlds(EMPHASES_WITHOUT_FAULTS), data=st.data())
def test_no_order_of_no_operations_breaks_the_cache(world: World, data: st.DataObject) -> None:
    assert play(world, chooser=Drawn(data)).failure is None


@pytest.mark.parametrize("name", ["counter not moved on split", "namespace joined as a string"])
def test_a_planted_fault_is_found_this_way(name: str) -> None:
    plant = next(plant for plant in CATALOG if plant.name == name)

    @settings(UNHURRIED, max_examples=300, phases=[Phase.generate], database=None, derandomize=True)
    @given(world=worlds((plant.emphasis,)), data=st.data())
    def search(world: World, data: Any) -> None:
        assert play(world, chooser=Drawn(data), builder=plant.builder).failure is None

    with pytest.raises(AssertionError):
        search()


class Kept(Drawn):
    """Keeps what it answered."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.choices: list[int] = []

    def choose(self, n: int) -> int:
        self.choices.append(super().choose(n))
        return self.choices[-1]


def test_the_schedule_shrinks() -> None:
    """It goes wrong where four tasks arrive in the opposite order; no more is left of the schedule than that takes."""
    failing: list[list[int]] = []

    async def race() -> None:
        arrived: list[int] = []

        async def work(number: int) -> None:
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            arrived.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(work, number)
        assert arrived != sorted(arrived, reverse=True)

    @settings(UNHURRIED, phases=[Phase.generate, Phase.shrink], database=None, derandomize=True)
    @given(data=st.data())
    def search(data: Any) -> None:
        chooser = Kept(data)
        done = attempt(race, backend="asyncio", chooser=chooser)
        if done.failed:
            failing.append(chooser.choices)
        assert not done.failed

    with pytest.raises(AssertionError):
        search()
    odd = [sum(map(bool, choices)) for choices in failing]
    assert 2 * odd[-1] <= max(odd)


def test_operations_and_schedule_shrink_together() -> None:
    plant = next(plant for plant in CATALOG if plant.name == "counter not moved on split")
    failing: list[tuple[int, int]] = []

    @settings(UNHURRIED, max_examples=60, phases=[Phase.generate, Phase.shrink], database=None, derandomize=True)
    @given(world=worlds((plant.emphasis,)), data=st.data())
    def search(world: World, data: Any) -> None:
        chooser = Kept(data)
        failure = play(world, chooser=chooser, builder=plant.builder).failure
        if failure is not None:
            failing.append((world.num_acts, sum(map(bool, chooser.choices))))
        assert failure is None

    with pytest.raises(AssertionError):
        search()
    num_acts, num_odd = failing[-1]
    assert num_odd == 0  # it needs no particular order
    assert num_acts < failing[0][0]
