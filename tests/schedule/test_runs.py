"""A run under a chosen schedule can be repeated, differs by seed, and takes no real time."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Callable

import anyio
import anyio.lowlevel
import hypothesis
import pytest
from hypothesis import strategies as st

from stress.schedules import Backend, Scripted, Seeded, attempt, run
from tests.support.schedules import Drawn

pytestmark = pytest.mark.parametrize("backend", ["asyncio", "trio"])


async def steps_of(num_tasks: int = 6, num_steps: int = 3) -> list[tuple[int, int]]:
    """The order in which the steps of some tasks ran."""
    order = []

    async def worker(number: int) -> None:
        for step in range(num_steps):
            order.append((number, step))
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        for number in range(num_tasks):
            group.start_soon(worker, number)
    return order


async def racy_counter(num_tasks: int = 3, num_rounds: int = 2) -> int:
    """Increments that were lost."""
    total = 0

    async def worker() -> None:
        nonlocal total
        for _ in range(num_rounds):
            seen = total
            await anyio.lowlevel.checkpoint()
            total = seen + 1

    async with anyio.create_task_group() as group:
        for _ in range(num_tasks):
            group.start_soon(worker)
    return num_tasks * num_rounds - total


async def nested_cancels(num_scopes: int = 20) -> list[int]:
    """The order in which tasks in many nested scopes learn that all are cancelled, and others that an event came."""
    order: list[int] = []
    event = anyio.Event()

    async def canceller(number: int) -> None:
        with anyio.CancelScope():
            try:
                await anyio.sleep_forever()
            finally:
                order.append(number)

    async def waiter(number: int) -> None:
        await event.wait()
        order.append(-number)

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                for number in range(1, num_scopes):
                    inner.start_soon(canceller, number)
                    group.start_soon(waiter, number)
                await anyio.sleep(1)
                event.set()
                scope.cancel()
    return order


async def tied_deadlines(num_tasks: int = 20) -> list[int]:
    """The order in which tasks go on whose time runs out at once."""
    order = []

    async def worker(number: int) -> None:
        with anyio.move_on_after(1):
            await anyio.sleep_forever()
        order.append(number)

    async with anyio.create_task_group() as group:
        for number in range(num_tasks):
            group.start_soon(worker, number)
    return order


SCENARIOS = [steps_of, racy_counter, nested_cancels, tied_deadlines]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_seed_gives_the_same_run(backend: Backend, scenario: Callable[[], object]) -> None:
    first = run(scenario, backend=backend, seed=5)  # type: ignore[arg-type, var-annotated]
    kept = []
    for size in range(1, 12):
        # Move what is allocated next elsewhere: nothing may depend on addresses.
        kept.append([object() for _ in range(size * 37)])
        assert run(scenario, backend=backend, seed=5) == first  # type: ignore[arg-type]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_recorded_choices_give_the_same_run(backend: Backend, scenario: Callable[[], object]) -> None:
    for seed in range(10):
        first = run(scenario, backend=backend, seed=seed)  # type: ignore[arg-type, var-annotated]
        assert run(scenario, backend=backend, chooser=Scripted(first.choices)) == first  # type: ignore[arg-type]
        assert run(scenario, backend=backend, chooser=first.script.chooser()) == first  # type: ignore[arg-type]


def test_choices_are_recorded_with_their_widths(backend: Backend) -> None:
    done = run(steps_of, backend=backend, seed=3)
    assert len(done.choices) == len(done.widths) > 10
    assert all(0 <= choice < width for choice, width in zip(done.choices, done.widths, strict=True))
    assert min(done.widths) >= 2
    assert done.num_steps >= 18
    assert sorted(done.result()) == [(number, step) for number in range(6) for step in range(3)]


def test_seeds_reach_different_interleavings(backend: Backend) -> None:
    orders = {tuple(run(steps_of, backend=backend, seed=seed).result()) for seed in range(100)}
    assert len(orders) == 100


def test_a_small_space_of_interleavings_is_reached_whole(backend: Backend) -> None:
    orders = {tuple(run(steps_of, 2, 3, backend=backend, seed=seed).result()) for seed in range(400)}
    assert len(orders) == 20  # 6 choose 3


def test_a_racy_counter_is_found_in_nearly_every_seed(backend: Backend) -> None:
    losses = [run(racy_counter, backend=backend, seed=seed).result() for seed in range(100)]
    assert sum(lost > 0 for lost in losses) >= 95
    assert len(set(losses)) > 2


def test_a_counter_under_a_lock_is_never_wrong(backend: Backend) -> None:
    async def locked_counter() -> int:
        total = 0
        lock = anyio.Lock()

        async def worker() -> None:
            nonlocal total
            for _ in range(2):
                async with lock:
                    seen = total
                    await anyio.lowlevel.checkpoint()
                    total = seen + 1

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(worker)
        return total

    assert {run(locked_counter, backend=backend, seed=seed).result() for seed in range(100)} == {6}


def test_time_is_virtual_and_exact(backend: Backend) -> None:
    async def sleepy() -> list[tuple[str, float]]:
        seen = []

        async def worker(name: str, seconds: float) -> None:
            await anyio.sleep(seconds)
            seen.append((name, anyio.current_time()))

        async with anyio.create_task_group() as group:
            group.start_soon(worker, "year", 365 * 86400.0)
            group.start_soon(worker, "tenth", 0.1)
            group.start_soon(worker, "second", 1.0)
            group.start_soon(worker, "instant", 1e-12)
        await anyio.sleep(0.3)
        seen.append(("after", anyio.current_time()))
        return seen

    done = run(sleepy, backend=backend, seed=1)
    year = 365 * 86400.0
    assert done.result() == [("instant", 1e-12), ("tenth", 0.1), ("second", 1.0), ("year", year), ("after", year + 0.3)]
    assert done.seconds == year + 0.3


def test_timers_due_at_one_time_fire_in_any_order(backend: Backend) -> None:
    async def tied() -> str:
        event = anyio.Event()

        async def setter() -> None:
            await anyio.sleep(1)
            event.set()

        async with anyio.create_task_group() as group:
            group.start_soon(setter)
            with anyio.move_on_after(1) as scope:
                await event.wait()
        return "timed out" if scope.cancelled_caught else "set"

    found = {run(tied, backend=backend, seed=seed).result() for seed in range(60)}
    assert "timed out" in found
    # Trio cancels what is due before any task that woke at the same time can run.
    assert ("set" in found) == (backend == "asyncio")


def test_what_the_function_raises_comes_out_with_the_way_to_repeat_it(backend: Backend) -> None:
    async def broken() -> None:
        await anyio.sleep(2)
        raise LookupError("no")

    done = attempt(broken, backend=backend, seed=9)
    assert done.failed
    assert done.seconds == 2
    assert type(done.error) is LookupError
    with pytest.raises(LookupError, match="no"):
        done.result()
    with pytest.raises(LookupError) as caught:
        run(broken, backend=backend, seed=9)
    assert caught.value.__notes__ == [f"schedule: {backend}, seed 9, {len(done.choices)} choices"]
    with pytest.raises(LookupError) as caught:
        run(broken, backend=backend, chooser=Scripted([1, 2]))
    assert "Scripted([1, 2])" in caught.value.__notes__[0]


def test_a_group_of_errors_is_an_outcome(backend: Backend) -> None:
    async def child() -> None:
        raise LookupError("child")

    async def broken() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(child)

    error = attempt(broken, backend=backend, seed=1).error
    assert isinstance(error, ExceptionGroup)
    assert [type(inner) for inner in error.exceptions] == [LookupError]


def test_exactly_one_of_seed_and_chooser(backend: Backend) -> None:
    with pytest.raises(ValueError, match="one of the two"):
        attempt(steps_of, backend=backend)
    with pytest.raises(ValueError, match="one of the two"):
        attempt(steps_of, backend=backend, seed=1, chooser=Seeded(1))


@pytest.mark.parametrize("answer", [-1, 1000])
def test_an_answer_out_of_range_ends_the_run(backend: Backend, answer: int) -> None:
    class Wrong:
        def choose(self, n: int) -> int:
            return answer

    with pytest.raises(ValueError, match=f"chose {answer} of"):
        attempt(steps_of, backend=backend, chooser=Wrong())


@pytest.mark.parametrize("error", [KeyError("chooser"), GeneratorExit()])
def test_what_the_chooser_raises_ends_the_run_and_is_not_its_outcome(backend: Backend, error: BaseException) -> None:
    num_asked = 0
    cleaned = []

    class Failing:
        def choose(self, n: int) -> int:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 5:
                raise error
            return 0

    async def watched() -> None:
        try:
            await steps_of()
        finally:
            cleaned.append(True)

    with pytest.raises(type(error)) as caught:
        attempt(watched, backend=backend, chooser=Failing())
    assert caught.value is error
    assert num_asked == 5
    assert cleaned == [True]


def test_what_runs_after_the_function_is_not_recorded(backend: Backend) -> None:
    left = []
    closed = []

    async def numbers(first: int) -> AsyncGenerator[int, None]:
        try:
            yield first
        finally:
            await anyio.lowlevel.cancel_shielded_checkpoint()
            closed.append(first)

    async def leaves_generators() -> None:
        for number in range(5):
            left.append(numbers(number))
            await anext(left[-1])

    assert run(leaves_generators, backend=backend, seed=1).choices == ()
    assert sorted(closed) == list(range(5))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_off_during_a_run_and_as_before_after_it(backend: Backend, enabled: bool) -> None:
    async def collecting() -> bool:
        return gc.isenabled()

    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert run(collecting, backend=backend, seed=1).result() is False
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=20)
def test_hypothesis_can_draw_the_schedule(backend: Backend, data: st.DataObject) -> None:
    done = run(steps_of, 3, 2, backend=backend, chooser=Drawn(data))
    assert len(done.result()) == 6


def test_hypothesis_finds_and_replays_a_schedule(backend: Backend) -> None:
    found: list[tuple[int, ...]] = []

    @hypothesis.given(data=st.data())
    @hypothesis.settings(max_examples=200, database=None, phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink])
    def no_task_overtakes(data: st.DataObject) -> None:
        done = run(steps_of, 3, 2, backend=backend, chooser=Drawn(data))
        if done.result().index((2, 1)) < done.result().index((0, 0)):
            found.append(done.choices)
            raise AssertionError("overtaken")

    with pytest.raises(AssertionError, match="overtaken"):
        no_task_overtakes()
    order = run(steps_of, 3, 2, backend=backend, chooser=Scripted(found[-1])).result()
    assert order.index((2, 1)) < order.index((0, 0))
