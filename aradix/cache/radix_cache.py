"""`RadixCache`: a synchronous tree, an allocator, and the async shell that makes them safe under many coroutines.

Where things are:

- `aradix.tree` decides: each call is one atomic step on the loop, and returns what has to be freed.
- `pool.py` is the only door to the allocator; `pressure.py` knows who waits for slots; `locks.py` who wants a subtree
alone.
- `hold.py` is what one lease has, `leases.py` the steps that change one, `lease.py` the user's handle to it.
- This file puts them together: it opens and closes, checks who calls, and has the low-level calls.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import numpy as np
import torch
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from aradix.cache.audit import audit_cache
from aradix.cache.event_sinks import EventCalls, EventSinks
from aradix.cache.evictor import Background
from aradix.cache.hold import Hold
from aradix.cache.home import Home
from aradix.cache.lease import Lease, count_of
from aradix.cache.leases import Leases, Passage, closed_error
from aradix.cache.locks import Exclusive, StandingGate
from aradix.cache.low_level import value_array
from aradix.cache.pressure import too_large
from aradix.cache.views import make_snapshot, make_stats, print_tree
from aradix.errors import InvalidKeyError, InvariantError, UsageError
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
from aradix.tree.protocol import NOWHERE, Slots

__all__ = ["RadixCache"]

_Params = TypeVar("_Params", MatchPrefixParams, InsertParams, EvictParams)

_FAIR_RUN = 128
"""Calls in a row that may complete without letting other tasks run."""
_LISTEN_FROM = _FAIR_RUN // 2
"""From here on the cache listens whether the loop came round by itself."""


class RadixCache(EventCalls):
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
        self._leases = Leases(params, self._core, self._on_low, self._fail)
        self._holds = self._leases.holds
        self._pool = self._leases.pool
        self._pressure = self._leases.pressure
        self._gates = self._leases.gates
        self._low_pins = self._leases.low_pins
        self._pressure.on_change = self._on_change
        self._event_sinks = EventSinks(self._core, self._fail)
        self._home: Home | None = None
        self._task_group: TaskGroup | None = None
        self._broken: str | None = None
        self._policy_reported = False
        self._dropped: deque[Hold] = deque()
        self._run_length = 0
        self._wake_pending = False
        self._ended = False
        self._background_is_over = False
        self._low_slots = int(params.low_watermark * params.allocator.num_slots)
        self._high_slots = int(params.high_watermark * params.allocator.num_slots)

    # ---- opening and closing ----

    async def __aenter__(self) -> Self:
        if self._home is not None:
            raise UsageError("this cache was opened already; make another RadixCache")
        self._home = Home()
        self._background = Background(self._wants_slots, self._evict_ahead, self._wants_polls, self._poll)
        self._task_group = anyio.create_task_group()
        await self._task_group.__aenter__()
        self._background.start(self._task_group)
        self._unsubscribe = self._params.allocator.subscribe(self._on_slots)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._home is None or self._task_group is None:
            raise UsageError("this cache was not opened")
        self._home.check()
        if self._ended:
            return None
        self._ended = True
        if not self._leases.closed:
            self._close()
        self._task_group.cancel_scope.cancel()
        try:
            return await self._leave_task_group(self._task_group, kind, error, trace)
        finally:
            self._background_is_over = True

    async def _leave_task_group(
        self,
        task_group: TaskGroup,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if error is not None and not _is_cancellation(error):
            # The user's own error goes on as it is, not in a group; a failure in the background still comes first.
            await task_group.__aexit__(None, None, None)
            swallowed = None
        else:
            swallowed = await task_group.__aexit__(kind, error, trace)
        self._background.raise_unheard()
        return swallowed

    def _close(self) -> None:
        self._leases.closed = True
        self._unsubscribe()
        self._drain_dropped()
        self._pressure.drop_all(closed_error)
        self._gates.close_down(closed_error)
        self._pool.give_back_all(self._core.detach().freed)
        self._event_sinks.close()
        if self._core.failure is not None:
            self._note_policy_failure(self._core.failure)

    def _begin(self) -> None:
        """The first line of every public call."""
        if self._home is None:
            raise UsageError("open the cache first: async with RadixCache(params) as cache")
        if not self._leases.closed or not self._home.is_this_thread():
            self._home.check()
        if self._broken is not None:
            raise InvariantError(f"the cache refuses further work: {self._broken}")
        if self._core.failure is not None:
            self._note_policy_failure(self._core.failure)
        if self._dropped:
            self._drain_dropped()

    def _note_policy_failure(self, error: BaseException) -> None:
        if not self._policy_reported:
            self._policy_reported = True
            self._fail(error)

    def _begin_open(self) -> None:
        self._begin()
        if self._leases.closed:
            raise closed_error()

    def _is_turn_over(self) -> bool:
        """Whether this call should let other tasks run first, before it takes anything."""
        self._run_length += 1
        if self._run_length == _LISTEN_FROM and self._home is not None:
            self._home.call_next(self._end_run)  # a task that yields by itself is never made to
        if self._run_length < _FAIR_RUN:
            return False
        self._end_run()
        return True

    def _end_run(self) -> None:
        self._run_length = 0

    async def _take_turn(self) -> None:
        """The first line of a call that can wait. Waits for one round of the loop now and then."""
        self._begin_open()
        if self._is_turn_over():
            await checkpoint()
            self._begin_open()

    def _fail(self, error: BaseException) -> None:
        """Something failed where it could not be raised: end the task group with it."""
        if self._background_is_over:
            warnings.warn(f"after the cache was closed: {error!r}", ResourceWarning, stacklevel=2, source=self)
        elif self._home is not None:
            self._background.fail(error)

    # ---- what changes from outside ----

    def _on_slots(self) -> None:
        """The allocator has news, on whatever thread, perhaps from a finaliser in the middle of a step of ours.

        So who waits is served in a step of its own. What this cache gives back itself needs no telling: the step that
        does it looks at its end.
        """
        if self._home is None or self._leases.closed or self._wake_pending:
            return
        if self._pool.is_busy and self._home.is_this_thread():
            self._pressure.note_change()
        elif len(self._pressure) or self._low_slots:
            self._wake_pending = True
            self._home.call_soon(self._slots_changed)

    def _slots_changed(self) -> None:
        self._wake_pending = False
        try:
            self._leases.changed()
        except Exception as error:
            self._fail(error)

    def _on_change(self) -> None:
        if self._gates.standing:
            self._gates.advance()
        if self._wants_polls():
            self._background.somebody_waits()

    def _wants_polls(self) -> bool:
        return len(self._pressure) > 0 and self._params.allocator.fenced_size() > 0

    def _poll(self) -> None:
        self._params.allocator.reclaim()

    def _on_low(self) -> None:
        self._background.pool_is_low()

    def _evict_ahead(self, num_slots: int) -> int:
        num_freed = self._leases.evict_slots(num_slots)
        self._leases.changed()
        return num_freed

    def _wants_slots(self) -> int:
        return 0 if self._leases.closed else max(0, self._high_slots - self._pool.num_coming)

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
        _check_priority(priority)
        if stream is not None:
            self._pool.check_stream(stream)
        elif self._pool.streams:
            stream = self._pool.streams[0]
        caller = sys._getframe(1)
        for name, flag in (("store", store), ("resume", resume)):
            if not isinstance(flag, bool):
                raise UsageError(f"{name} must be a bool, got {flag!r}")
        hold = self._leases.new(view, key, limit, priority, store, resume, stream, caller.f_code, caller.f_lineno)
        return Lease(self, hold, reserve)

    def _view(self, key: RadixKey) -> RadixKey:
        if not isinstance(key, RadixKey):
            raise InvalidKeyError(f"key must be a RadixKey, got {type(key).__name__}; RadixKey(token_ids) makes one")
        view = key.maybe_to_bigram_view(self._params.is_eagle)
        if view.is_bigram and not self._params.is_eagle:
            raise InvalidKeyError(f"{key!r} is a view of bigrams, which only a cache with is_eagle=True looks up")
        return view

    def _begin_release(self) -> None:
        assert self._home is not None
        if not self._leases.closed or not self._home.is_this_thread():
            self._home.check()

    def _drop(self, hold: Hold) -> None:
        """A lease was collected unreleased: only note it, for this may be any thread at any moment."""
        self._dropped.append(hold)
        if self._home is not None and not self._home.call_soon(self._drain_dropped):
            self._drain_dropped()  # the loop has ended, so no step is under way and nobody else would do it

    def _drain_dropped(self) -> None:
        while self._dropped:
            try:
                self._leases.release(self._dropped.popleft())
            except Exception as error:  # a bug of ours; the loop would only log it
                self._fail(error)

    # ---- gates ----

    def exclusive(self, key: RadixKey) -> Exclusive:
        self._begin_open()
        return Exclusive(self, self._view(key))

    async def _close_gate(self, view: RadixKey) -> StandingGate:
        self._begin_open()
        task_id = anyio.get_current_task().id
        if any(gate.task_id == task_id for gate in self._gates.standing):
            raise UsageError("this task holds a subtree already, and may hold only one; leave that block first")
        await self._take_turn()
        gate = await self._gates.close(view)
        if self._leases.closed:
            self._gates.open(gate)
            raise closed_error()
        return gate

    def _open_gate(self, gate: StandingGate) -> None:
        self._gates.open(gate)

    def _evict_below(self, gate: StandingGate) -> int:
        self._begin()
        self._gates.unpin_leaves(gate)
        freed = [] if self._core.is_detached(gate.node_id) else self._core.evict_below(gate.node_id)
        self._gates.pin_leaves(gate)
        num_freed = self._pool.give_back_all(freed)
        self._leases.num_evicted += num_freed
        self._leases.changed()
        return num_freed

    def _slots_tensor(self, ref: NodeRef) -> torch.Tensor:
        return torch.from_numpy(self._core.slots_of(ref))

    # ---- low-level calls ----

    async def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        self._begin_open()
        view = self._view(_expected(params, MatchPrefixParams).key)
        if self._params.disable:
            return MatchResult(torch.empty(0, dtype=torch.int64), NOWHERE, NOWHERE, NOWHERE)
        await self._take_turn()
        match = self._core.match(view)
        while match.gate:
            passage = await self._leases.wait_pinned(view)
            self._end_passage(passage)
            match = self._core.match(view, past_pending=True)
        self._leases.order_after(self._pool.streams, match.ready)
        return MatchResult(self._slots_tensor(match.last), match.last, match.last, match.last)

    def _end_passage(self, passage: Passage) -> None:
        """Unpin what kept the way open. Its caller takes its step at once: no gate is granted in between."""
        self._pool.give_back_all(self._core.unpin(passage.node_id, touch=False))
        # A gate may be granted now, or a waiter served, but only after the caller had the chance to pin what it got.
        assert self._home is not None
        self._home.call_soon(self._slots_changed)

    async def insert(self, params: InsertParams) -> InsertResult:
        self._begin_open()
        view = self._view(_expected(params, InsertParams).key)
        _check_priority(params.priority)
        value = value_array(params.value, len(view))
        if self._params.disable:
            return InsertResult(0, NOWHERE, torch.from_numpy(value.copy()))
        await self._take_turn()
        result = self._insert(view, value, params.priority, past_pending=False)
        while result is None:
            passage = await self._leases.wait_pinned(view)
            self._end_passage(passage)
            result = self._insert(view, value, params.priority, past_pending=True)
        self._leases.changed()
        return result

    def _insert(self, view: RadixKey, value: Slots, priority: int, past_pending: bool) -> InsertResult | None:
        """Insert in one step, or change nothing where a gate stands in the way."""
        page_size = self._params.page_size
        start, stop = self._core.peek(view), len(view) // page_size * page_size
        ready = self._leases.record_ready(self._pool.streams if start < stop else ())
        self._pool.adopt(value[start:stop])
        done = self._core.insert(view, value[:stop], priority=priority, ready=ready, past_pending=past_pending)
        if isinstance(done, int):
            self._pool.disown(value[start:stop])
            return None
        self._leases.order_after(self._pool.streams, done.ready)
        duplicates = np.concatenate((value[:start][value[:start] != done.existing], value[stop:]))
        return InsertResult(done.prefix_len, done.last, torch.from_numpy(duplicates), stop - start)

    async def evict(self, params: EvictParams) -> EvictResult:
        await self._take_turn()
        num_freed = self._leases.evict_slots(count_of("num_tokens", _expected(params, EvictParams).num_tokens))
        self._leases.changed()
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
        self._leases.changed()
        return num_evictable

    # ---- looking and clearing ----

    def peek(self, key: RadixKey) -> int:
        self._begin()
        return self._core.peek(self._view(key))

    async def flush(self, namespace: Namespace | str | None = None) -> FlushResult:
        await self._take_turn()
        flushed = None if namespace is None else Namespace.of(namespace)
        # Who waits to be entered is entered after the flush, so it must not bring along what it matched before.
        self._pressure.drop_waiting_pins(lambda hold: flushed in (None, hold.key.namespace))
        done = self._core.detach(flushed)
        self._pool.give_back_all(done.freed)
        self._pressure.admission_unblocked()
        self._gates.serve_walkers()
        self._leases.changed()
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

    def check(self) -> None:
        self._begin()
        try:
            audit_cache(self)
        except InvariantError as error:
            self._broken = str(error)
            raise


def _expected(params: _Params, kind: type[_Params]) -> _Params:
    if not isinstance(params, kind):
        raise UsageError(f"this call takes {kind.__name__}(...), got {type(params).__name__}")
    return params


def _check_priority(priority: object) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise UsageError(f"priority must be an int, got {priority!r}")


def _is_cancellation(error: BaseException) -> bool:
    """Whether an exception belongs to a cancel scope, which has to see it, alone or among others."""
    if isinstance(error, BaseExceptionGroup):
        return any(_is_cancellation(inner) for inner in error.exceptions)
    return isinstance(error, anyio.get_cancelled_exc_class())
