"""`HiRadixCache` in SGLang's shape: the same cache with a host tier below the device.

A store runs while the engine goes on; the cache takes note of its end in whatever call comes next. A load is waited
for, since what it brings is read at once.
"""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from aradix.adapters.sglang.keys import RadixKey
from aradix.adapters.sglang.nodes import NodeInTree, TreeNode
from aradix.adapters.sglang.radix_cache import RadixCache
from aradix.adapters.sglang.records import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from aradix.adapters.sglang.strategies import policy_of
from aradix.errors import ConfigError, TransferError, UsageError
from aradix.keys import RadixKey as CoreKey
from aradix.memory.allocator import SlotAllocator
from aradix.memory.host_pool import HostKVPool
from aradix.memory.kv_pool import BookKVPool, KVPool
from aradix.memory.transfer import Copy, Transfer
from aradix.params import NodeRef
from aradix.tree import make_tiered_core
from aradix.tree.protocol import NO_SLOTS, Freed, Slots
from aradix.tree.tiered import StoreJob, TieredCore

__all__ = ["HiRadixCache"]

# An insert is the first hit here, as it is there; the async cache does not count it.
_BACKUP_HITS = {"write_through": 1, "write_through_selective": 2, "write_back": None}
_GIGABYTE = 10**9

_log = logging.getLogger("aradix.adapters")


class HiRadixCache(RadixCache):
    """A prefix cache with a host tier.

    Args:
        params: as for `RadixCache`; the allocator's `get_kvcache()` is the `KVPool` of the device. Without one the tier
            only keeps books. Only the Python tree core has a host tier.
        server_args: `hicache_ratio` (host slots for one on the device; 2) or `hicache_size` (GB), and
            `hicache_write_policy`: `"write_through"`, `"write_through_selective"` or `"write_back"`.
        load_back_threshold: fewer tokens than this are not brought back.

    Raises:
        ConfigError: a value that cannot work, or a storage backend, which only the async cache has.
    """

    core: TieredCore

    def __init__(self, params: CacheInitParams, server_args: Any = None, *, load_back_threshold: int = 10) -> None:
        args = SimpleNamespace() if server_args is None else server_args
        self.hicache_write_policy = getattr(args, "hicache_write_policy", "write_through")
        if self.hicache_write_policy not in _BACKUP_HITS:
            raise ConfigError(
                f"hicache_write_policy must be one of {', '.join(_BACKUP_HITS)}, got {self.hicache_write_policy!r}"
            )
        if getattr(args, "hicache_storage_backend", None):
            raise ConfigError("hicache_storage_backend: storage lies below the async cache only; see CacheInitParams")
        hits = _BACKUP_HITS[self.hicache_write_policy]
        self.write_through_threshold = 1 if hits is None else hits
        self.load_back_threshold = load_back_threshold
        self._kv_pool = _device_pool(params)
        self.token_to_kv_pool_host = _host_pool(self._kv_pool, args)
        self.transfer = Transfer(self._kv_pool, self.token_to_kv_pool_host)
        self._stores: dict[int, tuple[Copy, Slots]] = {}
        self._reads: dict[int, list[int]] = {}
        super().__init__(params)

    def _make_core(self, **settings: Any) -> TieredCore:
        backup_hits = _BACKUP_HITS[self.hicache_write_policy]
        return make_tiered_core(
            self.params.tree_core, policy=policy_of(self.eviction_strategy), backup_hits=backup_hits, **settings
        )

    def reset(self) -> None:
        """Forget everything on both tiers, once the copies under way have ended: waits for them."""
        self._end_stores(wait=True)
        self._reads.clear()
        super().reset()
        host = self.token_to_kv_pool_host
        pages = host.allocator.pages_in("out")
        host.free((pages[:, None] * host.page_size + np.arange(host.page_size)).reshape(-1))

    def shutdown(self) -> None:
        """End the threads that copy, if there are any. Waits for what was started; twice is once."""
        self._end_stores(wait=True)
        self.transfer.close()

    # ---- what a cache does, on two tiers ----

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        self.check_hicache_events()
        if self.disable:
            return super().match_prefix(params)
        found = self._walk(self._core_key(params.key))
        device, best = self.node_at(found.last), self.node_at(found.best if found.host_hit else found.last)
        slots = self.on_device(self.core.slots_of(found.last))
        return MatchResult(slots, device, best, best, found.host_hit)

    def insert(self, params: InsertParams) -> InsertResult:
        self.check_hicache_events()
        done = super().insert(params)
        self._start(self.core.begin_stores())
        return done

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict from the device; what has a host copy stays there. Waits only with `write_back`, for the copies."""
        self.check_hicache_events()
        if self.hicache_write_policy != "write_back" or self.disable:
            return super().evict(params)
        missing = params.num_tokens
        while missing > 0:
            done = self.core.write_back(missing)
            missing -= self._free(done.freed)
            if not done.jobs:
                break
            if not self._start(done.jobs):
                break  # the host has no room
            if not self._end_stores(wait=True):
                break  # the copies failed, and would again
        if missing > 0:
            missing -= self._free(self.core.evict(missing))
        return EvictResult(num_tokens_evicted=params.num_tokens - missing)

    def evict_host(self, num_tokens: int) -> int:
        """Evict tokens that only the host holds, and nobody protects; how many it were. Does not wait."""
        before = self.core.host_tokens
        self._free(self.core.evict_host(num_tokens))
        return before - self.core.host_tokens

    def check_hicache_events(self) -> None:
        """Take note of the copies that have ended, and start what waited for them. Does not wait."""
        self._end_stores(wait=False)
        if self.core.num_due:
            self._start(self.core.begin_stores())

    # ---- device to host ----

    @property
    def ongoing_write_through(self) -> dict[int, Copy]:
        """The stores under way, by job."""
        return {job_id: copy for job_id, (copy, _) in self._stores.items()}

    def _host_slots(self, num_tokens: int) -> Slots | None:
        host = self.token_to_kv_pool_host
        slots = host.alloc(num_tokens)
        if slots is None:
            self.evict_host(num_tokens - host.available_size())
            slots = host.alloc(num_tokens)
        return None if slots is None else slots.numpy()

    def _start(self, jobs: list[StoreJob]) -> int:
        """Start these stores; how many there was room for on the host."""
        num_started = 0
        for job in jobs:
            host_slots = self._host_slots(job.end - job.start)
            if host_slots is None:
                self._free(self.core.end_store(job.job_id, None).freed)
                continue
            try:
                copy = self.transfer.store(job.slots, host_slots, after=self._streams())
            except TransferError:
                self.token_to_kv_pool_host.free(host_slots)
                self._free(self.core.end_store(job.job_id, None).freed)
                continue
            self._stores[job.job_id] = (copy, host_slots)
            num_started += 1
        return num_started

    def _end_stores(self, wait: bool) -> int:
        """End the stores whose copies have ended, in order, or all of them; how many tokens came over."""
        self.transfer.take_done()  # or it would keep every copy
        num_stored = 0
        for job_id, (copy, host_slots) in list(self._stores.items()):
            if not _has_ended(copy, wait):
                if not copy.is_lost:
                    break
                del self._stores[job_id]
                self._free(self.core.end_store(job_id, None).freed)
                _quarantine(self.token_to_kv_pool_host, host_slots, copy)
                continue
            del self._stores[job_id]
            landed = self.core.end_store(job_id, host_slots, num_ok=copy.num_tokens_done)
            num_stored += landed.num_tokens
            self._free(landed.freed)
            if len(landed.unused):
                self.token_to_kv_pool_host.free(landed.unused)
        return num_stored

    def _streams(self) -> tuple[Any, ...]:
        """What the copies come after: the stream that the model runs on."""
        return (torch.cuda.current_stream(self.device),) if self.device.type == "cuda" else ()

    # ---- host to device ----

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, Any]:
        """Bring back what only the host holds above a node: its slots, and where they end. Waits for the copy.

        All of it or nothing; nothing too where it is less than `load_back_threshold` or more than the quota, or where
        the device has no room. Lock what the match gave before, since room is made here.

        Raises:
            UsageError: the node is gone; match again.
        """
        node = params.best_match_node
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        if node is self.root_node:
            return nothing, node
        key, above = self._path_of(node)
        num_tokens = node.ref.depth - above.depth
        fits = params.mem_quota is None or num_tokens <= params.mem_quota
        if num_tokens < self.load_back_threshold or not fits or self.token_to_kv_pool_allocator is None:
            return nothing, self.node_at(above)
        root_id = self.core.match(key, limit=0, pin=True).node_id
        job = self.core.begin_load(root_id, key, limit=node.ref.depth)
        self._free(self.core.unpin(root_id, touch=False))  # from here on the job pins what it loads below
        if not job.job_id:
            return nothing, self.node_at(above)
        return self._load(job.job_id, job.host_slots, job.start, above)

    def _load(self, job_id: int, host_slots: Slots, start: int, above: NodeRef) -> tuple[torch.Tensor, Any]:
        allocator = self.token_to_kv_pool_allocator
        slots = allocator.alloc(len(host_slots))
        if slots is None:
            self.evict(EvictParams(len(host_slots)))
            slots = allocator.alloc(len(host_slots))
        num_ok = 0 if slots is None else self._copy_back(host_slots, slots)
        landed = self.core.end_load(job_id, slots.cpu().numpy() if num_ok else NO_SLOTS, num_ok)
        self._free(landed.freed)
        if len(landed.unused):
            allocator.free(self.on_device(landed.unused))
        if not landed.num_tokens:
            return torch.empty(0, dtype=torch.int64, device=self.device), self.node_at(above)
        return self.on_device(self.core.slots_of(landed.last, start)), self.node_at(landed.last)

    def _copy_back(self, host_slots: Slots, slots: torch.Tensor) -> int:
        """Copy to these slots of the device; how many came over. Where it is none, the slots are given back."""
        on_device = self.token_to_kv_pool_allocator.slots
        try:
            copy = self.transfer.load(host_slots, slots.cpu(), after=self._streams())
        except TransferError:
            on_device.free(slots.cpu())
            return 0
        if not _has_ended(copy, wait=True):
            _quarantine(on_device, slots.cpu(), copy)
            return 0
        if not copy.num_tokens_done:
            on_device.free(slots.cpu())
        return copy.num_tokens_done

    def load_back(self, node: TreeNode, mem_quota: int | None = None) -> torch.Tensor | None:
        """As `init_load_back`; `None` where nothing was brought back."""
        slots, _ = self.init_load_back(InitLoadBackParams(node, 0, mem_quota))
        return slots if len(slots) else None

    def _path_of(self, node: TreeNode) -> tuple[CoreKey, NodeRef]:
        """The key that ends at a node, and the place above it where its device part ends."""
        if not isinstance(node, NodeInTree):
            raise UsageError(f"{node!r} is no node of this cache")
        parts, above = [], NodeRef(0, 0)
        extra_key, walked = node.key.extra_key, node
        while isinstance(walked, NodeInTree):
            parts.append(walked.key.token_ids)
            if not above.depth and not walked.evicted:
                above = walked.ref
            walked = walked.parent  # type: ignore[assignment]
        ids = [token for part in reversed(parts) for token in (part[:-1] if self.is_eagle else part)]
        if self.is_eagle:
            ids.append(node.key.token_ids[-1])
        return RadixKey(ids, extra_key, self.is_eagle).to_core(), above

    # ---- what is kept for readers ----

    def protect_host(self, node: NodeInTree) -> None:
        """Keep a node's host copy. `UsageError` if it has none."""
        try:
            read = self.core.begin_read(node.ref, node.ref.depth - len(node.key))
        except KeyError as error:
            raise UsageError(f"{node!r} has no host copy to protect") from error
        self._reads.setdefault(node.ref.node_id, []).append(read.job_id)

    def release_host(self, node: NodeInTree) -> None:
        """Undo one `protect_host`. RuntimeError if there is none."""
        reads = self._reads.get(node.ref.node_id)
        if not reads:
            raise RuntimeError(f"release_host() of {node!r} without a protect_host() before it")
        self._free(self.core.end_read(reads.pop()))
        if not reads:
            del self._reads[node.ref.node_id]

    # ---- what comes back ----

    def _free(self, freed: list[Freed]) -> int:
        """Give slots back on both tiers; how many on the device."""
        num_freed = 0
        for part in freed:
            if len(part.host_slots):
                self.token_to_kv_pool_host.free(part.host_slots)
            if len(part.slots) and self.token_to_kv_pool_allocator is not None:
                self.token_to_kv_pool_allocator.free(self.on_device(part.slots))
            num_freed += len(part.slots)
        return num_freed


def _device_pool(params: CacheInitParams) -> KVPool:
    allocator = params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache() if hasattr(allocator, "get_kvcache") else None
    if pool is None:
        return BookKVPool(getattr(allocator, "size", 0) or params.page_size, params.page_size)
    if not isinstance(pool, KVPool):
        raise ConfigError(f"get_kvcache() must be a KVPool of aradix, got {type(pool).__name__}")
    return pool


def _host_pool(kv_pool: KVPool, args: Any) -> HostKVPool:
    size = getattr(args, "hicache_size", 0)
    if size:
        return HostKVPool.from_budget(int(size * _GIGABYTE), kv_pool)
    ratio = getattr(args, "hicache_ratio", 2.0)
    num_pages = int(kv_pool.num_slots * ratio) // kv_pool.page_size
    if num_pages < 1:
        raise ConfigError(f"hicache_ratio={ratio} of {kv_pool.num_slots} slots makes no page on the host")
    return HostKVPool(num_pages * kv_pool.page_size, kv_pool.page_size, kv_pool)


def _has_ended(copy: Copy, wait: bool) -> bool:
    """Whether a copy has ended, once it has if told to wait. A lost one never has."""
    try:
        if wait:
            with contextlib.suppress(Exception):  # what that means for the copy, `done` tells
                copy.synchronize()
        return copy.done()
    except TransferError:
        return False


def _quarantine(pool: SlotAllocator | HostKVPool, slots: Any, copy: Copy) -> None:
    """Take the slots of a lost copy out of use for good: nobody will know when it ends."""
    try:
        pool.free(slots, fence=copy.fence())
    except TransferError:
        _log.warning("%d slots are lost to %r", len(slots), copy)
