"""`Pressure`: who waits for slots, and who is served next.

Growth of entered leases goes before admission of new ones, each first come first served. Whoever makes room calls
`changed`, which hands slots to the head of the queue before waking it: nobody retries and nobody barges in. A demand
takes no slot and no victim until all of it can be met; slots behind a fence count as coming, so a slow fence does not
drain the cache.

When nothing will come by itself (`_is_stuck`), in this order: serve out of turn whoever fits; revoke the youngest pins
of leases that wait to be entered; take back the youngest `cache.pin()` that no time will end; tell the youngest entered
waiter to give way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from aradix.cache.hold import Hold
from aradix.cache.joins import Joins
from aradix.cache.pins import Pins
from aradix.cache.pool import SlotPool
from aradix.cache.slot_waiter import Load, SlotWaiter
from aradix.cache.watch import Watcher
from aradix.errors import RequestTooLargeError, RetractError
from aradix.memory.page_table import HELD
from aradix.tree.protocol import NO_SLOTS, Slots, TreeCore

__all__ = ["Admissions", "Pressure", "too_large"]

_log = logging.getLogger("aradix.cache")


class Admissions(Protocol):
    """What `Pressure` asks of the leases; `Leases` says what each does."""

    def rematch(self, hold: Hold) -> bool:
        """Match and pin a waiting lease's key anew; False where a gate stands in the way."""

    def drop_pins(self, hold: Hold) -> None:
        """Give up what a waiting lease has pinned."""

    def enter(self, hold: Hold) -> None:
        """A lease was admitted: from this step on it counts as held, though its task may still have to wake."""

    def count_query(self, hold: Hold) -> None:
        """A lease got its first slots."""

    @property
    def joins(self) -> Joins:
        """Who waits for what another lease computes; `Joins` says how."""

    @property
    def pins(self) -> Pins:
        """What is kept idle; `Pins` says how."""

    def end_expired(self) -> None:
        """Let go of what was kept, or ranked higher, for a time that is up."""

    def evict_for(self, hold: Hold, num_slots: int, demand: int) -> int:
        """Evict so many tokens into the allocator, for a lease that demands so many in all."""

    def note_taken(self, hold: Hold, num_evicted: int, grew: bool) -> None:
        """So many tokens were evicted by the short way, and a lease grew, whose hit the tree has counted."""

    def settle(self) -> None:
        """Hear of copies that have ended."""

    def others_can_release(self) -> bool:
        """Whether slots are pinned or held by something that is not an entered lease."""

    def after_take(self) -> None:
        """Slots were taken."""


class Pressure:
    """The slot waiters of a cache. Nothing here waits but `wait`."""

    # `is_timed` stands where compiled code reads it; see `short_calls.py`.
    __slots__ = ("__dict__", "__weakref__", "is_timed")

    def __init__(
        self,
        core: TreeCore,
        pool: SlotPool,
        cache: Admissions,
        holds: dict[int, Hold],
        clock: Callable[[], float],
        *,
        takes_short_ways: bool,
    ) -> None:
        self.watch: Watcher | None = None
        self._clock = clock
        self.growth: list[SlotWaiter] = []
        self.admission: list[SlotWaiter] = []
        self.num_waits = 0
        self.num_retracts = 0
        self.is_timed = False
        """Whether anything was ever kept, or ranked higher, for a time."""
        self.on_change: Callable[[], None] = lambda: None
        self.on_shortage: list[Callable[[], None]] = []
        """Called after something changed, while somebody waits: who is to have what there is may be another one now."""
        self._core = core
        self._pool = pool
        self._cache = cache
        self._holds = holds
        # By which a compiled tree does the plain case of a step in one call; see its short_ways.cpp.
        self._takes_short_ways = takes_short_ways
        self._short_core: Any = core
        self._table = pool.allocator.table
        self._busy = False
        self._again = False

    def __len__(self) -> int:
        return len(self.growth) + len(self.admission)

    # ---- taking slots in one step ----

    def take(self, num_slots: int, hold: Hold) -> Slots | None:
        """So many slots for a lease now, evicting for them if need be; `None` if they cannot all be had.

        Nothing changed then; but something may have been evicted into limbo where the slots are only behind a fence:
        they are then on their way.
        """
        if num_slots == 0:
            return NO_SLOTS
        if self.is_timed and num_slots > self._pool.num_coming:
            self._cache.end_expired()
        was_busy, self._busy = self._busy, True
        try:
            slots = self._pool.take(num_slots, hold.stream) if num_slots <= self._pool.num_coming else None
            if slots is None and num_slots > self._pool.num_coming:
                self._cache.settle()
                missing = num_slots - self._pool.num_coming
                if missing > self._core.evictable_tokens:
                    return None
                if missing > 0:
                    self._cache.evict_for(hold, missing, num_slots)
                slots = self._pool.take(num_slots, hold.stream)
        finally:
            self._busy = was_busy
        if slots is not None:
            self._cache.after_take()
        return slots

    def grow_now(self, hold: Hold, num_tokens: int) -> bool:
        """Serve a growth at once, unless others wait for theirs."""
        if self.is_timed:
            self._cache.end_expired()
            if self._again:  # others may have waited for just that
                self._catch_up()
        if self._takes_short_ways and not self.growth and self.watch is None:
            taken = self._short_core.grow_hold(hold, self._table, num_tokens, HELD)
            if taken is not None:
                num_taken, num_evicted, grew = taken
                self._pool.num_held += num_taken
                self._cache.note_taken(hold, num_evicted, grew)
                if num_evicted and self._table.num_free:  # a whole leaf went: others may wait for the rest of it
                    self._pool.note_given(0)
                if self._again:
                    self._catch_up()
                if grew:
                    return True
        num_slots = hold.fresh_slots_for(num_tokens)
        if num_slots and self.growth:
            return False
        slots = self.take(num_slots, hold)
        if slots is None:
            return False
        hold.add(slots, num_tokens)
        if not hold.counted:
            self._cache.count_query(hold)
        if self._again:
            self._catch_up()
        return True

    def admit_now(self, hold: Hold, num_tokens: int) -> bool:
        """Serve an admission whose prefix is pinned already, unless others wait, of whom those that are blocked are
        passed; or unless it has to wait for what another lease computes."""
        if self.growth or not all(waiter.blocked for waiter in self.admission):
            return False
        if hold.joins and self._cache.joins.board(hold):
            return False
        admitted = self._admit(hold, num_tokens)
        self._catch_up()
        return admitted

    def load_now(self, load: Load) -> bool:
        """Let a load begin, unless others wait."""
        if len(self):
            return False
        began = load.take_off()
        self._catch_up()
        return began

    def queue_load(self, waiter: SlotWaiter) -> None:
        """Let a load wait among the admissions. Does not wait: the load is told."""
        self.admission.append(waiter)
        waiter.hold.waiting = True
        self.num_waits += 1
        self.changed()

    def unqueue_load(self, waiter: SlotWaiter) -> None:
        """Take a load out of the queue, if it is there, and give up its pin."""
        if waiter in self.admission:
            self.admission.remove(waiter)
            waiter.hold.waiting = False
        self._cache.drop_pins(waiter.hold)

    def _admit(self, hold: Hold, num_tokens: int) -> bool:
        fresh = max(0, num_tokens - hold.num_tokens)
        slots = self.take(hold.fresh_slots_for(fresh), hold)
        if slots is None:
            return False
        hold.add(slots, fresh)
        self._cache.enter(hold)
        self._cache.count_query(hold)
        return True

    # ---- waiting ----

    async def wait(self, waiter: SlotWaiter) -> None:
        """Queue up, and wait until the slots are there. Waits.

        Cancelled, it leaves the queue, or hands back what it was given in the same moment, and wakes the next.

        Raises:
            RetractError, CacheClosedError, LeaseReleasedError, RequestTooLargeError: why there will be none.
        """
        queue = self.admission if waiter.reserve else self.growth
        queue.append(waiter)
        waiter.hold.waiting = True
        waiter.began = self._clock()
        self.num_waits += 1
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "%d tokens more wait for slots, for the lease of %d opened at %s",
                waiter.num_tokens,
                *_said(waiter.hold),
            )
        self.changed()
        try:
            await waiter.event.wait()
        except BaseException:
            if waiter.granted:
                self._hand_back(waiter)
            elif waiter in queue:
                self._leave(waiter)
            self.changed()
            raise
        finally:
            if self.watch is not None:
                self.watch.waited_for_slots(waiter.began)
        if waiter.error is not None:
            raise waiter.error

    def _hand_back(self, waiter: SlotWaiter) -> None:
        """Undo a growth that its caller will never hear of; the cache itself releases a whole admission."""
        hold = waiter.hold
        if waiter.reserve or hold.released:
            return
        num_own = min(hold.num_own, max(0, waiter.num_before - hold.published))
        self._pool.give_back(hold.cut(num_own), ())

    def _leave(self, waiter: SlotWaiter, error: BaseException | None = None) -> None:
        (self.admission if waiter.reserve else self.growth).remove(waiter)
        waiter.hold.waiting = False
        if waiter.reserve:
            self._cache.joins.leave(waiter.hold)
            self._cache.drop_pins(waiter.hold)
        if error is not None:
            waiter.settle(error)

    def is_short(self, hold: Hold) -> bool:
        """Whether a lease waits for slots, and not for a gate or for what another one computes."""
        if not hold.waiting or self._cache.joins.is_waiting(hold):
            return False
        return any(waiter.hold is hold and not waiter.blocked for waiter in (*self.growth, *self.admission))

    def drop(self, hold: Hold, error: BaseException) -> None:
        """End the wait of a lease with an error, if it waits."""
        for waiter in [*self.growth, *self.admission]:
            if waiter.hold is hold:
                self._leave(waiter, error)

    def drop_all(self, make_error: Callable[[], BaseException]) -> None:
        """End every wait with an error."""
        for waiter in [*self.growth, *self.admission]:
            self._leave(waiter, make_error())

    def revoke_pins(self, is_concerned: Callable[[Hold], bool]) -> bool:
        """Take the pins of waiting admissions, the youngest first and only the first found; whether there was one."""
        for waiter in reversed(self.admission):
            if waiter.hold.node_id and is_concerned(waiter.hold):
                if waiter.load is not None:
                    waiter.load.give_up()
                else:
                    self._cache.drop_pins(waiter.hold)
                    waiter.keeps_pins = False
                return True
        return False

    def drop_waiting_pins(self, is_concerned: Callable[[Hold], bool]) -> None:
        """Make waiting admissions let go of what they pinned; they match again when they are served."""
        for waiter in self.admission:
            if waiter.load is None and waiter.hold.node_id and is_concerned(waiter.hold):
                self._cache.drop_pins(waiter.hold)

    def admission_unblocked(self) -> None:
        """A gate opened, or a flight moved on: admissions that met one, or wait for it, may look again."""
        for waiter in self.admission:
            waiter.blocked = False

    # ---- serving ----

    def changed(self) -> None:
        """Something came back, became evictable, or began to wait: tell the gates, and serve whoever can be served.

        Safe to call from anywhere on the loop. In the middle of a step it only takes note, and what it would do follows
        at the step's end: whoever is being served must not lose his pins to a gate meanwhile.
        """
        self._again = True
        if self._busy:
            return
        self._busy = True
        try:
            while self._again:
                self._again = False
                self.on_change()
                while self._serve_in_order() or (len(self) and self._is_stuck() and self._unstick()):
                    self.on_change()
        finally:
            self._busy = False
        if len(self):
            for tell in self.on_shortage:
                tell()

    def note_change(self) -> None:
        """Something came back in the middle of a step of the cache; the step looks at its end."""
        self._again = True

    def _catch_up(self) -> None:
        """Do what had to wait for the end of a step."""
        if self._again and not self._busy:
            self.changed()

    def _serve_in_order(self) -> bool:
        if self.growth:
            return self._serve(self.growth[0])
        for waiter in self.admission:
            if self._serve(waiter):
                return True
            if not waiter.blocked:
                return False
        return False

    def _serve(self, waiter: SlotWaiter) -> bool:
        hold = waiter.hold
        if waiter.load is not None:
            served = waiter.load.take_off()
        elif waiter.reserve:
            served = self._serve_admission(waiter)
        else:
            slots = self.take(hold.fresh_slots_for(waiter.num_tokens), hold)
            served = slots is not None
            if slots is not None:
                waiter.num_before = hold.num_tokens
                hold.add(slots, waiter.num_tokens)
                self._cache.count_query(hold)
        if served:
            (self.admission if waiter.reserve else self.growth).remove(waiter)
            hold.waiting = False
            waiter.settle()
        return served

    def _serve_admission(self, waiter: SlotWaiter) -> bool:
        """Match again (others may have published meanwhile, or the pins were revoked), and take what is missing."""
        hold, joins = waiter.hold, self._cache.joins
        if hold.joins and joins.is_waiting(hold):
            waiter.blocked = True
            return False
        if waiter.blocked or not hold.node_id or waiter.version != self._core.version:
            waiter.blocked = not self._cache.rematch(hold)
            # A match that a gate stopped says nothing of what is there now, whatever it may still have pinned.
            waiter.version = -1 if waiter.blocked else self._core.version
            if waiter.blocked:
                return False
        if hold.joins and joins.board(hold):
            waiter.blocked = True
            return False
        if self._admit(hold, waiter.num_tokens):
            return True
        if not waiter.keeps_pins:
            self._cache.drop_pins(hold)
        return False

    # ---- when nothing comes by itself ----

    def _is_stuck(self) -> bool:
        """Whether the head can only be served if a waiter gives way."""
        head = next((waiter for waiter in (*self.growth, *self.admission) if not waiter.blocked), None)
        # What is kept for a time comes by itself, at the latest when that time is over.
        num_coming = self._pool.num_coming + self._core.evictable_tokens + self._cache.pins.num_timed_tokens
        if head is None or self._num_missing(head) <= num_coming:
            return False
        if self._cache.others_can_release():
            return False
        return all(hold.waiting or not (hold.num_own_slots or hold.published) for hold in self._holds.values())

    def _num_missing(self, waiter: SlotWaiter) -> int:
        hold = waiter.hold
        fresh = max(0, waiter.num_tokens - hold.num_tokens) if waiter.reserve else waiter.num_tokens
        return hold.fresh_slots_for(fresh)

    def _unstick(self) -> bool:
        """One step out of it; whether the queues should be looked at again."""
        if any(self._serve(waiter) for waiter in [*self.growth[1:], *self.admission]):
            return True
        if self.revoke_pins(lambda hold: True) or self._cache.pins.take_back():
            return True
        if self.growth:
            victim = max(self.growth, key=lambda waiter: waiter.hold.order)
            self.num_retracts += 1
            _log.info("everybody waits: the lease of %d tokens opened at %s gives way", *_said(victim.hold))
            self._leave(victim, self._retract_error(victim))
            return True
        for waiter in self.admission:
            if self._num_missing(waiter) > self._pool.capacity:  # the pool shrank: slots went into quarantine
                self._leave(waiter, too_large(waiter.num_tokens, self._pool))
                return True
        return False

    def _retract_error(self, waiter: SlotWaiter) -> RetractError:
        hold = waiter.hold
        return RetractError(
            f"no room for {waiter.num_tokens} more tokens: {self._pool.num_coming} slots are free or fenced, "
            f"{self._core.evictable_tokens} evictable, and every other slot belongs to {len(self._holds)} leases "
            f"that wait as well. This lease of {hold.num_tokens} tokens is the youngest: release it and try again"
        )


def too_large(num_tokens: int, pool: SlotPool) -> RequestTooLargeError:
    """The error for a request that no amount of waiting will serve."""
    return RequestTooLargeError(
        f"{num_tokens} tokens can never fit: the pool has {pool.capacity} usable slots in pages of "
        f"{pool.allocator.page_size}; split the request, or use a larger pool"
    )


def _said(hold: Hold) -> tuple[int, str]:
    """How a log line names a lease: never by its tokens."""
    return hold.num_tokens, hold.where
