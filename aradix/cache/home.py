"""`Home`: the event loop and thread that a cache belongs to, and the one thread-safe way into it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from anyio import get_cancelled_exc_class
from anyio.lowlevel import current_token

from aradix.errors import WrongLoopError

__all__ = ["Home", "is_cancellation"]


class Home:
    """The loop that is running now. Asking whether this is still it costs a tenth of a microsecond."""

    __slots__ = ("_call_soon", "_thread", "ask_task", "call_later", "call_next", "current", "token")

    def __init__(self) -> None:
        token: Any = current_token().native_token
        self.token = token
        self._thread = threading.get_ident()
        self.current: Callable[[], Any]
        self._call_soon: Callable[[Callable[[], None]], Any]
        self.call_next: Callable[[Callable[[], None]], Any]
        """Run a step when the loop next comes round; only from the loop itself."""
        self.call_later: Callable[[float, Callable[[], None]], Any]
        """Run a step on the loop after so many seconds; only from the loop itself."""
        self.ask_task: Callable[[], Any]
        """The loop's own object of the running task; trio raises RuntimeError outside of any, asyncio says None."""
        if hasattr(token, "run_sync_soon"):
            import trio

            self.current, self._call_soon = trio.lowlevel.current_trio_token, token.run_sync_soon
            self.call_next, self.call_later = token.run_sync_soon, _call_later_on_trio
            self.ask_task = trio.lowlevel.current_task
        else:
            import asyncio

            self.current, self._call_soon = asyncio.get_running_loop, token.call_soon_threadsafe
            self.call_next, self.call_later = token.call_soon, token.call_later
            # Told which loop, asyncio need not find out, for which it would make a system call.
            self.ask_task = partial(asyncio.current_task, token)

    def is_here(self) -> bool:
        """Whether the caller runs on this very loop, and so on its thread."""
        try:
            return self.current() is self.token
        except RuntimeError:
            return False

    def is_this_thread(self) -> bool:
        """Whether the caller runs on the home thread."""
        return threading.get_ident() == self._thread

    def check(self) -> None:
        """Does not wait.

        Raises:
            WrongLoopError: the caller runs on another thread or loop.
        """
        if threading.get_ident() != self._thread:
            raise WrongLoopError(
                f"called from thread {threading.current_thread().name!r}, but the cache was opened on another thread; "
                "only SlotAllocator.retire() and the completion of a fence may come from elsewhere"
            )
        if not self.is_here():
            try:
                here = self.current()
            except RuntimeError:
                here = None
            raise WrongLoopError(
                f"called from {here or 'outside any event loop'}, but the cache was opened on {self.token}"
            )

    def call_soon(self, step: Callable[[], None]) -> bool:
        """Run a step on the loop soon, from whatever thread or finaliser; False if the loop is gone."""
        try:
            self._call_soon(step)
        except RuntimeError:  # the loop is closed, or trio's run has ended
            return False
        return True


def _call_later_on_trio(seconds: float, step: Callable[[], None]) -> None:
    import trio

    async def wait() -> None:
        await trio.sleep(seconds)
        step()

    trio.lowlevel.spawn_system_task(wait, name="aradix call_later")


def is_cancellation(error: BaseException) -> bool:
    """Whether an exception belongs to a cancel scope, which has to see it, alone or among others."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_cancellation(inner) for inner in error.exceptions)
    return isinstance(error, get_cancelled_exc_class())
