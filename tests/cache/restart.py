"""A process of tomorrow: a cache with empty pools over the page stores that another process filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Stores", "restart"]


class Stores(NamedTuple):
    """Where the stores are."""

    folder: Path
    valkey_url: str
    mooncake_address: str


def restart(where: Stores, shape: tuple[int, int, int], prompt: list[int], found: Path) -> None:
    """Leases a prompt over each store in turn, and saves the KV that came, by token: `{store: [tokens, ...]}`.

    Args:
        shape: layers, KV heads and their dimension.
    """
    import anyio
    import torch

    from aradix.memory.storage.file_store import FileStore
    from aradix.memory.storage.mooncake_store import MooncakeStore
    from aradix.memory.storage.valkey_store import ValkeyStore

    async def main() -> None:
        stores: dict[str, Any] = {
            "file": FileStore(where.folder, timeout_s=60),
            "valkey": ValkeyStore(where.valkey_url, timeout_s=60),
            # It lends no memory: the pages are in that of the process that filled the store.
            "mooncake": MooncakeStore(where.mooncake_address, segment_bytes=0, buffer_bytes=64 << 20, timeout_s=60),
        }
        torch.save({name: await _leased(store, shape, prompt) for name, store in stores.items()}, found)
        for store in stores.values():
            await store.aclose()

    anyio.run(main)


async def _leased(store: Any, shape: tuple[int, int, int], prompt: list[int]) -> Any:
    import torch

    from aradix import CacheInitParams, HiRadixCache, HostKVPool, MHAKVPool, RadixKey, SlotAllocator
    from tests.support.answers import PAGE_SIZE

    pool = MHAKVPool(64, PAGE_SIZE, *shape, torch.float32, "cpu", "page_first")
    params = CacheInitParams(
        SlotAllocator(64, PAGE_SIZE),
        PAGE_SIZE,
        kv_pool=pool,
        host=HostKVPool(64, PAGE_SIZE, pool),
        storage=store,
        model_id="smollm2, restarted",
        prefetch_timeout_s=60,
        load_back_threshold=PAGE_SIZE,
    )
    async with HiRadixCache(params) as cache:
        async with cache.lease(RadixKey(prompt), leave_last=1) as lease:
            rows = pool.buffer[lease.slots].clone()
        cache.check()
    return rows
