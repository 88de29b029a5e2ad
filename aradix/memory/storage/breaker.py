"""Breaker: stops asking a store that does not answer, and finds out when it does again."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Breaker"]


class Breaker:
    """Closed, calls go through. After `max_failures` in a row it opens: none do, but one now and then to try.

    The pause before a try doubles from `retry_s` to `max_retry_s`. Safe from any thread; no call waits.
    """

    def __init__(self, max_failures: int, retry_s: float, max_retry_s: float, clock: Callable[[], float]) -> None:
        self._max_failures = max_failures
        self._retry_s = retry_s
        self._max_retry_s = max_retry_s
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._pause_s = retry_s
        self._try_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls are stopped."""
        return self._try_at is not None

    def allows(self) -> bool:
        """Whether to make a call now. Its end must be told, else the next try comes a pause later."""
        with self._lock:
            if self._try_at is None:
                return True
            if self._clock() < self._try_at:
                return False
            self._try_at = self._clock() + self._pause_s
            return True

    def succeeded(self) -> bool:
        """Tells that a call was answered; True where that closes the breaker."""
        with self._lock:
            was_open, self._try_at = self.is_open, None
            self._num_failures, self._pause_s = 0, self._retry_s
            return was_open

    def failed(self) -> bool:
        """Tells that a call was not answered; True where that opens the breaker."""
        with self._lock:
            self._num_failures += 1
            if self._try_at is not None:
                self._pause_s = min(self._pause_s * 2, self._max_retry_s)
                self._try_at = self._clock() + self._pause_s
                return False
            if self._num_failures < self._max_failures:
                return False
            self._try_at = self._clock() + self._pause_s
            return True
