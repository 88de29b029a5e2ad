"""What runs next: the earliest request whose session is not at work."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import anyio.lowlevel
import pytest

from aradix.replay.request import Request
from aradix.replay.schedule import LOOKAHEAD, Schedule
from tests.replay.traces import token_request

pytestmark = pytest.mark.anyio


def requests(sessions: str) -> list[Request]:
    """One request for each letter, in that session; `-` is in none."""
    return [token_request([index], session=None if letter == "-" else letter) for index, letter in enumerate(sessions)]


def index_of(request: Request | None) -> int:
    assert request is not None
    return int(request.ids[0])


async def test_one_at_a_time_is_the_order_of_the_trace() -> None:
    schedule = Schedule(iter(requests("aab-ba-c")))
    order = []
    while (request := await schedule.take()) is not None:
        order.append(index_of(request))
        schedule.finish(request)
    assert order == list(range(8))
    assert await schedule.take() is None


async def test_a_busy_session_is_passed_over_and_then_comes_first() -> None:
    schedule = Schedule(iter(requests("aaabb-")))
    first = await schedule.take()
    second = await schedule.take()
    third = await schedule.take()
    assert [index_of(request) for request in (first, second, third)] == [0, 3, 5]
    assert first is not None
    assert second is not None
    schedule.finish(second)
    schedule.finish(first)
    assert index_of(await schedule.take()) == 1
    assert index_of(await schedule.take()) == 4


async def test_who_finds_nothing_waits_for_a_session_to_end() -> None:
    schedule = Schedule(iter(requests("aa")))
    first = await schedule.take()
    assert first is not None
    taken: list[Request | None] = []

    async def take() -> None:
        taken.append(await schedule.take())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        assert taken == []
        schedule.finish(first)
        await anyio.wait_all_tasks_blocked()
        second = taken[0]
        assert index_of(second) == 1
        assert len(taken) == 1 or taken[1] is None
        assert second is not None
        schedule.finish(second)
    assert sum(request is None for request in taken) == 1


@pytest.mark.parametrize("num_workers", [1, 2, 5])
async def test_sessions_never_overlap_themselves_and_nothing_is_lost(num_workers: int) -> None:
    plan = "aaabbbacacaa-bb--dddddd-a"
    schedule = Schedule(iter(requests(plan)))
    at_work: set[object] = set()
    order: list[int] = []
    most = 0

    async def work() -> None:
        nonlocal most
        while (request := await schedule.take()) is not None:
            assert request.session not in at_work
            if request.session is not None:
                at_work.add(request.session)
            most = max(most, len(at_work))
            for _ in range(index_of(request) % 3):
                await anyio.lowlevel.checkpoint()
            at_work.discard(request.session)
            order.append(index_of(request))
            schedule.finish(request)

    async with anyio.create_task_group() as workers:
        for _ in range(num_workers):
            workers.start_soon(work)
    assert sorted(order) == list(range(len(plan)))
    for session in "abcd":
        turns = [index for index in order if plan[index] == session]
        assert turns == sorted(turns)
    assert (most > 1) == (num_workers > 1)


async def test_it_reads_no_further_ahead_than_its_bound() -> None:
    num_read = 0

    def endless() -> Iterator[Request]:
        nonlocal num_read
        while True:
            num_read += 1
            yield token_request([0], session="a")

    schedule = Schedule(endless())
    request = await schedule.take()
    assert request is not None
    assert num_read == 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(schedule.take)
        await anyio.wait_all_tasks_blocked()
        assert num_read == LOOKAHEAD + 1
        schedule.finish(request)
