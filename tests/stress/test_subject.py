"""Somebody else's cache on the harness: one that is right passes, one that forgets its pins does not."""

from __future__ import annotations

import pytest

from stress.harness.subject import drive
from stress.schedules import Scripted
from tests.stress.tiny_cache import TinyCache, UnpinnedCache


@pytest.mark.parametrize("seed", range(20))
def test_a_cache_that_is_right_passes(seed: int) -> None:
    done = drive(TinyCache, seed, backend="trio" if seed % 4 == 3 else "asyncio")
    assert done.failure is None, done.failure
    assert done.num_acts > 20


def test_a_forgotten_pin_is_found() -> None:
    failures = [drive(UnpinnedCache, seed).failure for seed in range(10)]
    assert [failure.oracle for failure in failures if failure is not None].count("owner") > 7


def test_a_run_can_be_repeated() -> None:
    first = drive(UnpinnedCache, 3)
    assert drive(UnpinnedCache, 3, chooser=Scripted(first.choices)) == first
