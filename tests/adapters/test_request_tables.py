"""Requests in a table: nothing leaks, no row names a wrong slot, and both caches do the same."""

from __future__ import annotations

from typing import Any

import pytest

from aradix import SlotAllocator
from aradix.adapters.sglang import ReqToTokenPool
from tests.adapters.scheduler import MAX_LEN, AsyncPort, Scheduler, ShapedPort
from tests.support.caches import opened

pytestmark = pytest.mark.anyio

NUM_SLOTS = 96
NUM_STEPS = 400


@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
async def test_both_caches_serve_a_scheduler_alike(seed: int, page_size: int, is_eagle: bool) -> None:
    allocator, table = SlotAllocator(NUM_SLOTS, page_size), ReqToTokenPool(16, MAX_LEN)
    async with opened(allocator=allocator, is_eagle=is_eagle, req_to_token_pool=table) as cache:
        ports = (AsyncPort(cache, allocator, table), ShapedPort(NUM_SLOTS, page_size, is_eagle=is_eagle))
        first, second = (Scheduler(port, (seed, page_size)) for port in ports)
        for number in range(NUM_STEPS):
            for scheduler in (first, second):
                await scheduler.step()
            assert first.log[-4:] == second.log[-4:], number
        assert first.log == second.log
        assert {entry[0] for entry in first.log} >= {"matched", "held", "ended"}
        for scheduler in (first, second):
            scheduler.drain()
            scheduler.port.check()
            evictable, protected, available = scheduler.port.sizes()
            assert protected == 0
            assert evictable + available == NUM_SLOTS
            assert await scheduler.port.evict(NUM_SLOTS) == evictable
            assert scheduler.port.sizes() == (0, 0, NUM_SLOTS)
            assert scheduler.port.table.available_size() == 16


@pytest.mark.parametrize("params", [{"evict_unit": "node"}, {"strict_compat": True}, {"tree_core": "python"}])
async def test_under_other_settings_nothing_leaks_either(params: dict[str, Any]) -> None:
    port = ShapedPort(NUM_SLOTS, 4, **params)
    scheduler = Scheduler(port, "other")
    for _ in range(NUM_STEPS):
        await scheduler.step()
    scheduler.drain()
    port.check()
    assert port.sizes()[0] + port.sizes()[2] == NUM_SLOTS
