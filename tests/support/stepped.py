"""An asyncio loop that a test moves by hand, one ready handle at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from stress.schedules import SeededLoop

__all__ = ["SteppedLoop"]

_T = TypeVar("_T")


class _Turn:
    """A chooser that answers with what the test said last, whatever the number of ready handles."""

    choice = 0

    def choose(self, n: int) -> int:
        return self.choice % n


class _Shutter:
    """A ready queue that shows the loop as many handles as the test lets through: one, or none."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.num_shown = 0
        self.handles: list[asyncio.Handle] = []

    def __len__(self) -> int:
        return min(self.num_shown, len(self.inner))

    def append(self, handle: asyncio.Handle) -> None:
        self.inner.append(handle)
        self.handles.append(handle)

    def popleft(self) -> asyncio.Handle:
        handle: asyncio.Handle = self.inner.popleft()
        self.handles.remove(handle)
        return handle

    def clear(self) -> None:
        self.inner.clear()
        self.handles.clear()


class SteppedLoop(SeededLoop):
    """A `SeededLoop` on which nothing runs but by `step`. Its virtual clock starts at 0 and moves by `advance` only."""

    def __init__(self) -> None:
        self._turn = _Turn()
        super().__init__(self._turn)
        self._shown = _Shutter(self._ready)
        self._ready = self._shown  # type: ignore[assignment]
        self.failures: list[dict[str, Any]] = []
        """What asyncio would have logged: callbacks that raised, failures that nobody asked for."""
        self.set_exception_handler(lambda _, context: self.failures.append(context))

    @property
    def num_ready(self) -> int:
        """Handles that could run now."""
        return len(self._shown.inner)

    @property
    def num_timers(self) -> int:
        """Timers that are set."""
        return len(self._times())

    def _times(self) -> list[float]:
        return [handle.when() for handle in self._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]

    def woken(self) -> list[asyncio.Task[Any]]:
        """Tasks that were woken, and have not run since."""
        owners = [getattr(handle._callback, "__self__", None) for handle in self._shown.handles if handle._args]  # type: ignore[attr-defined]
        return [owner for owner in owners if isinstance(owner, asyncio.Task)]

    def waits_for(self, task: asyncio.Task[Any] | None) -> asyncio.Future[Any] | None:
        """What a suspended task waits for; done where it was woken and has not run since. None for a mere yield."""
        waits_for: asyncio.Future[Any] | None = getattr(task, "_fut_waiter", None)
        return waits_for

    def step(self, choice: int = 0) -> None:
        """Run one ready handle, and nothing else; 0 is the oldest, and numbers too great wrap around."""
        self._turn.choice = choice
        self._run_round(1)

    def advance(self) -> bool:
        """Move the clock to the next timer and make ready all that are due then; False if there is none."""
        times = self._times()
        if not times:
            return False
        self._move_clock(max(self.time(), min(times)))
        self._run_round(0)
        return True

    def settle(self, max_steps: int = 10_000) -> None:
        """Step and advance until nothing is left to run.

        Raises:
            AssertionError: it never comes to rest.
        """
        for _ in range(max_steps):
            if self.num_ready:
                self.step()
            elif not self.advance():
                return
        raise AssertionError(f"still running after {max_steps} steps")

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function that must be on the loop, outside any task, between two steps."""
        asyncio._set_running_loop(self)
        try:
            return function()
        finally:
            asyncio._set_running_loop(None)

    def _run_round(self, num_handles: int) -> None:
        self._shown.num_shown = num_handles
        self._stopping = True  # so `run_forever` makes a single round, and polls without waiting
        self.run_forever()
