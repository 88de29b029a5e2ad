"""`Leases`: every lease of a cache, and the steps that change one.

A step first brings the tree, the holds and the counters into agreement, and only then gives slots back, since that may
serve a waiter at once. No step waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aradix.cache.calls import Calls, closed_error
from aradix.cache.hold import Hold, make_hold
from aradix.cache.joins import Joins
from aradix.cache.locks import Gates
from aradix.cache.low_level import LowLevelPins
from aradix.cache.pins import Pins
from aradix.cache.pool import SlotPool
from aradix.cache.pressure import Pressure
from aradix.cache.tenants import Tenants
from aradix.cache.watch import Watcher
from aradix.errors import AradixError, LeaseReleasedError
from aradix.keys import BIGRAM_BYTES, TOKEN_BYTES, RadixKey
from aradix.memory.page_table import HELD
from aradix.params import CacheInitParams, InsertResult, NodeRef, PriorityRange
from aradix.tree.protocol import Freed, Ready, Slots, TreeCore

if TYPE_CHECKING:
    from aradix.cache.tiering import Tiers

__all__ = ["NO_DUPLICATES", "Leases", "Passage"]

NO_DUPLICATES = torch.empty(0, dtype=torch.int64)


def _ticks(seconds: float) -> int:
    """A time on the cache's clock as the tree counts it; never 0, which is no time to it, nor beyond its 64 bits."""
    return int(min(seconds * 1e9, 2.0**62)) or 1


class Passage:
    """A low-level call that a gate let in, and that has not woken yet."""

    __slots__ = ("node_id",)

    def __init__(self) -> None:
        self.node_id = 0


class Leases:
    """The leases of one cache, with those who wait for slots (`pressure`) and for a subtree (`gates`).

    Args:
        params: of the cache.
        core: its tree.
        calls: told what could not be raised; knows whether the cache is closed.
        on_low: called when the pool fell below the low watermark.
    """

    # Those that are named stand where compiled code reads and counts them; see `short_calls.py`.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_num_opened",
        "num_evicted",
        "num_hit_tokens",
        "num_queries",
        "num_query_tokens",
        "num_resumes",
        "watch",
    )

    def __init__(self, params: CacheInitParams, core: TreeCore, calls: Calls, on_low: Callable[[], None]) -> None:
        self.holds: dict[int, Hold] = {}
        self.pool = SlotPool(params.allocator, params.streams, calls.fail)
        self.tenants = Tenants(core)
        self._has_tenants = bool(self.tenants)
        # The short ways, and the compiled holds that go them, know nothing of streams, tenants and tiers.
        self._is_native = core.name == "cpp" and not self._has_tenants and params.host is None
        is_plain = self._is_native and not params.streams
        self.pressure: Pressure = Pressure(core, self.pool, self, self.holds, params.clock, takes_short_ways=is_plain)
        self.pins = Pins(core, params.clock, params.pin_tokens(), self.pool.give_back_all)
        self.pins.changed = self.changed
        self.gates = Gates(core, self.pressure, self.pool.give_back_all, self.changed, params.clock, self.pins)
        self.low_pins = LowLevelPins(core)
        item_bytes = BIGRAM_BYTES if params.is_eagle else TOKEN_BYTES
        self.joins = Joins(self, params.page_size, params.page_size * item_bytes, params.clock)
        self.passing: set[Hold | Passage] = set()
        """Pinned, and neither held nor queued: let in by a gate or by a load in the step that ended it, and not awake
        yet; or waiting for the page store."""
        self.tiers: Tiers | None = None
        """What moves KV between this device and the tiers below; none in a cache that has none."""
        self.watch: Watcher | None = None
        self.watchers: tuple[Watcher, ...] = ()
        self.num_queries = 0
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_evicted = 0
        self.num_resumes = 0
        self._params = params
        self._page_size = params.page_size
        self._is_disabled = params.disable
        # By which a compiled tree does the plain case of a step in one call; see its short_ways.cpp.
        self.takes_short_ways = is_plain and not params.disable
        self._make_hold = self.tenants.make_hold if self._has_tenants else make_hold if params.host is None else Hold
        self._short_core: Any = core
        self._table = params.allocator.table
        self._core = core
        self._on_low = on_low
        self._calls = calls
        self.low_slots = int(params.low_watermark * params.allocator.num_slots)
        self._num_opened = 0
        self._has_timed_priorities = False

    def new(
        self,
        view: RadixKey,
        given: RadixKey,
        limit: int,
        priority: int,
        store: bool,
        resume: bool,
        stream: Any,
        opened_in: CodeType,
        opened_near: int,
    ) -> Hold:
        """A hold on nothing yet; `opened_near` is the last instruction of the code that opened it."""
        self._num_opened += 1
        return self._make_hold(
            self._num_opened,
            view,
            given,
            limit,
            priority,
            store and not self._params.disable,
            resume,
            stream,
            opened_in,
            opened_near,
            self._params.clock(),
            self._page_size,
        )

    def rematch(self, hold: Hold) -> bool:
        """Match and pin a key in one step, letting go of an earlier match; False where a gate stands in the way."""
        if self._is_disabled:
            return True
        if self.watch is not None:
            self.watch.matching(hold)
        if self.takes_short_ways and self._short_core.enter_hold(hold):
            return True
        match = self._core.match(hold.key, limit=hold.limit, pin=True)
        if match.gate:
            return False
        if hold.node_id:
            self.pool.give_back_all(self._core.unpin(hold.node_id))
        hold.node_id = match.node_id
        hold.num_matched = hold.published = hold.committed = match.num_matched
        if self.tiers is not None:
            hold.host_hit = match.host_hit
        if match.ready and hold.stream is not None:
            try:
                self.order_after((hold.stream,), match.ready)
            except AradixError:
                # Read without that order it might be garbage. Let go, and wait for the end that this brings about.
                self.drop_pins(hold)
                return False
        return True

    async def wait_at_gate(self, hold: Hold) -> None:
        """`rematch` once a gate lets it pass. Waits; cancelled, the lease is released."""

        def step() -> bool:
            if hold.released:
                return True
            passed = self.rematch(hold)
            if passed:
                self.passing.add(hold)
            return passed

        def undo() -> None:
            self.passing.discard(hold)
            self.release(hold)

        await self._wait_in_line(step, undo)
        self.passing.discard(hold)

    async def wait_pinned(self, view: RadixKey) -> Passage:
        """Match and pin a key once a gate lets it pass; the caller unpins it before its next await. Waits."""
        passage = Passage()

        def step() -> bool:
            passage.node_id = (match := self._core.match(view, pin=True)).node_id
            if not match.gate:
                self.passing.add(passage)
            return not match.gate

        def undo() -> None:
            self.passing.discard(passage)
            self.pool.give_back_all(self._core.unpin(passage.node_id))
            self.changed()

        await self._wait_in_line(step, undo)
        self.passing.discard(passage)
        return passage

    async def _wait_in_line(self, step: Callable[[], bool], undo: Callable[[], None]) -> None:
        await self.gates.wait_in_line(step, undo)
        if self._calls.closed:  # in the very moment in which the gate let it pass
            undo()
            raise closed_error()

    @property
    def is_closed(self) -> bool:
        """Whether the cache was closed."""
        return self._calls.closed

    def drop_pins(self, hold: Hold) -> None:
        """Give up what a lease that waits to be entered has pinned."""
        node_id, hold.node_id = hold.node_id, 0
        hold.num_matched = hold.published = hold.committed = 0
        if node_id:
            self.pool.give_back_all(self._core.unpin(node_id))

    def count_query(self, hold: Hold) -> None:
        """A lease got its first slots, or commits first: now it counts in the hit rate, once."""
        if hold.counted:
            return
        self._note_query(hold)
        if hold.num_matched and hold.node_id and not hold.resume:
            self._core.record_hit(hold.node_id)

    def _note_query(self, hold: Hold) -> None:
        hold.counted = True
        if self.watch is not None:
            self.watch.queried(hold)
        if hold.resume:
            self.num_resumes += 1
            return
        self.num_queries += 1
        self.num_query_tokens += hold.given.num_items
        self.num_hit_tokens += hold.num_matched
        if self._has_tenants:
            self.tenants.count_query(hold)

    def others_can_release(self) -> bool:
        """Whether slots are pinned or held by something that is not an entered lease."""
        allocator = self._params.allocator
        return bool(
            self.low_pins
            or self.passing
            or (self.tiers is not None and self.tiers.will_settle)
            or any(gate.granted for gate in self.gates.standing)
            or allocator.outside_size()
            or allocator.held_size() > self.pool.num_held
        )

    def enter(self, hold: Hold) -> None:
        """From now on the hold is a lease that somebody has."""
        hold.entered = hold.held = True
        self.holds[hold.order] = hold
        if hold.joins:
            self.joins.announce(hold)

    def commit(self, hold: Hold, given: RadixKey, view: RadixKey) -> InsertResult:
        """Publish the whole pages of a key that was checked already."""
        if not hold.counted:
            self.count_query(hold)
        start = hold.published
        hold.committed = num_tokens = view.num_items
        num_pages_tokens = num_tokens - num_tokens % self._page_size
        streams: tuple[Any, ...] = ()
        done = None
        if hold.store and num_pages_tokens > start and not self._calls.closed:
            streams = hold.touching(self.pool.streams)
            ready = self.record_ready(streams) if streams else ()
            done = self._core.extend(hold.node_id, view, hold.own, priority=hold.priority, ready=ready)
        if num_tokens > hold.key.num_items:  # the longest key so far stands for the lease
            hold.key, hold.given = view, given
        if done is None:
            return InsertResult(start, hold.ref, NO_DUPLICATES, 0, (start, start))
        held, end = done.prefix_len, done.end
        hold.node_id, hold.published = done.node_id, end
        duplicates = NO_DUPLICATES
        if held > start:
            duplicates = torch.from_numpy(hold.own[: held - start].copy())
        hold.take_front(end - start)
        if held > start:
            self.pool.give_back(duplicates.numpy(), streams)
        self.changed()
        if done.ready and hold.stream is not None:
            self.order_after((hold.stream,), done.ready)
        return InsertResult(held, done.last, duplicates, end - held, (start, held))

    def record_ready(self, streams: tuple[Any, ...]) -> tuple[Ready, ...]:
        """Events behind what is being written; a stream that cannot tell ends the cache."""
        try:
            return self.pool.ready_after(streams)
        except AradixError as error:
            self._calls.fail(error)
            raise

    def order_after(self, streams: tuple[Any, ...], ready: tuple[Ready, ...]) -> None:
        """Whoever reads on these streams comes after what others write; if that cannot be had, the cache ends."""
        try:
            for stream in streams:
                self.pool.order_after(stream, ready)
        except AradixError as error:
            self._calls.fail(error)
            raise

    def slots_of(self, hold: Hold) -> Slots:
        """The slots of a hold's tokens, in token order: a new array."""
        if self._is_native:
            slots: Slots = self._short_core.slots_of_hold(hold)
            return slots
        parts = [self._core.slots_of(hold.ref)] if hold.published else []
        return np.concatenate([*parts, hold.own[: hold.num_own]])

    def truncate(self, hold: Hold, num_tokens: int) -> None:
        """Give back the slots beyond so many tokens."""
        is_bigram = hold.key.is_bigram
        # Other tokens may follow now. A pair that ends in a token beyond is gone with it, unless it is published.
        num_kept = max(hold.num_opened - is_bigram, hold.published, num_tokens - is_bigram)
        hold.key, hold.given = hold.key[:num_kept], hold.given[: num_kept + is_bigram]
        hold.committed = max(hold.published, min(hold.committed, num_tokens - is_bigram))
        freed = hold.cut(num_tokens - hold.published)
        self.pool.give_back(freed, hold.touching(self.pool.streams))
        self.changed()

    def fork(self, hold: Hold, opened_in: CodeType, opened_near: int) -> Hold:
        """A second hold, entered, on what the first has matched and published."""
        # What was committed beyond whole pages is the other's alone: this one may go on otherwise.
        num_kept = max(hold.num_opened - hold.key.is_bigram, hold.published)
        twin = self.new(
            hold.key[:num_kept],
            hold.given[: num_kept + hold.key.is_bigram],
            hold.limit,
            hold.priority,
            hold.store,
            hold.resume,
            hold.stream,
            opened_in,
            opened_near,
        )
        twin.node_id = self._core.pin(NodeRef(hold.node_id, hold.published)) if hold.node_id else 0
        twin.num_matched = twin.published = twin.committed = hold.published
        twin.counted = twin.opening = True
        twin.task = self._calls.running_task()
        self.enter(twin)
        return twin

    def release(self, hold: Hold) -> None:
        """Give back all that a lease has, entered or not. Does not raise."""
        if hold.released:
            return
        if self.watch is not None and hold.held:
            self.watch.released(hold)
        hold.released = True
        hold.held = False
        if hold.joins:
            self.joins.forget(hold)
        self.holds.pop(hold.order, None)
        if hold.waiting:
            self.pressure.drop(
                hold, LeaseReleasedError(f"the lease opened at {hold.where} was released while it waited")
            )
        if self.takes_short_ways:
            num_given = self._short_core.leave_hold(hold, self._table, HELD)
            if num_given is not None:
                if num_given:
                    self.pool.note_given(num_given)
                self.changed()
                return
        streams = hold.touching(self.pool.streams)
        freed: list[Freed] = []
        if hold.node_id:
            if streams and (extra := frozenset(stream for stream in streams if stream not in self.pool.streams)):
                self._core.mark_streams(hold.node_id, extra)
            freed = self._core.unpin(hold.node_id)
            hold.node_id = 0
        own = hold.cut(0)
        if freed:
            self.pool.give_back_all(freed)
        if len(own):
            self.pool.give_back(own, streams)
        self.changed()

    def changed(self) -> None:
        """Slots came back or became evictable: see whether somebody, or the background evictor, waits for that."""
        if self._calls.closed:
            return
        if self.tiers is not None:
            self.tiers.begin_due()
        pressure = self.pressure
        if pressure.growth or pressure.admission or self.gates.standing:
            pressure.changed()
        if self.low_slots:
            self.after_take()

    def settle(self) -> None:
        """Hear of copies that have ended, before anybody says that there is no room."""
        if self.tiers is not None:
            self.tiers.drain()

    def after_take(self) -> None:
        """Slots were taken: tell if the pool is below its low watermark, and something can be done about it."""
        if self.pool.num_coming >= self.low_slots or not self._core.evictable_tokens:
            return
        # While victims are being written back, the end of each copy is the time to look again.
        if self.tiers is None or not self.tiers.will_make_room:
            self._on_low()

    def publish(self, hold: Hold, given: RadixKey, view: RadixKey) -> InsertResult | None:
        """Commit a key by the short way; `None`, and then nothing was changed, where it is not that plain."""
        if not self.takes_short_ways or self._calls.closed:
            return None
        start, num_known = hold.published, hold.key.num_items
        done = self._short_core.publish_hold(hold, self._table, view, HELD)
        if done is None:
            return None
        if view.num_items > num_known:
            hold.given = given
        held, end, ref, duplicates = done
        spare = NO_DUPLICATES
        if duplicates is not None:
            self.pool.note_given(len(duplicates))
            spare = torch.from_numpy(duplicates)
        self.changed()
        return InsertResult(held, ref, spare, end - held, (start, held))

    def note_taken(self, hold: Hold, num_evicted: int, grew: bool) -> None:
        """So many tokens were evicted by the short way, and a lease grew, whose hit the tree has counted."""
        if grew and not hold.counted:
            self._note_query(hold)
        self.num_evicted += num_evicted
        if self.low_slots:
            self.after_take()

    def evict_slots(self, num_slots: int, only_excess: bool = False) -> int:
        """Evict so many tokens, or all there are, into the allocator; how many it were.

        With `only_excess` no tenant loses what it has a claim on.
        """
        self.end_expired()
        return self._evict(num_slots, only_excess=only_excess)

    def prioritize(self, hold: Hold, priorities: Sequence[PriorityRange]) -> None:
        """Give parts of what a lease has published priorities of their own."""
        if not hold.published or self._core.is_detached(hold.node_id):
            return
        now, page_size = self._params.clock(), self._page_size
        for part in priorities:
            stop = hold.published if part.stop is None else min(part.stop, hold.published)
            first, last = (-(-end // page_size) * page_size for end in (part.start, stop))
            if first >= last:
                continue
            expires = 0
            if part.duration is not None:
                expires = _ticks(now + part.duration)
                self._has_timed_priorities = self.pressure.is_timed = True
            self._core.prioritize(hold.node_id, first, last, part.priority, expires)

    def end_expired(self) -> None:
        """What was kept, or ranked higher, for a time that is up is not any more."""
        if self._has_timed_priorities:
            self._core.decay(_ticks(self._params.clock()))
        if self.pins.expire():
            self.pressure.note_change()

    def evict_for(self, hold: Hold, num_slots: int, demand: int) -> int:
        """As `evict_slots`, for a lease that demands so many slots in all, which its tenant has to answer for."""
        if not self._has_tenants:
            return self._evict(num_slots)
        return self._evict(num_slots, namespace=hold.key.namespace, demand=demand)

    def _evict(self, num_slots: int, **shares: Any) -> int:
        watch = self.watch
        began = 0.0 if watch is None else self._params.clock()
        if watch is not None:
            watch.evicting()
        freed = self._core.evict(num_slots, **shares) if self.tiers is None else self.tiers.evict(num_slots, **shares)
        num_freed = self.pool.give_back_all(freed)
        self.num_evicted += num_freed
        if watch is not None:
            watch.evicted(num_freed, began)
        return num_freed
