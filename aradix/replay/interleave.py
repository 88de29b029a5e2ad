"""Sessions side by side: their requests in the order of time, with no more sessions open than are live."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from aradix.replay.request import Request

__all__ = ["Session", "interleave"]

Session = tuple[float, Iterator[tuple[float, Request]]]
"""When a session begins, in seconds, and its requests, each with its own time. Times never run backwards."""


def interleave(sessions: Iterable[Session]) -> Iterator[Request]:
    """The requests of all sessions in the order of time; ties go to the session that came first.

    `sessions` must come in the order of their beginnings, and may be endless: the next one is asked for only when the
    live ones have caught up with the beginning of the one before.
    """
    pending = iter(sessions)
    waiting = next(pending, None)
    live: list[tuple[float, int, Request, Iterator[tuple[float, Request]]]] = []
    num_begun = 0
    while live or waiting is not None:
        while waiting is not None and (not live or waiting[0] <= live[0][0]):
            turns = waiting[1]
            for at, request in turns:
                heapq.heappush(live, (at, num_begun, request, turns))
                break
            num_begun += 1
            waiting = next(pending, None)
        if not live:
            continue
        _, order, request, turns = live[0]
        yield request
        following = next(turns, None)
        if following is None:
            heapq.heappop(live)
        else:
            heapq.heapreplace(live, (following[0], order, following[1], turns))
