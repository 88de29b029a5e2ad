"""Trio on a virtual clock, one task step at a time, each chosen by a chooser.

Trio runs what is runnable in batches, in an order it draws itself. This clock and instrument leave a single task in the
run queue before each batch. Both are interfaces that trio offers; the run queue, the deadlines and the tasks that
wait for the others to block are its private parts, reached through the run's own `Runner` and patched nowhere.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import trio
from outcome import Error
from trio._core._run import GLOBAL_RUN_CONTEXT

from stress.schedules.choices import Recorder
from stress.schedules.stacks import DeadlockError, LivelockError, StuckError, TaskStack, await_stack, stands_in_thread

__all__ = ["TrioSteps"]


def _tasks_below(top: trio.lowlevel.Task | None) -> Iterator[trio.lowlevel.Task]:
    """A task and all its descendants; none where the main task was not made yet."""
    stack = [] if top is None else [top]
    while stack:
        task = stack.pop()
        yield task
        stack.extend(child for nursery in task.child_nurseries for child in nursery.child_tasks)


def _creation(task: Any) -> int:
    number: int = task._counter
    return number


class TrioSteps(trio.abc.Clock, trio.abc.Instrument):
    """The clock and the instrument of one run: give it to `trio.run` as both.

    Args:
        recorder: says which task runs next.
        max_steps: task steps before the run counts as endless.
    """

    def __init__(self, recorder: Recorder, max_steps: int) -> None:
        self._recorder = recorder
        self._max_steps = max_steps
        self._limit = max_steps
        self._now = 0.0
        self._held_back: list[trio.lowlevel.Task] = []
        self._num_queued = 0
        self._polled = False
        self._raised_in_tasks = False
        self._crash = False
        self.num_steps = 0
        """Steps of tasks that ran."""
        self.on_failure: Callable[[], object] | None = None
        """Called once when the run is given up: it is to cancel what runs, so that it unwinds."""
        self.failure: BaseException | None = None
        """Why the run was given up; what it returned or raised then means nothing."""

    # The clock

    def start_clock(self) -> None:
        """The clock starts at 0 and moves only in `deadline_to_sleep_time`."""

    def current_time(self) -> float:
        if self._crash and self.failure is not None:
            raise self.failure
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Called when no task is runnable: wake one, move the clock, or give up. Returns how long to wait for files."""
        runner = GLOBAL_RUN_CONTEXT.runner
        if self._waits_for_thread(runner):
            return math.inf
        if not self._polled:
            # A `run_sync_soon` of this thread, or of one that has just ended, shows only when the files are polled.
            self._polled = True
            return 0
        if runner.waiting_for_idle:
            cushion = runner.waiting_for_idle.keys()[0][0]
            for key in [key for key in runner.waiting_for_idle if key[0] == cushion]:
                runner.reschedule(runner.waiting_for_idle.pop(key))
        elif deadline < math.inf:
            self._now = max(self._now, deadline)
        elif self._waits_for_file(runner):
            return math.inf
        else:
            self._give_up(self._stuck(DeadlockError, "deadlock: no task can run, and no timer is set"))
        return 0

    def _waits_for_thread(self, runner: Any) -> bool:
        return threading.active_count() > 1 and any(
            stands_in_thread(task.coro) for task in _tasks_below(runner.main_task)
        )

    def _waits_for_file(self, runner: Any) -> bool:
        waits = runner.io_manager.statistics()
        # Trio's own system task always waits for its wake-up socket.
        return bool(waits.tasks_waiting_read > 1 or waits.tasks_waiting_write)

    # The instrument

    def after_io_wait(self, timeout: float) -> None:
        """Leave one runnable task in the queue. Trio would only log an exception here, so each ends the run instead."""
        runner = GLOBAL_RUN_CONTEXT.runner
        runner.deadlines.expire(self._now)  # trio would only do it after this, and wake tasks behind our back
        queue = runner.runq
        if not queue:
            return
        self._polled = False
        self.num_steps += 1
        if self.num_steps > self._limit:
            self._limit += self._max_steps
            self._give_up(self._stuck(LivelockError, f"livelock: still running after {self._max_steps} steps"))
        tasks = list(queue)
        tasks[self._num_queued :] = sorted(tasks[self._num_queued :], key=_creation)
        index = 0
        if len(tasks) > 1:
            try:
                index = self._recorder.choose(len(tasks))
            except BaseException as failure:
                self._give_up(failure)
        chosen = tasks.pop(index)
        self._held_back = tasks
        queue.clear()
        queue.append(chosen)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Queue what was held back, and behind it what this step made runnable."""
        queue = GLOBAL_RUN_CONTEXT.runner.runq
        woken = sorted(queue, key=_creation)
        queue.clear()
        queue.extend(self._held_back)
        queue.extend(woken)
        self._num_queued = len(queue)
        self._held_back = []

    # The end

    def _stuck(self, error: type[StuckError], reason: str) -> StuckError:
        tasks = sorted(_tasks_below(GLOBAL_RUN_CONTEXT.runner.main_task), key=_creation)
        return error(reason, self._now, [TaskStack(task.name, await_stack(task.coro)) for task in tasks])

    def _give_up(self, failure: BaseException) -> None:
        """Have the run cancelled; if it is stuck again, raise in every task that waits; then let trio crash."""
        self._recorder.stop()
        cancel, self.on_failure = self.on_failure, None
        if self.failure is None:
            self.failure = failure
        if cancel is not None:
            cancel()
        elif isinstance(failure, DeadlockError) and not self._raised_in_tasks:
            self._raised_in_tasks = True
            runner = GLOBAL_RUN_CONTEXT.runner
            for task in sorted(_tasks_below(runner.main_task), key=_creation):
                if not any(nursery.child_tasks for nursery in task.child_nurseries):
                    runner.reschedule(task, Error(self.failure))
        else:
            self._crash = True
