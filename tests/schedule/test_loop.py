"""The asyncio loop keeps what asyncio promises, and permutes the rest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import pytest

from stress.schedules import Scripted, Seeded, SeededLoop, run

T = TypeVar("T")
FIFO: tuple[int, ...] = ()


def on_loop(main: Callable[[], Coroutine[Any, Any, T]], chooser: int | Scripted | Seeded) -> T:
    with asyncio.Runner(loop_factory=lambda: SeededLoop(chooser)) as runner:
        return runner.run(main())


async def everything() -> list[object]:
    """Tasks, callbacks, timers, locks, queues and cancellation, and the order in which they came."""
    loop = asyncio.get_running_loop()
    order: list[object] = []
    lock, queue = asyncio.Lock(), asyncio.Queue[int]()
    futures = [loop.create_future() for _ in range(3)]

    async def worker(number: int) -> None:
        async with lock:
            order.append(("lock", number))
            loop.call_soon(order.append, ("call", number))
            await asyncio.sleep(0)
        await queue.put(number)
        order.append(("got", number, await queue.get()))
        await asyncio.sleep(number % 3 / 10)
        order.append(("slept", number))
        await futures[number % 3]
        order.append(("future", number))

    async def patient(number: int) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            order.append(("cancelled", number))

    tasks = [asyncio.create_task(worker(number)) for number in range(8)]
    others = [asyncio.create_task(patient(number)) for number in range(4)]
    for number, future in enumerate(futures):
        loop.call_later(1 - number / 10, future.set_result, None)
    await asyncio.gather(*tasks)
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    return order


def test_choosing_0_always_is_plain_asyncio() -> None:
    class Timely(asyncio.SelectorEventLoop):
        """Asyncio's own loop on a clock that jumps, so that the two can be compared without waiting."""

        now = 0.0

        def time(self) -> float:
            return self.now

        def _run_once(self) -> None:
            scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
            if not self._ready and scheduled:  # type: ignore[attr-defined]
                self.now = max(self.now, scheduled[0].when())
            super()._run_once()  # type: ignore[misc]

    with asyncio.Runner(loop_factory=Timely) as runner:
        plain = runner.run(everything())
    assert on_loop(everything, Scripted(FIFO)) == plain
    assert on_loop(everything, 1) != plain


def test_a_callback_runs_before_whatever_became_ready_after_it() -> None:
    async def calls() -> tuple[str, ...]:
        loop = asyncio.get_running_loop()
        order: list[str] = []
        ended = asyncio.Event()

        async def worker(name: str) -> None:
            order.append(name)

        earlier = [asyncio.create_task(worker(f"earlier {number}")) for number in range(2)]
        loop.call_soon(order.append, "first call")
        loop.call_soon(order.append, "second call")
        later = [asyncio.create_task(worker(f"later {number}")) for number in range(2)]
        later[0].add_done_callback(lambda _: ended.set())
        await ended.wait()
        await asyncio.gather(*earlier, *later)
        return tuple(order)

    orders = {on_loop(calls, seed) for seed in range(300)}
    for order in orders:
        assert order.index("first call") < order.index("second call")
        assert order.index("second call") < min(order.index("later 0"), order.index("later 1"))
    # The calls, then two tasks in any order, and two others anywhere among these: 2 * 5 * 6.
    assert 45 <= len(orders) <= 60


def test_a_checkpoint_after_a_shield_sees_the_cancellation_around_it() -> None:
    async def cancelled_late() -> bool:
        with anyio.move_on_after(1) as scope:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(3)
            await anyio.lowlevel.checkpoint()
        return scope.cancelled_caught

    assert {on_loop(cancelled_late, seed) for seed in range(50)} == {True}


def test_timers_fire_in_the_order_of_their_times_and_ties_in_any() -> None:
    async def timers() -> tuple[int, ...]:
        loop = asyncio.get_running_loop()
        fired: list[int] = []
        for number in range(3):
            loop.call_at(2.0, fired.append, number)
            loop.call_at(1.0, fired.append, number + 10)
        cancelled = loop.call_at(1.5, fired.append, 99)
        cancelled.cancel()
        await asyncio.sleep(3)
        return tuple(fired)

    orders = {on_loop(timers, seed) for seed in range(200)}
    assert {frozenset(order[:3]) for order in orders} == {frozenset({10, 11, 12})}
    assert {frozenset(order[3:]) for order in orders} == {frozenset({0, 1, 2})}
    assert len({order[:3] for order in orders}) == 6


def test_large_times_still_move() -> None:
    async def far() -> float:
        await asyncio.sleep(1e12)
        await asyncio.sleep(1e-5)  # less than the distance between two floats out there
        return asyncio.get_running_loop().time()

    assert on_loop(far, 1) == pytest.approx(1e12)


def test_call_soon_threadsafe_from_the_loop_itself() -> None:
    async def calls() -> bool:
        event = asyncio.Event()
        asyncio.get_running_loop().call_soon_threadsafe(event.set)
        return await event.wait()

    assert {on_loop(calls, seed) for seed in range(10)} == {True}


@pytest.mark.parametrize("how", ["run_in_executor", "asyncio.to_thread", "anyio.to_thread"])
def test_a_thread_is_waited_for_before_the_clock_moves(how: str) -> None:
    async def waits() -> float:
        gate = threading.Event()

        async def open_late() -> None:
            await asyncio.sleep(1)
            gate.set()  # from here on nothing is ready until the thread answers
            await asyncio.sleep(100)

        def blocking() -> bool:
            return gate.wait(60)

        async def in_thread() -> float:
            await asyncio.sleep(1)
            if how == "run_in_executor":
                found = await asyncio.get_running_loop().run_in_executor(None, blocking)
            elif how == "asyncio.to_thread":
                found = await asyncio.to_thread(blocking)
            else:
                found = await anyio.to_thread.run_sync(blocking)
            assert found
            return asyncio.get_running_loop().time()

        opener = asyncio.create_task(open_late())
        ended = await in_thread()
        opener.cancel()
        return ended

    for seed in range(5):
        assert run(waits, backend="asyncio", seed=seed).result() == 1


def test_sockets_work() -> None:
    async def echo() -> bytes:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readline())
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"hello\n")
            found = await reader.readline()
            writer.close()
            await writer.wait_closed()
        return found

    assert {on_loop(echo, seed) for seed in range(10)} == {b"hello\n"}


def test_anyio_run_takes_the_loop() -> None:
    loops: list[SeededLoop] = []

    def make() -> SeededLoop:
        loops.append(SeededLoop(7))
        return loops[-1]

    async def main() -> float:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(anyio.sleep, 10)
        return anyio.current_time()

    assert [anyio.run(main, backend_options={"loop_factory": make}) for _ in range(2)] == [10, 10]
    assert loops[0].recorder.choices == loops[1].recorder.choices != []


def test_tasks_are_walked_in_the_order_of_their_creation() -> None:
    async def names() -> list[str]:
        tasks = {asyncio.create_task(asyncio.sleep(0), name=str(number)) for number in range(30)}
        found = [task.get_name() for task in tasks]
        await asyncio.gather(*tasks)
        return found

    assert on_loop(names, 1) == on_loop(names, 2)
