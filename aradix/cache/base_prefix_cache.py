"""`BasePrefixCache`: what every prefix cache of this library can do, and what each call promises."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aradix.events import KVCacheEvent
from aradix.keys import Namespace, RadixKey
from aradix.params import (
    CacheStats,
    EvictParams,
    EvictResult,
    FlushResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    NodeRef,
    TenantStats,
)

if TYPE_CHECKING:
    from aradix.cache.lease import Lease
    from aradix.cache.locks import Exclusive
    from aradix.cache.pins import Pin
    from aradix.cache.request_rows import RequestRow

__all__ = ["BasePrefixCache"]


class BasePrefixCache(abc.ABC):
    """The interface of a prefix cache: an async context manager, bound to the loop and thread that opened it.

    Every call raises `WrongLoopError` from another loop or thread, `UsageError` before the cache is opened, and
    `InvariantError` once an audit has failed. Calls that take or give slots raise `CacheClosedError` after it was
    closed. Only functions that can wait are `async`.
    """

    @abc.abstractmethod
    async def __aenter__(self) -> Self:
        """Bind to the running loop and start the background tasks. Does not wait."""

    @abc.abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Close: waiters get `CacheClosedError`, cached slots go back, held leases stay usable until released. Waits.

        Raises:
            ExceptionGroup: of what failed in the background.
        """

    # ---- leases ----

    @abc.abstractmethod
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
        """A lease on the longest cached prefix of a key, to be entered with `async with`. Does not wait; entering may.

        Args:
            key: the tokens, in their namespace.
            reserve: enter only once slots for so many tokens in all are held, matched and fresh.
            leave_last: tokens at the end that are never matched, so that something is left to compute.
            priority: of what is committed, for the `priority` policy; higher stays longer. Also what `Lease.urgency`
                begins with.
            store: whether commits publish; without it all slots are freed at release.
            resume: this request was preempted and comes back: not counted as a query.
            stream: that the allocations are ordered for; the first of the engine's if there are any.
            load_back: copy to the device what a tier below it holds, before the lease is entered; entering may then
                wait for slots. A cache without such a tier has nothing to copy.
            join: wait, before the lease is entered, while another lease with `join=True` computes some of what this key
                lacks: until that has committed as much as the two keys share, in whole pages, or has ended. Whoever is
                entered, stores and lacks a page is waited for in turn, so of many leases that want the same one
                computes it, and if that one fails, is cancelled or gives way, another goes on from what it committed;
                none of the others hears of the failure. Commit each chunk as soon as it is computed: others wait for
                it. While it waits a lease holds neither pins nor slots, and with `reserve` its place in the queue for
                them. A task that holds another lease, one it has entered or forked, or a subtree waits for nobody:
                else the other one could wait in turn for just that. Nothing else is known of who holds what, so do not
                join while something that only the waiting task would give back is kept in another way: by a lease
                that another task entered (asyncio's own `wait_for` enters it in one, up to Python 3.11; a fork is that
                one's who enters it), by a parent that waits for this task, by `cache.pin()`, the low level or the
                allocator. How long it waits is not bounded but by `anyio.fail_after`.
                Meanwhile the one it waits for is at least as urgent as it is (`Lease.urgency`), which is for whoever
                schedules them: the cache itself serves nobody by priority.
                `CacheStats` counts `num_joiners`, `joins`, `joined_tokens` and `join_takeovers`.

        Raises:
            InvalidKeyError: `key` is no `RadixKey`.
            UsageError: a number that is negative or not an int, a flag that is no bool.
            RequestTooLargeError: `reserve` can never fit.
            CacheClosedError: the cache is closed.
        """

    @abc.abstractmethod
    def exclusive(self, key: RadixKey) -> Exclusive:
        """A subtree of one's own, to be entered with `async with`. Does not wait; entering does.

        The subtree is what begins with the cached part of `key`; an empty key is its whole namespace. Entering waits
        until every lease there has ended, so a task that holds one there, or opens one there meanwhile, waits for
        itself: bound the wait with `anyio.fail_after`.

        Raises:
            InvalidKeyError: `key` is no `RadixKey`.
            UsageError: on entering, if this task holds a subtree already.
        """

    @abc.abstractmethod
    def pin(self, key: RadixKey, *, ttl: float | None = None, budget: int | None = None) -> Pin:
        """Keep the cached prefix of a key from eviction while it is idle. Does not wait.

        What is cached now is pinned, and nothing that comes later: commit first. A budget that does not reach shortens
        the pin to the whole pages that fit, which `Pin.num_tokens` beside `Pin.num_matched` tells. Waiting requests
        count on what a `ttl` will give back, so none of them is told to give way for it.

        Args:
            key: the tokens, in their namespace.
            ttl: seconds on the cache's clock; `None` until it is released, or taken back where nobody could go on
                otherwise. It ends idle protection only: leases that stand there keep what they have.
            budget: the most tokens to pin; whatever it is, all pins together stay within
                `CacheInitParams(pin_budget=)`.

        Raises:
            InvalidKeyError: `key` is no `RadixKey`.
            UsageError: a `ttl` that is not above 0 and finite, a `budget` below 0; or somebody has a subtree that the
                prefix runs through exclusively.
            CacheClosedError: the cache is closed.
        """

    # ---- low-level calls, for schedulers that keep their own tables ----

    @abc.abstractmethod
    async def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix. Waits only for a gate.

        Nothing is pinned: give `last_device_node` to `inc_lock_ref` before the next await.

        Raises:
            TransferError: a stream could not be made to wait for what others write; the cache ends.
        """

    @abc.abstractmethod
    async def insert(self, params: InsertParams) -> InsertResult:
        """Publish the whole pages of a key with the slots of its tokens. Waits only for a gate.

        The tree keeps copies of the slots it adopts, and owns them from then on; `InsertResult.duplicates` lists those
        that it did not adopt and that are not the tree's own already.

        Raises:
            UsageError: fewer slots than tokens, or slots to adopt that the caller was not handed out or that are no
                whole pages. Nothing was changed.
        """

    @abc.abstractmethod
    async def evict(self, params: EvictParams) -> EvictResult:
        """Evict so many tokens, in whole pages, or as many as are evictable. Does not wait.

        What it reports came back to the allocator, free or fenced.
        """

    @abc.abstractmethod
    def inc_lock_ref(self, node: NodeRef) -> int:
        """Pin the path to a node; the tokens that were evictable and are protected now. Does not wait.

        Raises:
            UsageError: the node was evicted, trimmed, merged or flushed meanwhile, or somebody has it exclusively.
        """

    @abc.abstractmethod
    def dec_lock_ref(self, node: NodeRef) -> int:
        """Undo one `inc_lock_ref` of this node; the tokens that are evictable again. Does not wait.

        Raises:
            UsageError: there is none to undo.
        """

    @abc.abstractmethod
    def cache_unfinished_req(self, req: RequestRow, chunked: bool = False) -> None:
        """Publish the whole pages of a request's `fill_ids`, and move its pin and its row there. Does not wait.

        `last_node`, `cache_protected_len` and `prefix_indices` are set. Its slots of what the tree held already go
        back. After a flush of what it stands on, and below a subtree that somebody has, nothing is published. A request
        that matched nothing stands on nothing, so a flush does not end it: give new weights a namespace of their own.

        Args:
            req: it has pinned `last_node` with `inc_lock_ref`, and the slots in its row are its own from there on.
            chunked: more of the prompt follows. Nothing depends on it: what a request published is no hit of its own.

        Raises:
            UsageError: the request and its pin do not fit, or slots of its row are not its own. Nothing was changed.
        """

    @abc.abstractmethod
    def cache_finished_req(
        self, req: RequestRow, is_insert: bool = True, *, kv_len_to_handle: int | None = None
    ) -> None:
        """Publish what a request has computed, give back all other slots of its row, and unpin. Does not wait.

        For a request that ends, is aborted or retracted. Over-allocated slots (`kv_allocated_len`) go back too.

        Args:
            req: as for `cache_unfinished_req`; `last_node` is `None` afterwards. Its row is the scheduler's to free.
            is_insert: whether to publish.
            kv_len_to_handle: tokens whose KV is complete, instead of what the request says.

        Raises:
            UsageError: as for `cache_unfinished_req`.
        """

    # ---- looking and clearing ----

    @abc.abstractmethod
    def peek(self, key: RadixKey) -> int:
        """Tokens that a match would find: no split, no touch, no statistics. Does not wait, for gates neither."""

    @abc.abstractmethod
    async def flush(self, namespace: Namespace | str | None = None, **fields: str | int | None) -> FlushResult:
        """Make what is cached unmatchable for ever: all, or some namespaces. Does not wait, for leases neither.

        `flush()` is everything, `flush(namespace)` that one, and `flush(lora="x", version=1)` every namespace in which
        these fields of `Namespace` have these values, whatever the others are. What leases hold comes back when they
        end, and what they computed is not published any more. Pins of what is flushed end.

        Raises:
            UsageError: a namespace and fields, or no field of a namespace.
            InvalidKeyError: a value that is neither a `str`, an `int` nor `None`.
        """

    @abc.abstractmethod
    def stats(self) -> CacheStats:
        """All counters at this moment. Does not wait."""

    @abc.abstractmethod
    def tenant_stats(self) -> dict[str | int | None, TenantStats]:
        """What each tenant with a quota has, by tenant; `None` stands for all others together. Does not wait.

        Empty without `CacheInitParams(quotas=...)`. It costs one step for each quota, whatever the cache holds, so that
        a metrics worker may ask as often as it likes; counts with a past (`evicted`, `queries` ...) only grow.
        """

    @abc.abstractmethod
    def snapshot(self, tokens: bool = True) -> dict[str, Any]:
        """The tree as plain dicts and lists; with `tokens=False` without the token ids. Does not wait.

        `{"namespaces": [{"namespace": {...}, "root": node}]}`, a node being `{"id", "num_tokens", "tokens", "lock_ref",
        "residency", "priority", "hit_count", "children": [...]}`. Where there are pins, `"pins"` lists them as
        `{"namespace", "node", "num_tokens", "expires"}`.
        """

    @abc.abstractmethod
    def check(self) -> None:
        """Audit everything, in time linear in the cache. Does not wait.

        Raises:
            InvariantError: naming what differs; the cache refuses further work then.
        """

    @abc.abstractmethod
    def evictable_size(self) -> int:
        """Cached tokens that nobody pins. Does not wait."""

    @abc.abstractmethod
    def protected_size(self) -> int:
        """Cached tokens that somebody pins. Does not wait."""

    @abc.abstractmethod
    def total_size(self) -> int:
        """Cached tokens. Does not wait."""

    @abc.abstractmethod
    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call; none unless `enable_kv_cache_events`. Does not wait.

        Raises:
            UsageError: sinks take the events (`add_event_sink`).
        """

    @abc.abstractmethod
    def current_events(self) -> list[KVCacheEvent]:
        """Events that say what is cached now, for a reader who joins late: as if all of it was stored this moment.

        A parent before its children. Takes time linear in the cache; what was recorded and not taken yet stays so.
        None unless `enable_kv_cache_events`. Does not wait.
        """

    @abc.abstractmethod
    def add_event_sink(
        self, sink: Callable[[Sequence[KVCacheEvent]], None], *, delay: float = 0.0
    ) -> Callable[[], None]:
        """Have the events handed to `sink` as they arise; gives what removes it again. Does not wait.

        The sink sees exactly what later steps record: once a turn of the loop, in one sequence, in order, in a step of
        its own, in which it may call the cache; the rest when the cache closes, before that returns. All sinks get the
        same sequence, which none may change. On the compiled core, pages are hashed and records made when somebody
        first looks into a sequence: a sink that hands it to a thread leaves that to the thread, and pays next to
        nothing. What nobody has taken when the first sink is added is dropped: take `current_events()` in the same
        step, or `take_events()` before it.

        An exception in a sink removes it and ends the cache's task group with that exception.

        Args:
            sink: gets the events, in the cache's own thread.
            delay: seconds that events may wait, so that those of many turns come at once. A step of the loop each turn
                costs more than recording does, one in a millisecond next to nothing. The sink with the shortest delay
                decides for all.

        Raises:
            UsageError: `sink` cannot be called, `delay` is no time, or the cache was made without
                `enable_kv_cache_events=True`.
            CacheClosedError: the cache is closed.
        """

    @abc.abstractmethod
    def pretty_print(self) -> None:
        """Print the tree, a line a node. Does not wait."""
