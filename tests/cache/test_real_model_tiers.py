"""A real model over a cache with tiers: KV that left the device comes back as it was, from wherever it went."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint

from aradix import CacheInitParams, EvictParams, HiRadixCache, HostKVPool, MHAKVPool, SlotAllocator
from aradix.memory.kv_pool import Layout
from aradix.memory.storage.file_store import FileStore
from aradix.memory.storage.mooncake_store import MooncakeStore
from aradix.memory.storage.valkey_store import ValkeyStore
from tests.cache.restart import Stores, restart
from tests.memory.storage.processes import PROCESSES
from tests.memory.storage.servers import needs_mooncake_master, needs_valkey
from tests.support.answers import CLOSE, NUM_NEW, OTHER, PAGE_SIZE, STORY, Answer, ask, assert_same
from tests.support.core import TREE_CORE
from tests.support.smollm2 import SmolLM2, needs_smollm2

pytestmark = [needs_smollm2, pytest.mark.anyio]

NUM_SLOTS = 64
Backend = tuple[str, dict[str, Any]]
ASYNCIO: Backend = ("asyncio", {})
TRIO: Backend = ("trio", {})


class Site:
    """A cache over pools for the model's KV."""

    def __init__(self, cache: HiRadixCache, pool: MHAKVPool, host: HostKVPool, model: SmolLM2) -> None:
        self.cache = cache
        self.pool = pool
        self.host = host
        self.model = model

    async def ask(self, prompt: list[int]) -> Answer:
        """An answer, which must be what computing everything gives."""
        answer = await ask(self.cache, self.model, self.pool, prompt)
        assert_same(answer, self.model.cold(prompt, NUM_NEW))
        return answer

    async def stored(self) -> None:
        while self.cache.stats().storing:
            await checkpoint()

    async def leave_the_device(self) -> None:
        """Evict everything, and leave nothing of it in the device's memory."""
        await self.stored()
        await self.cache.evict(EvictParams(NUM_SLOTS))
        assert self.cache.total_size() == 0
        self.pool.buffer.fill_(7.0)


@asynccontextmanager
async def opened(model: SmolLM2, layout: Layout = "layer_first", **params: Any) -> AsyncIterator[Site]:
    pool = model.pool(NUM_SLOTS, PAGE_SIZE, layout)
    host = HostKVPool(2 * NUM_SLOTS, PAGE_SIZE, pool)
    allocator = SlotAllocator(NUM_SLOTS, PAGE_SIZE)
    params = {"write_policy": "write_through", "load_back_threshold": PAGE_SIZE, "tree_core": TREE_CORE, **params}
    made = CacheInitParams(
        allocator,
        PAGE_SIZE,
        low_watermark=0,
        high_watermark=0,
        kv_pool=pool,
        host=host,
        prefetch_timeout_s=60,
        **params,
    )
    async with HiRadixCache(made) as cache:
        yield Site(cache, pool, host, model)
        cache.check()
    cache.check()


def whole_pages(prompt: list[int]) -> int:
    """Tokens of a prompt that can be found: one has to be left to compute."""
    return (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE


@pytest.mark.parametrize(
    ("anyio_backend", "write_policy", "layout"),
    [
        (ASYNCIO, "write_through", "layer_first"),
        (TRIO, "write_through_selective", "layer_first"),
        (ASYNCIO, "write_back", "page_first"),
    ],
    ids=["asyncio-write_through", "trio-write_through_selective", "asyncio-write_back"],
)
async def test_prefixes_come_back_from_the_host_after_eviction_and_splits(
    smollm2: SmolLM2, write_policy: str, layout: Layout
) -> None:
    story, other = smollm2.encode(STORY), smollm2.encode(OTHER)
    async with opened(smollm2, layout, write_policy=write_policy) as site:
        cache = site.cache
        assert (await site.ask(story)).num_matched == 0
        assert (await site.ask(other)).num_matched == 8
        if write_policy == "write_through_selective":
            for prompt in (story, other):
                assert (await site.ask(prompt)).num_matched == whole_pages(prompt)
        await site.leave_the_device()
        assert (await site.ask(story)).num_matched == whole_pages(story)
        assert cache.stats().load_backs == 1
        # What ends inside a node on the host splits it, and the rest stays below.
        third = [*other[:12], *story[4:9]]
        assert (await site.ask(third)).num_matched == 12
        assert (await site.ask(other)).num_matched == whole_pages(other)
        # A part is on the device and a part on the host.
        await site.stored()
        await cache.evict(EvictParams(3 * PAGE_SIZE))
        for prompt in (story, other, third):
            assert (await site.ask(prompt)).num_matched == whole_pages(prompt)
        # Many at a time, one copy.
        await site.leave_the_device()
        num_before = cache.stats().load_backs
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(site.ask, story)
        assert cache.stats().load_backs == num_before + 1


@pytest.mark.parametrize("anyio_backend", [ASYNCIO], ids=["asyncio"])
async def test_a_wrong_page_on_the_host_is_seen_in_the_logits(smollm2: SmolLM2) -> None:
    story = smollm2.encode(STORY)
    async with opened(smollm2) as site:
        await site.ask(story)
        await site.leave_the_device()
        assert site.host.pages is not None
        used = [page for page in range(1, len(site.host.pages)) if site.host.pages[page].any()]
        assert len(used) * PAGE_SIZE >= whole_pages(story)
        site.host.set_page(used[1], site.host.get_page(used[2]))  # (changed places they would do: keys carry theirs)
        answer = await ask(site.cache, smollm2, site.pool, story)
        assert answer.num_matched == whole_pages(story)
        _, right = smollm2.cold(story, NUM_NEW)
        assert (answer.logits[0] - right[0]).abs().max() > 100 * CLOSE


@pytest.fixture(
    params=[
        "file",
        pytest.param("valkey", marks=needs_valkey),
        pytest.param("mooncake", marks=needs_mooncake_master),
    ]
)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Each page store in turn."""
    if request.param == "mooncake":
        return request.getfixturevalue("joined_store")
    if request.param == "valkey":
        return ValkeyStore(request.getfixturevalue("valkey_url"), timeout_s=60)
    return FileStore(tmp_path, timeout_s=60)


@pytest.mark.parametrize("anyio_backend", [ASYNCIO], ids=["asyncio"])
async def test_prefixes_come_back_from_each_storage(
    smollm2: SmolLM2, storage: Any, request: pytest.FixtureRequest
) -> None:
    story, other = smollm2.encode(STORY), smollm2.encode(OTHER)
    named = {"storage": storage, "model_id": request.node.nodeid}
    async with opened(smollm2, **named) as site:
        await site.ask(story)
        await site.ask(other)
    assert storage.stats().stored  # closing waited for it
    # The next morning nothing is on the device, and nothing on the host.
    async with opened(smollm2, **named) as site:
        assert (await site.ask(other)).num_matched == whole_pages(other)
        assert site.cache.stats().prefetched_tokens >= whole_pages(other)
        # The rest hangs below what came back, and splits it.
        assert (await site.ask(story)).num_matched == whole_pages(story)
        await site.leave_the_device()
        assert (await site.ask(story)).num_matched == whole_pages(story)
        assert not site.cache.take_faults()
    if not isinstance(storage, MooncakeStore):  # which is everybody's
        await storage.aclose()


@needs_valkey
@needs_mooncake_master
@pytest.mark.parametrize("anyio_backend", [ASYNCIO], ids=["asyncio"])
async def test_another_process_finds_them_in_all_storages(
    smollm2: SmolLM2, tmp_path: Path, valkey_url: str, mooncake_address: str, joined_store: MooncakeStore
) -> None:
    story = smollm2.encode(STORY)
    where = Stores(tmp_path / "pages", valkey_url, mooncake_address)
    files, valkey = FileStore(where.folder, timeout_s=60), ValkeyStore(valkey_url, timeout_s=60)
    for storage in (files, valkey, joined_store):
        async with opened(smollm2, "page_first", storage=storage, model_id="smollm2, restarted") as site:
            assert (await site.ask(story)).num_matched == 0
            shape = (site.pool.num_layers, *site.pool.key_buffer[0].shape[1:])
    await files.aclose()
    await valkey.aclose()
    found = tmp_path / "found.pt"
    process = PROCESSES.Process(target=restart, args=(where, shape, story, found))
    process.start()
    await anyio.to_thread.run_sync(process.join)
    assert process.exitcode == 0
    # The other process has no model: the KV that it got is looked at here.
    kv: dict[str, torch.Tensor] = torch.load(found)
    assert set(kv) == {"file", "valkey", "mooncake"}
    for rows in kv.values():
        assert len(rows) == whole_pages(story)
        pool = smollm2.pool(NUM_SLOTS, PAGE_SIZE, "page_first")
        pool.buffer[PAGE_SIZE : PAGE_SIZE + len(rows)] = rows
        slots = torch.arange(PAGE_SIZE, PAGE_SIZE + len(story) + NUM_NEW - 1)
        answer = Answer(len(rows), *smollm2.greedy(story, len(rows), slots, pool))
        assert_same(answer, smollm2.cold(story, NUM_NEW))
