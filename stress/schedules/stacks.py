"""What a task that does not run is waiting for, and the errors that say so for all of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

__all__ = ["DeadlockError", "LivelockError", "StuckError", "TaskStack", "await_stack", "stands_in_thread"]

# Frames that wait for a thread of this process, by module and function.
_THREAD_WAITS = {
    ("anyio._backends._asyncio", "run_sync_in_worker_thread"),
    ("asyncio.base_events", "shutdown_default_executor"),
    ("asyncio.threads", "to_thread"),
    ("trio._threads", "to_thread_run_sync"),
}


def _await_frames(awaitable: Any) -> Iterator[FrameType]:
    """The frames from a coroutine down to the innermost one that can be seen, in the order of the awaits.

    Awaitables made in C (what `__anext__` or a coroutine's `__await__` returns) show nothing of what they stand for,
    but the garbage collector knows what they refer to; trio looks through them in the same way.
    """
    while awaitable is not None:
        for prefix, inner in (("cr", "cr_await"), ("ag", "ag_await"), ("gi", "gi_yieldfrom")):
            if hasattr(awaitable, inner):
                frame = getattr(awaitable, f"{prefix}_frame")
                if frame is not None:
                    yield frame
                awaitable = getattr(awaitable, inner)
                break
        else:
            if type(awaitable).__name__ not in {
                "async_generator_asend",
                "async_generator_athrow",
                "coroutine_wrapper",
                "ShortCoroutine",
            }:
                return
            awaitable = next(
                (
                    other
                    for other in gc.get_referents(awaitable)
                    if hasattr(other, "ag_await") or hasattr(other, "cr_await")
                ),
                None,
            )


def await_stack(coroutine: Any) -> list[tuple[str, int, str]]:
    """(file, line, function) of every await of a suspended coroutine, innermost last."""
    return [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in _await_frames(coroutine)]


def stands_in_thread(coroutine: Any) -> bool:
    """Whether a suspended coroutine waits for a worker thread of anyio, asyncio or trio."""
    return any(
        (frame.f_globals.get("__name__"), frame.f_code.co_name) in _THREAD_WAITS for frame in _await_frames(coroutine)
    )


class TaskStack(NamedTuple):
    """A task and its awaits as (file, line, function), innermost last."""

    name: str
    awaits: Sequence[tuple[str, int, str]]

    def __str__(self) -> str:
        lines = [f'    File "{file}", line {line}, in {function}' for file, line, function in self.awaits]
        return "\n".join([f"  {self.name}", *lines])


class StuckError(Exception):
    """A run that would never end.

    Args:
        reason: in a few words.
        seconds: the virtual time.
        tasks: every task that has not ended, in the order of their creation.
    """

    def __init__(self, reason: str, seconds: float, tasks: Sequence[TaskStack]) -> None:
        self.reason = reason
        self.seconds = seconds
        self.tasks = tuple(tasks)
        super().__init__(reason, seconds, self.tasks)

    def __str__(self) -> str:
        return "\n".join([f"{self.reason} (at {self.seconds:g} s)", *map(str, self.tasks)])


class DeadlockError(StuckError):
    """No task can run, and no timer, thread or file will wake one."""


class LivelockError(StuckError):
    """The run took more steps than it may."""
