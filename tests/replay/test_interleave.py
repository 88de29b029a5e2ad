"""Sessions run side by side in the order of time, and are asked for no earlier than needed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

from hypothesis import given
from hypothesis import strategies as st

from aradix.replay.interleave import Session, interleave
from aradix.replay.request import Request
from tests.replay.traces import token_request


def session(name: str, begin: float, gaps: list[float]) -> Session:
    def turns() -> Iterator[tuple[float, Request]]:
        at = begin
        for turn, gap in enumerate(gaps):
            at += gap
            yield at, token_request([turn], session=name)

    return begin, turns()


_GAPS = st.lists(st.integers(0, 5).map(float), max_size=6)


@given(st.lists(st.tuples(st.integers(0, 8), _GAPS), max_size=12))
def test_the_order_is_that_of_a_full_sort(plan: list[tuple[int, list[float]]]) -> None:
    begins = [float(sum(gap for gap, _ in plan[: index + 1])) for index in range(len(plan))]
    expected = sorted(
        (begin + sum(gaps[: turn + 1]), index, turn)
        for index, (begin, (_, gaps)) in enumerate(zip(begins, plan, strict=True))
        for turn in range(len(gaps))
    )
    sessions = (session(str(index), begins[index], gaps) for index, (_, gaps) in enumerate(plan))
    found = [(request.session, int(request.ids[0])) for request in interleave(sessions)]
    assert found == [(str(index), turn) for _, index, turn in expected]


def test_endless_sessions_are_asked_for_as_they_begin() -> None:
    asked: list[int] = []

    def sessions() -> Iterator[Session]:
        for number in count():
            asked.append(number)
            yield session(str(number), float(number), [0.0] * 3)

    assert len(list(islice(interleave(sessions()), 30))) == 30
    assert len(asked) <= 12
