"""What left the device comes back from the host: residency, write policies, and what the cache says of them."""

from __future__ import annotations

import pytest

from aradix import EvictParams, MatchPrefixParams
from tests.cache.acts import entered, key
from tests.support.tiers import opened_tiers

pytestmark = pytest.mark.anyio


async def evicted(scene, num_tokens: int) -> int:
    return (await scene.cache.evict(EvictParams(num_tokens))).num_freed_tokens


async def test_a_prefix_that_left_the_device_comes_back_with_the_right_kv() -> None:
    async with opened_tiers() as scene:
        await scene.fill(key(range(1, 9)))
        assert await evicted(scene, 8) == 8
        assert scene.cache.peek(key(range(1, 9))) == 0
        assert scene.cache.peek_tiers(key(range(1, 9))) == (0, 8)
        found = await scene.cache.match_prefix(MatchPrefixParams(key(range(1, 9))))
        assert (len(found.device_indices), found.host_hit_length) == (0, 8)
        async with scene.cache.lease(key(range(1, 9))) as lease:
            assert lease.num_matched == 8
            scene.assert_right(lease, key(range(1, 9)))
        stats = scene.cache.stats()
        assert (stats.load_backs, stats.load_back_tokens, stats.backups, stats.backuped_tokens) == (1, 8, 1, 8)
        assert (stats.host_used, stats.host_free, stats.evictable) == (8, 56, 8)
