"""Twenty tasks in a pool too small for them, cancelled at random: afterwards every slot is there."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aradix import EvictParams, InsertParams, Lease, MatchPrefixParams, RadixCache, SlotAllocator
from aradix.errors import OutOfSlotsError, RequestTooLargeError, RetractError
from stress.schedules import run
from tests.cache.acts import key, settled
from tests.support.caches import idle_sum, opened

NUM_TASKS = 20


class Crowd:
    """Tasks that take whatever the cache offers, from one seed.

    Args:
        cache: opened.
        seed: of all that is drawn.
        size: slots in the pool, in pages.
    """

    def __init__(self, cache: RadixCache, seed: int, size: int) -> None:
        self.cache = cache
        self.chance = random.Random(seed)
        self.page_size = cache._params.page_size
        self.capacity = size * self.page_size
        self.handed_over: list[Lease] = []
        self.num_done = 0

    def prompt(self) -> Any:
        chance = self.chance
        ids = [chance.randrange(2) for _ in range(chance.randrange(1, max(2, self.capacity // 2)))]
        return key(ids, namespace=chance.choice((None, None, "x")))

    async def request(self) -> None:
        chance, cache = self.chance, self.cache
        prompt = self.prompt()
        reserve = chance.choice((None, None, len(prompt), chance.randrange(self.capacity // 2)))
        lease = cache.lease(prompt, reserve=reserve, leave_last=chance.randrange(2), store=chance.random() < 0.9)
        async with lease:
            for _ in range(chance.randrange(4)):
                act = chance.randrange(7)
                if act == 0:
                    await checkpoint()
                elif act in (1, 2):
                    await lease.allocate(chance.randrange(1, 3))
                elif act == 3:
                    with suppress(OutOfSlotsError):
                        lease.allocate_nowait(1)
                elif act == 4:
                    least = max(lease._hold.committed, lease.num_matched)
                    if lease.num_tokens >= least and len(lease.key) >= least:
                        lease.commit(lease.key[: max(least, min(len(lease.key), lease.num_tokens))])
                elif act == 5 and lease.num_tokens > lease._hold.published:
                    lease.truncate(lease.num_tokens - 1)
                elif act == 6:
                    self.handed_over.append(lease.fork())
            if len(self.handed_over) > 3:
                self.handed_over.pop(chance.randrange(len(self.handed_over))).release()

    async def own(self) -> None:
        async with self.cache.exclusive(self.prompt()[: self.chance.randrange(4)]) as mine:
            await checkpoint()
            if self.chance.random() < 0.3:
                mine.evict()
            await checkpoint()

    async def low_level(self) -> None:
        chance, cache = self.chance, self.cache
        allocator = cache._params.allocator
        prompt = self.prompt()
        match = await cache.match_prefix(MatchPrefixParams(prompt))
        cache.inc_lock_ref(match.last_device_node)
        slots = None
        try:
            await checkpoint()
            length = -(-len(prompt) // self.page_size) * self.page_size
            slots = allocator.alloc(length)
            if slots is not None:
                done = await cache.insert(InsertParams(prompt, slots))
                slots = done.duplicates
            await cache.evict(EvictParams(chance.randrange(3)))
        finally:
            if slots is not None and len(slots):
                allocator.free(slots)
            cache.dec_lock_ref(match.last_device_node)

    async def one(self) -> None:
        for _ in range(4):
            act = self.chance.choice((self.request, self.request, self.request, self.own, self.low_level))
            with anyio.CancelScope() as scope:
                self.scopes.append(scope)
                with suppress(RetractError, RequestTooLargeError):
                    await act()
            self.scopes.remove(scope)
            self.num_done += 1
            if self.chance.random() < 0.05:
                await self.cache.flush(self.chance.choice((None, "x")))
            await checkpoint()

    async def canceller(self) -> None:
        while True:
            await checkpoint()
            # Those who hand on what they hold may wait for a fork that nobody else would release.
            while self.handed_over and self.chance.random() < 0.5:
                self.handed_over.pop().release()
            if self.scopes and self.chance.random() < 0.3:
                self.chance.choice(self.scopes).cancel()
            if self.chance.random() < 0.05:
                self.cache.check()

    async def run(self) -> None:
        self.scopes: list[anyio.CancelScope] = []
        async with anyio.create_task_group() as outer:
            outer.start_soon(self.canceller)
            async with anyio.create_task_group() as tasks:
                for _ in range(NUM_TASKS):
                    tasks.start_soon(self.one)
            outer.cancel_scope.cancel()
        while self.handed_over:
            self.handed_over.pop().release()


async def crowded(seed: int, page_size: int, size: int) -> int:
    allocator = SlotAllocator(size * page_size, page_size)
    watermarks: dict[str, Any] = {"low_watermark": 0.1, "high_watermark": 0.2} if seed % 2 else {}
    async with opened(allocator=allocator, waiters_keep_pins=bool(seed % 3), **watermarks) as cache:
        crowd = Crowd(cache, seed, size)
        await crowd.run()
        await settled()
        stats = cache.stats()
        assert (stats.protected, stats.leased, stats.outside, stats.num_leases, stats.num_slot_waiters) == (0,) * 5
        assert cache._gates.num_walkers == 0
        assert not cache._gates.standing
        assert idle_sum(cache) == size * page_size
        async with cache.lease(key(range(1000, 1000 + size * page_size))) as lease:
            await lease.allocate(size * page_size)
        await cache.flush()
        all_of_it = allocator.alloc(size * page_size)
        assert all_of_it is not None
        allocator.free(all_of_it)
        return crowd.num_done


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(25))
def test_after_any_schedule_of_cancellations_every_slot_is_there(backend: Any, page_size: int, seed: int) -> None:
    assert run(crowded, seed, page_size, 10, backend=backend, seed=seed).value == 4 * NUM_TASKS


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(5))
async def test_so_it_is_on_the_loops_that_people_use(seed: int) -> None:
    assert await crowded(seed, 1 + seed % 2, 10) == 4 * NUM_TASKS
