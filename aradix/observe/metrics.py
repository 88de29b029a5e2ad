"""`CacheMetrics`: a cache's figures for Prometheus, under the names that dashboards of SGLang and vLLM know.

Counters are the cache's own, so a request counts once however often it asked: when it is admitted. What waited, how
long leases lasted and what was evicted at what age comes from a watcher, which exists only while this is open.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aradix.cache.home import Home
from aradix.cache.radix_cache import RadixCache
from aradix.cache.watch import Watcher, watch
from aradix.errors import AradixError, ConfigError, UsageError
from aradix.keys import Namespace
from aradix.observe.labels import namespace_label
from aradix.params import CacheStats

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry
except ImportError as error:
    raise ImportError("CacheMetrics needs prometheus-client: pip install 'aradix[metrics]'") from error

if TYPE_CHECKING:
    from aradix.cache.hold import Hold

__all__ = ["CacheMetrics"]

_log = logging.getLogger("aradix.observe")

_PREFIX = "aradix:"
_RECENT_QUERIES = 1_000
_TICK_SECONDS = 0.01
_MAX_TICKS = 4_096
_SCRAPE_SECONDS = 1.0

_SHORT = (1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0, 5.0, 30.0)
_LONG = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0)

_Read = Callable[[CacheStats], float]


def _used(stats: CacheStats) -> int:
    """Slots that are neither free, nor on their way, nor evictable."""
    return stats.num_slots - stats.free - stats.fenced - stats.evictable


_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("token_usage", "Part of the pool in use: neither free, fenced nor evictable.", lambda s: _used(s) / s.num_slots),
    ("kv_cache_usage_perc", "The same, under vLLM's name (1 is all).", lambda s: _used(s) / s.num_slots),
    ("kv_used_tokens", "Slots in use.", _used),
    ("kv_available_tokens", "Slots that can be handed out now.", lambda s: s.free),
    ("kv_evictable_tokens", "Cached tokens that nobody pins.", lambda s: s.evictable),
    ("kv_protected_tokens", "Cached tokens that somebody pins.", lambda s: s.protected),
    ("kv_total_tokens", "Slots of the pool.", lambda s: s.num_slots),
    ("leased_tokens", "Slots that leases hold and the tree does not.", lambda s: s.leased),
    ("fenced_slots", "Retired slots that a stream or a copy may still touch.", lambda s: s.fenced),
    ("quarantined_slots", "Slots lost to a fence that could not be recorded.", lambda s: s.quarantined),
    ("slot_waiters", "Calls that wait for slots.", lambda s: s.num_slot_waiters),
    ("joiners", "Leases that wait for what another one computes.", lambda s: s.num_joiners),
    ("leases", "Leases that are held.", lambda s: s.num_leases),
    ("tree_nodes", "Nodes of the tree.", lambda s: s.num_nodes),
    ("namespaces", "Namespaces with something cached.", lambda s: s.num_namespaces),
)

_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("queries", "Requests that were admitted, each once; resumes are not among them.", lambda s: s.queries),
    ("prefix_cache_queries", "Prompt tokens of admitted requests.", lambda s: s.query_tokens),
    ("prefix_cache_hits", "Prompt tokens of admitted requests that were cached.", lambda s: s.hit_tokens),
    ("cached_tokens", "The same, under SGLang's name.", lambda s: s.hit_tokens),
    ("prompt_tokens_cached", "The same, under vLLM's name for it among prompt tokens.", lambda s: s.hit_tokens),
    ("evicted_tokens", "Tokens evicted from the device.", lambda s: s.evicted),
    ("resumes", "Requests that came back after a preemption.", lambda s: s.resumes),
    ("retracts", "Waiters that were told to give way.", lambda s: s.retracts),
    ("slot_waits", "Calls that had to wait for slots.", lambda s: s.slot_waits),
    ("gate_waits", "Calls that had to wait for a subtree.", lambda s: s.gate_waits),
    ("joins", "Leases that had to wait for what another one computes.", lambda s: s.joins),
    ("joined_tokens", "Tokens that they found after it and not before.", lambda s: s.joined_tokens),
    ("join_takeovers", "Those that had to compute the rest, since the other one ended.", lambda s: s.join_takeovers),
)

_HOST_GAUGES = (
    ("hicache_host_used_tokens", "Tokens cached on the host.", "host_used"),
    ("hicache_host_total_tokens", "Slots of the host pool.", "host_slots"),
)
_HOST_COUNTERS = (
    ("load_back_tokens", "Tokens copied back from the host.", "load_back_tokens"),
    ("backuped_tokens", "Tokens copied to the host.", "backuped_tokens"),
    ("prefetched_tokens", "Tokens fetched from storage.", "prefetched_tokens"),
    ("host_evicted_tokens", "Tokens evicted from the host.", "host_evicted"),
    ("failed_copies", "Copies between device and host of which a part or all failed.", "failed_copies"),
    ("archived_tokens", "Tokens put into storage.", "archived_tokens"),
    ("unarchived_tokens", "Tokens not put into storage, which came too slowly after.", "unarchived_tokens"),
)
_STORAGE_COUNTERS = (
    ("storage_hit_pages", "Pages that storage had.", "hits"),
    ("storage_missed_pages", "Pages asked of storage that it had not, or not in time.", "misses"),
    ("storage_refused_pages", "Pages that storage had no room for.", "refused"),
    ("storage_corrupt_pages", "Pages in storage that were not what they should be.", "corrupt"),
    ("storage_failed_calls", "Calls that storage did not answer.", "failed_calls"),
    ("storage_skipped_calls", "Calls not made, since storage did not answer before.", "skipped_calls"),
)


class _Histogram:
    """Counts by bucket, and a sum. Observing costs a bisection."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.about = about
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets, self._sum


class _TickTimes:
    """When the tree's ticks were, to within 10 ms: it counts steps, and never asks a clock.

    What is older than all that is remembered counts as old as that.
    """

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._times: list[float] = []

    def note(self, tick: int, now: float) -> None:
        """So many ticks there were before now: the next ones come later."""
        if self._times and tick == self._ticks[-1]:
            self._times[-1] = now
            return
        if self._times and now < self._times[-1] + _TICK_SECONDS:
            return
        if len(self._ticks) == _MAX_TICKS:  # coarser the further back
            del self._ticks[1 : _MAX_TICKS // 2 : 2]
            del self._times[1 : _MAX_TICKS // 2 : 2]
        self._ticks.append(tick)
        self._times.append(now)

    def at(self, tick: int) -> float:
        """The time of the last note before a tick, or the first one's."""
        return self._times[max(0, bisect_left(self._ticks, tick) - 1)]


class _Heard(Watcher):
    """What the watcher keeps; all of it is written on the cache's loop."""

    def __init__(self, cache: RadixCache, max_namespaces: int) -> None:
        self._core = cache._core
        self._clock = cache._params.clock
        self._max_namespaces = max_namespaces
        self._ticks = _TickTimes()
        self.recent: deque[tuple[int, int]] = deque(maxlen=_RECENT_QUERIES)
        self.namespaces: dict[Namespace, list[int]] = {}
        self.others = [0, 0]
        self.lease_age = _Histogram("lease_age_seconds", "How long leases were held.", _LONG)
        self.slot_wait = _Histogram("slot_wait_seconds", "How long calls waited for slots.", _SHORT)
        self.gate_wait = _Histogram("gate_wait_seconds", "How long calls waited for a subtree.", _SHORT)
        self.join_wait = _Histogram("join_wait_seconds", "How long leases waited for what others compute.", _LONG)
        self.eviction = _Histogram("eviction_duration_seconds", "How long evictions took.", _SHORT)
        self.lifetime = _Histogram(
            "kv_block_lifetime_seconds", "From store to eviction: of the first leaf of each eviction.", _LONG
        )
        self.idle = _Histogram(
            "kv_block_idle_before_evict_seconds",
            "From last use to eviction: of the first leaf of each eviction.",
            _LONG,
        )
        self.reuse_gap = _Histogram(
            "kv_block_reuse_gap_seconds", "From the use before: of the end of each prefix that a lease found.", _LONG
        )
        self.load_back = _Histogram(
            "load_back_duration_seconds", "How long copies from the host took, from their begin to their end.", _SHORT
        )
        self.histograms = [
            self.lease_age,
            self.slot_wait,
            self.gate_wait,
            self.join_wait,
            self.eviction,
            self.lifetime,
            self.idle,
            self.reuse_gap,
        ]
        if cache._params.host is not None:
            self.histograms.append(self.load_back)

    def _now(self) -> float:
        now = self._clock()
        self._ticks.note(self._core.tick, now)
        return now

    def matching(self, hold: Hold) -> None:
        now = self._now()
        path = self._core.look(hold.key)
        if len(path) > 1 and (end := self._core.glance(path[-1], children=False)) is not None:
            self.reuse_gap.observe(now - self._ticks.at(end.last_access))

    def queried(self, hold: Hold) -> None:
        if hold.resume:
            return
        num_tokens, num_hit = len(hold.given), hold.num_matched
        self.recent.append((num_tokens, num_hit))
        counts = self.namespaces.get(hold.key.namespace)
        if counts is None:
            full = len(self.namespaces) >= self._max_namespaces
            counts = self.others if full else self.namespaces.setdefault(hold.key.namespace, [0, 0])
        counts[0] += num_tokens
        counts[1] += num_hit

    def released(self, hold: Hold) -> None:
        self.lease_age.observe(self._now() - hold.opened_when)

    def waited_for_slots(self, began: float) -> None:
        self.slot_wait.observe(self._clock() - began)

    def waited_at_gate(self, began: float) -> None:
        self.gate_wait.observe(self._clock() - began)

    def waited_to_join(self, began: float) -> None:
        self.join_wait.observe(self._clock() - began)

    def evicting(self) -> None:
        victim = self._core.next_victim()
        if victim and (leaf := self._core.glance(victim, children=False)) is not None:
            now = self._now()
            self.lifetime.observe(now - self._ticks.at(leaf.created))
            self.idle.observe(now - self._ticks.at(leaf.last_access))

    def evicted(self, num_tokens: int, began: float) -> None:
        self.eviction.observe(self._clock() - began)

    def loaded(self, began: float) -> None:
        self.load_back.observe(self._clock() - began)


class CacheMetrics(Collector):
    """A cache's figures in a Prometheus registry, as a context manager inside the cache's own.

    A scrape from another thread asks the cache's loop, and waits a second at most; if the loop is busy longer, it gets
    what the last one got. Histograms of ages and gaps are of samples: one for each eviction, one for each lease.

    Args:
        cache: open.
        registry: where the figures go; Prometheus's own by default.
        labels: constant ones, such as `{"model_name": "...", "engine": "0"}`; they tell several caches apart.
        max_namespaces: so many have a label of their own; all others are `other`.

    Raises:
        ConfigError: labels or a number that cannot work.
        UsageError: on entering, the cache is not open here, or this was entered before.
    """

    def __init__(
        self,
        cache: RadixCache,
        registry: CollectorRegistry = REGISTRY,
        *,
        labels: Mapping[str, str] | None = None,
        max_namespaces: int = 50,
    ) -> None:
        self._labels = dict(labels or {})
        if any(not (isinstance(each, str) and each) for item in self._labels.items() for each in item):
            raise ConfigError(f"labels must be a dict of str: str, got {labels!r}")
        if isinstance(max_namespaces, bool) or not isinstance(max_namespaces, int) or max_namespaces < 0:
            raise ConfigError(f"max_namespaces must be an int of at least 0, got {max_namespaces!r}")
        self._cache = cache
        self._registry = registry
        self._heard = _Heard(cache, max_namespaces)
        self._home: Home | None = None
        self._last: list[Metric] = []

    def __enter__(self) -> Self:
        """Begin to count, and register. Does not wait."""
        if self._home is not None:
            raise UsageError("these metrics were entered already; make another CacheMetrics")
        self._cache.stats()  # which says so if the cache is not open, or not here
        self._home = Home()
        self._end_watch = watch(self._cache, self._heard)
        self._registry.register(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unregister, and stop counting. Does not wait."""
        self._registry.unregister(self)
        self._end_watch()

    def describe(self) -> Iterable[Metric]:
        """Nothing: names may depend on what the cache has. Does not wait."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The figures of this moment. Waits for the loop, from another thread."""
        home = self._home
        if home is None:
            return ()
        if home.is_this_thread():
            return self._collect()
        done = threading.Event()

        def step() -> None:
            try:
                self._collect()
            except AradixError as error:
                _log.warning("no new figures: %s", error)
            finally:
                done.set()

        if home.call_soon(step):
            done.wait(_SCRAPE_SECONDS)
        return self._last

    def _collect(self) -> list[Metric]:
        self._last = [*self._of_stats(self._cache.stats()), *self._of_watcher()]
        return self._last

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, about, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, about, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _of_stats(self, stats: CacheStats) -> Iterator[Metric]:
        for name, about, read in _GAUGES:
            yield self._gauge(name, about, read(stats))
        for name, about, read in _COUNTERS:
            yield self._counter(name, about, read(stats))
        if getattr(stats, "host_slots", 0):
            for name, about, field in _HOST_GAUGES:
                yield self._gauge(name, about, getattr(stats, field, 0))
            for name, about, field in _HOST_COUNTERS:
                if hasattr(stats, field):
                    yield self._counter(name, about, getattr(stats, field))
        storage = self._cache._params.storage
        if hasattr(storage, "stats"):
            of_storage = storage.stats()
            reachable = "Whether storage answers: 0 from the failure that stopped the calls until one succeeds again."
            yield self._gauge("storage_reachable", reachable, of_storage.is_reachable)
            for name, about, field in _STORAGE_COUNTERS:
                yield self._counter(name, about, getattr(of_storage, field))

    def _of_watcher(self) -> Iterator[Metric]:
        heard = self._heard
        num_tokens = sum(tokens for tokens, _ in heard.recent)
        num_hit = sum(hit for _, hit in heard.recent)
        rate = num_hit / num_tokens if num_tokens else 0.0
        yield self._gauge("cache_hit_rate", f"Prompt tokens cached, of the last {_RECENT_QUERIES} requests.", rate)
        names = [*self._labels, "namespace"]
        queries = CounterMetricFamily(_PREFIX + "namespace_query_tokens", "Prompt tokens by namespace.", labels=names)
        hits = CounterMetricFamily(_PREFIX + "namespace_hit_tokens", "Cached prompt tokens by namespace.", labels=names)
        by_label: dict[str, list[int]] = {}
        for namespace, counts in heard.namespaces.items():
            known = by_label.setdefault(namespace_label(namespace), [0, 0])
            known[0] += counts[0]
            known[1] += counts[1]
        if any(heard.others):
            by_label.setdefault("other", heard.others)
        for label, (tokens, hit) in by_label.items():
            queries.add_metric([*self._labels.values(), label], tokens)
            hits.add_metric([*self._labels.values(), label], hit)
        yield queries
        yield hits
        for histogram in heard.histograms:
            buckets, total = histogram.buckets()
            family = HistogramMetricFamily(_PREFIX + histogram.name, histogram.about, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), buckets, total)
            yield family
