"""The oracle of quotas and pins says what it should, and takes the side of the cache where it cannot know."""

from __future__ import annotations

from typing import Any

import pytest

from aradix import Namespace
from stress.harness.claims import Claims, Kept, Standing
from stress.harness.keeping import make_keeping
from stress.harness.play import play

A, B = Namespace(tenant="a"), Namespace(tenant="b")


class Given:
    """A pin as the oracle sees one."""

    ended: str | None = None


def claims_of(a: int, b: int) -> Claims:
    """Tenants of 4 of 8 slots each, with so many cached: slots 1.. are a's, 11.. are b's."""
    claims = Claims({"a": 4, "b": 4, None: 0}, lambda: 5.0, 1)
    for namespace, first, count in ((A, 1, a), (B, 11, b)):
        standing = Standing(namespace, [], 0)
        claims.standing.append(standing)
        claims.shown(standing, range(first, first + count), count)
        claims.ended(standing)
    return claims


def kept(claims: Claims, namespace: Namespace, slots: list[int], until: float) -> Kept:
    pin: Any = Given()
    made = Kept(pin, namespace, tuple(slots), slots, until)
    claims.kept.append(made)
    return made


def found(claims: Claims) -> str | None:
    return claims.violation.oracle if claims.violation is not None else None


def test_who_is_above_his_share_gives() -> None:
    claims = claims_of(6, 2)
    claims.came_back([6, 5])
    assert found(claims) is None
    assert claims.num_judged == 0
    claims.came_back([4])  # nobody is above any more
    assert found(claims) is None


def test_who_is_within_his_share_does_not_give_while_another_is_above() -> None:
    claims = claims_of(6, 2)
    claims.came_back([12])
    assert found(claims) == "quota"


@pytest.mark.parametrize("why", ["asks", "in transit", "pinned", "stood on", "to be matched", "flushed", "a flush"])
def test_it_is_no_fault_where_that_cannot_be_known(why: str) -> None:
    claims = claims_of(6, 2)
    if why == "asks":
        claims._asked.append(("b", 3, 0))
    elif why == "in transit":
        claims.handed_out([21, 22, 23])
    elif why == "pinned":
        kept(claims, A, [1, 2, 3, 4, 5, 6], 9.0)
    elif why == "stood on":
        claims.standing.append(Standing(A, range(1, 7), 6))
    elif why == "to be matched":
        claims._asked.append(("a", 0, 6))
    elif why == "flushed":
        claims.flushed([B])
    else:
        claims.is_flushing = True
    claims.came_back([12])
    assert found(claims) is None


@pytest.mark.parametrize(
    ("until", "ended", "oracle"),
    [(6.0, None, "kept"), (6.0, "taken back", "kept"), (5.0, None, None), (float("inf"), "taken back", None)],
)
def test_what_is_kept_stays_until_its_time(until: float, ended: str | None, oracle: str | None) -> None:
    claims = claims_of(6, 0)
    given: Any = kept(claims, A, [5, 6], until).pin
    given.ended = ended
    claims.came_back([6])
    assert found(claims) == oracle


def test_nothing_comes_back_from_under_a_lease() -> None:
    claims = claims_of(6, 0)
    claims.standing.append(Standing(A, range(1, 4), 3))
    claims.came_back([6])
    assert found(claims) is None
    claims.came_back([3])
    assert found(claims) == "under a lease"


def test_the_worlds_judge_many_victims() -> None:
    worlds = [make_keeping(seed) for seed in range(12)]
    assert all(play(world).failure is None for world in worlds)
    assert sum(len(world.quotas) >= 2 for world in worlds) >= 9
    assert make_keeping(3) == make_keeping(3)
