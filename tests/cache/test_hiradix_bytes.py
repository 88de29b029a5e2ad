"""Real pools and real copies on threads: what comes back from the host is, byte for byte, what was written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    Lease,
    MHAKVPool,
    MLAKVPool,
    RadixKey,
    SlotAllocator,
)
from tests.cache.acts import key
from tests.support.core import TREE_CORE

pytestmark = pytest.mark.anyio

LAYERS, PAGE = 3, 4
KINDS = ["mha-layer_first", "mha-page_first", "mla-layer_first"]


def make_pool(kind: str, num_slots: int) -> Any:
    name, layout = kind.split("-")
    if name == "mha":
        return MHAKVPool(num_slots, PAGE, LAYERS, 2, 8, torch.float32, layout=layout)  # type: ignore[arg-type]
    return MLAKVPool(num_slots, PAGE, LAYERS, 8, 4, torch.float32, layout=layout)  # type: ignore[arg-type]


class Engine:
    """Writes KV that only the prefix decides, so that a token in the wrong place has other bytes."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def kv(self, wanted: RadixKey, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        prefix = torch.cumsum(torch.from_numpy(wanted.token_ids().copy()).double() ** 1.5, 0).float()
        shapes = [buffer[0].shape for buffer in (self.pool.key_buffer[layer], self.pool.value_buffer[layer])]
        if isinstance(self.pool, MLAKVPool):
            shapes = [(1, self.pool.kv_lora_rank), (1, self.pool.rope_dim)]
        return tuple(  # type: ignore[return-value]
            (prefix + layer + 100 * part).reshape(-1, 1, 1).expand(-1, *shape).contiguous()
            for part, shape in enumerate(shapes)
        )

    def compute(self, lease: Lease, wanted: RadixKey) -> None:
        begin = lease.num_matched
        for layer in range(LAYERS):
            k, v = self.kv(wanted, layer)
            self.pool.set_kv(layer, lease.slots[begin:], k[begin:], v[begin:])

    def assert_right(self, lease: Lease, wanted: RadixKey) -> None:
        slots = lease.slots[: lease.num_matched]
        for layer in range(LAYERS):
            k, v = self.kv(wanted, layer)
            keys, values = self.pool.get_kv(layer)
            if isinstance(self.pool, MLAKVPool):
                assert torch.equal(keys[slots], torch.cat((k, v), dim=-1)[: len(slots)])
            else:
                assert torch.equal(keys[slots], k[: len(slots)])
                assert torch.equal(values[slots], v[: len(slots)])


@asynccontextmanager
async def opened_bytes(kind: str, num_slots: int = 64, **params: Any) -> AsyncIterator[tuple[HiRadixCache, Engine]]:
    pool = make_pool(kind, num_slots)
    host = HostKVPool(2 * num_slots, PAGE, pool)
    params = {"write_policy": "write_back", "load_back_threshold": 1, "tree_core": TREE_CORE, **params}
    made = CacheInitParams(
        SlotAllocator(num_slots, PAGE), PAGE, low_watermark=0, high_watermark=0, kv_pool=pool, host=host, **params
    )
    async with HiRadixCache(made) as cache:
        yield cache, Engine(pool)
        cache.check()
    cache.check()
    made.allocator.reclaim()
    host.allocator.reclaim()
    assert (made.allocator.available_size(), host.available_size()) == (num_slots, 2 * num_slots)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
async def test_the_bytes_are_right_after_eviction_splits_and_load_back(kind: str, write_policy: str) -> None:
    prompts = [key(range(1, 25)), key(range(1, 9), range(50, 66)), key(range(1, 17), range(80, 88))]
    async with opened_bytes(kind, write_policy=write_policy) as (cache, engine):
        for wanted in prompts:
            async with cache.lease(wanted) as lease:
                lease.allocate_nowait(len(wanted) - lease.num_matched)
                engine.compute(lease, wanted)
                lease.commit(wanted)
        while cache.stats().storing:
            await checkpoint()
        assert (await cache.evict(EvictParams(64))).num_freed_tokens == 48
        engine.pool.buffer.fill_(-1)
        for wanted in reversed(prompts):
            async with cache.lease(wanted) as lease:
                assert lease.num_matched == 24
                engine.assert_right(lease, wanted)
        assert cache.stats().load_back_tokens == 48


@pytest.mark.parametrize("kind", KINDS)
async def test_the_bytes_are_right_while_many_share_a_pool_that_is_too_small(kind: str) -> None:
    async with opened_bytes(kind, 48, write_policy="write_through") as (cache, engine):

        async def request(number: int) -> None:
            wanted = key(range(10 * (number % 3), 10 * (number % 3) + 8), range(100 + number % 4, 112 + number % 4))
            async with cache.lease(wanted, reserve=len(wanted)) as lease:
                engine.assert_right(lease, wanted)
                engine.compute(lease, wanted)
                lease.commit(wanted)
                await checkpoint()

        for _ in range(5):
            async with anyio.create_task_group() as tasks:
                for number in range(12):
                    tasks.start_soon(request, number)
            cache.check()
        assert cache.stats().load_back_tokens > 0
