"""Pages outlive the process: put into the store behind the request, and fetched before the next one computes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint

from aradix import (
    CacheInitParams,
    EvictParams,
    HiRadixCache,
    HostKVPool,
    MHAKVPool,
    Namespace,
    RadixKey,
    SlotAllocator,
)
from aradix.errors import ConfigError
from aradix.memory.storage.file_store import FileStore
from aradix.memory.storage.protocol import PageSpace
from tests.cache.acts import begin, entered, key, settled
from tests.support.core import TREE_CORE
from tests.support.stores import MemoryStore

pytestmark = pytest.mark.anyio

PAGE = 4


class Worker:
    """A process: a cache over pools of its own, whose KV is the running sum of the tokens."""

    def __init__(self, cache: HiRadixCache, pool: MHAKVPool) -> None:
        self.cache = cache
        self.pool = pool

    def kv(self, wanted: RadixKey) -> torch.Tensor:
        sums = torch.from_numpy(wanted.token_ids().copy()).cumsum(0).float()
        return sums.reshape(-1, 1, 1).expand(-1, 1, 2).contiguous()

    async def request(self, wanted: RadixKey, **options: Any) -> int:
        """What was found, its KV being right; the rest is computed and published."""
        async with self.cache.lease(wanted, **options) as lease:
            found = lease.num_matched
            assert torch.equal(self.pool.key_buffer[0][lease.slots[:found]], self.kv(wanted)[:found])
            lease.allocate_nowait(len(wanted) - found)
            self.pool.set_kv(0, lease.slots[found:], self.kv(wanted)[found:], -self.kv(wanted)[found:])
            lease.commit(wanted)
            return int(found)

    async def archived(self) -> None:
        """Wait until all that is on its way down has arrived."""
        await self.cache._all_archived()


@asynccontextmanager
async def started(store: Any, num_slots: int = 64, **params: Any) -> AsyncIterator[Worker]:
    pool = MHAKVPool(num_slots, PAGE, 1, 1, 2, torch.float32)
    host = HostKVPool(2 * num_slots, PAGE, pool)
    params = {"write_policy": "write_through", "load_back_threshold": PAGE, "tree_core": TREE_CORE, **params}
    params = {"model_id": "tiny", "prefetch_timeout_s": 60.0, **params}
    made = CacheInitParams(
        SlotAllocator(num_slots, PAGE),
        PAGE,
        low_watermark=0,
        high_watermark=0,
        kv_pool=pool,
        host=host,
        storage=store,
        **params,
    )
    async with HiRadixCache(made) as cache:
        yield Worker(cache, pool)
        cache.check()
    cache.check()
    for allocator in (made.allocator, host.allocator):
        allocator.reclaim()
        assert allocator.available_size() == allocator.num_slots


@pytest.mark.parametrize("backend", ["memory", "files"])
async def test_a_new_process_finds_the_prefixes_of_yesterday(backend: str, tmp_path: Path) -> None:
    memory = MemoryStore()
    for found, num_prefetched in (((0, 8, 0), 0), ((24, 24, 16), 56)):
        store: Any = memory if backend == "memory" else FileStore(tmp_path)
        async with started(store) as worker:
            assert await worker.request(key(range(1, 25))) == found[0]
            assert await worker.request(key(range(1, 9), range(50, 66))) == found[1]
            assert await worker.request(key(range(1, 17), namespace="other")) == found[2]
            assert worker.cache.stats().prefetched_tokens == num_prefetched
        await store.aclose()


async def test_pages_of_another_model_are_not_found() -> None:
    store = MemoryStore()
    async with started(store) as worker:
        await worker.request(key(range(1, 25)))
    async with started(store, model_id="another") as worker:
        assert await worker.request(key(range(1, 25))) == 0
    assert len(store.pages) == 12


async def test_what_is_cached_above_gets_its_host_copy_so_that_the_rest_can_hang_below() -> None:
    store = MemoryStore()
    async with started(store) as worker:
        await worker.request(key(range(1, 25)))
    async with started(store, write_policy="write_back") as worker:
        assert await worker.request(key(range(1, 9)), load_back=False) == 0
        assert await worker.request(key(range(1, 25))) == 24
        assert worker.cache.stats().prefetched_tokens == 16


async def test_many_who_miss_the_same_pages_fetch_them_once() -> None:
    store = MemoryStore()
    async with started(store) as worker:
        await worker.request(key(range(1, 25)))
    store.calls.clear()
    async with started(store) as worker, anyio.create_task_group() as tasks:
        store.held = anyio.Event()
        acts = [await begin(tasks, entered, worker.cache, key(range(1, 25))) for _ in range(10)]
        acts.pop(0).scope.cancel()
        await settled()
        store.held.set()
        while any(act.waits for act in acts):
            await checkpoint()
        assert [act.value.num_matched for act in acts] == [24] * 9
        assert store.calls == ["exists", "get"]
        for act in acts:
            act.value.release()


async def test_a_store_that_does_not_answer_holds_a_lease_up_to_its_deadline() -> None:
    store = MemoryStore()
    async with started(store) as worker:
        await worker.request(key(range(1, 25)))
    async with started(store, prefetch_timeout_s=0.001) as worker:
        store.held = anyio.Event()
        assert await worker.request(key(range(1, 25))) == 0
        # what comes late is there for the next one, unless that was faster
        store.held.set()
        store.held = None
        await settled()
        assert await worker.request(key(range(1, 25))) == 24


async def test_a_broken_store_is_a_miss_that_is_told() -> None:
    store = MemoryStore()
    store.broken = True
    async with started(store) as worker:
        assert await worker.request(key(range(1, 25))) == 0
        await worker.archived()
        assert worker.cache.stats().archived_tokens == 0
        assert {fault.operation for fault in worker.cache.take_faults()} == {"exists", "put"}


async def test_pages_that_are_gone_in_the_middle_leave_a_shorter_prefix() -> None:
    store = MemoryStore()
    wanted = key(range(1, 25))
    async with started(store) as worker:
        await worker.request(wanted)
        space = PageSpace("tiny", worker.pool.format_id, wanted.namespace)
    await store.delete(space, [wanted.hash_chain(PAGE)[3]])
    async with started(store) as worker:
        assert await worker.request(wanted) == 12


@pytest.mark.parametrize("namespace", [None, "a"])
async def test_after_a_flush_the_store_has_nothing_either(namespace: str | None) -> None:
    store = MemoryStore()
    wanted = key(range(1, 25), namespace="a")
    async with started(store) as worker:
        await worker.request(wanted)
        await worker.archived()
        await worker.request(key(range(1, 9), namespace="b"))
        await worker.archived()
        await worker.cache.flush(namespace)
        assert await worker.request(wanted) == 0
        assert await worker.request(key(range(1, 9), namespace="b")) == (8 if namespace else 0)


async def test_what_is_on_its_way_at_a_flush_arrives_nowhere() -> None:
    store = MemoryStore()
    wanted = key(range(1, 25))
    async with started(store) as worker:
        await worker.request(wanted)
        await worker.archived()
    async with started(store) as worker, anyio.create_task_group() as tasks:
        store.held = anyio.Event()
        act = await begin(tasks, entered, worker.cache, wanted)
        await worker.request(key(range(100, 108)), load_back=False)
        while worker.cache.stats().storing:
            await checkpoint()
        await worker.cache.flush()
        assert store.pages == {}
        store.held.set()
        while act.waits:
            await checkpoint()
        assert act.value.num_matched == 0
        act.value.release()
        assert await worker.request(wanted, load_back=False) == 0
        assert await worker.request(wanted) == 24


async def test_a_page_store_is_asked_for_what_it_must_have() -> None:
    with pytest.raises(ConfigError, match="page store"):
        async with started(object()):
            pass
    with pytest.raises(ConfigError, match="prefetch_timeout_s"):
        async with started(MemoryStore(), prefetch_timeout_s=0):
            pass


async def test_what_left_the_host_comes_back_from_the_store() -> None:
    store = MemoryStore()
    async with started(store, 16) as worker:
        for first in range(0, 100, 20):
            assert await worker.request(key(range(first + 1, first + 17))) == 0
            await worker.archived()
            assert (await worker.cache.evict(EvictParams(16))).num_freed_tokens == 16
        assert worker.cache.stats().host_evicted > 0
        for first in range(0, 100, 20):
            assert await worker.request(key(range(first + 1, first + 17))) == 16
            await worker.archived()


async def test_a_flush_by_fields_leaves_nothing_that_has_them_in_the_store() -> None:
    store = MemoryStore()
    wanted = key(range(1, 25), namespace=Namespace(lora="x", salt="s"))
    async with started(store) as worker:
        await worker.request(wanted)
        await worker.archived()
    async with started(store) as worker:
        assert (await worker.cache.flush(lora="x")).num_freed_tokens == 0
        assert await worker.request(wanted) == 0


async def test_who_joins_a_shorter_fetch_fetches_the_rest() -> None:
    store = MemoryStore()
    async with started(store) as worker:
        await worker.request(key(range(1, 25)))
    async with started(store) as worker, anyio.create_task_group() as tasks:
        store.held = anyio.Event()
        acts = [await begin(tasks, entered, worker.cache, key(range(1, end))) for end in (9, 25)]
        store.held.set()
        while any(act.waits for act in acts):
            await checkpoint()
        assert [act.value.num_matched for act in acts] == [8, 24]
        for act in acts:
            act.value.release()
