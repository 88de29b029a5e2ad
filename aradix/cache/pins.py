"""`Pins`: cached prefixes that are kept while nobody uses them, for a time and within a budget.

A pin holds its path as a lease does, by `lock_ref`, so what it covers is not evicted; and that is all it does. It waits
for nothing, nothing waits for it but slots, and its time ends its own hold only: a lease that stands there, or a copy
that runs, keeps what it has.

Expired pins are found where somebody needs room, and by a task that sleeps until the next one is due. The clock is the
cache's own, which need not be that of the event loop: after each sleep the task asks it again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import Any, Literal, Self

import anyio

from aradix.errors import UsageError
from aradix.keys import RadixKey
from aradix.params import NodeRef
from aradix.tree.protocol import Freed, TreeCore

__all__ = ["Pin", "PinEnd", "Pins"]

PinEnd = Literal["released", "expired", "flushed", "evicted", "taken back", "closed"]

_SHORTEST_SLEEP = 0.001
_SLACK = 64


class Pin:
    """What `cache.pin(key)` gives: a prefix that is not evicted while idle.

    `release()` ends it, leaving a `with` block does, and so do its time, a flush of what it covers, the `evict()` of
    somebody who holds the subtree exclusively, and the end of the cache. A pin without a `ttl` is taken back, the
    youngest first, where everybody waits for slots and nobody could go on otherwise. A pin that is dropped stays until
    its time, or the cache, ends.
    """

    __slots__ = ("_end", "_num_pinned", "_number", "_pins", "expires", "key", "node_id", "num_matched")

    def __init__(
        self,
        pins: Pins,
        number: int,
        key: RadixKey,
        node_id: int,
        num_matched: int,
        num_pinned: int,
        expires: float | None,
    ) -> None:
        self._pins = pins
        self._number = number
        self._num_pinned = num_pinned
        self._end: PinEnd | None = None
        self.key = key
        self.node_id = node_id
        self.num_matched = num_matched
        """Tokens of the key that were cached: more than `num_tokens` where the budget ended the pin earlier."""
        self.expires = expires
        """When its time ends, on the cache's clock; `None` for never."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it keeps, whole pages; 0 once it has ended."""
        return 0 if self.ended else self._num_pinned

    @property
    def ended(self) -> PinEnd | None:
        """What ended it; `None` while it holds. Does not wait."""
        return self._end or ("expired" if self._pins.is_over(self) else None)

    def release(self) -> None:
        """End it. Does not wait; a second call changes nothing.

        Raises:
            WrongLoopError: called from another thread or loop; it still holds then.
        """
        if self._end is None:
            self._pins.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = self.ended or ("until released" if self.expires is None else f"until {self.expires:.3f}")
        return f"<Pin {state}: {self._num_pinned} of {self.num_matched} cached tokens, {self.key.namespace!r}>"


class Pins:
    """The pins of one cache.

    Args:
        core: the tree.
        clock: seconds.
        budget: the most tokens that all pins may hold, those of overlapping pins counting for each; `None`: no limit.
        give_back: takes what the tree lets go.
    """

    def __init__(
        self, core: TreeCore, clock: Callable[[], float], budget: int | None, give_back: Callable[[list[Freed]], Any]
    ) -> None:
        self.budget = budget
        self.num_tokens = 0
        self.num_timed_tokens = 0
        """Of the pins whose time will end them: an upper bound of what comes back by itself."""
        self.on_release: Callable[[Callable[[], None]], None] = lambda step: step()
        self.changed: Callable[[], None] = lambda: None
        self.is_watched = False
        self._core = core
        self._clock = clock
        self._give_back = give_back
        self._live: dict[int, Pin] = {}
        self._due: list[tuple[float, int]] = []
        self._numbers = count(1)
        self._bell: anyio.Event | None = None

    def __len__(self) -> int:
        return len(self._live)

    def add(self, key: RadixKey, ttl: float | None, budget: int | None) -> Pin:
        """Pin the longest cached prefix of a key, or as much of it as the budgets allow.

        Raises:
            UsageError: it runs through a subtree that somebody has for himself.
        """
        expires = None if ttl is None else self._clock() + ttl
        num_cached = self._core.peek(key)
        limits = [] if budget is None else [budget]
        if self.budget is not None:
            limits.append(max(0, self.budget - self.num_tokens))
        limit = min(limits, default=None)
        limit = None if limit is None else min(limit, len(key))
        match = self._core.match(key, limit=limit, pin=True, past_pending=True)
        if match.gate:
            raise UsageError(f"{key!r} runs through a subtree that somebody holds exclusively; pin it afterwards")
        pin = Pin(self, next(self._numbers), key, match.node_id, num_cached, match.num_matched, expires)
        if not match.num_matched:  # a root need not be kept
            self._give_back(self._core.unpin(match.node_id, touch=False))
            pin.node_id, pin._end = 0, "released"
            return pin
        self._live[pin._number] = pin
        self.num_tokens += match.num_matched
        if expires is not None:
            self.num_timed_tokens += match.num_matched
            heapq.heappush(self._due, (expires, pin._number))
            if self._bell is not None and self._due[0][1] == pin._number:
                self._bell.set()
        return pin

    def is_over(self, pin: Pin) -> bool:
        """Whether its time is up, found or not."""
        return pin.expires is not None and pin.expires <= self._clock()

    def release(self, pin: Pin) -> None:
        """What a user's `release()` does: checks who calls, ends it, and sees whether somebody waits for that."""
        self.on_release(lambda: self.end(pin, "released"))

    def end(self, pin: Pin, how: PinEnd) -> None:
        """End a pin that holds."""
        if self._live.pop(pin._number, None) is None:
            return
        pin._end = how
        self.num_tokens -= pin._num_pinned
        if pin.expires is not None:
            self.num_timed_tokens -= pin._num_pinned
        node_id, pin.node_id = pin.node_id, 0
        # Its end is no use of what it kept, which is as old as its last use.
        self._give_back(self._core.unpin(node_id, touch=False))
        while self._due and self._due[0][1] not in self._live:
            heapq.heappop(self._due)
        if len(self._due) > 2 * len(self._live) + _SLACK:
            self._due = [due for due in self._due if due[1] in self._live]
            heapq.heapify(self._due)

    def end_all(self, how: PinEnd, is_concerned: Callable[[Pin], bool] = lambda pin: True) -> None:
        """End those that are concerned."""
        for pin in [pin for pin in self._live.values() if is_concerned(pin)]:
            self.end(pin, how)

    def expire(self) -> bool:
        """End those whose time is up; whether there were any. O(log n) for each of them."""
        if not self._due:
            return False
        now, found = self._clock(), False
        while self._due and self._due[0][0] <= now:
            self.end(self._live[self._due[0][1]], "expired")
            found = True
        return found

    def take_back(self) -> bool:
        """End the youngest pin that no time will end; whether there was one."""
        youngest = next((pin for pin in reversed(self._live.values()) if pin.expires is None), None)
        if youngest is not None:
            self.end(youngest, "taken back")
        return youngest is not None

    def below(self, node_id: int) -> list[Pin]:
        """Those that end at a node or below it."""
        return [pin for pin in self._live.values() if self._core.is_below(pin.node_id, node_id)]

    async def watch(self) -> None:
        """End pins as their time comes, until none is left that has a time. Waits."""
        while self._due:
            self._bell = anyio.Event()
            with anyio.move_on_after(max(_SHORTEST_SLEEP, self._due[0][0] - self._clock())):
                await self._bell.wait()
            self.expire()
            self.changed()  # somebody else may have found them, and had no waiter in mind
        self.is_watched = False

    # ---- looking ----

    def node_ids(self) -> list[int]:
        """The node of every pin, once for each."""
        return [pin.node_id for pin in self._live.values()]

    def snapshot(self) -> list[dict[str, Any]]:
        """As plain data, the oldest first."""
        return [
            {
                "namespace": pin.key.namespace._asdict(),
                "node": pin.node_id,
                "num_tokens": pin._num_pinned,
                "expires": pin.expires,
            }
            for pin in self._live.values()
        ]

    def audit(self) -> list[str]:
        """I2: each pin keeps what it says, none of it flushed, and whatever has a time will be found."""
        problems = []
        due = {number for _, number in self._due}
        for pin in self._live.values():
            found = len(self._core.slots_of(NodeRef(pin.node_id, pin._num_pinned)))
            if found != pin._num_pinned or self._core.is_detached(pin.node_id):
                problems.append(f"I2: {pin!r} keeps {found} tokens, or flushed ones")
            if pin.expires is not None and pin._number not in due:
                problems.append(f"I2: {pin!r} will never be found to have expired")
        held = sum(pin._num_pinned for pin in self._live.values())
        timed = sum(pin._num_pinned for pin in self._live.values() if pin.expires is not None)
        if (self.num_tokens, self.num_timed_tokens) != (held, timed):
            problems.append(
                f"I2: pins are said to keep {self.num_tokens} tokens ({self.num_timed_tokens} for a time), "
                f"a recount gives {held} ({timed})"
            )
        return problems
