"""Copies and kernels on a virtual device: nothing is read before it is written, nor overwritten while it is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aradix import CacheInitParams, EvictParams, HiRadixCache, HostKVPool, Lease, RadixKey, SlotAllocator
from aradix.memory.copiers import Job
from aradix.memory.kv_pool import BookKVPool
from stress.device import Kernel, VirtualCopier, VirtualDevice, VirtualStream
from tests.cache.acts import Act, begin, entered, key, settled
from tests.support.core import TREE_CORE

pytestmark = pytest.mark.anyio

SEEDS = range(8)
LONG_TIME = 1000.0


class Site:
    """A cache with a host tier on a virtual device, whose streams `a` and `b` are the engine's."""

    def __init__(self, seed: int, fault: Callable[[Job], tuple[int, Exception] | None]) -> None:
        self.device = VirtualDevice(seed)
        self.a, self.b = self.device.stream("a"), self.device.stream("b")
        self.copier = VirtualCopier(self.device, fault)
        self.allocator: SlotAllocator
        self.cache: HiRadixCache

    async def compute(
        self, wanted: RadixKey, stream: VirtualStream, duration: float | None = None, **options: Any
    ) -> tuple[Lease, Kernel]:
        """A request that reads what it matched, writes the rest, and publishes it while its kernel runs."""
        lease = await entered(self.cache, wanted, stream=stream, **options)
        lease.allocate_nowait(len(wanted) - lease.num_matched)
        slots = lease.slots.tolist()
        kernel = stream.launch(slots[: lease.num_matched], slots[lease.num_matched :], duration)
        lease.commit(wanted)
        return lease, kernel

    def read(self, lease: Lease, stream: VirtualStream, duration: float | None = None) -> Kernel:
        return stream.launch(lease.slots[: lease.num_matched], (), duration)

    async def drain(self, act: Act) -> Any:
        """Let the device finish all it has, and the cache hear of it, until an act is over."""
        while act.waits:
            self.device.run_until_idle()
            self.cache.stats()
            await settled()
        assert act.error is None
        return act.value

    def finish(self) -> None:
        for _ in range(3):
            self.device.run_until_idle()
            self.cache.stats()


@asynccontextmanager
async def opened_site(
    num_slots: int = 16,
    num_host_slots: int = 32,
    seed: int = 0,
    fault: Callable[[Job], tuple[int, Exception] | None] = lambda job: None,
    **params: Any,
) -> AsyncIterator[Site]:
    site = Site(seed, fault)
    kv_pool = BookKVPool(num_slots)
    host = HostKVPool(num_host_slots, 1, kv_pool)
    site.allocator = SlotAllocator(num_slots, event_factory=site.device.event)
    params = {"write_policy": "write_through", "load_back_threshold": 1, "tree_core": TREE_CORE, **params}
    made = CacheInitParams(
        site.allocator,
        low_watermark=0,
        high_watermark=0,
        streams=(site.a, site.b),
        kv_pool=kv_pool,
        host=host,
        copier=site.copier,
        **params,
    )
    async with HiRadixCache(made) as site.cache:
        yield site
        site.cache.check()
    site.cache.check()
    site.device.run_until_idle()
    site.allocator.reclaim()
    host.allocator.reclaim()
    assert (site.allocator.available_size(), host.available_size()) == (num_slots, num_host_slots)
    assert site.device.races == []


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_copy_to_the_host_follows_the_forward_that_writes_and_so_does_a_second_reader(seed: int) -> None:
    async with opened_site(seed=seed) as site:
        lease, forward = await site.compute(key(range(8)), site.a, LONG_TIME)
        assert site.cache.stats().storing == 8
        second = await entered(site.cache, key(range(8)), stream=site.b)
        reader = site.read(second, site.b)
        lease.release()
        second.release()
        site.finish()
        assert set(reader.seen.values()) == {forward.stamp}
        await site.cache.evict(EvictParams(8))
        async with anyio.create_task_group() as tasks:
            act = await begin(tasks, lambda: entered(site.cache, key(range(8)), stream=site.b))
            again = await site.drain(act)
        assert again.num_matched == 8
        reader = site.read(again, site.b)
        again.release()
        site.finish()
        assert set(reader.seen.values()) == {forward.stamp}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reader", ["a", "b"])
async def test_a_load_into_a_slot_follows_whoever_still_reads_it(seed: int, reader: str) -> None:
    async with opened_site(8, seed=seed) as site:
        lease, forward = await site.compute(key(range(8)), site.a)
        site.finish()
        lease.release()
        await site.cache.evict(EvictParams(8))
        other, _ = await site.compute(key(range(20, 28)), site.b)
        site.finish()
        slow = site.read(other, getattr(site, reader), LONG_TIME)
        other.release()
        async with anyio.create_task_group() as tasks:
            act = await begin(tasks, lambda: entered(site.cache, key(range(8)), stream=site.a))
            assert act.waits
            again = await site.drain(act)
        assert again.num_matched == 8
        assert slow.done
        last = site.read(again, site.a)
        again.release()
        site.finish()
        assert set(last.seen.values()) == {forward.stamp}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
async def test_many_requests_under_pressure_read_what_was_written_for_them(seed: int, write_policy: str) -> None:
    num_copies = 0

    def fault(job: Job) -> tuple[int, Exception] | None:
        nonlocal num_copies
        num_copies += 1
        if num_copies % 5:
            return None
        return len(job.source_pages) // 2, RuntimeError("the copy engine gave up")

    stamps: dict[tuple[int, ...], int] = {}
    async with opened_site(24, 48, seed, fault, write_policy=write_policy) as site:

        async def request(number: int) -> None:
            ids = [number % 5, *range(100, 100 + 3 + number % 7)]
            wanted = RadixKey(ids)
            stream = site.a if number % 2 else site.b
            async with site.cache.lease(wanted, stream=stream, reserve=len(wanted)) as lease:
                slots = lease.slots.tolist()
                matched = site.read(lease, stream)
                for i in range(lease.num_matched, len(wanted)):
                    written = stream.launch((), slots[i : i + 1])
                    stamps.setdefault(tuple(ids[: i + 1]), written.stamp)
                    if stamps[tuple(ids[: i + 1])] != written.stamp:
                        written.stamp = stamps[tuple(ids[: i + 1])]  # the same tokens have the same KV
                lease.commit(wanted)
                reads.append((matched, slots[: lease.num_matched], ids))

        reads: list[tuple[Kernel, list[int], list[int]]] = []
        over = False

        async def device_runs() -> None:
            while not over:
                site.device.advance(3.0)
                site.cache.stats()
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as helpers:
            helpers.start_soon(device_runs)
            for first in range(0, 48, 8):
                async with anyio.create_task_group() as tasks:
                    for number in range(first, first + 8):
                        tasks.start_soon(request, number)
                site.cache.check()
            over = True
        site.finish()
        for matched, slots, ids in reads:
            for i, slot in enumerate(slots):
                assert matched.seen[slot] == stamps[tuple(ids[: i + 1])]
        stats = site.cache.stats()
        assert stats.load_back_tokens > 0
        assert stats.failed_copies > 0
