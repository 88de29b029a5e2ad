"""An asyncio event loop on a virtual clock that asks a chooser which ready task runs next.

It is asyncio's own selector loop with two parts exchanged: the queue of ready handles picks one instead of the
oldest, and the selector moves the clock instead of sleeping. Nothing of asyncio is patched.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from stress.schedules.choices import Chooser, Recorder, Seeded
from stress.schedules.stacks import DeadlockError, LivelockError, StuckError, TaskStack, await_stack, stands_in_thread

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

__all__ = ["SeededLoop", "SeededTask"]

_T = TypeVar("_T")
_TaskCoroutine = Generator[Any, None, _T] | Coroutine[Any, Any, _T]


class SeededTask(asyncio.Task[_T]):
    """A task that is numbered by its creation and hashes to its number.

    anyio and asyncio walk sets of tasks to cancel them: with hashes made of addresses that order would change from
    run to run.
    """

    def __init__(self, coro: _TaskCoroutine[_T], *, number: int, **options: Any) -> None:
        self.number = number  # before asyncio puts the task into its first set
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


class _ReadyQueue:
    """The ready handles of a loop, as the part of a deque's interface that asyncio uses."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self._choose = choose
        # Appended to from any thread; the rest belongs to the loop's own.
        self._arrived: deque[asyncio.Handle] = deque()
        self._num_arrived = 0
        # (arrival, handle), ascending: what may run in any order, and what runs before all that came after it.
        self._free: list[tuple[int, Any]] = []
        self._ordered: deque[tuple[int, Any]] = deque()

    def __len__(self) -> int:
        return len(self._arrived) + len(self._free) + len(self._ordered)

    def append(self, handle: asyncio.Handle) -> None:
        self._arrived.append(handle)

    def clear(self) -> None:
        self._arrived.clear()
        self._free.clear()
        self._ordered.clear()

    def popleft(self) -> asyncio.Handle:
        if self._arrived:
            self._sort_in()
        free, ordered = self._free, self._ordered
        if not ordered:
            return free.pop(self._choose(len(free)))[1]  # type: ignore[no-any-return]
        num_before = bisect_left(free, ordered[0])
        index = self._choose(num_before + 1)
        return (ordered.popleft() if index == num_before else free.pop(index))[1]  # type: ignore[no-any-return]

    def _sort_in(self) -> None:
        """Take over what one step made ready."""
        cancelled: list[tuple[int, Any]] = []
        while self._arrived:
            handle: Any = self._arrived.popleft()
            self._num_arrived += 1
            if isinstance(getattr(handle._callback, "__self__", None), SeededTask):
                self._free.append((self._num_arrived, handle))
                if handle._args and isinstance(handle._args[0], asyncio.Future) and handle._args[0].cancelled():
                    cancelled.append((len(self._free) - 1, handle))
            elif isinstance(handle, asyncio.TimerHandle):
                self._free.append((self._num_arrived, handle))
            else:
                self._ordered.append((self._num_arrived, handle))
        if len(cancelled) > 1:
            # anyio walks sets of scopes to cancel what is in them, and their order is not ours to choose.
            by_task = sorted((handle for _, handle in cancelled), key=lambda handle: handle._callback.__self__.number)
            for (place, _), handle in zip(cancelled, by_task, strict=True):
                self._free[place] = (self._free[place][0], handle)


class _JumpingSelector(selectors.BaseSelector):
    """A selector that never sleeps: where asyncio would, it asks its loop what to do.

    Args:
        waits_for_thread: whether only a thread's wake-up can help; then it is waited for.
        on_idle: called when nothing at all happens; it says whether to wait for a file.
    """

    def __init__(self, waits_for_thread: Callable[[], bool], on_idle: Callable[[], bool]) -> None:
        self._files = selectors.DefaultSelector()
        self._waits_for_thread = waits_for_thread
        self._on_idle = on_idle

    def register(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._files.unregister(fileobj)

    def modify(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._files.modify(fileobj, events, data)

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._files.get_map()

    def close(self) -> None:
        self._files.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        idle = timeout is None or timeout > 0
        # Asked before the files are polled: a thread that has just ended has left its wake-up there.
        if idle and self._waits_for_thread():
            return self._files.select(None)
        found = self._files.select(0)
        if idle and not found and self._on_idle():
            return self._files.select(None)
        return found


class SeededLoop(asyncio.SelectorEventLoop):
    """An event loop on which no time passes by itself, and which runs ready tasks in the order a chooser says.

    Use it through `stress.schedules.run`, or as `anyio.run(..., backend_options={"loop_factory": lambda:
    SeededLoop(7)})`. Time starts at 0 and moves only when nothing is ready, to the next timer.

    Args:
        chooser: an object with `choose(n)`, or the seed of one.
        max_steps: callbacks that may run before the run counts as endless.

    Raises:
        DeadlockError: out of `run_until_complete`, when nothing can ever run again.
        LivelockError: out of `run_until_complete`, after `max_steps` callbacks.
    """

    def __init__(self, chooser: Chooser | int, *, max_steps: int = 1_000_000) -> None:
        selector = _JumpingSelector(self._waits_for_thread, self._idle)
        super().__init__(selector)
        if isinstance(chooser, int):
            chooser = Seeded(chooser)
        self.recorder = chooser if isinstance(chooser, Recorder) else Recorder(chooser)
        self._move_clock(0.0)
        self._num_tasks = 0
        self._num_executor_calls = 0
        self._num_own_files = len(selector.get_map())
        self._max_steps = max_steps
        self._limit = max_steps
        self._ready = _ReadyQueue(self._choose)
        self.num_steps = 0
        """Callbacks that ran."""
        self.on_failure: Callable[[], object] | None = None
        """Called once, instead of raising, when the run is given up: it is to cancel what runs, so that it unwinds."""
        self.failure: BaseException | None = None
        """Why the run was given up."""
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        future: asyncio.Future[_T] = super().run_in_executor(executor, func, *args)
        self._num_executor_calls += 1
        future.add_done_callback(self._executor_call_ended)
        return future

    def _executor_call_ended(self, _: asyncio.Future[Any]) -> None:
        self._num_executor_calls -= 1

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: _TaskCoroutine[_T], **options: Any) -> SeededTask[_T]:
        self._num_tasks += 1
        return SeededTask(coro, loop=loop, number=self._num_tasks, **options)

    def _choose(self, n: int) -> int:
        """Which of `n` ready handles runs next."""
        self.num_steps += 1
        if self.num_steps > self._limit:
            self._limit += self._max_steps
            self._give_up(self._stuck(LivelockError, f"livelock: still running after {self._max_steps} steps"))
        if n == 1:
            return 0
        try:
            return self.recorder.choose(n)
        except BaseException as failure:
            self._give_up(failure)
            return 0

    def _idle(self) -> bool:
        """Nothing is ready: move the clock, or say True to wait for a file, or give up."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if timers and timers[0].when() < math.inf:
            self._move_clock(max(self._now, timers[0].when()))
            return False
        if len(self._selector.get_map()) > self._num_own_files:  # type: ignore[attr-defined]
            return True
        self._give_up(self._stuck(DeadlockError, "deadlock: no task can run, and no timer is set"))
        return False

    def _move_clock(self, now: float) -> None:
        self._now = now
        # asyncio runs timers that are due earlier than the time plus this: exactly those due now.
        self._clock_resolution = math.ulp(now)

    def _waits_for_thread(self) -> bool:
        if threading.active_count() == 1:
            return False
        return self._num_executor_calls > 0 or any(
            stands_in_thread(task.get_coro()) for task in asyncio.all_tasks(self)
        )

    def _stuck(self, error: type[StuckError], reason: str) -> StuckError:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        return error(reason, self._now, [TaskStack(task.get_name(), await_stack(task.get_coro())) for task in tasks])

    def _give_up(self, failure: BaseException) -> None:
        """Have the run cancelled; without somebody who does, or the second time, raise."""
        self.recorder.stop()
        first = self.failure is None
        if self.failure is None:
            self.failure = failure
        if not first or self.on_failure is None:
            raise self.failure
        self.on_failure()
