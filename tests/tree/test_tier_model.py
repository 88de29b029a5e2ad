"""Any sequence of steps on two tiers, jobs open over any of them, leaves the core as a brute-force model says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.tree_model import RANKS
from tests.tree.test_model import ARGUMENTS as DEVICE_ARGUMENTS
from tests.tree.test_model import LIMITS, NUMBERS, PAGES, REST, SPACES, STREAMS, Steps, configurations, drawn_at_random
from tests.tree.tier_lockstep import TierLockstep, empty_out

PAGE_COUNTS = st.integers(0, 6)

TIER_ARGUMENTS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "begin_store": (NUMBERS,),
    "begin_stores": (NUMBERS,),
    "end_store": (NUMBERS, PAGE_COUNTS, REST),
    "write_back": (PAGE_COUNTS,),
    "begin_load": (NUMBERS, PAGES, LIMITS, st.integers(0, 3)),
    "end_load": (NUMBERS, PAGE_COUNTS, REST, STREAMS),
    "evict_host": (PAGE_COUNTS, REST),
    "insert_host": (PAGES, REST, SPACES, st.integers(0, 3)),
    "begin_read": (NUMBERS, st.integers(0, 3)),
    "end_read": (NUMBERS,),
    "peek": (PAGES, REST, SPACES),
}
ARGUMENTS = {**DEVICE_ARGUMENTS, **TIER_ARGUMENTS}


class TierSteps(Steps):
    """The steps of `TierLockstep` with arguments that can be drawn before the tree is known."""

    lockstep: TierLockstep

    def begin_load(self, which: int, pages: list[int], limit: int | None, at_least: int) -> None:
        self.lockstep.begin_load(which, self.prompt(pages, 0), limit, at_least)

    def evict_host(self, num_pages: int, more: int) -> None:
        self.lockstep.evict_host(num_pages * self.lockstep.page_size - more)

    def insert_host(self, pages: list[int], rest: int, *more: Any) -> None:
        self.lockstep.insert_host(self.prompt(pages, rest), *more)

    def peek(self, pages: list[int], rest: int, *more: Any) -> None:
        self.lockstep.peek(self.prompt(pages, rest), *more)


def take(lockstep: TierLockstep, name: str, arguments: Sequence[Any]) -> None:
    target = TierSteps(lockstep) if hasattr(TierSteps, name) else lockstep
    getattr(target, name)(*arguments)


ONE_STEP = st.one_of([st.tuples(st.just(name), st.tuples(*drawn)) for name, drawn in ARGUMENTS.items()])


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    configuration=configurations(),
    backup_hits=st.sampled_from((None, 0, 1)),
    steps=st.lists(ONE_STEP, min_size=5, max_size=60),
)
def test_any_steps_on_two_tiers_leave_the_core_as_the_model_says(
    configuration: dict[str, Any], backup_hits: int | None, steps: list[tuple[str, tuple[Any, ...]]]
) -> None:
    lockstep = TierLockstep(backup_hits=backup_hits, **configuration)
    for name, arguments in steps:
        take(lockstep, name, arguments)


def drawn(source: random.Random, name: str) -> tuple[Any, ...]:
    """What `ARGUMENTS` describes, drawn plainly."""
    if name not in TIER_ARGUMENTS:
        return drawn_at_random(source, name)
    which, rest, count = source.randrange(16), source.randrange(4), source.randrange(7)
    pages, space, *_ = drawn_at_random(source, "close_gate")
    space = drawn_at_random(source, "close_gate")[2]
    return {
        "begin_store": (which,),
        "begin_stores": (which,),
        "end_store": (which, source.choice((6, 6, count)), source.choice((0, 0, rest))),
        "write_back": (count,),
        "begin_load": (which, pages, source.choice((None, None, source.randrange(20))), 1),
        "end_load": (which, source.choice((9, count)), source.choice((0, 0, rest)), which % 2),
        "evict_host": (source.randrange(4), rest),
        "insert_host": (pages, rest, space, source.choice((0, 0, rest))),
        "begin_read": (which, rest),
        "end_read": (which,),
        "peek": (pages, rest, space),
    }[name]


WEIGHTS = {"match": 12, "insert": 20, "extend": 4, "unpin": 10, "evict": 8, "begin_load": 8, "end_load": 5}
WEIGHTS |= {"begin_store": 8, "begin_stores": 6, "end_store": 10, "insert_host": 3, "evict_host": 2, "record_hit": 2}
WEIGHTS |= {"begin_read": 2, "end_read": 2, "open_gate": 3}


@pytest.mark.parametrize("evict_unit", ["page", "node"])
@pytest.mark.parametrize("policy", sorted(RANKS))
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_long_runs_on_two_tiers_leave_the_core_as_the_model_says(policy: str, evict_unit: str, page_size: int) -> None:
    source = random.Random(f"tiers {policy} {evict_unit} {page_size}")
    lockstep = TierLockstep(
        backup_hits=source.choice((None, 0, 1)),
        page_size=page_size,
        item_bytes=source.choice((4, 8)),
        policy=policy,
        evict_unit=evict_unit,
    )
    names = source.choices(list(ARGUMENTS), [WEIGHTS.get(name, 1) for name in ARGUMENTS], k=120)
    for name in names:
        take(lockstep, name, drawn(source, name))
    empty_out(lockstep)
