"""The compiled page table does what the Python one does, and refuses what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aradix.memory.page_table import FREE, FRESH, HELD, OUT, RETIRED, PageTable, make_page_table, table_makers

MAKERS = table_makers()

pytestmark = pytest.mark.skipif("native" not in MAKERS, reason="needs the compiled module")


def _twins(num_pages: int, page_size: int) -> list[PageTable]:
    return [make_page_table(num_pages, page_size, maker) for maker in MAKERS.values()]


def _same(answers: list[Any]) -> Any:
    first, *others = answers
    for other in others:
        if isinstance(first, np.ndarray):
            assert isinstance(other, np.ndarray)
            assert other.dtype == first.dtype
            assert other.tolist() == first.tolist()
        else:
            assert other == first
    return first


def _assert_equal(twins: list[PageTable]) -> None:
    _same([table.states for table in twins])
    _same([table.counts() for table in twins])
    _same([table.stack[: table.num_free] for table in twins])
    _same([(table.num_free, table.free_slots, table.num_pages, table.page_size) for table in twins])


@pytest.mark.parametrize("page_size", [1, 2, 16])
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_two_tables_live_the_same_life(page_size: int, data: st.DataObject) -> None:
    num_pages = data.draw(st.integers(1, 12))
    twins = _twins(num_pages, page_size)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        act = data.draw(st.sampled_from(["take", "give", "bad", "pop", "move"]))
        if act == "take":
            wanted = data.draw(st.integers(-1, (num_pages + 1) * page_size))
            slots = _same([table.take(wanted, HELD) for table in twins])
            if slots is not None and len(slots):
                held.append(slots.tolist())
        elif act == "give" and held:
            slots = np.array(held.pop(data.draw(st.integers(0, len(held) - 1))), np.int64)
            assert _same([table.give(slots, HELD) for table in twins]) is True
        elif act == "bad":
            # Mostly not what anybody holds in that order: nothing may change then.
            wrong = np.array(data.draw(st.lists(st.integers(-2, (num_pages + 2) * page_size), max_size=8)), np.int64)
            origin = data.draw(st.sampled_from([OUT, RETIRED]))
            assert _same([table.give(wrong, origin) for table in twins]) is (len(wrong) == 0)
        elif act == "pop":
            pages = _same([table.pop(min(1, table.num_free), OUT) for table in twins])
            for table in twins:
                table.push(pages, OUT)
        elif act == "move" and twins[0].num_free:
            pages = _same([table.pop(1, HELD) for table in twins])
            for table in twins:
                table.move(pages, HELD, RETIRED)
            _assert_equal(twins)
            for table in twins:
                table.push(pages, RETIRED)
        _assert_equal(twins)


@pytest.mark.parametrize("page_size", [1, 4])
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_long_runs_are_taken_and_given_page_by_page(page_size: int, data: st.DataObject) -> None:
    """Pages that follow one another are looked at many at once: a single one that is wrong has to show."""
    num_pages = data.draw(st.integers(40, 120))
    twins = _twins(num_pages, page_size)
    held: list[list[int]] = []

    def slots_of(pages: list[int]) -> Any:
        return (np.array(pages, np.int64)[:, None] * page_size + np.arange(page_size)).reshape(-1)

    for _ in range(data.draw(st.integers(2, 12))):
        act = data.draw(st.sampled_from(["take", "take", "give", "part", "wrong"]))
        if act == "take":
            wanted = data.draw(st.integers(0, twins[0].num_free))
            taken = _same([table.take(wanted * page_size, HELD) for table in twins])
            held.append((taken[::page_size] // page_size).tolist())
        elif not held:
            continue
        elif act == "give":
            pages = held.pop(data.draw(st.integers(0, len(held) - 1)))
            turned = data.draw(st.integers(0, len(pages)))
            assert _same([table.give(slots_of(pages[turned:] + pages[:turned]), HELD) for table in twins]) is True
        elif act == "part":
            pages = held[data.draw(st.integers(0, len(held) - 1))]
            gone = [pages.pop(data.draw(st.integers(0, len(pages) - 1))) for _ in range(min(2, len(pages)))]
            assert _same([table.give(slots_of(gone), HELD) for table in twins]) is True
        else:
            pages = list(held[data.draw(st.integers(0, len(held) - 1))])
            if not pages:
                continue
            at = data.draw(st.integers(0, len(pages) - 1))
            free = [page for page in range(1, num_pages + 1) if not any(page in run for run in held)]
            between = [page for page in free if page - 1 in pages]
            if data.draw(st.booleans()) and between:  # free, and in line with its neighbours
                pages.insert(pages.index(between[0] - 1) + 1, between[0])
            else:
                wrong = data.draw(st.sampled_from([0, -1, num_pages + 1, 2**31, *free[:1], pages[at - 1]]))
                if len(pages) == 1 and wrong == pages[0]:
                    continue
                pages[at] = wrong
            assert _same([table.give(slots_of(pages), HELD) for table in twins]) is False
        _assert_equal(twins)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
class TestEach:
    def test_pages_come_in_ascending_order_at_first_and_last_in_first_out_afterwards(self, maker: Any) -> None:
        table = make_page_table(4, 2, maker)
        first = table.take(4, HELD)
        assert first is not None
        assert first.tolist() == [2, 3, 4, 5]
        assert table.give(np.array([4, 5, 2, 3], np.int64), HELD)
        again = table.take(8, HELD)
        assert again is not None
        assert again.tolist() == [4, 5, 2, 3, 6, 7, 8, 9]

    @pytest.mark.parametrize(
        "slots",
        [[2], [3, 2], [2, 4], [2, 3, 2, 3], [0, 1], [-2, -1], [10, 11], [2, 3, 6, 7], [3, 4]],
        ids=["part", "descends", "torn", "twice", "padding", "negative", "beyond", "one is free", "not aligned"],
    )
    def test_what_is_not_held_in_whole_pages_is_not_taken_back(self, maker: Any, slots: list[int]) -> None:
        table = make_page_table(4, 2, maker)
        table.take(4, HELD)
        before = table.states.copy(), table.num_free, table.counts()
        assert not table.give(np.array(slots, np.int64), HELD)
        assert (table.states == before[0]).all()
        assert (table.num_free, table.counts()) == before[1:]

    def test_slots_in_another_state_stay_there(self, maker: Any) -> None:
        table = make_page_table(2, 1, maker)
        table.take(1, OUT)
        assert not table.give(np.array([1], np.int64), HELD)
        assert table.states.tolist()[1:] == [OUT, FRESH]
        assert table.give(np.array([1], np.int64), OUT)
        assert table.states.tolist()[1:] == [FREE, FRESH]

    @pytest.mark.parametrize("slots", [[1], np.array([1.0]), np.array([1], np.int32)], ids=["list", "floats", "int32"])
    def test_only_int64_arrays_take_the_short_way(self, maker: Any, slots: Any) -> None:
        table = make_page_table(2, 1, maker)
        table.take(1, HELD)
        assert not table.give(slots, HELD)
        assert table.num_free == 1
