"""Pages outlive the process: put into the store behind the request, and fetched before the next one computes."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
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
from aradix.cache import archive
from aradix.cache.archive import Archive
from aradix.cache.hold import Hold
from aradix.errors import CacheClosedError, ConfigError
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


class HeldInGet(MemoryStore):
    """Waits with what it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.held_read: anyio.Event | None = None

    async def get(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bytes | None]:
        pages = await super().get(space, hashes)
        if self.held_read is not None:
            await self.held_read.wait()
        return pages


async def test_what_was_read_before_a_flush_arrives_nowhere() -> None:
    store = HeldInGet()
    wanted = key(range(1, 25))
    async with started(store) as worker:
        await worker.request(wanted)
        await worker.archived()
    async with started(store) as worker, anyio.create_task_group() as tasks:
        store.held_read = anyio.Event()
        act = await begin(tasks, entered, worker.cache, wanted)
        while "get" not in store.calls:
            await checkpoint()
        await worker.cache.flush()
        store.held_read.set()
        while act.waits:
            await checkpoint()
        assert act.value.num_matched == 0
        act.value.release()
        assert worker.cache.stats().host_used == 0
        assert worker.cache.peek(wanted) == 0


async def test_what_was_copied_before_a_flush_is_not_put_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    copied, may_go = threading.Event(), threading.Event()
    read = HostKVPool.get_page

    def held_up(self: HostKVPool, page: int) -> bytes:
        copied.set()
        may_go.wait()
        return read(self, page)

    monkeypatch.setattr(HostKVPool, "get_page", held_up)
    async with started(store) as worker:
        await worker.request(key(range(1, 25)))
        while not copied.is_set():
            await checkpoint()
        await worker.cache.flush()
        may_go.set()
        await worker.archived()
        assert store.calls == ["exists", "clear"]
        assert store.pages == {}


async def test_a_lease_waits_for_the_store_until_one_deadline_whoever_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    async with started(store) as worker:
        await worker.request(key(range(1, 33)))
        await worker.archived()
    waits: dict[Hold, list[float]] = {}
    prefetch = Archive.prefetch

    async def noted(self: Archive, hold: Hold, deadline: float) -> bool:
        waits.setdefault(hold, []).append(deadline)
        return await prefetch(self, hold, deadline)

    monkeypatch.setattr(Archive, "prefetch", noted)
    async with started(store) as worker, anyio.create_task_group() as tasks:
        store.held = anyio.Event()
        acts = [await begin(tasks, entered, worker.cache, key(range(1, last))) for last in (9, 17, 33)]
        store.held.set()
        while any(act.waits for act in acts):
            await checkpoint()
        assert [act.value.num_matched for act in acts] == [8, 16, 32]
        for act in acts:
            act.value.release()
    assert max(map(len, waits.values())) > 1
    assert all(len(set(deadlines)) == 1 for deadlines in waits.values())


async def test_no_call_of_the_store_has_more_pages_than_it_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(MemoryStore):
        async def get(self, space: PageSpace, hashes: Sequence[bytes]) -> list[bytes | None]:
            sizes["get"].append(len(hashes))
            return await super().get(space, hashes)

        async def put(self, space: PageSpace, hashes: Sequence[bytes], pages: Sequence[bytes]) -> list[bool]:
            sizes["put"].append(len(hashes))
            return await super().put(space, hashes, pages)

    sizes: dict[str, list[int]] = {}
    for batch_bytes, expected in ((160, [2, 2, 2]), (64, [1] * 6), (1, [1] * 6), (1 << 20, [6])):
        monkeypatch.setattr(archive, "_BATCH_BYTES", batch_bytes)
        sizes.update(get=[], put=[])
        store = Counting()
        for found in (0, 24):
            async with started(store) as worker:  # whose pages have 64 bytes
                assert await worker.request(key(range(1, 25))) == found
                await worker.archived()
        assert sizes == {"get": expected, "put": expected}


async def test_what_comes_too_fast_for_the_store_is_counted() -> None:
    store = MemoryStore()
    async with started(store) as worker:
        store.held = anyio.Event()
        for first in range(0, 150, 50):
            await worker.request(key(range(first + 1, first + 41)), load_back=False)
            while worker.cache.stats().storing:
                await checkpoint()
            await worker.cache.evict(EvictParams(40))
        assert worker.cache.stats().unarchived_tokens == 2 * 40  # half of the host's 128 slots may wait
        store.held.set()
        await worker.archived()
        assert worker.cache.stats().archived_tokens == 40


class Failing(MemoryStore):
    """Breaks what a store promises."""

    async def put(self, space: PageSpace, hashes: Sequence[bytes], pages: Sequence[bytes]) -> list[bool]:
        await self._begin("put", hashes)
        raise ZeroDivisionError


@pytest.mark.parametrize("cause", ["around", "background"])
async def test_who_is_cancelled_while_the_last_pages_are_put_leaves_a_closed_cache(cause: str) -> None:
    store = MemoryStore() if cause == "around" else Failing()
    store.held = held = anyio.Event()
    scope = anyio.CancelScope()
    workers: list[Worker] = []

    async def leave() -> None:
        with scope:
            async with started(store) as worker:
                workers.append(worker)
                await worker.request(key(range(1, 25)), load_back=False)

    async def interrupt() -> None:
        while "put" not in store.calls:
            await checkpoint()
        if cause == "around":
            scope.cancel()
        else:
            held.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(interrupt)
        if cause == "around":
            await leave()
            assert scope.cancelled_caught
        else:
            with pytest.raises(ExceptionGroup) as raised:
                await leave()
            assert raised.group_contains(ZeroDivisionError)
    params = workers[0].cache._params
    with pytest.raises(CacheClosedError):
        await workers[0].cache.flush()
    workers[0].cache.check()
    for allocator in (params.allocator, params.host.allocator):
        allocator.reclaim()
        assert allocator.available_size() == allocator.num_slots


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
