"""`RadixCache`: a synchronous tree, an allocator, and the async shell that makes them safe under many coroutines.

Where things are:

- `aradix.tree` decides: each call is one atomic step on the loop, and returns what has to be freed.
- `pool.py` is the only door to the allocator; `pressure.py` knows who waits for slots; `locks.py` who wants a subtree
alone.
- `hold.py` is what one lease has, `leases.py` the steps that change one, `lease.py` the user's handle to it.
- `short_calls.py`: what a lease's calls need to do their plain case in compiled code.
- `keeping.py` has the calls that say what is kept and for whom.
- This file puts them together: it opens and closes, checks who calls, and has the low-level calls.
"""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import numpy as np
import torch
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from aradix.cache.audit import audit_cache
from aradix.cache.calls import Calls, closed_error
from aradix.cache.event_sinks import EventCalls, EventSinks
from aradix.cache.evictor import Background
from aradix.cache.home import Home, is_cancellation
from aradix.cache.keeping import KeepingCalls
from aradix.cache.lease import Lease, count_of
from aradix.cache.leases import Leases, Passage
from aradix.cache.locks import Exclusive, StandingGate
from aradix.cache.low_level import value_array
from aradix.cache.pressure import too_large
from aradix.cache.request_rows import RequestRow, committed_len, computed_ids, joined_ids
from aradix.cache.requests import Requests
from aradix.cache.short_calls import make_short_calls
from aradix.cache.views import make_snapshot, make_stats, print_tree
from aradix.errors import ConfigError, InvalidKeyError, InvariantError, UsageError
from aradix.keys import BIGRAM_BYTES, TOKEN_BYTES, RadixKey
from aradix.params import (
    CacheInitParams,
    CacheStats,
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    NodeRef,
)
from aradix.short_method import short_method
from aradix.tree import make_core
from aradix.tree.protocol import NOWHERE, Slots, TreeCore

__all__ = ["RadixCache"]

_log = logging.getLogger("aradix.cache")

_Params = TypeVar("_Params", MatchPrefixParams, InsertParams, EvictParams)


class RadixCache(KeepingCalls, EventCalls):
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
        self._item_bytes = BIGRAM_BYTES if params.is_eagle else TOKEN_BYTES
        self._core = self._make_core(params)
        self._calls = Calls(
            lambda: self._core.failure,
            lambda hold: self._leases.release(hold),
            never_fails=isinstance(params.eviction_policy, str),
        )
        self._leases = Leases(params, self._core, self._calls, self._on_low)
        self._holds = self._leases.holds
        self._pool = self._leases.pool
        self._pressure = self._leases.pressure
        self._gates = self._leases.gates
        self._low_pins = self._leases.low_pins
        self._requests = Requests(params, self._core, self._leases)
        self._pressure.on_change = self._on_change
        self._short_calls: Any = make_short_calls(params, self._item_bytes, self._calls, self._leases, self._core)
        self._leases.pins.on_release = self._release_pin
        self._event_sinks = EventSinks(self._core, self._calls.fail)
        self._home: Home | None = None
        self._task_group: TaskGroup | None = None
        self._wake_pending = False
        self._ended = False
        self._high_slots = int(params.high_watermark * params.allocator.num_slots)

    def _make_core(self, params: CacheInitParams) -> TreeCore:
        if params.host is not None:
            raise ConfigError(f"{type(self).__name__} has no host tier; take HiRadixCache, or leave host= out")
        return make_core(params.tree_core, **self._core_settings(params))

    def _core_settings(self, params: CacheInitParams) -> dict[str, Any]:
        """What every core is told."""
        return {
            "page_size": params.page_size,
            "item_bytes": self._item_bytes,
            "policy": params.eviction_policy,
            "evict_unit": params.evict_unit,
            "record_events": params.enable_kv_cache_events,
            "shares": params.shares(),
        }

    # ---- opening and closing ----

    async def __aenter__(self) -> Self:
        if self._home is not None:
            raise UsageError("this cache was opened already; make another RadixCache")
        self._home = Home()
        self._background = Background(self._wants_slots, self._evict_ahead, self._wants_polls, self._poll)
        self._task_group = anyio.create_task_group()
        await self._task_group.__aenter__()
        self._background.start(self._task_group)
        self._calls.open(self._home, self._background)
        allocator = self._params.allocator
        _log.info("opened: %d slots in pages of %d, %s core", allocator.num_slots, allocator.page_size, self._core.name)
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
        if not self._calls.closed:
            self._close()
        self._task_group.cancel_scope.cancel()
        try:
            return await self._leave_task_group(self._task_group, kind, error, trace)
        finally:
            self._calls.background_is_over()

    async def _leave_task_group(
        self,
        task_group: TaskGroup,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if error is not None and not is_cancellation(error):
            # The user's own error goes on as it is, not in a group; a failure in the background still comes first.
            await task_group.__aexit__(None, None, None)
            swallowed = None
        else:
            swallowed = await task_group.__aexit__(kind, error, trace)
        self._background.raise_unheard()
        return swallowed

    def _close(self) -> None:
        self._calls.close()
        self._unsubscribe()
        self._calls.drain_dropped()
        self._pressure.drop_all(closed_error)
        self._gates.close_down(closed_error)
        self._leases.joins.close_down(closed_error)
        self._leases.pins.end_all("closed")
        self._pool.give_back_all(self._core.detach().freed)
        self._event_sinks.close()
        _log.info("closed, with %d leases held", len(self._holds))
        self._calls.note_policy_failure()

    async def _take_turn(self) -> None:
        """The first line of a call that can wait. Waits for one round of the loop now and then."""
        self._calls.begin_open()
        if self._calls.is_turn_over():
            await checkpoint()
            self._calls.begin_open()

    # ---- what changes from outside ----

    def _on_slots(self) -> None:
        """The allocator has news, on whatever thread, perhaps from a finaliser in the middle of a step of ours.

        So who waits is served in a step of its own. What this cache gives back itself needs no telling: the step that
        does it looks at its end.
        """
        if self._home is None or self._calls.closed or self._wake_pending:
            return
        if self._pool.is_busy and self._home.is_this_thread():
            self._pressure.note_change()
        elif len(self._pressure) or self._leases.low_slots:
            self._wake_pending = True
            self._home.call_soon(self._slots_changed)

    def _slots_changed(self) -> None:
        self._wake_pending = False
        try:
            self._leases.changed()
        except Exception as error:
            self._calls.fail(error)

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
        num_freed = self._leases.evict_slots(num_slots, only_excess=True)
        if num_freed:
            self._leases.changed()
        else:  # not of the low pool, which nothing can be done about
            self._pressure.changed()
        return num_freed

    def _wants_slots(self) -> int:
        return 0 if self._calls.closed else max(0, self._high_slots - self._pool.num_coming)

    # ---- leases ----

    @short_method("lease")
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
        load_back: bool = True,
        join: bool = False,
    ) -> Lease:
        self._calls.begin_open()
        view = self._view(key)
        limit = view.num_items
        if type(leave_last) is not int or leave_last:
            limit = min(limit, max(0, len(key) - count_of("leave_last", leave_last)))
        if reserve is not None:
            reserve = count_of("reserve", reserve)
            page_size = self._params.page_size
            if -(-reserve // page_size) * page_size > self._pool.capacity:
                raise too_large(reserve, self._pool)
        if type(priority) is not int:
            _check_priority(priority)
        if stream is not None:
            self._pool.check_stream(stream)
        elif self._pool.streams:
            stream = self._pool.streams[0]
        if not (store is True or store is False):
            raise UsageError(f"store must be a bool, got {store!r}")
        if not (resume is True or resume is False):
            raise UsageError(f"resume must be a bool, got {resume!r}")
        if not (load_back is True or load_back is False):
            raise UsageError(f"load_back must be a bool, got {load_back!r}")
        if not (join is True or join is False):
            raise UsageError(f"join must be a bool, got {join!r}")
        caller = sys._getframe(1)
        hold = self._leases.new(view, key, limit, priority, store, resume, stream, caller.f_code, caller.f_lasti)
        if self._leases.tiers is not None:
            hold.load_back = load_back
        if join and not self._params.disable:
            hold.joins = True
        return Lease(self, hold, reserve)

    def _view(self, key: RadixKey) -> RadixKey:
        if type(key) is RadixKey and key.item_bytes == self._item_bytes:
            return key
        if not isinstance(key, RadixKey):
            raise InvalidKeyError(f"key must be a RadixKey, got {type(key).__name__}; RadixKey(token_ids) makes one")
        view = key.maybe_to_bigram_view(self._params.is_eagle)
        if view.is_bigram and not self._params.is_eagle:
            raise InvalidKeyError(f"{key!r} is a view of bigrams, which only a cache with is_eagle=True looks up")
        return view

    # ---- gates ----

    def exclusive(self, key: RadixKey) -> Exclusive:
        self._calls.begin_open()
        return Exclusive(self, self._view(key))

    async def _close_gate(self, view: RadixKey) -> StandingGate:
        self._calls.begin_open()
        task_id = anyio.get_current_task().id
        if any(gate.task_id == task_id for gate in self._gates.standing):
            raise UsageError("this task holds a subtree already, and may hold only one; leave that block first")
        await self._take_turn()
        gate = await self._gates.close(view)
        if self._calls.closed:
            self._gates.open(gate)
            raise closed_error()
        return gate

    def _open_gate(self, gate: StandingGate) -> None:
        self._gates.open(gate)

    def _evict_below(self, gate: StandingGate) -> int:
        self._calls.begin()
        self._gates.unpin_leaves(gate)
        below = {pin for pin in self._leases.pins.below(gate.node_id) if pin.node_id != gate.node_id}
        self._leases.pins.end_all("evicted", below.__contains__)
        watch, began = self._leases.watch, self._params.clock()
        if watch is not None:
            watch.evicting()
        freed = [] if self._core.is_detached(gate.node_id) else self._core.evict_below(gate.node_id)
        self._gates.pin_leaves(gate)
        num_freed = self._pool.give_back_all(freed)
        self._leases.num_evicted += num_freed
        if watch is not None:
            watch.evicted(num_freed, began)
        self._leases.changed()
        return num_freed

    def _slots_tensor(self, ref: NodeRef) -> torch.Tensor:
        return torch.from_numpy(self._core.slots_of(ref)) if ref.node_id else torch.empty(0, dtype=torch.int64)

    # ---- low-level calls ----

    async def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        self._calls.begin_open()
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
        best = match.best if match.host_hit else match.last
        return MatchResult(self._slots_tensor(match.last), match.last, best, best, match.host_hit)

    def _end_passage(self, passage: Passage) -> None:
        """Unpin what kept the way open. Its caller takes its step at once: no gate is granted in between."""
        self._pool.give_back_all(self._core.unpin(passage.node_id, touch=False))
        # A gate may be granted now, or a waiter served, but only after the caller had the chance to pin what it got.
        assert self._home is not None
        self._home.call_soon(self._slots_changed)

    async def insert(self, params: InsertParams) -> InsertResult:
        self._calls.begin_open()
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
        self._calls.begin_open()
        if self._gates and self._gates.behind_granted(node.node_id):
            raise UsageError(f"{node} is in a subtree that somebody holds exclusively; match again")
        return self._low_pins.pin(node)

    def dec_lock_ref(self, node: NodeRef) -> int:
        self._calls.begin()
        before = self._core.evictable_tokens
        self._pool.give_back_all(self._low_pins.unpin(node))
        num_evictable = self._core.evictable_tokens - before
        self._leases.changed()
        return num_evictable

    def cache_unfinished_req(self, req: RequestRow, chunked: bool = False) -> None:
        self._calls.begin_open()
        ids = computed_ids(req)
        self._requests.unfinished(req, self._view(RadixKey(ids, req.extra_key)), len(ids))

    def cache_finished_req(
        self, req: RequestRow, is_insert: bool = True, *, kv_len_to_handle: int | None = None
    ) -> None:
        self._calls.begin_open()
        num_tokens = committed_len(req, kv_len_to_handle)
        view = self._view(RadixKey(joined_ids(req)[:num_tokens], req.extra_key)) if is_insert else None
        self._requests.finished(req, view, num_tokens)

    # ---- looking ----

    def peek(self, key: RadixKey) -> int:
        self._calls.begin()
        return self._core.peek(self._view(key))

    def stats(self) -> CacheStats:
        self._calls.begin()
        return make_stats(self)

    def snapshot(self, tokens: bool = True) -> dict[str, Any]:
        self._calls.begin()
        return make_snapshot(self._core, tokens, self._leases.pins)

    def pretty_print(self) -> None:
        self._calls.begin()
        print_tree(self._core)

    def evictable_size(self) -> int:
        self._calls.begin()
        return self._core.evictable_tokens

    def protected_size(self) -> int:
        self._calls.begin()
        return self._core.protected_tokens

    def total_size(self) -> int:
        self._calls.begin()
        return self._core.evictable_tokens + self._core.protected_tokens

    def check(self) -> None:
        self._calls.begin()
        try:
            audit_cache(self)
        except InvariantError as error:
            self._calls.refuse_work(str(error))
            raise


def _expected(params: _Params, kind: type[_Params]) -> _Params:
    if not isinstance(params, kind):
        raise UsageError(f"this call takes {kind.__name__}(...), got {type(params).__name__}")
    return params


def _check_priority(priority: object) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise UsageError(f"priority must be an int, got {priority!r}")
