"""A run that would never end says so, and shows what every task waits for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from stress.schedules import Backend, DeadlockError, LivelockError, SeededLoop, StuckError, attempt, await_stack, run

both = pytest.mark.parametrize("backend", ["asyncio", "trio"])
LINES = Path(__file__).read_text(encoding="utf-8").splitlines()


def line_of(mark: str) -> int:
    """The line of this file that ends with a comment `mark`."""
    (found,) = (number for number, line in enumerate(LINES, 1) if line.endswith(f"  # {mark}"))
    return found


def ours(error: StuckError) -> dict[str, list[tuple[int, str]]]:
    """The awaits in this file, by the last part of the task's name."""
    return {
        task.name.rpartition(".")[2]: [(line, function) for file, line, function in task.awaits if file == __file__]
        for task in error.tasks
    }


async def crossed_locks() -> None:
    left, right = anyio.Lock(), anyio.Lock()

    async def one() -> None:
        async with left:
            await anyio.sleep(1)
            async with right:  # one waits
                raise AssertionError

    async def other() -> None:
        async with right:
            await anyio.sleep(1)
            await take(left)  # other calls

    async def take(lock: anyio.Lock) -> None:
        await lock.acquire()  # other waits

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        group.start_soon(other)


@both
def test_a_deadlock_shows_every_await_of_every_task(backend: Backend) -> None:
    error = attempt(crossed_locks, backend=backend, seed=4).error
    assert isinstance(error, DeadlockError)
    assert error.seconds == 1
    stacks = ours(error)
    assert stacks["one"] == [(line_of("one waits"), "one")]
    assert stacks["other"] == [(line_of("other calls"), "other"), (line_of("other waits"), "take")]
    assert [function for _, function in stacks["observed"]] == ["crossed_locks"]
    text = str(error)
    assert text.startswith("deadlock: no task can run, and no timer is set (at 1 s)\n")
    assert f'File "{__file__}", line {line_of("other waits")}, in take' in text
    assert text.index("in other") < text.index("in take")


@both
def test_a_deadlock_is_found_only_where_it_is(backend: Backend) -> None:
    """Two tasks that take two locks in opposite order: some schedules get through."""

    async def opposite() -> None:
        left, right = anyio.Lock(), anyio.Lock()

        async def taker(first: anyio.Lock, second: anyio.Lock) -> None:
            await anyio.lowlevel.checkpoint()
            async with first:
                await anyio.lowlevel.checkpoint()
                async with second:
                    pass

        async with anyio.create_task_group() as group:
            group.start_soon(taker, left, right)
            group.start_soon(taker, right, left)

    errors = [attempt(opposite, backend=backend, seed=seed).error for seed in range(100)]
    assert {type(error) for error in errors} == {DeadlockError, type(None)}


@both
def test_a_deadlocked_run_is_unwound(backend: Backend) -> None:
    cleaned = []

    async def waits_for_ever() -> None:
        try:
            await anyio.Event().wait()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(1)
            cleaned.append(anyio.current_time())

    with pytest.raises(DeadlockError):
        run(waits_for_ever, backend=backend, seed=1)
    assert cleaned == [1]


@both
def test_a_deadlock_behind_a_shield_ends_too(backend: Backend) -> None:
    left = []

    async def shielded() -> None:
        try:
            with anyio.CancelScope(shield=True):
                await anyio.Event().wait()
        finally:
            left.append("shielded")

    async def group_of_them() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(shielded)
            group.start_soon(shielded)

    error = attempt(group_of_them, backend=backend, seed=1).error
    assert isinstance(error, DeadlockError)
    assert left == ["shielded"] * 2
    assert [function for _, function in ours(error)["shielded"]] == ["shielded"]


@both
def test_waiting_for_a_timer_that_never_comes_is_a_deadlock(backend: Backend) -> None:
    assert isinstance(attempt(anyio.sleep_forever, backend=backend, seed=1).error, DeadlockError)

    async def endless_timeout() -> None:
        with anyio.fail_after(float("inf")):
            await anyio.Event().wait()

    assert isinstance(attempt(endless_timeout, backend=backend, seed=1).error, DeadlockError)


@both
def test_a_livelock_ends_after_its_steps(backend: Backend) -> None:
    cleaned = []

    async def spins() -> None:
        try:
            while True:
                await anyio.lowlevel.checkpoint()  # it spins
        finally:
            cleaned.append(True)

    done = attempt(spins, backend=backend, seed=1, max_steps=500)
    assert isinstance(done.error, LivelockError)
    assert str(done.error).startswith("livelock: still running after 500 steps (at 0 s)")
    assert ours(done.error)["observed"] == [(line_of("it spins"), "spins")]
    assert 500 < done.num_steps < 600
    assert cleaned == [True]


@both
def test_time_that_runs_away_is_a_livelock(backend: Backend) -> None:
    async def sleeps_on() -> None:
        for _ in itertools.count():
            await anyio.sleep(1)

    error = attempt(sleeps_on, backend=backend, seed=1, max_steps=500).error
    assert isinstance(error, LivelockError)
    assert error.seconds > 100


@both
def test_a_run_that_needs_its_steps_is_no_livelock(backend: Backend) -> None:
    async def walks() -> None:
        for _ in range(400):
            await anyio.lowlevel.checkpoint()

    assert attempt(walks, backend=backend, seed=1, max_steps=500).error is None


@both
def test_awaits_are_seen_through_generators(backend: Backend) -> None:
    async def numbers() -> AsyncGenerator[int, None]:
        yield 1
        await anyio.Event().wait()  # the generator waits

    @asynccontextmanager
    async def entered() -> AsyncIterator[None]:
        await numbers_summed()  # the manager waits
        yield

    async def numbers_summed() -> None:
        async for _ in numbers():  # the loop waits
            pass

    class Awaitable:
        def __await__(self) -> Generator[Any, Any, None]:
            yield from enter().__await__()  # the object waits

    async def enter() -> None:
        async with entered():  # the entry waits
            pass

    async def outer() -> None:
        await Awaitable()  # the task waits

    error = attempt(outer, backend=backend, seed=1).error
    assert isinstance(error, DeadlockError)
    assert ours(error)["observed"] == [
        (line_of("the task waits"), "outer"),
        (line_of("the object waits"), "__await__"),
        (line_of("the entry waits"), "enter"),
        (line_of("the manager waits"), "entered"),
        (line_of("the loop waits"), "numbers_summed"),
        (line_of("the generator waits"), "numbers"),
    ]


def test_the_stack_of_a_coroutine_that_has_not_started_or_has_ended() -> None:
    async def idle() -> None:
        pass

    coroutine = idle()
    assert [function for _, _, function in await_stack(coroutine)] == ["idle"]
    with pytest.raises(StopIteration):
        coroutine.send(None)
    assert await_stack(coroutine) == []
    assert await_stack(None) == []


def test_the_bare_loop_raises() -> None:
    async def waits() -> None:
        await asyncio.get_running_loop().create_future()

    with asyncio.Runner(loop_factory=lambda: SeededLoop(1)) as runner, pytest.raises(DeadlockError) as caught:
        runner.run(waits())
    assert [function for _, function in next(iter(ours(caught.value).values()))] == ["waits"]


def test_the_bare_loop_counts_steps() -> None:
    async def spins() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=lambda: SeededLoop(1, max_steps=100)) as runner, pytest.raises(LivelockError):
        runner.run(spins())
