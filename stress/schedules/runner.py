"""One way to run async code under a chosen schedule, on either event loop."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, TypeVarTuple, cast

import anyio
import anyio.lowlevel

from stress.schedules.choices import Chooser, Recorder, Seeded
from stress.schedules.loop import SeededLoop
from stress.schedules.script import Script
from stress.schedules.trio_steps import TrioSteps

__all__ = ["Backend", "Run", "attempt", "run"]

Backend = Literal["asyncio", "trio"]
_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@dataclass(frozen=True, slots=True)
class Run(Generic[_T]):
    """A run that ended, and the schedule it took.

    Args:
        backend: `"asyncio"` or `"trio"`.
        choices: the answers of the chooser; `Scripted(choices)` takes the same way again.
        widths: among how many each was made.
        num_steps: of tasks and callbacks.
        seconds: of virtual time, when the function ended or was given up.
        value: what the function returned, where `error` is `None`.
        error: what it raised.
    """

    backend: Backend
    choices: tuple[int, ...]
    widths: tuple[int, ...]
    num_steps: int
    seconds: float
    value: _T | None
    error: BaseException | None

    @property
    def failed(self) -> bool:
        """Whether the function raised, or never ended."""
        return self.error is not None

    @property
    def script(self) -> Script:
        """The schedule as it is kept in a file."""
        return Script(self.backend, self.choices)

    def result(self) -> _T:
        """What the function returned; raises what it raised."""
        if self.error is not None:
            raise self.error
        return cast(_T, self.value)


def attempt(
    function: Callable[[*_Args], Awaitable[_T]],
    *args: *_Args,
    backend: Backend,
    seed: int | None = None,
    chooser: Chooser | None = None,
    max_steps: int = 1_000_000,
) -> Run[_T]:
    """Run an async function under a chosen schedule; whatever it raises is in the answer. Takes no real time to wait.

    The garbage collector is off meanwhile: when it runs depends on what the process did before, and so would
    finalisers. What is left to unwind after the function ended runs in the plainest order and is not recorded.

    Args:
        function: what to run, with `args`.
        backend: `"asyncio"` or `"trio"`.
        seed: of a `Seeded` chooser; give this or `chooser`.
        chooser: an object with `choose(n)`.
        max_steps: before the run counts as endless.

    Raises:
        ValueError: not exactly one of `seed` and `chooser` was given.
        Exception: whatever the chooser raised.
        KeyboardInterrupt, SystemExit: as they come.
    """
    if (seed is None) == (chooser is None):
        raise ValueError("give a seed or a chooser, one of the two")
    recorder = Recorder(Seeded(seed) if chooser is None else chooser)  # type: ignore[arg-type]
    recorder.stop()
    steps = TrioSteps(recorder, max_steps)
    drivers: list[TrioSteps | SeededLoop] = [steps] if backend == "trio" else []
    ended_at = 0.0

    def make_loop() -> SeededLoop:
        loop = SeededLoop(recorder, max_steps=max_steps)
        drivers.append(loop)
        return loop

    async def observed() -> _T:
        nonlocal ended_at
        with anyio.CancelScope() as scope:
            drivers[0].on_failure = scope.cancel
            await anyio.lowlevel.checkpoint()  # trio starts a task of its own beside this one
            recorder.start()
            try:
                return await function(*args)
            finally:
                recorder.stop()
                ended_at = anyio.current_time()
        return cast(_T, None)  # given up: the driver knows why

    options: dict[str, Any] = (
        {"clock": steps, "instruments": [steps]} if backend == "trio" else {"loop_factory": make_loop}
    )
    value: _T | None = None
    error: BaseException | None = None
    collecting = gc.isenabled()
    gc.disable()
    try:
        value = anyio.run(observed, backend=backend, backend_options=options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as raised:
        error = raised
    finally:
        if collecting:
            gc.enable()
    if recorder.failure is not None:
        raise recorder.failure
    if drivers[0].failure is not None:
        value, error = None, drivers[0].failure
    return Run(
        backend,
        tuple(recorder.choices),
        tuple(recorder.widths),
        drivers[0].num_steps,
        ended_at,
        value,
        error,
    )


def run(
    function: Callable[[*_Args], Awaitable[_T]],
    *args: *_Args,
    backend: Backend,
    seed: int | None = None,
    chooser: Chooser | None = None,
    max_steps: int = 1_000_000,
) -> Run[_T]:
    """As `attempt`, but raises what the function raised, with a note that says how to take the same way again."""
    done = attempt(function, *args, backend=backend, seed=seed, chooser=chooser, max_steps=max_steps)
    if done.error is not None:
        who = f"seed {seed}" if chooser is None else repr(chooser)
        done.error.add_note(f"schedule: {backend}, {who}, {len(done.choices)} choices")
        raise done.error
    return done
