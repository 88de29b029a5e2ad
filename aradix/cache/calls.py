"""`Calls`: who may call a cache, when, and how many calls in a row before others have their turn.

Every public call begins here, so what is asked each time is one flag and the running loop; all else is behind the flag.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

from aradix.cache.hold import Hold
from aradix.cache.home import Home
from aradix.errors import CacheClosedError, InvariantError, UsageError

if TYPE_CHECKING:
    from aradix.cache.evictor import Background

__all__ = ["LISTEN_FROM", "MAX_RUN", "Calls", "closed_error"]

_log = logging.getLogger("aradix.cache")

MAX_RUN = 128
"""Calls in a row that may complete without letting other tasks run."""
LISTEN_FROM = MAX_RUN // 2
"""At this call of a run the cache begins to listen whether the loop comes round by itself."""


def closed_error() -> CacheClosedError:
    """The error of a call that needs an open cache."""
    return CacheClosedError("the cache is closed; leases that are held stay usable until they are released")


class Calls:
    """The way into one cache. Nothing here waits.

    Args:
        policy_failure: asks the tree for what a user's policy raised.
        release: gives back what a lease has that was dropped.
        never_fails: no policy of a user's is asked, so that nothing of it can have failed.
    """

    __slots__ = (
        "_ask_task",
        "_background",
        "_background_is_over",
        "_broken",
        "_current",
        "_dropped",
        "_home",
        "_never_fails",
        "_plain",
        "_policy_failure",
        "_policy_reported",
        "_release",
        "_run_length",
        "_token",
        "closed",
    )

    def __init__(
        self, policy_failure: Callable[[], BaseException | None], release: Callable[[Hold], None], never_fails: bool
    ) -> None:
        self.closed = False
        self._policy_failure = policy_failure
        self._release = release
        self._never_fails = never_fails
        self._home: Home | None = None
        self._background: Background | None = None
        self._background_is_over = False
        self._broken: str | None = None
        self._policy_reported = False
        self._dropped: deque[Hold] = deque()
        self._run_length = 0
        self._plain = False
        # What the home is asked at every call, without asking it for that.
        self._current: Callable[[], Any] = lambda: None
        self._token: Any = self
        self._ask_task: Callable[[], Any] = lambda: None

    # ---- the first line of a call ----

    def begin(self) -> None:
        """The first line of every public call.

        Raises:
            UsageError: the cache was never opened.
            WrongLoopError: from another loop or thread.
            InvariantError: an audit failed.
        """
        try:
            if self._plain and self._current() is self._token:
                return
        except RuntimeError:  # no loop runs here
            pass
        self._begin_slowly()

    def begin_open(self) -> None:
        """The first line of a call that a closed cache refuses with `CacheClosedError`."""
        try:
            if self._plain and self._current() is self._token:
                return
        except RuntimeError:
            pass
        self._begin_slowly()
        if self.closed:
            raise closed_error()

    def _begin_slowly(self) -> None:
        self._check_caller()
        if self._broken is not None:
            raise InvariantError(f"the cache refuses further work: {self._broken}")
        self.note_policy_failure()
        self.drain_dropped()

    def begin_release(self) -> None:
        """The first line of a release, which even a broken cache allows."""
        try:
            if self._plain and self._current() is self._token:
                return
        except RuntimeError:
            pass
        self._check_caller()

    def _check_caller(self) -> None:
        if self._home is None:
            raise UsageError("open the cache first: async with RadixCache(params) as cache")
        if not self.closed or not self._home.is_this_thread():
            self._home.check()

    def running_task(self) -> ref[Any] | None:
        """The task that calls, by the loop's own object, which unlike an id is never another one's."""
        try:
            task = self._ask_task()
        except RuntimeError:  # trio runs something that is no task
            return None
        return None if task is None else ref(task)

    def is_turn_over(self) -> bool:
        """Whether this call should let other tasks run first, before it takes anything."""
        self._run_length += 1
        if self._run_length < LISTEN_FROM:
            return False
        if self._run_length == LISTEN_FROM and self._home is not None:
            self._home.call_next(self._end_run)  # a task that yields by itself is never made to
        if self._run_length < MAX_RUN:
            return False
        self._end_run()
        return True

    def _end_run(self) -> None:
        self._run_length = 0

    # ---- what changes the answer ----

    def open(self, home: Home, background: Background) -> None:
        """From now on calls are let in."""
        self._home, self._background = home, background
        self._current, self._token, self._ask_task = home.current, home.token, home.ask_task
        self._look_again()

    def close(self) -> None:
        """From now on only what gives back is let in."""
        self.closed = True
        self._look_again()

    def background_is_over(self) -> None:
        """Nobody is there any more to end for a failure."""
        self._background_is_over = True

    def refuse_work(self, why: str) -> None:
        """An audit failed: from now on every call raises."""
        _log.error("an audit failed, the cache refuses further work: %s", why)
        self._broken = why
        self._look_again()

    def _look_again(self) -> None:
        self._plain = (
            self._home is not None
            and not self.closed
            and self._broken is None
            and not self._dropped
            and (self._never_fails or self._policy_reported)
        )

    def drop(self, hold: Hold) -> None:
        """A lease was collected unreleased: only note it, for this may be any thread at any moment."""
        self._dropped.append(hold)
        self._plain = False
        if self._home is not None and not self._home.call_soon(self.drain_dropped):
            self.drain_dropped()  # the loop has ended, so no step is under way and nobody else would do it

    def drain_dropped(self) -> None:
        """Give back what was dropped."""
        while self._dropped:
            try:
                self._release(self._dropped.popleft())
            except Exception as error:  # a bug of ours; the loop would only log it
                self.fail(error)
        self._look_again()
        if self._dropped:  # in the very moment, on another thread: the next call sees to it
            self._plain = False

    def note_policy_failure(self) -> None:
        """End the cache with what a user's policy raised, once."""
        if not self._policy_reported and (error := self._policy_failure()) is not None:
            self._policy_reported = True
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Something failed where it could not be raised: end the cache's task group with it."""
        if self._background_is_over:
            warnings.warn(f"after the cache was closed: {error!r}", ResourceWarning, stacklevel=2, source=self)
        elif self._background is not None:
            _log.error("a failure ends the cache: %r", error)
            self._background.fail(error)
