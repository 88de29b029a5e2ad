"""The compiled hold keeps a lease's slots as the Python one does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aradix.cache.hold import hold_makers
from aradix.keys import RadixKey

MAKERS = hold_makers()
KEY = RadixKey(range(7))


def made(maker: Any, page_size: int) -> Any:
    return maker(3, KEY, KEY, 7, -2, True, False, None, made.__code__, 0, 1.5, page_size)


def fields(hold: Any) -> dict[str, Any]:
    names = (
        *("order", "limit", "priority", "store", "resume", "num_opened", "opened_when", "stream", "used", "node_id"),
        *("num_matched", "published", "committed", "num_own", "version", "opening", "entered", "held", "released"),
        *("counted", "waiting", "num_tokens", "num_own_slots", "ref", "where"),
    )
    return {name: getattr(hold, name) for name in names} | {"own": hold.own.tolist()}


def assert_alike(holds: list[Any]) -> None:
    first, *others = map(fields, holds)
    assert all(other == first for other in others)


@pytest.mark.skipif("native" not in MAKERS, reason="needs the compiled module")
@pytest.mark.parametrize("page_size", [1, 4])
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_two_holds_live_the_same_life(page_size: int, data: st.DataObject) -> None:
    holds = [made(maker, page_size) for maker in MAKERS.values()]
    assert_alike(holds)
    for _ in range(data.draw(st.integers(1, 20))):
        act = data.draw(st.sampled_from(["add", "front", "cut", "fresh"]))
        own, spare = holds[0].num_own, holds[0].num_own_slots
        number = data.draw(st.integers(0, 200))
        if act == "add":
            num_slots = holds[0].fresh_slots_for(number)
            slots = np.arange(num_slots, dtype=np.int64) + data.draw(st.integers(1, 1000))
            for hold in holds:
                hold.add(slots.copy(), number)
        elif act == "front":
            for hold in holds:
                hold.take_front(min(number, own) // page_size * page_size)
        elif act == "cut":
            freed = [hold.cut(min(number, own)).tolist() for hold in holds]
            assert freed.count(freed[0]) == len(freed)
            assert len(freed[0]) == spare - holds[0].num_own_slots
        else:
            assert len({hold.fresh_slots_for(number) for hold in holds}) == 1
        assert_alike(holds)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_long_decode_keeps_no_block_for_what_it_gave_away(maker: Any) -> None:
    hold = made(maker, 1)
    hold.add(np.arange(100_000, dtype=np.int64), 100_000)
    hold.take_front(99_999)
    assert hold.own.tolist() == [99_999]
    hold.add(np.array([5], np.int64), 1)
    assert hold.own.tolist() == [99_999, 5]
    assert hold.cut(0).tolist() == [99_999, 5]
    assert (hold.num_own, hold.num_own_slots) == (0, 0)
