"""Nothing flushed is ever matched again, on any tier."""

from __future__ import annotations

import anyio
import pytest

from aradix import EvictParams
from tests.cache.acts import begin, entered, key, settled
from tests.support.tiers import opened_tiers

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("namespace", [None, "a"])
async def test_after_a_flush_no_tier_has_anything_and_the_host_is_free(namespace: str | None) -> None:
    async with opened_tiers() as scene:
        await scene.fill(key(range(1, 9), namespace="a"), key(range(21, 29), namespace="a"))
        await scene.cache.evict(EvictParams(12))
        result = await scene.cache.flush(namespace)
        assert (result.num_freed_tokens, result.num_held_tokens) == (4, 0)
        assert scene.cache.peek_tiers(key(range(1, 9), namespace="a")) == (0, 0)
        async with scene.cache.lease(key(range(1, 9), namespace="a")) as lease:
            assert lease.num_matched == 0
        stats = scene.cache.stats()
        assert (stats.free, stats.host_free) == (64, 64)


async def test_a_flush_says_how_many_tokens_leases_still_hold() -> None:
    async with opened_tiers() as scene:
        await scene.fill(key(range(1, 9)))
        await scene.cache.evict(EvictParams(8))
        lease = await entered(scene.cache, key(range(1, 7)))
        result = await scene.cache.flush()
        assert (result.num_freed_tokens, result.num_held_tokens) == (0, 6)
        assert scene.cache.stats().host_free == 64
        lease.release()
        assert scene.cache.stats().free == 64


async def test_other_namespaces_stay_on_every_tier() -> None:
    async with opened_tiers() as scene:
        await scene.fill(key(range(1, 9), namespace="a"), key(range(1, 9), namespace="b"))
        await scene.cache.evict(EvictParams(12))
        await scene.cache.flush("a")
        assert scene.cache.peek_tiers(key(range(1, 9), namespace="a")) == (0, 0)
        assert scene.cache.peek_tiers(key(range(1, 9), namespace="b")) == (4, 4)


async def test_a_copy_to_the_host_that_is_under_way_brings_nothing_after_a_flush() -> None:
    async with opened_tiers(at_once=False) as scene:
        await scene.fill(key(range(1, 9)))
        result = await scene.cache.flush()
        assert (result.num_freed_tokens, result.num_held_tokens) == (0, 8)
        stats = scene.cache.stats()
        assert (stats.storing, stats.detached) == (8, 8)
        await scene.fill(key(range(1, 5)))
        scene.copier.next("store").finish()
        stats = scene.cache.stats()
        assert (stats.host_used, stats.detached, stats.evictable + stats.protected) == (0, 0, 4)
        scene.copier.finish_all()
        assert scene.cache.stats().host_free == 60


async def test_a_load_under_way_brings_nothing_after_a_flush_and_who_waits_for_it_computes() -> None:
    wanted = key(range(1, 9))
    async with opened_tiers(at_once=False) as scene, anyio.create_task_group() as tasks:
        await scene.fill(wanted)
        scene.copier.finish_all()
        await scene.cache.evict(EvictParams(8))
        acts = [await begin(tasks, entered, scene.cache, wanted) for _ in range(2)]
        await scene.cache.flush()
        scene.cache.check()
        scene.copier.next("load").finish()
        await settled()
        assert [act.value.num_matched for act in acts] == [0, 0]
        stats = scene.cache.stats()
        assert (stats.free, stats.host_free) == (64, 64)
        for act in acts:
            act.value.release()


async def test_a_load_that_waits_for_slots_holds_nothing_of_what_is_flushed() -> None:
    wanted = key(range(1, 9))
    async with opened_tiers(16, 32) as scene, anyio.create_task_group() as tasks:
        await scene.fill(wanted)
        await scene.cache.evict(EvictParams(4))
        holder = await entered(scene.cache, key(range(21, 33)), 12)
        act = await begin(tasks, entered, scene.cache, wanted)
        assert act.waits
        result = await scene.cache.flush()
        assert (result.num_freed_tokens, result.num_held_tokens) == (4, 0)
        await settled()
        assert act.value.num_matched == 0
        act.value.release()
        holder.release()
        assert scene.cache.stats().free == 16
