"""`Joins`: who computes what right now, and who waits for that instead of computing the same.

A lease with `join=True` that is entered announces what it lacks of its key: a *flight*. Another one, whose key runs on
into that flight, waits until the flight has committed as much as the two keys share, or is over; then it is matched
again and entered, in that very step. If it still has something to compute, that is its own flight: so of many that
wanted the same exactly one takes over, and the others wait for that one.

Who waits holds nothing, neither pins nor slots, and its task no other lease and no subtree; or it does not wait. So no
other lease waits in turn for what this one would give back: joining closes no circle, with other flights, slots or
gates. What it wants nobody can evict, since the one that computes stands on all that they have in common. A lease with
`reserve` waits where it waits for its slots, in the queue of admissions, as if it had met a gate: others are served
past it, and it keeps its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import numpy as np

from aradix.cache.calls import closed_error
from aradix.cache.hold import Hold
from aradix.errors import LeaseReleasedError
from aradix.keys import TOKEN_BYTES, Namespace, RadixKey

if TYPE_CHECKING:
    from aradix.cache.leases import Leases

__all__ = ["Flight", "Joiner", "Joins", "num_shared"]


class Flight:
    """What an entered lease is about to compute: the whole pages of its key from `front`, which moves, to `end`."""

    __slots__ = ("end", "front", "hold", "is_alone", "joiners", "key", "start")

    def __init__(self, hold: Hold, end: int, is_alone: bool) -> None:
        self.hold = hold
        self.key = hold.key
        self.start = self.front = hold.published
        self.end = end
        self.is_alone = is_alone
        """Whether somebody else computes some of it, who could not be waited for."""
        self.joiners: list[Joiner] = []

    def page(self, page_bytes: int) -> bytes:
        """The first page that is not committed yet, by which the flight is found."""
        return _page_at(self.key, self.front, page_bytes)


class Joiner:
    """A lease that waits until its flight has committed `target` tokens; without one it may go on.

    It has an `event` of its own, or none where it stands in the queue of admissions.
    """

    __slots__ = ("began", "error", "event", "flight", "hold", "is_heir", "num_before", "target")

    def __init__(self, hold: Hold, event: anyio.Event | None, began: float) -> None:
        self.hold = hold
        self.began = began
        self.event = event
        self.flight: Flight | None = None
        self.target = 0
        self.num_before = hold.num_matched
        self.is_heir = False
        """Whether its flight was over before it had brought all."""
        self.error: BaseException | None = None


class Joins:
    """The flights of one cache, and those who wait for them. Only `look` waits.

    Args:
        leases: of the cache.
        page_size: tokens.
        page_bytes: of a page of a key.
        clock: seconds.
    """

    def __init__(self, leases: Leases, page_size: int, page_bytes: int, clock: Callable[[], float]) -> None:
        self.num_joins = 0
        self.num_tokens = 0
        self.num_takeovers = 0
        self.flights: dict[int, Flight] = {}
        """By the number of their lease."""
        self.joiners: dict[int, Joiner] = {}
        self._leases = leases
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._clock = clock
        # By namespace, front and first page. Who shares more with a flight than is cached has matched up to its front
        # at least, so a look-up asks once for each front that is not beyond its own match.
        self._fronts: dict[Namespace, dict[int, dict[bytes, list[Flight]]]] = {}
        self._refused: set[int] = set()

    @property
    def num_waiting(self) -> int:
        """Leases that wait for a flight."""
        return sum(joiner.flight is not None for joiner in self.joiners.values())

    def enlist(self, hold: Hold) -> None:
        """The running task is about to enter this lease. One that has a subtree waits for nobody, and leads nobody."""
        hold.joins = not self._leases.gates.is_held_by_this_task()

    # ---- those who compute ----

    def announce(self, hold: Hold) -> None:
        """A lease was entered: what it lacks of its key is its flight."""
        is_alone = hold.order in self._refused
        self._refused.discard(hold.order)
        end = self._whole_pages(hold.key.num_items)
        if hold.store and hold.published < end:
            flight = self.flights[hold.order] = Flight(hold, end, is_alone)
            self._index(flight)

    def progressed(self, hold: Hold) -> bool:
        """A lease has committed: let go on who waited for no more than that. Whether its flight goes on."""
        flight = self.flights.get(hold.order)
        if flight is None:
            return False
        if hold.published == flight.front:
            return True
        self._unindex(flight)
        flight.front = hold.published
        is_over = flight.front >= flight.end
        if is_over:
            del self.flights[hold.order]
        else:
            self._index(flight)
        ready = [joiner for joiner in flight.joiners if joiner.target <= flight.front]
        if ready:
            flight.joiners = [joiner for joiner in flight.joiners if joiner.target > flight.front]
            self._go_on(ready)
            self._leases.changed()
        return not is_over

    def forget(self, hold: Hold) -> None:
        """A lease is being released, and still has its pins: its flight is over, and it waits for none."""
        self._refused.discard(hold.order)
        joiner = self.joiners.get(hold.order)
        if joiner is not None:
            self.leave(hold)
            if joiner.event is not None:
                joiner.error = LeaseReleasedError(
                    f"the lease opened at {hold.where} was released while it waited for what another one computes"
                )
                joiner.event.set()
        flight = self.flights.pop(hold.order, None)
        if flight is not None:
            self._unindex(flight)
            self._end(flight)

    def flushed(self, is_concerned: Callable[[Namespace], bool]) -> None:
        """Namespaces were flushed: what is being computed there is published no more."""
        over = [flight for flight in self.flights.values() if is_concerned(flight.key.namespace)]
        for flight in over:
            del self.flights[flight.hold.order]
            self._unindex(flight)
        for flight in over:
            self._end(flight)

    def close_down(self, make_error: Callable[[], BaseException]) -> None:
        """End every wait with an error."""
        joiners = list(self.joiners.values())
        for joiner in joiners:
            self.leave(joiner.hold)
        self.flights.clear()
        self._fronts.clear()
        for joiner in joiners:
            if joiner.event is not None:
                joiner.error = make_error()
                joiner.event.set()

    def _end(self, flight: Flight) -> None:
        joiners, flight.joiners = flight.joiners, []
        for joiner in joiners:
            joiner.is_heir = True
        self._go_on(joiners)

    def _index(self, flight: Flight) -> None:
        pages = self._fronts.setdefault(flight.key.namespace, {}).setdefault(flight.front, {})
        pages.setdefault(flight.page(self._page_bytes), []).append(flight)

    def _unindex(self, flight: Flight) -> None:
        namespace, page = flight.key.namespace, flight.page(self._page_bytes)
        fronts = self._fronts[namespace]
        pages = fronts[flight.front]
        pages[page].remove(flight)
        if not pages[page]:
            del pages[page]
        if not pages:
            del fronts[flight.front]
        if not fronts:
            del self._fronts[namespace]

    def urgency(self, hold: Hold) -> int:
        """The highest priority among a lease and those that wait for its flight."""
        flight = self.flights.get(hold.order)
        joiners = () if flight is None else flight.joiners
        return max([hold.priority, *(joiner.hold.priority for joiner in joiners)])

    # ---- those who wait ----

    async def look(self, hold: Hold, has_waited: bool, may_wait: bool) -> bool:
        """Wait while another lease computes what this one lacks; it has matched its key, and gives up that pin.

        Afterwards it is entered. Or it is to match again (True): a gate is in the way, and then it has no pin, or a
        tier below may have more. Cancelled, it is released. False where there is nothing to wait for.

        Args:
            hold: of the lease.
            has_waited: whether its match is of an earlier step, since when others may have published, and be gone.
            may_wait: or it waits in the queue of admissions.

        Raises:
            CacheClosedError: the cache was closed meanwhile.
            LeaseReleasedError: the lease was released meanwhile.
        """
        if has_waited and not self._leases.rematch(hold):
            self._leases.drop_pins(hold)
            self._leases.changed()  # the gate may be waiting for just this pin
            return True
        event = anyio.Event()
        if not may_wait or not self.board(hold, event):
            return False
        joiner = self.joiners[hold.order]
        try:
            await event.wait()
            if joiner.error is not None:
                raise joiner.error
            if self._leases.is_closed and not hold.entered:
                raise closed_error()
        except BaseException:
            self.leave(hold)
            self._leases.passing.discard(hold)
            self._leases.release(hold)
            raise
        finally:
            if self._leases.watch is not None:
                self._leases.watch.waited_to_join(joiner.began)
        self._leases.passing.discard(hold)
        return not hold.entered

    def board(self, hold: Hold, event: anyio.Event | None = None) -> bool:
        """Let a lease that has matched its key wait for the flight that brings it the most; False if none brings any.

        It gives up its pin.
        """
        joiner = self.joiners.get(hold.order)
        best = self._find(hold)
        if best is None:
            if joiner is not None:
                self._went_on(joiner)
            return False
        if joiner is None:
            if self._task_holds_another(hold):
                self._refused.add(hold.order)
                return False
            joiner = Joiner(hold, event, self._clock())
            self.num_joins += 1
        self._board(joiner, *best)
        self._leases.changed()  # it can give nothing back any more: perhaps nobody can, or a gate waited for just that
        return True

    def is_waiting(self, hold: Hold) -> bool:
        """Whether a lease in the queue of admissions waits for a flight."""
        joiner = self.joiners.get(hold.order)
        return joiner is not None and joiner.flight is not None

    def leave(self, hold: Hold) -> None:
        """A lease waits no longer, if it did."""
        joiner = self.joiners.pop(hold.order, None)
        if joiner is None:
            return
        if joiner.flight is not None:
            joiner.flight.joiners.remove(joiner)
            joiner.flight = None

    def _board(self, joiner: Joiner, flight: Flight, target: int) -> None:
        hold = joiner.hold
        joiner.flight, joiner.target, joiner.is_heir = flight, target, False
        flight.joiners.append(joiner)
        self.joiners[hold.order] = joiner
        self._leases.drop_pins(hold)

    def _go_on(self, joiners: list[Joiner]) -> None:
        """Match again who waited for what has come or is over, and let it enter unless there is more to wait for."""
        for joiner in joiners:
            joiner.flight = None
        self._leases.pressure.admission_unblocked()
        for joiner in joiners:
            hold = joiner.hold
            if joiner.event is None:
                continue  # whoever serves the admissions matches it
            if not self._leases.rematch(hold):
                self.leave(hold)
            elif best := self._find(hold):
                self._board(joiner, *best)
                continue
            else:
                self._went_on(joiner)
                if self._leases.tiers is not None and self._leases.tiers.may_bring(hold):
                    self._leases.passing.add(hold)
                else:
                    self._leases.enter(hold)
            joiner.event.set()

    def _went_on(self, joiner: Joiner) -> None:
        hold = joiner.hold
        self.leave(hold)
        self.num_tokens += max(0, hold.num_matched - joiner.num_before)
        self.num_takeovers += joiner.is_heir and hold.num_matched < joiner.target

    def _find(self, hold: Hold) -> tuple[Flight, int] | None:
        """The flight that brings a lease the furthest beyond its match, and how far; None if none brings a page."""
        self._refused.discard(hold.order)
        fronts = self._fronts.get(hold.key.namespace)
        found = most = hold.num_matched
        limit = self._whole_pages(hold.limit)
        if not fronts or limit <= found:
            return None
        best = None
        for front, pages in fronts.items():
            if front > found:
                continue
            for flight in pages.get(_page_at(hold.key, front, self._page_bytes), ()):
                target = min(self._whole_pages(num_shared(hold.key, flight.key)), flight.end, limit)
                if target > most:
                    best, most = flight, target
        return None if best is None else (best, most)

    def _task_holds_another(self, hold: Hold) -> bool:
        """Whether the task that would wait has entered a lease that is still held."""
        return any(other.task is hold.task for other in self._leases.holds.values())

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._page_size

    # ---- looking ----

    def audit(self, queued: set[int]) -> list[str]:
        """I9: who waits will be woken, and nobody computes what another one has announced.

        Args:
            queued: the numbers of the leases in the queue of admissions.
        """
        problems: list[str] = []
        for joiner in self.joiners.values():
            hold, flight = joiner.hold, joiner.flight
            name = f"I9: the lease opened at {hold.where}"
            if hold.entered or hold.released or hold.node_id:
                problems.append(f"{name} waits for a flight, but is entered, released or pinned")
            if joiner.event is None and hold.order not in queued:
                problems.append(f"{name} waits for a flight, but in no queue")
            if flight is None:
                if joiner.event is not None:
                    problems.append(f"{name} waits for no flight, and is not woken")
            elif self.flights.get(flight.hold.order) is not flight or joiner not in flight.joiners:
                problems.append(f"{name} waits for a flight that is over")
            elif joiner.target <= flight.front:
                problems.append(f"{name} waits for {joiner.target} tokens, of which {flight.front} are committed")
        earlier: list[Flight] = []
        for flight in self.flights.values():
            name = f"I9: the flight of the lease opened at {flight.hold.where}"
            if not flight.hold.held or flight.front != flight.hold.published or flight.front >= flight.end:
                problems.append(f"{name} is over, or not where it is said to be")
            if not flight.is_alone:
                problems += [
                    f"{name} computes what that of the lease opened at {other.hold.where} had announced"
                    for other in earlier
                    if self._num_common(flight, other) > flight.start
                ]
            earlier.append(flight)
        return problems

    def _num_common(self, flight: Flight, earlier: Flight) -> int:
        """How many tokens of an earlier flight's key another one could have waited for."""
        if earlier.key.namespace != flight.key.namespace:
            return 0
        first_pages = (_page_at(each.key, flight.start, self._page_bytes) for each in (flight, earlier))
        if len(set(first_pages)) > 1:
            return 0  # told apart cheaply: most have nothing in common
        limit = self._whole_pages(flight.hold.limit)
        return min(self._whole_pages(num_shared(flight.key, earlier.key)), earlier.end, limit)


def _page_at(key: RadixKey, start: int, page_bytes: int) -> bytes:
    """The bytes of the page of a key that begins at token `start`; fewer where the key ends before it does."""
    begin = key.start + start * key.item_bytes
    return key.data[begin : min(begin + page_bytes, key.stop)]


def num_shared(one: RadixKey, other: RadixKey) -> int:
    """How many items two keys begin with in common; they are in one namespace. Does not wait."""
    if one.is_prefix_of(other) or other.is_prefix_of(one):
        return min(one.num_items, other.num_items)
    size = min(one.stop - one.start, other.stop - other.start) // TOKEN_BYTES
    first, second = (np.frombuffer(key.data, np.int32, size, key.start) for key in (one, other))
    return int((first != second).argmax()) * TOKEN_BYTES // one.item_bytes
