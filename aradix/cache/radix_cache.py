"""`RadixCache`: a synchronous tree, an allocator, and the async shell that makes them safe under many coroutines.

Where things are:

- `aradix.tree` decides: each call is one atomic step on the loop, and returns what has to be freed.
- `pool.py` is the only door to the allocator; `pressure.py` knows who waits for slots; `locks.py` who wants a subtree
alone.
- `hold.py` is what one lease has; `lease.py` the user's handle to it.
- This file puts them together: it opens, closes, admits, commits and releases, and has the low-level calls.

Order matters in one respect: a step first brings tree, holds and counters into agreement, and only then gives slots
back, since that may serve a waiter at once.
"""

from __future__ import annotations

import sys
from collections import deque
from itertools import count
from types import CodeType, TracebackType
from typing import Any, Self

import anyio
import numpy as np
import torch
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from aradix.cache.audit import audit_cache
from aradix.cache.base_prefix_cache import BasePrefixCache
from aradix.cache.evictor import Background
from aradix.cache.hold import Hold
from aradix.cache.home import Home
from aradix.cache.lease import Lease, count_of
from aradix.cache.locks import Exclusive, Gates, StandingGate
from aradix.cache.low_level import LowLevelPins, value_array
from aradix.cache.pool import SlotPool
from aradix.cache.pressure import Pressure, too_large
from aradix.cache.views import make_snapshot, make_stats, print_tree
from aradix.errors import CacheClosedError, InvalidKeyError, InvariantError, LeaseReleasedError, UsageError
from aradix.events import KVCacheEvent
from aradix.keys import BIGRAM_BYTES, TOKEN_BYTES, Namespace, RadixKey
from aradix.params import (
    CacheInitParams,
    CacheStats,
    EvictParams,
    EvictResult,
    FlushResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    NodeRef,
)
from aradix.tree import make_core
from aradix.tree.protocol import NOWHERE, Freed

__all__ = ["RadixCache"]

_FAIR_RUN = 128
"""Calls in a row that may complete without letting other tasks run."""


class RadixCache(BasePrefixCache):
    """The prefix cache. `BasePrefixCache` says what each call promises, `CacheInitParams` what can be set.

    Args:
        params: checked already.

    Raises:
        ConfigError: a policy, tree core or stream that cannot work.
    """

    def __init__(self, params: CacheInitParams) -> None:
        if not isinstance(params, CacheInitParams):
            raise UsageError(f"RadixCache takes CacheInitParams(allocator=...), got {type(params).__name__}")
        self._params = params
        self._core = make_core(
            params.tree_core,
            page_size=params.page_size,
            item_bytes=BIGRAM_BYTES if params.is_eagle else TOKEN_BYTES,
            policy=params.eviction_policy,
            evict_unit=params.evict_unit,
            record_events=params.enable_kv_cache_events,
        )
        self._holds: dict[int, Hold] = {}
        self._pool = SlotPool(params.allocator, params.streams, self._fail)
        self._pressure = Pressure(self._core, self._pool, self, self._holds)
        self._gates = Gates(self._core, self._pressure, self._pool.give_back_all)
        self._pressure.on_change = self._on_change
        self._low_pins = LowLevelPins(self._core)
        self._home: Home | None = None
        self._task_group: TaskGroup | None = None
        self._closed = False
        self._broken: InvariantError | None = None
        self._policy_reported = False
        self._dropped: deque[Hold] = deque()
        self._orders = count(1)
        self._run_length = 0
        num_slots = params.allocator.num_slots
        self._low_slots = int(params.low_watermark * num_slots)
        self._high_slots = int(params.high_watermark * num_slots)
        self.num_queries = 0
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_evicted = 0
        self.num_resumes = 0

    # ---- opening and closing ----

    async def __aenter__(self) -> Self:
        if self._home is not None:
            raise UsageError("this cache was opened already; make another RadixCache")
        self._home = Home()
        self._background = Background(self._wants_slots, self.evict_slots, self._wants_polls, self._poll)
        self._task_group = anyio.create_task_group()
        await self._task_group.__aenter__()
        self._background.start(self._task_group)
        self._unsubscribe = self._params.allocator.subscribe(self._on_slots)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._task_group is not None
        self._close()
        self._task_group.cancel_scope.cancel()
        if isinstance(error, Exception):
            # The user's own error goes on as it is, not in a group; a failure in the background still comes first.
            await self._task_group.__aexit__(None, None, None)
            return None
        return await self._task_group.__aexit__(kind, error, trace)

    def _close(self) -> None:
        self._closed = True
        self._unsubscribe()
        self._drain_dropped()
        self._pressure.drop_all(self._closed_error)
        self._pool.give_back_all(self._core.detach().freed)
        self._gates.wake_walkers()

    @staticmethod
    def _closed_error() -> CacheClosedError:
        return CacheClosedError("the cache is closed; leases that are held stay usable until they are released")

    def _begin(self) -> None:
        """The first line of every public call."""
        if self._home is None:
            raise UsageError("open the cache first: async with RadixCache(params) as cache")
        if not self._closed or not self._home.is_this_thread():
            self._home.check()
        if self._broken is not None:
            raise InvariantError(f"the cache refuses further work: {self._broken}")
        if self._core.failure is not None and not self._policy_reported:
            self._policy_reported = True
            self._fail(self._core.failure)
        if self._dropped:
            self._drain_dropped()

    def _begin_open(self) -> None:
        self._begin()
        if self._closed:
            raise self._closed_error()

    def _is_turn_over(self) -> bool:
        """Whether this call should let other tasks run first, before it takes anything."""
        self._run_length += 1
        if self._run_length < _FAIR_RUN:
            return False
        self._run_length = 0
        return True

    def _fail(self, error: BaseException) -> None:
        """Something failed where it could not be raised: end the task group with it."""
        if self._home is not None:
            self._background.fail(error)

    # ---- what changes from outside ----

    def _on_slots(self) -> None:
        """The allocator has news, on whatever thread."""
        home = self._home
        if home is None or self._closed:
            return
        if home.is_this_thread():
            self._slots_changed()
        else:
            home.call_soon(self._slots_changed)

    def _slots_changed(self) -> None:
        if len(self._pressure):
            self._pressure.pump()

    def _on_change(self) -> None:
        if self._gates.standing:
            self._gates.advance()
        if self._wants_polls():
            self._background.somebody_waits()

    def _wants_polls(self) -> bool:
        return len(self._pressure) > 0 and self._params.allocator.fenced_size() > 0

    def _poll(self) -> None:
        self._params.allocator.reclaim()

    def _wants_slots(self) -> int:
        return 0 if self._closed else max(0, self._high_slots - self._pool.num_coming)

    def after_take(self) -> None:
        if self._pool.num_coming < self._low_slots:
            self._background.pool_is_low()

    def evict_slots(self, num_slots: int) -> int:
        num_freed = self._pool.give_back_all(self._core.evict(num_slots))
        self.num_evicted += num_freed
        return num_freed

    # ---- leases ----

    def lease(
        self,
        key: RadixKey,
        *,
        reserve: int | None = None,
        leave_last: int = 0,
        priority: int = 0,
        store: bool = True,
        resume: bool = False,
        stream: Any = None,
    ) -> Lease:
        self._begin_open()
        view = self._view(key)
        limit = min(len(view), max(0, len(key) - count_of("leave_last", leave_last)))
        if reserve is not None:
            reserve = count_of("reserve", reserve)
            page_size = self._params.page_size
            if -(-reserve // page_size) * page_size > self._pool.capacity:
                raise too_large(reserve, self._pool)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise UsageError(f"priority must be an int, got {priority!r}")
        if stream is None and self._pool.streams:
            stream = self._pool.streams[0]
        caller = sys._getframe(1)
        hold = self._new_hold(view, limit, priority, store, resume, stream, caller.f_code, caller.f_lineno)
        return Lease(self, hold, reserve)

    def _view(self, key: RadixKey) -> RadixKey:
        if not isinstance(key, RadixKey):
            raise InvalidKeyError(f"key must be a RadixKey, got {type(key).__name__}; RadixKey(token_ids) makes one")
        return key.maybe_to_bigram_view(True) if self._params.is_eagle else key

    def _new_hold(
        self,
        view: RadixKey,
        limit: int,
        priority: int,
        store: bool,
        resume: bool,
        stream: Any,
        opened_in: CodeType,
        opened_at: int,
    ) -> Hold:
        hold = Hold(
            next(self._orders),
            view,
            limit=limit,
            priority=priority,
            store=store and not self._params.disable,
            resume=resume,
            stream=stream,
            opened_in=opened_in,
            opened_at=opened_at,
        )
        hold.opened_when = self._params.clock()
        return hold

    def rematch(self, hold: Hold) -> bool:
        if self._params.disable:
            return True
        match = self._core.match(hold.key, limit=hold.limit, pin=True)
        if match.gate:
            return False
        if hold.node_id:
            self._pool.give_back_all(self._core.unpin(hold.node_id))
        hold.node_id = match.node_id
        hold.num_matched = hold.published = hold.committed = match.num_matched
        if match.ready and hold.stream is not None:
            self._pool.order_after(hold.stream, match.ready)
        return True

    def drop_pins(self, hold: Hold) -> None:
        node_id, hold.node_id = hold.node_id, 0
        hold.num_matched = hold.published = hold.committed = 0
        if node_id:
            self._pool.give_back_all(self._core.unpin(node_id))

    def count_query(self, hold: Hold) -> None:
        if hold.counted:
            return
        hold.counted = True
        if hold.resume:
            self.num_resumes += 1
            return
        self.num_queries += 1
        self.num_query_tokens += len(hold.key)
        self.num_hit_tokens += hold.num_matched
        if hold.num_matched and hold.node_id:
            self._core.record_hit(hold.node_id)

    def others_can_release(self) -> bool:
        allocator = self._params.allocator
        return bool(
            self._low_pins
            or any(gate.granted for gate in self._gates.standing)
            or allocator.outside_size()
            or allocator.held_size() > self._pool.num_held
        )

    def _enter(self, hold: Hold) -> None:
        hold.entered = True
        self._holds[hold.order] = hold

    def _commit(self, hold: Hold, view: RadixKey) -> InsertResult:
        self.count_query(hold)
        start = hold.published
        hold.committed = len(view)
        page_size = self._params.page_size
        num_pages_tokens = len(view) // page_size * page_size
        publishes = hold.store and not self._closed and num_pages_tokens > start
        if not publishes or self._core.is_detached(hold.node_id):
            hold.key = max(hold.key, view, key=len)
            return InsertResult(start, hold.ref, torch.empty(0, dtype=torch.int64), 0, (start, start))
        ready = self._pool.ready_after(hold.touching(self._pool.streams)) if self._pool.streams else ()
        slots = np.frombuffer(hold.own, np.int64)[: num_pages_tokens - start].copy()
        done = self._core.extend(hold.node_id, view, slots, priority=hold.priority, ready=ready)
        hold.key = max(hold.key, view, key=len)
        hold.node_id, hold.published = done.node_id, done.end
        hold.take_front(done.end - start)
        duplicates = slots[: done.prefix_len - start]
        if hold.stream is not None:
            self._pool.order_after(hold.stream, done.ready)
        self._pool.give_back(duplicates, hold.touching(self._pool.streams))
        if len(self._pressure) or self._gates:
            self._pressure.changed()
        return InsertResult(
            done.prefix_len,
            hold.ref,
            torch.from_numpy(duplicates),
            done.end - done.prefix_len,
            (start, done.prefix_len),
        )

    def _cut(self, hold: Hold, num_tokens: int) -> None:
        hold.committed = min(hold.committed, num_tokens)
        freed = hold.cut(num_tokens - hold.published, self._params.page_size)
        self._pool.give_back(freed, hold.touching(self._pool.streams))
        self._changed()

    def _fork(self, hold: Hold, opened_in: CodeType, opened_at: int) -> Lease:
        twin = self._new_hold(
            hold.key, hold.limit, hold.priority, hold.store, hold.resume, hold.stream, opened_in, opened_at
        )
        twin.node_id = self._core.pin(hold.ref) if hold.node_id else 0
        twin.num_matched = twin.published = twin.committed = hold.published
        twin.counted = True
        self._enter(twin)
        lease = Lease(self, twin, None)
        lease._forked = True
        return lease

    def _begin_release(self) -> None:
        assert self._home is not None
        if not self._closed or not self._home.is_this_thread():
            self._home.check()

    def _release(self, hold: Hold) -> None:
        """Give back all that a lease has, entered or not. Does not raise."""
        if hold.released:
            return
        hold.released = True
        self._holds.pop(hold.order, None)
        if hold.waiting:
            self._pressure.drop(
                hold, LeaseReleasedError(f"the lease opened at {hold.where} was released while it waited")
            )
        streams = hold.touching(self._pool.streams)
        freed: list[Freed] = []
        if hold.node_id:
            extra = frozenset(stream for stream in streams if stream not in self._pool.streams)
            if extra:
                self._core.mark_streams(hold.node_id, extra)
            freed = self._core.unpin(hold.node_id)
            hold.node_id = 0
        own = hold.cut(0, self._params.page_size)
        self._pool.give_back_all(freed)
        self._pool.give_back(own, streams)
        self._changed()

    def _changed(self) -> None:
        """Slots came back or became evictable: see whether somebody waits for that."""
        if (len(self._pressure) or self._gates) and not self._closed:
            self._pressure.changed()

    def _drop(self, hold: Hold) -> None:
        """A lease was collected unreleased: only note it, for this may be any thread at any moment."""
        self._dropped.append(hold)
        if self._home is not None:
            self._home.call_soon(self._drain_dropped)

    def _drain_dropped(self) -> None:
        while self._dropped:
            self._release(self._dropped.popleft())

    # ---- gates ----

    def exclusive(self, key: RadixKey) -> Exclusive:
        self._begin_open()
        return Exclusive(self, self._view(key))

    async def _close_gate(self, view: RadixKey) -> StandingGate:
        self._begin_open()
        task_id = anyio.get_current_task().id
        if any(gate.task_id == task_id for gate in self._gates.standing):
            raise UsageError("this task holds a subtree already, and may hold only one; leave that block first")
        gate = await self._gates.close(view)
        if self._closed:
            self._gates.open(gate)
            raise self._closed_error()
        return gate

    def _open_gate(self, gate: StandingGate) -> None:
        self._gates.open(gate)

    def _evict_below(self, gate: StandingGate) -> int:
        self._begin()
        self._gates.unpin_leaves(gate)
        freed = [] if self._core.is_detached(gate.node_id) else self._core.evict_below(gate.node_id)
        self._gates.pin_leaves(gate)
        num_freed = self._pool.give_back_all(freed)
        self.num_evicted += num_freed
        self._changed()
        return num_freed

    def _slots_tensor(self, ref: NodeRef) -> torch.Tensor:
        return torch.from_numpy(self._core.slots_of(ref))

    # ---- low-level calls ----

    async def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        self._begin_open()
        view = self._view(params.key)
        if self._params.disable:
            return MatchResult(torch.empty(0, dtype=torch.int64), NOWHERE, NOWHERE, NOWHERE)
        if self._is_turn_over():
            await checkpoint()
        while (match := self._core.match(view)).gate:
            await self._gates.wait_for_change()
            self._begin_open()
        self._pool.order_all_after(match.ready)
        return MatchResult(self._slots_tensor(match.last), match.last, match.last, match.last)

    async def insert(self, params: InsertParams) -> InsertResult:
        self._begin_open()
        view = self._view(params.key)
        value = value_array(params.value, len(view))
        if self._params.disable:
            return InsertResult(0, NOWHERE, torch.from_numpy(value.copy()))
        if self._is_turn_over():
            await checkpoint()
            self._begin_open()
        page_size = self._params.page_size
        stop = len(view) // page_size * page_size
        while True:
            start = self._core.peek(view)
            adopted = value[start:stop]
            self._pool.adopt(adopted)
            ready = self._pool.ready_after(self._pool.streams)
            done = self._core.insert(view, value[:stop], priority=params.priority, ready=ready)
            if not isinstance(done, int):
                break
            self._pool.disown(adopted)
            await self._gates.wait_for_change()
            self._begin_open()
        self._pool.order_all_after(done.ready)
        duplicates = np.concatenate((value[:start][value[:start] != done.existing], value[stop:]))
        self._changed()
        return InsertResult(done.prefix_len, done.last, torch.from_numpy(duplicates), len(adopted))

    async def evict(self, params: EvictParams) -> EvictResult:
        self._begin_open()
        num_freed = self.evict_slots(count_of("num_tokens", params.num_tokens))
        self._changed()
        return EvictResult(num_freed)

    def inc_lock_ref(self, node: NodeRef) -> int:
        self._begin_open()
        if self._gates and self._gates.behind_granted(node.node_id):
            raise UsageError(f"{node} is in a subtree that somebody holds exclusively; match again")
        return self._low_pins.pin(node)

    def dec_lock_ref(self, node: NodeRef) -> int:
        self._begin()
        before = self._core.evictable_tokens
        self._pool.give_back_all(self._low_pins.unpin(node))
        num_evictable = self._core.evictable_tokens - before
        self._changed()
        return num_evictable

    # ---- looking and clearing ----

    def peek(self, key: RadixKey) -> int:
        self._begin()
        return self._core.peek(self._view(key))

    async def flush(self, namespace: Namespace | str | None = None) -> FlushResult:
        self._begin_open()
        done = self._core.detach(None if namespace is None else Namespace.of(namespace))
        self._pool.give_back_all(done.freed)
        self._gates.wake_walkers()
        self._pressure.admission_unblocked()
        self._changed()
        return FlushResult(done.num_freed, done.num_held)

    def stats(self) -> CacheStats:
        self._begin()
        return make_stats(self)

    def snapshot(self, tokens: bool = True) -> dict[str, Any]:
        self._begin()
        return make_snapshot(self._core, tokens)

    def pretty_print(self) -> None:
        self._begin()
        print_tree(self._core)

    def evictable_size(self) -> int:
        self._begin()
        return self._core.evictable_tokens

    def protected_size(self) -> int:
        self._begin()
        return self._core.protected_tokens

    def total_size(self) -> int:
        self._begin()
        return self._core.evictable_tokens + self._core.protected_tokens

    def take_events(self) -> list[KVCacheEvent]:
        self._begin()
        return self._core.take_events()

    def check(self) -> None:
        self._begin()
        try:
            audit_cache(self)
        except InvariantError as error:
            self._broken = error
            raise
