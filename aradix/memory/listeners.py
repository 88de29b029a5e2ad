"""Listeners: telling others that something changed, in rounds that never nest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["Listeners"]

_log = logging.getLogger("aradix.memory")


class Listeners:
    """Callbacks to call after `changed` was set. A change during a round brings one more round, on the same thread.

    Safe from any thread. No call waits for a round of another thread.
    """

    __slots__ = ("_callbacks", "_lock", "_running", "changed")

    def __init__(self) -> None:
        self.changed = False
        self._callbacks: dict[object, Callable[[], None]] = {}
        # Reentrant: a finaliser may come between any two lines, and it may cause a change.
        self._lock = threading.RLock()
        self._running = False

    @property
    def callbacks(self) -> dict[object, Callable[[], None]]:
        """Who is called: to be counted, not to be changed."""
        return self._callbacks

    def add(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Has `callback` called from the next round on; returns what ends that, which may be called twice."""
        key = object()
        self._callbacks[key] = callback

        def remove() -> None:
            self._callbacks.pop(key, None)

        return remove

    def notify(self) -> None:
        """Calls everybody until nothing changes any more, unless a round is under way: that one goes on."""
        if not self._callbacks:
            self.changed = False
            return
        with self._lock:
            if self._running:
                return
            self._running = True
        try:
            while self._start_round():
                for callback in tuple(self._callbacks.values()):
                    try:
                        callback()
                    except Exception:
                        # Raised from here it would read as if the change itself had failed.
                        _log.exception("the listener %r raised", callback)
        except BaseException:
            self._running = False
            raise

    def _start_round(self) -> bool:
        with self._lock:
            self._running = self.changed
            self.changed = False
            return self._running
