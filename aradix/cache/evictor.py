"""`Background`: what a cache does on its own: evict below the low watermark, poll fences for waiters, fail loudly."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

__all__ = ["Background"]

_log = logging.getLogger("aradix.cache")

_POLL_SECONDS = 0.001
_MAX_BATCH = 4096
"""Slots evicted in one step, so that the loop is not held up."""


class _Bell:
    """An event that can be rung again and again; ringing does not wait."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def ring(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event = anyio.Event()


class Background:
    """The background tasks of one cache.

    Args:
        wants_slots: how many slots to evict now; 0 once the high watermark is reached.
        evict: evict so many, and tell how many came.
        wants_polls: whether somebody waits for a fence.
        poll: look at the fences once.
    """

    def __init__(
        self,
        wants_slots: Callable[[], int],
        evict: Callable[[int], int],
        wants_polls: Callable[[], bool],
        poll: Callable[[], None],
    ) -> None:
        self._wants_slots = wants_slots
        self._evict = evict
        self._wants_polls = wants_polls
        self._poll = poll
        self._low = _Bell()
        self._fenced = _Bell()
        self._failed = _Bell()
        self._failure: BaseException | None = None
        self._raised = False

    def start(self, task_group: TaskGroup) -> None:
        """Start the tasks. Does not wait."""
        for task in (self._run_evictor, self._run_reclaimer, self._run_alarm):
            task_group.start_soon(task, name=f"aradix {task.__name__.removeprefix('_run_')}")

    def pool_is_low(self) -> None:
        """The low watermark was crossed. Does not wait."""
        self._low.ring()

    def somebody_waits(self) -> None:
        """Fences have to be polled. Does not wait."""
        self._fenced.ring()

    def fail(self, error: BaseException) -> None:
        """End the cache's task group with this error; the first one counts. Does not wait."""
        if self._failure is None:
            self._failure = error
            self._failed.ring()

    def raise_unheard(self) -> None:
        """Raise a failure that came too late for the alarm, in a group as the task group does. Does not wait."""
        if self._failure is not None and not self._raised:
            self._raised = True
            raise BaseExceptionGroup("a background failure ends the cache", [self._failure])

    async def _run_evictor(self) -> None:
        while True:
            await self._low.wait()
            while (wanted := self._wants_slots()) and (num_evicted := self._evict(min(wanted, _MAX_BATCH))):
                _log.debug("%d slots below the high watermark: evicted %d", wanted, num_evicted)
                await checkpoint()

    async def _run_reclaimer(self) -> None:
        while True:
            await self._fenced.wait()
            while self._wants_polls():
                self._poll()
                await anyio.sleep(_POLL_SECONDS)

    async def _run_alarm(self) -> None:
        await self._failed.wait()
        assert self._failure is not None
        self._raised = True
        raise self._failure
