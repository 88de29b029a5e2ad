"""The replay itself: requests in flight, side by side, over a real cache.

Each does what a scheduler does: lease the prompt with its slots reserved, let others run (the engine would compute
now), commit, then decode in steps, committing as it goes. No engine runs, so the times are the cache's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import anyio
import numpy as np
from anyio.lowlevel import checkpoint

from aradix.cache.hiradix_cache import HiRadixCache
from aradix.cache.radix_cache import RadixCache
from aradix.errors import InvariantError, RetractError
from aradix.keys import RadixKey
from aradix.memory.allocator import SlotAllocator
from aradix.memory.host_pool import HostKVPool
from aradix.memory.kv_pool import BookKVPool
from aradix.memory.storage.file_store import FileStore
from aradix.params import CacheInitParams, CacheStats
from aradix.replay.request import Request
from aradix.replay.schedule import Schedule

__all__ = ["Observed", "ReplayResult", "ReplaySetup", "TenantHits", "check_idle", "replay"]

Observed = Callable[[RadixCache], AbstractAsyncContextManager[None]]

_BUSY_PART = 0.8
DECODE_STEP_TOKENS = 64
"""Output tokens allocated and committed at a time."""


_PATIENCE_S = 60.0
"""How long a replay waits for its page store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetup:
    """One run: the cache, and how it is driven.

    Args:
        join: whether a request waits for what another one in flight computes, instead of computing the same.
        pace: requests begun a second at most. Each then takes its time, so that most of `concurrency` is in flight.
    """

    policy: str
    num_pages: int
    page_size: int
    concurrency: int = 1
    low_watermark: float = 0.05
    high_watermark: float = 0.10
    core: Any = "auto"
    outputs: bool = False
    num_host_pages: int = 0
    write_policy: Any = "write_through_selective"
    storage: Path | None = None
    join: bool = False
    pace: float | None = None

    def cache_params(self, num_pages: int | None = None) -> CacheInitParams:
        """The cache's parameters, with a pool of its own of `num_pages` or the run's size.

        Raises:
            ConfigError: a value that cannot work.
        """
        num_slots = (self.num_pages if num_pages is None else num_pages) * self.page_size
        tiers: dict[str, Any] = {}
        if self.num_host_pages:
            # Pools that only keep books: the cache does all it does elsewhere, and nothing is copied.
            kv_pool = BookKVPool(num_slots, self.page_size)
            tiers = {
                "kv_pool": kv_pool,
                "host": HostKVPool(self.num_host_pages * self.page_size, self.page_size, kv_pool),
                "write_policy": self.write_policy,
                # A replay shows what a store holds, not how fast this machine's disk is today.
                "storage": None if self.storage is None else FileStore(self.storage, timeout_s=_PATIENCE_S),
                "prefetch_timeout_s": _PATIENCE_S,
                "model_id": "replay",
            }
        return CacheInitParams(
            allocator=SlotAllocator(num_slots, page_size=self.page_size),
            page_size=self.page_size,
            eviction_policy=self.policy,
            low_watermark=self.low_watermark,
            high_watermark=self.high_watermark,
            tree_core=self.core,
            **tiers,
        )


class TenantHits(NamedTuple):
    """What one tenant's requests came to. `tenant` is "" where they name none; counts are in tokens."""

    tenant: str
    num_requests: int
    input_tokens: int
    hit_tokens: int

    @property
    def hit_ratio(self) -> float:
        """Input tokens found in the cache, of all input tokens."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one run found. Counts are in tokens unless named otherwise; percentiles in microseconds.

    Args:
        seconds: of the replay, without reading the trace and expanding its blocks.
        num_waits: calls that had to wait for slots.
        num_retracts: waiters that had to give way, and came back.
        tenants: the same for each tenant, the largest first; none where nobody counted.
        load_back_tokens: of the hits, those that came back from the host.
        backuped_tokens: copied to the host.
        prefetched_tokens: that came from the page store.
        num_joins: requests that waited for what another one computed.
        joined_tokens: of the hits, those that such requests found after that and not before.
        num_takeovers: those that had to compute it in the end, since the other one did not.
    """

    setup: ReplaySetup
    num_requests: int
    input_tokens: int
    hit_tokens: int
    output_tokens: int
    evicted_tokens: int
    num_waits: int
    num_retracts: int
    lease_p50_us: float
    lease_p99_us: float
    seconds: float
    tenants: tuple[TenantHits, ...] = ()
    load_back_tokens: int = 0
    backuped_tokens: int = 0
    prefetched_tokens: int = 0
    num_joins: int = 0
    joined_tokens: int = 0
    num_takeovers: int = 0

    @property
    def prefill_tokens(self) -> int:
        """Input tokens that an engine had to compute."""
        return self.input_tokens - self.hit_tokens

    @property
    def hit_ratio(self) -> float:
        """Input tokens found in the cache, of all input tokens."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def requests_per_s(self) -> float:
        """Requests done in a second."""
        return self.num_requests / self.seconds if self.seconds else 0.0


async def replay(
    requests: Iterator[Request],
    setup: ReplaySetup,
    on_progress: Callable[[int], None] | None = None,
    observed: Observed | None = None,
) -> ReplayResult:
    """Drive a cache over requests, `setup.concurrency` of them in flight. Waits until the last one is done.

    Args:
        requests: in order; read as they are needed.
        setup: of the run.
        on_progress: told how many requests are done, after each.
        observed: opened around the replay with its cache; the cache closes after it was left.

    Raises:
        ReplayError: the trace broke off.
        ConfigError: the setup cannot work.
        InvariantError: the cache was not whole afterwards, or a slot was missing.
    """
    run = _Run(requests, setup, on_progress, observed)
    try:
        return await run.finish()
    except BaseExceptionGroup as group:
        # One failed request ends the run, and its error is the run's: callers look for that, not for a group.
        leaf: BaseException = group
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        raise leaf from None


class _Run:
    """The counters of a run and the requests that write them."""

    def __init__(
        self,
        requests: Iterator[Request],
        setup: ReplaySetup,
        on_progress: Callable[[int], None] | None,
        observed: Observed | None,
    ) -> None:
        self._setup = setup
        self._schedule = Schedule(requests)
        self._on_progress = on_progress
        self._observed = observed
        self._next_at = 0.0
        self._capacity = setup.num_pages * setup.page_size
        self._lease_seconds = array("d")
        self._expand_seconds = 0.0
        self._num_requests = 0
        self._num_retracts = 0
        self._input_tokens = 0
        self._hit_tokens = 0
        self._tenants: dict[str, list[int]] = {}
        self._output_tokens = 0

    async def finish(self) -> ReplayResult:
        """Run all requests, then check that the idle cache is whole."""
        params = self._setup.cache_params()
        async with AsyncExitStack() as stack:
            made = HiRadixCache(params) if params.host is not None else RadixCache(params)
            cache = await stack.enter_async_context(made)
            if self._observed is not None:
                await stack.enter_async_context(self._observed(cache))
            begun = perf_counter()
            async with anyio.create_task_group() as workers:
                for _ in range(self._setup.concurrency):
                    workers.start_soon(self._work, cache)
            seconds = perf_counter() - begun - self._schedule.read_seconds - self._expand_seconds
            while (stats := cache.stats()).storing:
                await checkpoint()
            cache.check()
            check_idle(stats)
        if params.storage is not None:
            await params.storage.aclose()
        lease_us = np.frombuffer(self._lease_seconds, np.float64) * 1e6 if self._lease_seconds else np.zeros(1)
        p50, p99 = np.percentile(lease_us, (50, 99))
        return ReplayResult(
            setup=self._setup,
            num_requests=self._num_requests,
            input_tokens=self._input_tokens,
            hit_tokens=self._hit_tokens,
            output_tokens=self._output_tokens,
            evicted_tokens=stats.evicted,
            num_waits=stats.slot_waits,
            num_retracts=self._num_retracts,
            lease_p50_us=float(p50),
            lease_p99_us=float(p99),
            seconds=seconds,
            tenants=tuple(
                TenantHits(tenant, *counts)
                for tenant, counts in sorted(self._tenants.items(), key=lambda item: (-item[1][1], item[0]))
            ),
            load_back_tokens=stats.load_back_tokens,
            backuped_tokens=stats.backuped_tokens,
            prefetched_tokens=stats.prefetched_tokens,
            num_joins=stats.joins,
            joined_tokens=stats.joined_tokens,
            num_takeovers=stats.join_takeovers,
        )

    async def _work(self, cache: RadixCache) -> None:
        while (request := await self._schedule.take()) is not None:
            if self._setup.pace is not None:
                at = max(self._next_at, anyio.current_time())
                self._next_at = at + 1 / self._setup.pace
                await anyio.sleep_until(at)
            hit_tokens = await self._serve(cache, request)
            self._schedule.finish(request)
            self._num_requests += 1
            self._input_tokens += request.input_tokens
            counts = self._tenants.setdefault(request.tenant, [0, 0, 0])
            counts[0] += 1
            counts[1] += request.input_tokens
            counts[2] += hit_tokens
            if self._on_progress is not None:
                self._on_progress(self._num_requests)

    async def _serve(self, cache: RadixCache, request: Request) -> int:
        """Run one request; gives how many of its input tokens were found."""
        begun = perf_counter()
        tokens = request.prompt(self._capacity)
        num_prompt = len(tokens)
        if self._setup.outputs and len(request.output):
            tokens = np.concatenate((tokens, request.output[: self._capacity - num_prompt]))
        self._expand_seconds += perf_counter() - begun
        if num_prompt == 0:
            return 0
        key = RadixKey(tokens, request.extra_key)
        hit_tokens, held = await self._prefill(cache, key, num_prompt, request.input_tokens)
        while held < len(key):
            self._num_retracts += 1
            held = await self._resume(cache, key)
        self._output_tokens += len(key) - num_prompt
        return hit_tokens

    async def _prefill(self, cache: RadixCache, key: RadixKey, num_prompt: int, weight: int) -> tuple[int, int]:
        """Compute the prompt and decode what fits; gives how much was found, and how much of the key was committed."""
        prompt = key[:num_prompt]
        asked = perf_counter()
        async with cache.lease(prompt, reserve=num_prompt, join=self._setup.join) as lease:
            self._lease_seconds.append(perf_counter() - asked)
            hit_tokens = min(lease.num_matched, weight)
            self._hit_tokens += hit_tokens
            await self._compute()
            lease.commit(prompt)
            held = num_prompt
            while held < len(key):
                step = min(DECODE_STEP_TOKENS, len(key) - held)
                try:
                    await lease.allocate(step)
                except RetractError:
                    return hit_tokens, held
                await self._compute(step / (len(key) - num_prompt))
                held += step
                lease.commit(key[:held])
        return hit_tokens, held

    async def _compute(self, part: float = 1.0) -> None:
        """Where an engine would compute, a part of a prefill or of a decode: others have their turn. Waits."""
        if self._setup.pace is None:
            await checkpoint()
        else:
            await anyio.sleep(part * _BUSY_PART / 2 * self._setup.concurrency / self._setup.pace)

    async def _resume(self, cache: RadixCache, key: RadixKey) -> int:
        """After a retract: come back with all that the request will ever need, so that it cannot be stuck again."""
        async with cache.lease(key, reserve=len(key), resume=True, join=self._setup.join) as lease:
            await self._compute()
            lease.commit(key)
        return len(key)


def check_idle(stats: CacheStats) -> None:
    """With nobody at work every slot is free, evictable, or behind a fence. Does not wait.

    Raises:
        InvariantError: some are elsewhere, or leases are open.
    """
    idle = stats.free + stats.fenced + stats.evictable
    if idle != stats.num_slots or stats.num_leases:
        raise InvariantError(
            f"after the replay {idle} of {stats.num_slots} slots are accounted for (free {stats.free}, fenced "
            f"{stats.fenced}, evictable {stats.evictable}, protected {stats.protected}, leased {stats.leased}) "
            f"and {stats.num_leases} leases are open"
        )
