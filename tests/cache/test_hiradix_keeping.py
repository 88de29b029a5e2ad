"""Pins, quotas and priorities over a host tier."""

from __future__ import annotations

import pytest

from aradix import EvictParams, Namespace
from tests.cache.acts import key
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
