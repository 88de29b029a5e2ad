"""Each planted bug is found in nearly every seed, and the allocator as it is races in none."""

from __future__ import annotations

import pytest

from stress.device import VirtualDevice
from stress.planted_memory import PLANTED, Kernels, SlotWorkload, clean, hunt, survey

SEEDS = range(100)


@pytest.mark.parametrize("kernels", ["short", "long", "mixed"])
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_in_nearly_every_seed(bug: str, kernels: Kernels) -> None:
    found = sum(bool(hunt(PLANTED[bug], seed, kernels)) for seed in SEEDS)
    assert found >= 90


@pytest.mark.parametrize("kernels", ["short", "long", "mixed"])
def test_the_allocator_races_in_no_seed(kernels: Kernels) -> None:
    assert [race for seed in SEEDS for race in hunt(clean, seed, kernels)] == []


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_workload_returns_every_slot(page_size: int) -> None:
    for seed in range(5):
        device = VirtualDevice(seed)
        workload = SlotWorkload(device, clean(device, 16 * page_size, page_size), seed)
        workload.run(200)
        workload.drain()
        assert workload.allocator.available_size() == 16 * page_size
        assert device.races == []


def test_a_survey_counts_by_name() -> None:
    counts = survey(range(3), "long")
    assert counts == {**dict.fromkeys(PLANTED, 3), "clean": 0}


def test_a_hunt_can_be_repeated() -> None:
    first, second = (hunt(PLANTED["no fence"], 5) for _ in range(2))
    assert [str(race) for race in first] == [str(race) for race in second]
    assert first
