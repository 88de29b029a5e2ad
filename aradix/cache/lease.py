"""`Lease`: a request's hold on its prefix and its slots, as an async context manager.

A lease pins the path it matched in the same step that walked it, so what it shows cannot be evicted. It is bound to no
task and holds no lock object: it may be opened in one task and closed in another.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
import numpy as np
import torch
from anyio.lowlevel import checkpoint

from aradix.cache.calls import closed_error
from aradix.cache.hold import Hold
from aradix.cache.pressure import too_large
from aradix.cache.slot_waiter import SlotWaiter
from aradix.errors import LeaseReleasedError, OutOfSlotsError, UsageError
from aradix.keys import RadixKey
from aradix.params import InsertResult, NodeRef, PriorityRange
from aradix.short_method import short_method, short_properties

if TYPE_CHECKING:
    from aradix.cache.radix_cache import RadixCache

__all__ = ["Lease", "count_of"]


def count_of(name: str, value: object) -> int:
    """A count that a caller gave. UsageError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise UsageError(f"{name} must be an int of at least 0, got {value!r}")
    return int(value)


@short_properties
class Lease:
    """What `cache.lease(key)` gives; enter it with `async with`.

    Entering pins the longest cached prefix. Leaving releases: it unpins, and retires every slot that was not committed.
    A lease that is dropped unreleased gives a `ResourceWarning` that says where it was opened, and its slots come back.
    """

    __slots__ = ("__weakref__", "_cache", "_forked", "_hold", "_reserve", "_short_calls", "_slots", "_slots_of")

    def __init__(self, cache: RadixCache, hold: Hold, reserve: int | None) -> None:
        self._cache = cache
        self._hold = hold
        self._reserve = reserve
        self._forked = False
        # Compiled code knows nothing of those who wait for a commit.
        self._short_calls: Any = None if hold.joins else cache._short_calls
        self._slots: torch.Tensor | None = None
        self._slots_of: tuple[int, int, int] | None = None

    # ---- entering and leaving ----

    @short_method("enter")
    async def __aenter__(self) -> Self:
        """Match and pin in one step. Waits for a gate, and with `reserve` for slots; safe to cancel.

        With `join` it waits for what others compute.

        Raises:
            CacheClosedError: the cache is closed, or was closed meanwhile.
            UsageError: it was entered before, also if that was cancelled; this task holds a subtree.
        """
        cache, hold = self._cache, self._hold
        if self._forked and not hold.released:
            self._forked = False
            hold.task = cache._calls.running_task()
            return self
        if hold.opening or hold.entered:
            raise UsageError(f"the lease opened at {hold.where} was entered already; call cache.lease(key) for another")
        cache._calls.begin_open()
        hold.opening = True
        if cache._calls.is_turn_over():
            await checkpoint()
            cache._calls.begin_open()
            self._check_not_released()
        hold.task = cache._calls.running_task()
        if hold.joins:
            cache._leases.joins.enlist(hold)
        has_waited = False
        while True:
            if not hold.node_id and not cache._leases.rematch(hold):
                await cache._leases.wait_at_gate(hold)
                self._check_not_released()
                has_waited = True
            tiers = cache._leases.tiers
            if tiers is not None and tiers.may_bring(hold):
                await tiers.load_back(hold)
                self._check_not_released()
                has_waited = True
            if not hold.joins or not await cache._leases.joins.look(hold, has_waited, self._reserve is None):
                break
            self._check_not_released()
            has_waited = True
        if self._reserve is not None and not cache._pressure.admit_now(hold, self._reserve):
            await self._wait_for_admission(hold, self._reserve)
            self._check_not_released()
        if not hold.entered:
            cache._leases.enter(hold)
        return self

    def _check_not_released(self) -> None:
        hold = self._hold
        if hold.released:
            raise LeaseReleasedError(f"the lease opened at {hold.where} was released while it waited to be entered")

    async def _wait_for_admission(self, hold: Hold, reserve: int) -> None:
        cache = self._cache
        keeps_pins = cache._params.waiters_keep_pins
        try:
            cache._gates.forbid_waiting("slots")
            if not keeps_pins:
                cache._leases.drop_pins(hold)
            await cache._pressure.wait(SlotWaiter(hold, reserve, reserve=True, keeps_pins=keeps_pins))
        except BaseException:
            hold.used = set()  # what it may have been given in the same moment was touched by no stream
            cache._leases.release(hold)
            raise

    @short_method("exit")
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release. Does not wait, and raises only `WrongLoopError`, from another thread or loop."""
        abandoned = kind is GeneratorExit and not self._hold.released and _in_collected_generator()
        num_tokens = self._hold.num_tokens
        self.release()
        if abandoned:
            self._warn(num_tokens, "was left open in an async generator that was abandoned")

    @short_method("release")
    def release(self) -> None:
        """Unpin, and give back what was not committed. Does not wait; a second call changes nothing.

        A lease that another task waits with, for slots or to be entered, ends that wait with `LeaseReleasedError`.

        Raises:
            WrongLoopError: called from another thread or loop; the lease is still held then.
        """
        hold = self._hold
        if hold.released or not hold.opening:
            return
        self._cache._calls.begin_release()
        self._cache._leases.release(hold)
        if not hold.entered:
            self._cache._gates.serve_walkers()  # it may be among them
            if self._cache._leases.tiers is not None:
                self._cache._leases.tiers.loads.drop(hold)  # or among those who wait for a copy

    @short_method("finish")
    def __del__(self) -> None:
        hold = getattr(self, "_hold", None)
        if hold is None or not hold.held:
            return
        num_tokens = hold.num_tokens
        # This may run in the middle of a step or on another thread: leave the work to the next step.
        self._cache._calls.drop(hold)
        self._warn(num_tokens, "was never released; its slots come back now")

    def _warn(self, num_tokens: int, what: str) -> None:
        warnings.warn(
            f"the lease of {num_tokens} tokens opened at {self._hold.where} {what}; use `async with`",
            ResourceWarning,
            stacklevel=3,
            source=self,
        )

    def _entered(self) -> Hold:
        hold = self._hold
        if not hold.held:
            state = "released" if hold.released else "not entered yet"
            raise LeaseReleasedError(
                f"the lease opened at {hold.where} is {state}; use it inside its `async with` block"
            )
        self._cache._calls.begin()
        return hold

    # ---- what it holds ----

    @property
    def key(self) -> RadixKey:
        """The key it was opened with, or the longest committed since."""
        return self._hold.given

    @property
    @short_method("num_matched")
    def num_matched(self) -> int:
        """Tokens whose KV could be reused when it was entered: whole pages."""
        return self._hold.num_matched

    @property
    @short_method("num_tokens")
    def num_tokens(self) -> int:
        """Tokens with a slot: matched, committed and allocated."""
        return self._hold.num_tokens

    @property
    def node(self) -> NodeRef:
        """The place in the tree that it pins: the end of what is matched or committed.

        Raises:
            LeaseReleasedError: it is not held.
        """
        return self._entered().ref

    @property
    def waits_for_slots(self) -> bool:
        """Whether it stands in a queue for slots now, in whatever task: to be entered, to grow, or for a copy.

        Not while it waits there for a gate, or for what another lease computes.
        """
        hold, tiers = self._hold, self._cache._leases.tiers
        if hold.waiting:
            return self._cache._pressure.is_short(hold)
        return tiers is not None and not hold.entered and tiers.loads.is_queued_for(hold)

    @property
    def urgency(self) -> int:
        """The highest priority among this lease and those that wait for what it computes (`join`). Does not wait.

        Its own where nobody waits for it: before it is entered, as soon as what they want is committed, and after its
        end. A scheduler that computes first, and preempts last, by this has nobody urgent wait behind the less urgent.
        """
        return self._cache._leases.joins.urgency(self._hold)

    @property
    @short_method("slots")
    def slots(self) -> torch.Tensor:
        """The slots of its tokens, in token order: an int64 CPU tensor of shape `[num_tokens]`. Does not wait.

        Made when asked for and kept until something changes; do not write into it.

        Raises:
            LeaseReleasedError: it is not held.
        """
        hold = self._entered()
        state = (hold.node_id, hold.published, hold.version)
        if self._slots is None or self._slots_of != state:
            self._slots = torch.from_numpy(self._cache._leases.slots_of(hold))
            self._slots_of = state
        return self._slots

    def slots_on(self, device: torch.device | str) -> torch.Tensor:
        """`slots` copied to a device without blocking the host: int64, shape `[num_tokens]`. Does not wait."""
        slots = self.slots
        if torch.device(device).type == "cuda":
            slots = slots.pin_memory()
        return slots.to(device, non_blocking=True)

    def page_table(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The page ids of its tokens, in token order, the last page perhaps partly used: int32. Does not wait.

        Args:
            out: written to and returned, cut to shape `[num_pages]`; on whatever device.

        Raises:
            UsageError: `out` is too short.
        """
        page_size = self._cache._params.page_size
        pages = (self.slots[::page_size] // page_size).to(torch.int32)
        if out is None:
            return pages
        if out.ndim != 1 or len(out) < len(pages):
            raise UsageError(
                f"out must have one dimension and room for {len(pages)} pages, got shape {tuple(out.shape)}"
            )
        return out[: len(pages)].copy_(pages, non_blocking=True)

    # ---- growing and publishing ----

    def _check_growth(self, num_tokens: int) -> tuple[Hold, int]:
        hold = self._entered()
        cache = self._cache
        if cache._calls.closed:
            raise closed_error()
        count = num_tokens if type(num_tokens) is int and num_tokens >= 0 else count_of("num_tokens", num_tokens)
        if hold.waiting:
            raise UsageError(f"the lease opened at {hold.where} waits for slots already, in another task")
        if count > cache._pool.allocator.num_slots:  # compiled code counts in 64 bits
            self._check_size(hold, count)
        return hold, count

    def _check_size(self, hold: Hold, num_tokens: int) -> None:
        """Asked only of what cannot be had now."""
        page_size, pool = self._cache._params.page_size, self._cache._pool
        if hold.published + -(-(hold.num_own + num_tokens) // page_size) * page_size > pool.capacity:
            raise too_large(hold.num_tokens + num_tokens, pool)

    @short_method("allocate")
    async def allocate(self, num_tokens: int) -> None:
        """Add slots for so many more tokens: the rest of its last page first. Waits its turn under pressure.

        Every lease that does not wait counts as one that may be released, also one that this very task holds, or that
        is held until this task ends: who grows one lease with another in hand bounds the wait with `anyio.fail_after`,
        or asks with `allocate_nowait`.

        Raises:
            RequestTooLargeError: it can never fit.
            RetractError: everybody waits, and this is the youngest: release it and try again later.
            CacheClosedError: the cache is closed, or was closed meanwhile.
            LeaseReleasedError: it is not held, or was released meanwhile.
        """
        hold, count = self._check_growth(num_tokens)
        cache = self._cache
        if cache._calls.is_turn_over():
            await checkpoint()
            hold, count = self._check_growth(num_tokens)
        if not cache._pressure.grow_now(hold, count):
            self._check_size(hold, count)
            cache._gates.forbid_waiting("slots")
            await cache._pressure.wait(SlotWaiter(hold, count, reserve=False))
            self._entered()

    def allocate_nowait(self, num_tokens: int) -> None:
        """As `allocate`, but never waits: under `write_back` what it evicts goes without a copy.

        Raises:
            OutOfSlotsError: there is not enough room now, or others wait for slots already.
        """
        hold, count = self._check_growth(num_tokens)
        cache = self._cache
        tiers = cache._leases.tiers
        if not (cache._pressure.grow_now(hold, count) if tiers is None else tiers.grow_hastily(hold, count)):
            self._check_size(hold, count)
            raise OutOfSlotsError(
                f"no room for {count} more tokens now: {cache._pool.allocator.available_size()} slots are free, "
                f"{cache._pool.allocator.fenced_size()} fenced, {cache._core.evictable_tokens} evictable, and "
                f"{len(cache._pressure.growth)} leases wait to grow; retract a request, or await allocate()"
            )

    @short_method("commit")
    def commit(self, key: RadixKey, *, priorities: Sequence[PriorityRange] = ()) -> InsertResult:
        """Publish the whole pages of `key`, whose KV is computed or in flight on the lease's streams. Does not wait.

        Where the tree holds some of it already, this lease's duplicates are retired and `slots` names the tree's
        instead (`InsertResult.repointed`). Nothing is published after a flush of what it stands on, below a subtree
        that somebody has or wants exclusively, or with `store=False`; the slots stay the lease's then.

        Args:
            key: in the lease's namespace; it and the lease's key are prefixes of one another.
            priorities: of parts of the key, in place of the lease's own, the later ones over the earlier ones. A page
                is of the range that its first token is in; only what is published by now is concerned, and what
                another commit said of the same tokens is replaced. For policies that look at priorities.

        Raises:
            UsageError: another namespace, another prefix, shorter than what is matched or committed, or longer than the
                slots held. Nothing was changed.
            TransferError: an event could not be recorded, or a stream not made to wait; the cache ends.
        """
        hold = self._entered()
        if not all(isinstance(part, PriorityRange) for part in priorities):
            raise UsageError(f"priorities must be PriorityRange(start, stop, priority, duration), got {priorities!r}")
        leases, view = self._cache._leases, self._cache._view(key)
        done = leases.publish(hold, key, view)
        if done is None:
            self._check_commit(hold, view)
            done = leases.commit(hold, key, view)
        if priorities:
            leases.prioritize(hold, priorities)
        if hold.joins and not leases.joins.progressed(hold):
            self._short_calls = self._cache._short_calls
        return done

    def _check_commit(self, hold: Hold, view: RadixKey) -> None:
        key = hold.key
        num_tokens, unit = view.num_items, "bigrams" if view.is_bigram else "tokens"
        if not (view.is_prefix_of(key) if num_tokens < key.num_items else key.is_prefix_of(view)):
            if view.namespace != key.namespace:
                raise UsageError(f"the key is in {view.namespace}, the lease in {key.namespace}")
            raise UsageError(
                f"the key of {num_tokens} {unit} and the lease's of {len(key)} are not prefixes of one another"
            )
        if num_tokens < hold.committed:
            raise UsageError(f"the key has {num_tokens} {unit}, but {hold.committed} are matched or committed already")
        if num_tokens > hold.published + hold.num_own:
            raise UsageError(
                f"the key has {num_tokens} {unit}, but slots are held for {hold.num_tokens}; allocate() first"
            )

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` and give back the slots beyond: rejected draft tokens. Does not wait.

        Raises:
            UsageError: more than it holds, or less than what is matched or published.
        """
        hold = self._entered()
        keep = count_of("num_tokens", num_tokens)
        if not hold.published <= keep <= hold.num_tokens:
            raise UsageError(
                f"cannot truncate to {keep} tokens: {hold.published} are matched or published, {hold.num_tokens} held"
            )
        if hold.waiting:
            raise UsageError(f"the lease opened at {hold.where} waits for slots in another task")
        self._cache._leases.truncate(hold, keep)

    def fork(self) -> Lease:
        """A second lease, entered already, on what this one has matched and published. Does not wait.

        For parallel sampling: both go on from there, each with slots of its own. Release it, or use `async with`.

        Raises:
            LeaseReleasedError: this one is not held.
            CacheClosedError: the cache is closed.
        """
        hold = self._entered()
        self._cache._calls.begin_open()
        caller = sys._getframe(1)
        twin = Lease(self._cache, self._cache._leases.fork(hold, caller.f_code, caller.f_lasti), None)
        twin._forked = True
        return twin

    def used_on(self, stream: Any) -> None:
        """Name a stream that touches this lease's slots; only the named ones count then. Does not wait.

        Raises:
            UsageError: nothing can be fenced behind this stream.
        """
        hold = self._entered()
        self._cache._pool.check_stream(stream)
        if hold.used is None:
            hold.used = set()
        hold.used.add(stream)

    def __repr__(self) -> str:
        hold = self._hold
        age = self._cache._params.clock() - hold.opened_when
        state = "released" if hold.released else f"held for {age:.1f} s" if hold.entered else "not entered"
        return f"<Lease {state}: {hold.num_matched} matched, {hold.num_tokens} tokens, opened at {hold.where}>"


def _in_collected_generator() -> bool:
    """Whether this runs because the event loop closes an async generator that nobody will resume.

    asyncio then drives `aclose()` itself, in a task that is nothing but that. trio warns of its own accord.
    """
    try:
        task: Any = anyio.get_current_task()
    except RuntimeError:  # no task, or no loop: whoever closes it does so by hand
        return False
    return type(getattr(task, "coro", None)).__name__ == "async_generator_athrow"
