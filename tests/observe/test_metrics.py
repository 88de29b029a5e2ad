"""Metrics: the names that dashboards know, with the meanings they have; each request counts once."""

from __future__ import annotations

import importlib.resources
import json
import re
import threading
from typing import Any

import anyio
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from aradix import CacheInitParams, EvictParams, Namespace, RadixCache, SlotAllocator
from aradix.errors import ConfigError, UsageError
from aradix.observe import CacheMetrics
from aradix.observe.labels import namespace_label
from aradix.observe.metrics import _TickTimes
from tests.cache.acts import begin, entered, filled, joiner, key, leader, settled
from tests.support.caches import opened
from tests.support.tiers import opened_tiers

pytestmark = pytest.mark.anyio


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scraped:
    """What Prometheus sees of a registry, parsed from the text it would get."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                assert sample.name.startswith("aradix:")
                self.samples[sample.name.removeprefix("aradix:"), tuple(sorted(sample.labels.items()))] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, tuple(sorted(labels.items()))]

    def mean(self, name: str) -> float:
        return self(f"{name}_sum") / self(f"{name}_count")


async def test_counters_and_gauges_are_the_caches_own() -> None:
    registry = CollectorRegistry()
    async with opened(64, 4, enable_kv_cache_events=False) as cache:
        with CacheMetrics(cache, registry):
            await filled(cache, key(range(16)), key(range(16)), key(range(8), 50, 51, 52, 53))
            await cache.evict(EvictParams(4))
            async with cache.lease(key(range(8))) as lease:
                await lease.allocate(8)
                found, stats = Scraped(registry), cache.stats()
                assert found("prefix_cache_queries_total") == stats.query_tokens == 16 + 16 + 12 + 8
                for name in ("prefix_cache_hits_total", "cached_tokens_total", "prompt_tokens_cached_total"):
                    assert found(name) == stats.hit_tokens == 16 + 8 + 8
                assert found("cache_hit_rate") == 32 / 52
                assert found("queries_total") == 4
                assert found("evicted_tokens_total") == 4
                assert found("kv_available_tokens") == stats.free
                assert found("kv_evictable_tokens") == stats.evictable
                assert found("kv_used_tokens") == stats.protected + stats.leased == 16
                assert found("token_usage") == found("kv_cache_usage_perc") == 16 / 64
                assert found("fenced_slots") == 0
                assert found("leases") == 1
                assert found("tree_nodes") == stats.num_nodes


async def test_one_request_is_one_query_however_often_it_looked() -> None:
    registry = CollectorRegistry()
    async with opened(16) as cache:
        with CacheMetrics(cache, registry):
            await filled(cache, key(range(8)))
            before = Scraped(registry)
            other = await entered(cache, key(range(100, 112)), 12)
            prompt = key(range(8), range(50, 54))
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    cache.peek(prompt)
                    async with cache.lease(prompt):
                        pass  # looked up, never admitted
                request = cache.lease(prompt, reserve=12)
                waiting = await begin(tasks, request.__aenter__)
                assert waiting.waits
                for number in range(5):  # it is matched anew each time something was cached
                    cache._pressure.changed()
                    assert Scraped(registry)("queries_total") == before("queries_total") + 1, number
                other.release()
                await settled()
                assert waiting.returned
                request.release()  # preempted
                async with cache.lease(prompt, reserve=12, resume=True) as lease:
                    lease.commit(prompt)
            after = Scraped(registry)
            assert after("queries_total") == before("queries_total") + 2  # the other one, and this one
            assert after("prefix_cache_queries_total") == before("prefix_cache_queries_total") + 12 + 12
            assert after("resumes_total") == 1
            assert after("slot_waits_total") == 1
            assert after("slot_wait_seconds_count") == 1
            assert after("namespace_query_tokens_total", namespace="default") == after("prefix_cache_queries_total")


async def test_ages_waits_and_gaps() -> None:
    registry, clock = CollectorRegistry(), Clock()
    async with opened(8, clock=clock) as cache:
        with CacheMetrics(cache, registry):
            await filled(cache, key(range(8)))
            clock.now += 10
            async with cache.lease(key(range(8))):
                clock.now += 3
            found = Scraped(registry)
            assert found("lease_age_seconds_sum") == 3
            assert found("lease_age_seconds_count") == 2
            assert found.mean("kv_block_reuse_gap_seconds") == 10
            clock.now += 20
            held = await entered(cache, key(range(50, 54)), 4)
            found = Scraped(registry)
            assert found.mean("kv_block_lifetime_seconds") == 33
            assert found.mean("kv_block_idle_before_evict_seconds") == 20
            assert found("eviction_duration_seconds_count") == 1
            async with anyio.create_task_group() as tasks:
                waiting = await begin(tasks, held.allocate, 4)
                assert waiting.returned  # evicts the rest
                other = cache.lease(key(7), reserve=1)
                waiting = await begin(tasks, other.__aenter__)
                clock.now += 2
                held.release()
                await settled()
                assert waiting.returned
                other.release()
            assert Scraped(registry).mean("slot_wait_seconds") == 2
            async with anyio.create_task_group() as tasks:
                lease = await entered(cache, key(range(8)))
                waiting = await begin(tasks, cache.exclusive(key(range(8))).__aenter__)
                blocked = await begin(tasks, cache.lease(key(range(8))).__aenter__)
                clock.now += 5
                blocked.scope.cancel()
                lease.release()
                await settled()
                await waiting.value.__aexit__(None, None, None)
            found = Scraped(registry)
            assert found("gate_wait_seconds_sum") == 5
            assert found("gate_wait_seconds_bucket", le="5.0") == 1
            assert found("gate_wait_seconds_bucket", le="1.0") == 0
            assert found("gate_wait_seconds_bucket", le="+Inf") == 1


async def test_who_waits_for_what_others_compute_is_counted() -> None:
    registry, clock = CollectorRegistry(), Clock()
    async with opened(clock=clock) as cache, anyio.create_task_group() as tasks:
        with CacheMetrics(cache, registry):
            first = await leader(tasks, cache, key(range(12)), 12)
            first.commit(key(range(4)))
            acts = [await joiner(tasks, cache, key(range(12))) for _ in range(2)]
            assert Scraped(registry)("joiners") == 2
            clock.now += 5
            first.release()
            await settled()
            found = Scraped(registry)
            assert (found("joiners"), found("joins_total"), found("join_takeovers_total")) == (1, 2, 1)
            assert found("joined_tokens_total") == 0  # the first four were found before
            assert found.mean("join_wait_seconds") == 5
            acts[0].value.release()
            await settled()
            acts[1].value.release()


async def test_namespaces_have_labels_of_their_own_up_to_a_bound() -> None:
    registry = CollectorRegistry()
    async with opened(256) as cache:
        with CacheMetrics(cache, registry, max_namespaces=2, labels={"engine": "7"}):
            for salt in "abcd":
                for _ in range(2):
                    await filled(cache, key(range(10), namespace=Namespace(salt=salt, lora="x")))
            found = Scraped(registry)
            for salt in "ab":
                label = namespace_label(Namespace(salt=salt, lora="x"))
                assert salt not in label.split("#")[0].removeprefix("lora=x,salt=")
                assert found("namespace_query_tokens_total", namespace=label, engine="7") == 20
                assert found("namespace_hit_tokens_total", namespace=label, engine="7") == 10
            assert found("namespace_query_tokens_total", namespace="other", engine="7") == 40
            labels = {dict(labels)["namespace"] for name, labels in found.samples if name.startswith("namespace_")}
            assert len(labels) == 3


def test_labels_say_what_a_namespace_is_but_no_salt() -> None:
    assert namespace_label(Namespace()) == "default"
    assert namespace_label(Namespace(lora="x", tenant=3, extra="e")) == "lora=x,tenant=3,extra=e"
    assert re.fullmatch("salt=#[0-9a-f]{8}", namespace_label(Namespace(salt="secret")))


async def test_another_thread_gets_the_figures_of_this_moment_or_the_last_ones() -> None:
    registry = CollectorRegistry()
    async with opened(64) as cache:
        with CacheMetrics(cache, registry):
            await filled(cache, key(range(8)))
            found = await anyio.to_thread.run_sync(Scraped, registry)
            assert found("kv_evictable_tokens") == 8
            taken: list[Scraped] = []
            thread = threading.Thread(target=lambda: taken.append(Scraped(registry)))
            await filled(cache, key(range(20, 28)))
            thread.start()
            thread.join()  # this loop is busy, with waiting
            assert taken[0]("kv_evictable_tokens") == 8
    assert Scraped(registry).samples == {}


async def test_nothing_is_watched_after_it_was_left() -> None:
    registry = CollectorRegistry()
    async with opened(64) as cache:
        metrics = CacheMetrics(cache, registry)
        with metrics, CacheMetrics(cache, CollectorRegistry()) as second:
            await filled(cache, key(range(8)))
            assert cache._leases.watch is not None
            assert len(second._heard.recent) == len(metrics._heard.recent) == 1
        assert cache._leases.watch is cache._pressure.watch is cache._gates.watch is None
        with pytest.raises(UsageError, match="entered already"), metrics:
            pass
        for options in ({"labels": {"a": ""}}, {"labels": {"a": 3}}, {"max_namespaces": -1}, {"max_namespaces": True}):
            with pytest.raises(ConfigError):
                CacheMetrics(cache, registry, **options)
    unopened = RadixCache(CacheInitParams(allocator=SlotAllocator(4)))
    with pytest.raises(UsageError, match="open the cache"), CacheMetrics(unopened, registry):
        pass


def test_the_times_of_ticks_grow_coarser_and_stay_in_order() -> None:
    times = _TickTimes()
    for tick in range(20_000):
        times.note(tick, tick * 0.5)
    assert len(times._ticks) <= 4_096
    assert times.at(20_000) == 19_999 * 0.5
    assert times.at(15_001) == 15_000 * 0.5
    times.note(19_999, 12_345.0)
    assert times.at(20_000) == 12_345.0
    found = [times.at(tick) for tick in range(0, 20_000, 7)]
    assert found == sorted(found)
    assert all(at <= tick * 0.5 for tick, at in zip(range(0, 20_000, 7), found, strict=True))


async def test_a_load_from_the_host_takes_from_its_copys_begin_to_its_end() -> None:
    registry, clock = CollectorRegistry(), Clock()
    async with opened_tiers(at_once=False, clock=clock) as scene:
        cache = scene.cache
        with CacheMetrics(cache, registry):
            await scene.fill(key(range(8)), key(range(20, 28)))
            scene.copier.finish_all()
            await settled()
            await cache.evict(EvictParams(16))
            for ids, seconds in ((range(8), 0.25), (range(20, 28), 0.75)):
                async with anyio.create_task_group() as tasks:
                    act = await begin(tasks, entered, cache, key(ids))
                    clock.now += seconds
                    scene.copier.finish_all()
                    await settled()
                assert act.value.num_matched == 8
                act.value.release()
            found = Scraped(registry)
            assert found("load_back_duration_seconds_count") == 2
            assert found.mean("load_back_duration_seconds") == 0.5
            assert found("load_back_tokens_total") == found("backuped_tokens_total") == 16
            # One that fails brings nothing.
            await cache.evict(EvictParams(8))
            async with anyio.create_task_group() as tasks:
                act = await begin(tasks, entered, cache, key(range(8)))
                scene.copier.next("load").fail()
                await settled()
            act.value.release()
            assert Scraped(registry)("load_back_duration_seconds_count") == 2
        cache.check()


async def test_the_names_that_dashboards_of_others_ask_for() -> None:
    registry = CollectorRegistry()
    async with opened_tiers() as scene:
        with CacheMetrics(scene.cache, registry):
            there = {name for name, _ in Scraped(registry).samples}
    assert there >= {
        "cache_hit_rate",
        "cached_tokens_total",
        "token_usage",
        "evicted_tokens_total",
        "eviction_duration_seconds_bucket",
        "load_back_tokens_total",
        "load_back_duration_seconds_bucket",
        "kv_available_tokens",
        "kv_evictable_tokens",
        "kv_used_tokens",
        "hicache_host_used_tokens",
        "hicache_host_total_tokens",
        "prefetched_tokens_total",
        "backuped_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "kv_cache_usage_perc",
        "prompt_tokens_cached_total",
        "kv_block_lifetime_seconds_bucket",
        "kv_block_idle_before_evict_seconds_bucket",
        "kv_block_reuse_gap_seconds_bucket",
    }


async def test_the_dashboard_asks_for_what_there_is() -> None:
    text = importlib.resources.files("aradix.observe").joinpath("grafana.json").read_text()
    dashboard: dict[str, Any] = json.loads(text)
    asked = set(re.findall(r"aradix:([a-z_]+)", text))
    registry = CollectorRegistry()
    async with opened(64) as cache:
        with CacheMetrics(cache, registry):
            await filled(cache, key(range(8)))
            there = {name for name, _ in Scraped(registry).samples}
    async with opened_tiers() as scene:
        with CacheMetrics(scene.cache, registry):
            host = {name for name, _ in Scraped(registry).samples} - there
    assert asked - there <= host
    same = {"kv_cache_usage_perc", "cached_tokens_total", "prompt_tokens_cached_total", "kv_used_tokens"}
    unshown = {name for name in (there | host) - asked - same if not re.search("_(created|sum|count)$", name)}
    assert unshown <= {"cache_hit_rate", "kv_total_tokens"}
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
