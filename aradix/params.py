"""The records that go into the cache and come out of it.

Records only: no torch, no waiting. Counts are in tokens unless the name says otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from aradix.errors import ConfigError, UsageError
from aradix.keys import RadixKey
from aradix.policies import policy_named

if TYPE_CHECKING:
    import torch

__all__ = [
    "CacheInitParams",
    "CacheStats",
    "EvictParams",
    "EvictResult",
    "FlushResult",
    "InsertParams",
    "InsertResult",
    "MatchPrefixParams",
    "MatchResult",
    "NodeRef",
    "PriorityRange",
    "TenantStats",
]


_ROUNDING = 1e-6
"""What fractions may be off by, as 0.29 * 100 is."""


class NodeRef(NamedTuple):
    """A place in the tree: the end of a prefix.

    Args:
        node_id: generation-tagged: ids are never used again, and trimming a node gives it a new one.
        depth: tokens from the root to this place; inside the node or at its end.
    """

    node_id: int
    depth: int


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class CacheInitParams:
    """How a cache is set up; all of it is checked at construction.

    Args:
        allocator: the `SlotAllocator` whose slots the cache owns.
        page_size: tokens a page; the allocator's own.
        disable: match nothing, publish nothing.
        is_eagle: keys are looked up by bigrams (EAGLE): N tokens are N-1 bigrams.
        eviction_policy: a name from `aradix.policies`, or an object with a `rank` method.
        evict_unit: `"page"` trims as many pages as asked from the tail of the least valuable leaf; `"node"` takes
            whole leaves.
        low_watermark: fraction of the pool; below it the background evictor starts.
        high_watermark: fraction of the pool; there it stops. 0 and 0 switch it off.
        streams: the engine's streams; slots are reused only behind what these were doing when they came back.
        waiters_keep_pins: what a lease waiting to be entered (`reserve=`) holds meanwhile: its prefix (fast where the
            pool is roomy), or nothing (better where it is tight).
        enable_kv_cache_events: record events for `take_events()`.
        pin_budget: fraction of the pool that the pins of `cache.pin` may hold together, what several hold counting for
            each; `None` for no limit.
        quotas: by tenant (a field of `Namespace`), the fraction of the pool that it has a claim on. What a tenant has
            is what is cached of it, pinned or not, and what its leases hold. Under pressure the tenant most above its
            claim gives first, its own least valuable leaves, and the one that asks is counted as if it had what it
            asks for. Nobody is refused: unused claims are lent, and what running leases hold cannot be taken. The
            background evictor leaves every tenant its claim, even below the watermark. All tenants without a quota
            (no tenant is one of them) share the rest.
        tree_core: `"auto"`, `"python"` or `"cpp"`.
        kv_pool: the device's KV pool, which a cache with a host tier copies from and to.
        host: the `HostKVPool` that a `HiRadixCache` keeps what left the device in.
        storage: a page store behind the host, for what should outlive the process.
        model_id: names the weights, down to the revision, in the page store: KV of other weights is wrong KV.
        prefetch_timeout_s: seconds that a lease waits for the page store, at most.
        write_policy: when tokens are copied to the host: `"write_through"` as soon as they are published,
            `"write_through_selective"` once they were found again, `"write_back"` when they are evicted.
        load_back_threshold: fewer host-resident tokens than this are computed again and not copied.
        copier: how the device copies, where the pool's own way is not wanted: a virtual device brings its own.
        req_to_token_pool: the table of requests, for `cache_unfinished_req` and `cache_finished_req`.
        clock: seconds, for the age of leases; never for the order of eviction.

    Raises:
        ConfigError: a value that cannot work, with the value and what would.
    """

    allocator: Any
    page_size: int = 1
    disable: bool = False
    is_eagle: bool = False
    eviction_policy: Any = "lru"
    low_watermark: float = 0.05
    high_watermark: float = 0.10
    _: KW_ONLY
    evict_unit: Literal["page", "node"] = "page"
    streams: tuple[Any, ...] = ()
    waiters_keep_pins: bool = True
    enable_kv_cache_events: bool = False
    pin_budget: float | None = None
    quotas: Mapping[str | int, float] = field(default_factory=dict, hash=False)
    tree_core: Literal["auto", "python", "cpp"] = "auto"
    kv_pool: Any = None
    host: Any = None
    storage: Any = None
    model_id: str = ""
    prefetch_timeout_s: float = 0.5
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through_selective"
    load_back_threshold: int = 10
    copier: Any = None
    req_to_token_pool: Any = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if isinstance(self.page_size, bool) or not isinstance(self.page_size, int) or self.page_size < 1:
            raise ConfigError(f"page_size must be an int of at least 1, got {self.page_size!r}")
        for needed in ("alloc_held", "free_held", "num_slots", "page_size"):
            if not hasattr(self.allocator, needed):
                raise ConfigError(f"allocator must be a SlotAllocator, got {type(self.allocator).__name__}")
        if self.allocator.page_size != self.page_size:
            raise ConfigError(
                f"page_size is {self.page_size} but the allocator's is {self.allocator.page_size}; they must be equal"
            )
        self._check_watermarks()
        self._check_quotas()
        _check_choice("evict_unit", self.evict_unit, ("page", "node"))
        _check_choice("tree_core", self.tree_core, ("auto", "python", "cpp"))
        self._check_tiers()
        for name in ("disable", "is_eagle", "waiters_keep_pins", "enable_kv_cache_events"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be a bool, got {getattr(self, name)!r}")
        table = self.req_to_token_pool
        if table is not None and not (hasattr(table, "req_to_token") and callable(getattr(table, "write", None))):
            raise ConfigError(f"req_to_token_pool must have req_to_token and write(), got {type(table).__name__}")
        if not callable(self.clock):
            raise ConfigError(f"clock must be callable and give seconds, got {self.clock!r}")
        policy_named(self.eviction_policy)
        if isinstance(self.streams, str) or not isinstance(self.streams, Iterable):
            raise ConfigError(f"streams must be a tuple of the engine's streams, got {self.streams!r}")
        object.__setattr__(self, "streams", tuple(self.streams))
        if str(self.allocator.device).startswith("cuda") and not self.streams:
            raise ConfigError("on CUDA the engine's streams must be named: streams=(torch.cuda.current_stream(), ...)")

    def _check_tiers(self) -> None:
        _check_choice("write_policy", self.write_policy, ("write_through", "write_through_selective", "write_back"))
        threshold = self.load_back_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 1:
            raise ConfigError(f"load_back_threshold must be an int of at least 1, got {threshold!r}")
        if not isinstance(self.model_id, str):
            raise ConfigError(f"model_id must be a str, got {self.model_id!r}")
        timeout = self.prefetch_timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ConfigError(f"prefetch_timeout_s must be above 0, got {timeout!r}")
        for needed in ("exists", "get", "put", "clear", "take_faults") if self.storage is not None else ():
            if not hasattr(self.storage, needed):
                raise ConfigError(f"storage must be a page store, got {type(self.storage).__name__}")
        if self.host is None:
            if self.storage is not None:
                raise ConfigError("storage= needs host=: pages go to a store and come back by way of the host")
            return
        for needed in ("allocator", "format_id", "page_ids"):
            if not hasattr(self.host, needed):
                raise ConfigError(f"host must be a HostKVPool, got {type(self.host).__name__}")
        for needed in ("format_id", "page_ids", "num_slots"):
            if not hasattr(self.kv_pool, needed):
                raise ConfigError(
                    f"host= needs kv_pool=, the pool whose slots the allocator hands out, got "
                    f"{type(self.kv_pool).__name__}"
                )
        if self.kv_pool.num_slots < self.allocator.num_slots:
            raise ConfigError(
                f"kv_pool has {self.kv_pool.num_slots} slots, too few for the allocator's {self.allocator.num_slots}"
            )
        if not self.page_size == self.kv_pool.page_size == self.host.page_size:
            raise ConfigError(
                f"page_size is {self.page_size}, kv_pool's is {self.kv_pool.page_size} and host's is "
                f"{self.host.page_size}; they must be equal"
            )

    def _check_watermarks(self) -> None:
        for name in ("low_watermark", "high_watermark", "pin_budget"):
            value = getattr(self, name)
            if name == "pin_budget" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"{name} must be a fraction of the pool from 0 to 1, got {value!r}")
        if self.low_watermark > self.high_watermark:
            raise ConfigError(
                f"low_watermark {self.low_watermark} is above high_watermark {self.high_watermark}; "
                "eviction starts below low and stops at high"
            )

    def _check_quotas(self) -> None:
        if not isinstance(self.quotas, Mapping):
            raise ConfigError(f"quotas must be a dict of tenant: fraction of the pool, got {self.quotas!r}")
        object.__setattr__(self, "quotas", dict(self.quotas))
        for tenant, fraction in self.quotas.items():
            if type(tenant) not in (str, int):
                raise ConfigError(f"quotas: a tenant is a str or an int, as in Namespace(tenant=...), got {tenant!r}")
            if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
                raise ConfigError(
                    f"quotas: the share of tenant {tenant!r} must be a fraction of the pool above 0 and at most 1, "
                    f"got {fraction!r}"
                )
            if not _whole_pages(fraction, self.allocator):
                raise ConfigError(
                    f"quotas: {fraction} of {self.allocator.num_slots} slots for tenant {tenant!r} is less than one "
                    f"page of {self.page_size}; use a larger fraction or pool, or leave the tenant out"
                )
        total = sum(self.quotas.values())
        if total > 1 + _ROUNDING:
            raise ConfigError(f"quotas: the shares {self.quotas} make {total} of the pool; they may make at most 1")

    def pin_tokens(self) -> int | None:
        """The most tokens that all pins may hold; `None` for no limit."""
        return None if self.pin_budget is None else _whole_pages(self.pin_budget, self.allocator)

    def shares(self) -> list[tuple[str | int | None, int]]:
        """Each tenant with its quota in tokens, whole pages; last `None` with the rest. Empty without quotas."""
        if not self.quotas:
            return []
        shares: list[tuple[str | int | None, int]] = [
            (tenant, _whole_pages(fraction, self.allocator)) for tenant, fraction in self.quotas.items()
        ]
        return [*shares, (None, self.allocator.num_slots - sum(num_tokens for _, num_tokens in shares))]


def _whole_pages(fraction: float, allocator: Any) -> int:
    """A fraction of a pool in tokens, rounded down to whole pages."""
    page_size: int = allocator.page_size
    return int(fraction * allocator.num_slots + _ROUNDING) // page_size * page_size


@dataclass(frozen=True, slots=True)
class MatchPrefixParams:
    """What to look up."""

    key: RadixKey


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest cached prefix of a key, not pinned.

    Args:
        device_indices: int64 CPU tensor of shape `[num_matched]`: the slots, in token order.
        last_device_node: where the match ends on the device; give it to `inc_lock_ref` before the next await.
        last_host_node: where it ends on the host; the same place in a cache without a host tier.
        best_match_node: the deeper of the two.
        host_hit_length: tokens beyond the device match that the host holds.
    """

    device_indices: torch.Tensor
    last_device_node: NodeRef
    last_host_node: NodeRef
    best_match_node: NodeRef
    host_hit_length: int = 0


@dataclass(frozen=True, slots=True)
class InsertParams:
    """What to insert: a key, and the slot of each of its tokens (int64, at least as many as the key's items)."""

    key: RadixKey
    value: Any
    priority: int = 0


class InsertResult(NamedTuple):
    """What an insert or a commit did.

    Args:
        prefix_len: tokens of the key that the tree held already.
        node: where the published key ends.
        duplicates: int64 CPU tensor: slots of the caller that the tree did not adopt, in the order given: first those
            whose tokens it held already in other slots, last the tail that fills no page. After `insert` they are
            the caller's to free; after `lease.commit` the duplicates are freed already and the tail is the lease's.
        num_adopted: slots that the tree took over.
        repointed: after `lease.commit` the half-open range of `lease.slots` that now names other slots.
    """

    prefix_len: int
    node: NodeRef
    duplicates: torch.Tensor
    num_adopted: int = 0
    repointed: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class PriorityRange:
    """A part of a prompt that is worth more, or less, than the rest; for policies that look at priorities.

    Source of the shape: TensorRT-LLM's `KvCacheRetentionConfig`.

    Args:
        start: the first token.
        stop: the token behind the last; `None` is the end of what is committed.
        priority: higher stays longer.
        duration: seconds on the cache's clock, after which the lease's own priority (or a higher one, of another lease
            that committed the same tokens) counts again; `None` is for good, or until a higher one comes.

    Raises:
        UsageError: a range of no tokens, a priority that is no int, a duration that is not above 0 and finite.
    """

    start: int
    stop: int | None
    priority: int
    duration: float | None = None

    def __post_init__(self) -> None:
        for name in ("start", "stop", "priority"):
            value = getattr(self, name)
            if type(value) is not int and not (name == "stop" and value is None):
                raise UsageError(f"{name} of a priority range must be an int, got {value!r}")
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise UsageError(f"a priority range must have tokens, got those from {self.start} to {self.stop}")
        seconds = self.duration
        if seconds is not None and (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not seconds > 0
            or not math.isfinite(seconds)
        ):
            raise UsageError(f"duration of a priority range must be seconds above 0, or None; got {seconds!r}")


@dataclass(frozen=True, slots=True)
class EvictParams:
    """How many tokens to evict."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class EvictResult:
    """How many tokens came back; they may still be fenced."""

    num_freed_tokens: int


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What a flush gave back at once, and what comes back when the leases on it end."""

    num_freed_tokens: int
    num_held_tokens: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A frozen view of the counters, in tokens unless named otherwise.

    Each slot is in one place: `free + fenced + evictable + protected + leased + outside + quarantined == num_slots`.

    Args:
        num_slots: of the pool.
        free: can be handed out now.
        fenced: retired; a stream or a copy may still touch them.
        evictable: cached, pinned by nobody.
        protected: cached and pinned.
        leased: held by leases, and not in the tree (any more): uncommitted, or flushed since; and by copies from the
            host that are under way.
        detached: the part of `leased` that was flushed.
        outside: handed out by the allocator to somebody else than this cache.
        quarantined: lost to a fence that could not be recorded.
        num_nodes: of the tree, roots of namespaces not counted.
        num_namespaces: that the tree has a root for.
        num_leases: entered and not released.
        num_slot_waiters: calls that wait for slots.
        queries: admitted leases.
        query_tokens: tokens of their keys.
        hit_tokens: tokens they found.
        evicted: so far.
        resumes: leases entered with `resume=True`; not counted as queries.
        retracts: waiters told to give way.
        slot_waits: calls that had to wait for slots, so far.
        num_pins: of `cache.pin` that hold something.
        pinned: by them, and so a part of `protected`; what several pins hold counts for each.
        gate_waits: calls that had to wait for a subtree that somebody wanted alone, so far.
        num_joiners: leases that wait for what another one computes (`join=True`).
        joins: leases that had to wait for that, so far.
        joined_tokens: tokens that they found after it and not before, so far.
        join_takeovers: those whose leader ended before it had committed all, and that computed the rest, so far.
        loading: the part of `leased` that copies from the host are being made into.
        host_slots: of the host pool; what follows is about a cache that has one.
        host_free: can be handed out now.
        host_used: cached on the host, on the device too or not.
        host_evictable: cached on the host alone, and in no copy.
        storing: host slots that copies from the device are being made into, or that were flushed and are in a copy.
        load_backs: copies from the host, so far.
        load_back_tokens: tokens that they brought.
        backups: copies to the host, so far.
        backuped_tokens: tokens that they brought there.
        failed_copies: copies of which a part or all failed, so far.
        host_evicted: tokens evicted from the host, so far.
        prefetched_tokens: tokens that came from the storage tier, so far.
        archived_tokens: tokens that were put there, or found there already, so far.
        unarchived_tokens: tokens that were not put there, since half of the host waited for that already, so far.
    """

    num_slots: int
    free: int
    fenced: int
    evictable: int
    protected: int
    leased: int
    detached: int
    outside: int
    quarantined: int
    num_nodes: int
    num_namespaces: int
    num_leases: int
    num_slot_waiters: int
    queries: int
    query_tokens: int
    hit_tokens: int
    evicted: int
    resumes: int
    retracts: int = field(default=0)
    slot_waits: int = field(default=0)
    gate_waits: int = field(default=0)
    loading: int = field(default=0)
    host_slots: int = field(default=0)
    host_free: int = field(default=0)
    host_used: int = field(default=0)
    host_evictable: int = field(default=0)
    storing: int = field(default=0)
    load_backs: int = field(default=0)
    load_back_tokens: int = field(default=0)
    backups: int = field(default=0)
    backuped_tokens: int = field(default=0)
    failed_copies: int = field(default=0)
    host_evicted: int = field(default=0)
    prefetched_tokens: int = field(default=0)
    archived_tokens: int = field(default=0)
    unarchived_tokens: int = field(default=0)
    num_pins: int = field(default=0)
    pinned: int = field(default=0)
    num_joiners: int = field(default=0)
    joins: int = field(default=0)
    joined_tokens: int = field(default=0)
    join_takeovers: int = field(default=0)


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What one tenant has and had, in tokens unless named otherwise.

    Args:
        share: that its quota is a claim on.
        cached: in the tree, pinned or not; and flushed, while leases hold them.
        leased: slots of its leases that are not in the tree.
        evicted: so far.
        queries: admitted leases, so far.
        query_tokens: of their keys.
        hit_tokens: that they found.
    """

    share: int
    cached: int
    leased: int
    evicted: int
    queries: int
    query_tokens: int
    hit_tokens: int
