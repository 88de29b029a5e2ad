"""One-off prompts: what is asked once does not push out what is asked again and again, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from aradix import Namespace, RadixCache
from tests.cache.acts import filled, key
from tests.support.caches import opened
from tests.tree.lockstep import CORES

pytestmark = pytest.mark.anyio


async def hits_of_a_hot_prefix(cache: RadixCache, num_namespaces: int, store: bool) -> list[int]:
    """A prefix of 200 is hit every 20 operations, between one-off prompts of 50, each in a namespace of its own."""
    hot, hits = key(range(200)), []
    await filled(cache, hot, hot, hot)  # two hits make it hot
    for number in range(num_namespaces):
        if number % 20 == 0:
            async with cache.lease(hot) as lease:
                hits.append(lease.num_matched)
                lease.allocate_nowait(200 - lease.num_matched)
                lease.commit(hot)
        await filled(cache, key(range(50), namespace=Namespace(salt=number)), store=store)
        assert cache.stats().num_namespaces <= 1 + 1000 // 50
    return hits


async def run_one_offs(num_namespaces: int, core: str, *, store: bool = True, **options: Any) -> None:
    async with opened(1000, tree_core=core, **options) as cache:
        hits = await hits_of_a_hot_prefix(cache, num_namespaces, store)
        assert hits == [200] * (num_namespaces // 20)
        await cache.flush()
        assert cache.stats().num_namespaces == 0
        assert cache.stats().free == 1000


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    "options", [{"eviction_policy": "slru"}, {"eviction_policy": "slru", "quotas": {"a": 0.1}}, {"store": False}]
)
async def test_a_hot_prefix_survives_one_off_namespaces(options: dict[str, Any], core: str) -> None:
    await run_one_offs(600, core, **options)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("options", [{"eviction_policy": "slru"}, {"store": False}])
async def test_and_ten_thousand_of_them(options: dict[str, Any]) -> None:
    await run_one_offs(10_000, "auto", **options)


async def test_without_protection_the_same_prefix_is_lost_each_time() -> None:
    async with opened(1000) as cache:
        assert sum((await hits_of_a_hot_prefix(cache, 200, store=True))[1:]) == 0
