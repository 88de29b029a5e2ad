"""Which request runs next: the earliest whose session is not at work."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator
from time import perf_counter

import anyio

from aradix.replay.request import Request

__all__ = ["LOOKAHEAD", "Schedule"]

LOOKAHEAD = 4096
"""Requests held back, at most, while a later one runs. They are small: blocks are not expanded before they run."""


class Schedule:
    """Hands out requests in their order, except that none overtakes an earlier one of its own session.

    Where the next requests all wait for sessions at work, it reads on to find one that need not wait, so that a trace
    grouped by session runs several sessions at once. With one request in flight the order is that of the trace.

    Args:
        requests: in order; read as they are needed.
    """

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._exhausted = False
        self._num_read = 0
        self._num_held = 0
        self._held: dict[Hashable, deque[tuple[int, Request]]] = {}
        self._ready: list[tuple[int, Hashable]] = []
        self._at_work: set[Hashable] = set()
        self._finished = anyio.Event()
        self.read_seconds = 0.0

    async def take(self) -> Request | None:
        """The next request to run, or None when all have been handed out. Waits while every one must wait."""
        while True:
            request = self._take_held() or self._read_on()
            if request is not None:
                if request.session is not None:
                    self._at_work.add(request.session)
                return request
            if self._exhausted and not self._num_held:
                return None
            await self._finished.wait()

    def finish(self, request: Request) -> None:
        """The request is done: the next one of its session may run. Does not wait."""
        session = request.session
        if session is None:
            return
        self._at_work.discard(session)
        if session in self._held:
            heapq.heappush(self._ready, (self._held[session][0][0], session))
        self._finished.set()
        self._finished = anyio.Event()

    def _take_held(self) -> Request | None:
        if not self._ready:
            return None
        _, session = heapq.heappop(self._ready)
        queue = self._held[session]
        _, request = queue.popleft()
        if not queue:
            del self._held[session]
        self._num_held -= 1
        return request

    def _read_on(self) -> Request | None:
        while not self._exhausted and self._num_held < LOOKAHEAD:
            begun = perf_counter()
            request = next(self._requests, None)
            self.read_seconds += perf_counter() - begun
            if request is None:
                self._exhausted = True
                return None
            self._num_read += 1
            if request.session is None or request.session not in self._at_work:
                return request
            self._held.setdefault(request.session, deque()).append((self._num_read, request))
            self._num_held += 1
        return None
