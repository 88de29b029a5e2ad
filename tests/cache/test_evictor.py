"""The background evictor: it keeps a share of the pool free, and no more than that."""

from __future__ import annotations

import anyio
import pytest

from aradix import InsertParams, RadixCache, SlotAllocator
from tests.cache.acts import entered, filled, key, settled
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


async def test_it_starts_below_the_low_watermark_and_stops_at_the_high_one() -> None:
    async with opened(100, low_watermark=0.2, high_watermark=0.5) as cache:
        await filled(cache, key(range(80)))
        await settled()
        assert cache.stats().free == 20  # not below low
        await filled(cache, key(range(100, 101)))
        await settled()
        assert cache.stats().free == 50
        assert cache.stats().evicted == 31
        assert cache.peek(key(range(80))) == 49


async def test_watermarks_of_zero_switch_it_off() -> None:
    async with opened(16, low_watermark=0, high_watermark=0) as cache:
        await filled(cache, key(range(16)))
        await settled()
        assert cache.stats().free == 0
        await filled(cache, key(range(20, 24)))
        assert cache.stats().evicted == 4


async def test_it_takes_nothing_that_is_pinned() -> None:
    async with opened(16, low_watermark=1.0, high_watermark=1.0) as cache:
        lease = await entered(cache, key(range(8)), 8)
        lease.commit(key(range(8)))
        await settled()
        assert cache.stats().protected == 8
        lease.release()


async def test_what_becomes_evictable_later_is_evicted_then() -> None:
    async with opened(16, low_watermark=0.5, high_watermark=0.5) as cache:
        lease = await entered(cache, key(range(16)), 16)
        lease.commit(key(range(16)))
        await settled()
        assert cache.stats().free == 0  # all pinned: there was nothing to take
        lease.release()
        await settled()
        assert cache.stats().free == 8


async def test_a_pool_filled_by_low_level_inserts_is_kept_free_too() -> None:
    allocator = SlotAllocator(16)
    async with opened(allocator=allocator, low_watermark=0.5, high_watermark=0.5) as cache:
        slots = allocator.alloc(16)
        await cache.insert(InsertParams(key(range(16)), slots))
        await settled()
        assert cache.stats().free == 8


async def test_whoever_waits_goes_before_the_watermark() -> None:
    async with opened(16, low_watermark=0.25, high_watermark=0.5) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(8)))
        hog = await entered(cache, key(range(20, 28)), 8)
        lease = await entered(cache, key(range(30, 46)))
        tasks.start_soon(lease.allocate, 8)
        await settled()
        assert len(lease.slots) == 8
        hog.release()
        lease.release()


async def test_large_evictions_let_others_run_between_their_batches() -> None:
    async with opened(40_000, low_watermark=1.0, high_watermark=1.0) as cache:
        await filled(cache, key(range(20_000)))
        sizes = []
        for _ in range(30):
            await anyio.lowlevel.checkpoint()
            sizes.append(cache.evictable_size())
        assert sizes[-1] == 0
        assert len({size for size in sizes if 0 < size < 20_000}) >= 2


class Breaks(RuntimeError):
    pass


async def test_what_fails_in_the_background_reaches_the_user() -> None:
    class Broken(RadixCache):
        def _wants_slots(self) -> int:
            raise Breaks

    with pytest.RaisesGroup(Breaks):
        async with opened(16, cache_class=Broken, low_watermark=1.0, high_watermark=1.0) as cache:
            await filled(cache, key(range(8)))
            await anyio.sleep_forever()
