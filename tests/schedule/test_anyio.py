"""What anyio offers works under every schedule, on both event loops."""

from __future__ import annotations

import socket
import threading
from collections.abc import Awaitable, Callable

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest
from anyio.abc import TaskStatus

from stress.schedules import Backend, DeadlockError, run

pytestmark = pytest.mark.parametrize("backend", ["asyncio", "trio"])
SEEDS = range(30)


def outcomes(function: Callable[[], Awaitable[object]], backend: Backend) -> set[object]:
    return {run(function, backend=backend, seed=seed).result() for seed in SEEDS}


def test_event(backend: Backend) -> None:
    async def waits() -> int:
        event = anyio.Event()
        woken = 0

        async def waiter() -> None:
            nonlocal woken
            await event.wait()
            woken += 1

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(waiter)
            await anyio.wait_all_tasks_blocked()
            assert (woken, event.statistics().tasks_waiting) == (0, 5)
            event.set()
        return woken

    assert outcomes(waits, backend) == {5}


def test_start_waits_until_started(backend: Backend) -> None:
    async def starts() -> tuple[object, ...]:
        steps: list[object] = []

        async def service(*, task_status: TaskStatus[str]) -> None:
            await anyio.sleep(1)
            steps.append("ready")
            task_status.started("value")
            await anyio.sleep_forever()

        async with anyio.create_task_group() as group:
            steps.append(await group.start(service))
            group.cancel_scope.cancel()
        return tuple(steps)

    assert outcomes(starts, backend) == {("ready", "value")}


def test_a_failing_task_cancels_the_others(backend: Backend) -> None:
    async def fails() -> int:
        cancelled = 0

        async def other() -> None:
            nonlocal cancelled
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                cancelled += 1
                raise

        async def failing() -> None:
            await anyio.sleep(1)
            raise LookupError

        with pytest.RaisesGroup(LookupError):
            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(other)
                group.start_soon(failing)
        return cancelled

    assert outcomes(fails, backend) == {4}


def test_timeouts_and_shields(backend: Backend) -> None:
    async def times_out() -> tuple[float, ...]:
        seen = []
        with pytest.raises(TimeoutError):
            with anyio.fail_after(2):
                await anyio.sleep(5)
        seen.append(anyio.current_time())
        with anyio.move_on_after(1) as scope:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(3)
            await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        seen.append(anyio.current_time())
        return tuple(seen)

    assert outcomes(times_out, backend) == {(2, 5)}


def test_lock_condition_semaphore_and_limiter_exclude(backend: Backend) -> None:
    async def excludes() -> int:
        lock, condition = anyio.Lock(), anyio.Condition()
        semaphore, limiter = anyio.Semaphore(2), anyio.CapacityLimiter(3)
        inside = {"lock": 0, "semaphore": 0, "limiter": 0}
        peak = dict(inside)
        done = 0

        async def enter(name: str) -> None:
            inside[name] += 1
            peak[name] = max(peak[name], inside[name])
            await anyio.lowlevel.checkpoint()
            inside[name] -= 1

        async def worker() -> None:
            nonlocal done
            async with limiter:
                await enter("limiter")
            async with semaphore:
                await enter("semaphore")
            async with lock:
                await enter("lock")
            async with condition:
                done += 1
                condition.notify_all()

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(worker)
            async with condition:
                while done < 8:
                    await condition.wait()
        assert peak["lock"] == 1
        assert peak["semaphore"] <= 2
        assert peak["limiter"] <= 3
        return done

    assert outcomes(excludes, backend) == {8}


def test_memory_streams(backend: Backend) -> None:
    async def streams() -> tuple[int, ...]:
        send, receive = anyio.create_memory_object_stream[int](1)

        async def produce() -> None:
            async with send:
                for number in range(6):
                    await send.send(number)

        async with anyio.create_task_group() as group, receive:
            group.start_soon(produce)
            found = [number async for number in receive]
        return tuple(found)

    assert outcomes(streams, backend) == {(0, 1, 2, 3, 4, 5)}


def test_many_tasks_waiting_for_the_others_to_block(backend: Backend) -> None:
    async def blocked() -> tuple[int, ...]:
        order = []

        async def waiter(number: int) -> None:
            await anyio.wait_all_tasks_blocked()
            order.append(number)

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(waiter, number)
        return tuple(order)

    for seed in SEEDS:
        first = run(blocked, backend=backend, seed=seed)
        assert sorted(first.result()) == [0, 1, 2]
        assert run(blocked, backend=backend, seed=seed) == first
    if backend == "trio":  # on asyncio anyio polls, each on its own
        assert len(outcomes(blocked, backend)) == 6


def test_threads_answer_and_are_waited_for(backend: Backend) -> None:
    async def threads() -> tuple[object, ...]:
        gate = threading.Event()
        seen: list[object] = []

        async def sleeper() -> None:
            await anyio.sleep(100)
            seen.append("slept")

        async def opener() -> None:
            await anyio.sleep(1)
            gate.set()

        async with anyio.create_task_group() as group:
            group.start_soon(sleeper)
            group.start_soon(opener)
            await anyio.sleep(1)
            seen.append(await anyio.to_thread.run_sync(gate.wait, 60))
            seen.append(anyio.current_time())
            seen.append(await anyio.to_thread.run_sync(anyio.from_thread.run_sync, anyio.current_time))
        return tuple(seen)

    assert {run(threads, backend=backend, seed=seed).result() for seed in range(5)} == {(True, 1.0, 1.0, "slept")}


def test_a_socket_is_waited_for_where_nothing_else_can_happen(backend: Backend) -> None:
    async def reads() -> bytes:
        ours, theirs = socket.socketpair()
        gate = threading.Event()

        def send() -> None:
            gate.wait(60)
            theirs.send(b"hello")

        with ours, theirs:
            ours.setblocking(False)
            sender = threading.Thread(target=send)
            sender.start()
            gate.set()
            await anyio.wait_readable(ours)
            sender.join()
            return ours.recv(5)

    assert {run(reads, backend=backend, seed=seed).result() for seed in range(20)} == {b"hello"}


def test_a_deadlock_after_a_thread_has_answered_is_still_found(backend: Backend) -> None:
    async def waits() -> None:
        await anyio.to_thread.run_sync(int)
        await anyio.Event().wait()

    with pytest.raises(DeadlockError):
        run(waits, backend=backend, seed=1)


def test_contexts_and_names_are_kept(backend: Backend) -> None:
    async def names() -> str | None:
        found: list[str | None] = []

        async def child() -> None:
            found.append(anyio.get_current_task().name)

        async with anyio.create_task_group() as group:
            group.start_soon(child, name="a child")
        return found[0]

    assert outcomes(names, backend) == {"a child"}
