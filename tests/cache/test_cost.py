"""What work must not grow with: the number of leaves, the length of a prompt, the number of those who wait."""

from __future__ import annotations

import tracemalloc
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from aradix import EvictParams, MatchPrefixParams, RadixKey
from tests.cache.acts import begin, entered, filled, key, settled
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


class Counting:
    """Least recently used, and how often a rank was asked for."""

    def __init__(self) -> None:
        self.num_ranks = 0

    def rank(self, node: Any) -> int:
        self.num_ranks += 1
        last_access: int = node.last_access
        return last_access


async def ranks_a_round(num_leaves: int) -> float:
    policy = Counting()
    async with opened(8 * num_leaves, eviction_policy=policy) as cache:
        ids = np.arange(8, dtype=np.int32)
        for i in range(num_leaves):
            await filled(cache, RadixKey(ids + 8 * i))
        before = policy.num_ranks
        for i in range(num_leaves, num_leaves + 100):
            await cache.evict(EvictParams(64))
            for part in range(8):
                await filled(cache, RadixKey(ids + 8 * (8 * i + part)))
        return (policy.num_ranks - before) / 100


async def test_evicting_and_inserting_asks_for_as_many_ranks_however_many_leaves_there_are() -> None:
    few, many = await ranks_a_round(200), await ranks_a_round(2000)
    assert many <= 1.5 * few


async def peak_bytes(call: Any) -> int:
    tracemalloc.start()
    try:
        await call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


async def test_a_long_match_makes_no_object_for_a_token() -> None:
    length = 1 << 20
    async with opened(length) as cache:
        prompt = RadixKey(np.arange(length, dtype=np.int32))
        await filled(cache, prompt)

        async def lease_it() -> None:
            async with cache.lease(prompt) as lease:
                assert lease.num_matched == length

        async def look_at_it() -> None:
            assert cache.peek(prompt) == length

        async def match_it() -> None:
            assert len((await cache.match_prefix(MatchPrefixParams(prompt))).device_indices) == length

        assert await peak_bytes(look_at_it) < 1 << 20
        assert await peak_bytes(lease_it) < 1 << 20
        assert await peak_bytes(match_it) < 4 * 8 * length  # the slots themselves, and not much more


async def test_long_prompts_that_wait_are_probed_again_without_being_copied() -> None:
    length = 1 << 15
    async with opened(2 * length) as cache, anyio.create_task_group() as tasks:
        shared = np.arange(length // 2, dtype=np.int32)
        await filled(cache, RadixKey(shared))
        hog = await entered(cache, key(range(10**6, 10**6 + 3 * length // 2)), 3 * length // 2)
        acts = []
        for i in range(100):
            own = np.arange(length // 2, dtype=np.int32) + (i + 1) * length
            lease = cache.lease(RadixKey(np.concatenate((shared, own))), reserve=length)
            acts.append(await begin(tasks, lease.__aenter__))
        assert cache.stats().num_slot_waiters == 100

        async def ticks() -> None:
            for i in range(20):
                hog.commit(hog.key[: i + 1])  # something new can be matched: all may look again
                await checkpoint()

        assert await peak_bytes(ticks) < 1 << 20
        hog.release()
        await settled()
        for act in acts:
            if act.returned:
                act.value.release()
                await settled()
            act.scope.cancel()
        await settled()
        for act in acts:
            if act.returned:
                act.value.release()
        assert cache.stats().num_slot_waiters == 0
