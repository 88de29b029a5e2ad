"""Pins, quotas and priorities over a host tier."""

from __future__ import annotations

import anyio
import pytest

from aradix import EvictParams, Namespace
from tests.cache.acts import begin, entered, key, settled
from tests.support.tiers import opened_tiers

pytestmark = pytest.mark.anyio


async def test_what_is_pinned_stays_on_the_device_while_its_copy_is_on_the_host() -> None:
    async with opened_tiers() as scene:
        await scene.fill(key(range(1, 9)))
        pin = scene.cache.pin(key(range(1, 5)))
        assert (await scene.cache.evict(EvictParams(8))).num_freed_tokens == 4
        assert scene.cache.peek_tiers(key(range(1, 9))) == (4, 4)
        pin.release()
        assert (await scene.cache.evict(EvictParams(8))).num_freed_tokens == 4
        assert scene.cache.peek_tiers(key(range(1, 9))) == (0, 8)


async def test_the_time_of_a_pin_ends_and_a_copy_that_runs_keeps_both_its_ends() -> None:
    now = 0.0
    async with opened_tiers(16, 8, at_once=False, clock=lambda: now) as scene, anyio.create_task_group() as tasks:
        cache, story, other = scene.cache, key(range(1, 9)), key(range(21, 29))
        await scene.fill(story)
        pin = cache.pin(story, ttl=10)
        now = 11
        assert (await cache.evict(EvictParams(16))).num_freed_tokens == 0  # the copy reads them
        assert pin.ended == "expired"
        assert cache.stats().num_pins == 0
        scene.copier.next("store").finish()
        assert (await cache.evict(EvictParams(16))).num_freed_tokens == 8
        assert cache.peek_tiers(story) == (0, 8)
        act = await begin(tasks, entered, cache, story)
        assert act.waits
        await scene.fill(other)
        assert cache.peek_tiers(other) == (8, 0)  # it found no room on the host, whose pages are being read
        assert (await cache.evict(EvictParams(16))).num_freed_tokens == 8
        scene.copier.next("load").finish()
        await settled()
        assert act.value.num_matched == 8
        scene.assert_right(act.value, story)
        act.value.release()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
async def test_a_tenant_above_its_claim_gives_first_and_finds_it_on_the_host(write_policy: str) -> None:
    async with opened_tiers(16, 64, quotas={"a": 0.5, "b": 0.5}, write_policy=write_policy) as scene:
        ours, theirs = (key(range(1, 9), namespace=Namespace(tenant=tenant)) for tenant in "ab")
        more = key(range(21, 33), namespace=Namespace(tenant="a"))
        await scene.fill(theirs)
        async with scene.cache.lease(ours, reserve=8) as lease:
            scene.compute(lease, ours)
            lease.commit(ours)
        async with scene.cache.lease(more, reserve=12 if write_policy == "write_back" else 8) as lease:
            assert lease.num_matched == 0
        assert scene.cache.peek_tiers(ours) == (0, 8)
        async with scene.cache.lease(ours) as lease:
            assert lease.num_matched == 8
            scene.assert_right(lease, ours)
        assert sum(scene.cache.peek_tiers(theirs)) == 8
