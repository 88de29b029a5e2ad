"""A failing schedule becomes short and plain, and still fails."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import hypothesis
import pytest
from hypothesis import strategies as st

from stress.schedules import Backend, Script, Scripted, attempt, shrink


async def overtaken() -> None:
    """Fails only where the last of five tasks takes both its steps before any other takes its second."""
    second = []

    async def worker(number: int) -> None:
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        second.append(number)

    async with anyio.create_task_group() as group:
        for number in range(5):
            group.start_soon(worker, number)
    assert second[0] != 4


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_failing_schedule_shrinks_to_a_few_choices(backend: Backend) -> None:
    def fails(choices: list[int]) -> bool:
        return attempt(overtaken, backend=backend, chooser=Scripted(choices)).failed

    assert not fails([])
    failing = [run for seed in range(100) if (run := attempt(overtaken, backend=backend, seed=seed)).failed]
    assert len(failing) > 5
    for run in failing[:5]:
        short = shrink(run.choices, fails)
        assert fails(short)
        assert len(short) <= len(run.choices)
        assert 1 <= sum(choice > 0 for choice in short) <= 3
        for place, choice in enumerate(short):
            if choice:
                assert not fails([*short[:place], 0, *short[place + 1 :]])
        again = Script.from_json(Script(backend, tuple(short), "the last task wins").to_json())
        assert attempt(overtaken, backend=backend, chooser=again.chooser()).failed


@pytest.mark.parametrize(
    ("choices", "needed", "short"),
    [
        ([3, 1, 4, 1, 5, 9, 2, 6], lambda choices: 9 in choices, [9]),
        ([3, 1, 4, 1, 5, 9, 2, 6], lambda choices: len(choices) > 5 and choices[5] > 0, [0, 0, 0, 0, 0, 1]),
        ([3, 1, 4, 1, 5, 9, 2, 6], lambda choices: sum(choices) >= 3, [3]),
        ([7] * 40, lambda choices: max(choices, default=0) >= 5, [5]),
        ([1, 2, 0, 0, 0], lambda choices: True, []),
        ([0, 0, 8, 0, 8], lambda choices: [c for c in choices if c] == [8, 8], [8, 8]),
    ],
)
def test_shrunk_to_the_minimum(choices: list[int], needed: object, short: list[int]) -> None:
    assert shrink(choices, needed) == short  # type: ignore[arg-type]


def test_what_does_not_fail_cannot_be_shrunk() -> None:
    with pytest.raises(ValueError, match="does not fail"):
        shrink([1, 2, 3], lambda choices: False)


def test_runs_are_bounded_and_the_best_so_far_is_kept() -> None:
    asked: list[list[int]] = []

    def fails(choices: list[int]) -> bool:
        asked.append(choices)
        return sum(choices) >= 30

    short = shrink([1] * 60, fails, max_runs=10)
    assert len(asked) == 10
    assert sum(short) >= 30
    assert len(short) < 60


def test_no_schedule_is_tried_twice() -> None:
    asked: list[tuple[int, ...]] = []

    def fails(choices: list[int]) -> bool:
        asked.append(tuple(choices))
        return len([choice for choice in choices if choice]) >= 2

    shrink([5, 0, 4, 3, 0, 0, 2], fails)
    assert len(asked) == len(set(asked))


@hypothesis.given(choices=st.lists(st.integers(0, 6), max_size=25), wanted=st.sets(st.integers(0, 24), max_size=4))
def test_nothing_is_left_that_is_not_needed(choices: list[int], wanted: set[int]) -> None:
    """A schedule fails where each of some places still has its choice, or more."""
    needed = {place: choices[place] for place in wanted if place < len(choices)}

    def fails(candidate: list[int]) -> bool:
        return all((candidate[place] if place < len(candidate) else 0) >= least for place, least in needed.items())

    end = max((place + 1 for place, least in needed.items() if least), default=0)
    assert shrink(choices, fails) == [needed.get(place, 0) for place in range(end)]
