"""Storage that is not there, or holds what it should not: a miss that is told, slows nobody and is never wrong KV."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from aradix.errors import StorageCorruptError
from aradix.memory.storage.file_store import FileStore
from aradix.memory.storage.mooncake_store import MooncakeStore
from aradix.memory.storage.valkey_store import ValkeyStore
from aradix.observe import CacheMetrics
from tests.cache.acts import key
from tests.cache.test_hiradix_storage import PAGE, started
from tests.memory.storage.servers import free_port, needs_mooncake
from tests.support.stores import MemoryStore

pytestmark = pytest.mark.anyio

NUM_FAILURES = 3
"""After so many in a row nothing is asked of a store for a while."""
WANTED = key(range(1, 25))


def figures(registry: CollectorRegistry) -> dict[str, float]:
    """What Prometheus sees of storage."""
    lines = generate_latest(registry).decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("aradix:storage")]
    return {name.removeprefix("aradix:storage_"): float(value) for name, value in pairs}


@pytest.fixture(params=["files", "valkey", pytest.param("mooncake", marks=needs_mooncake)])
def unreachable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A store whose server is not there, or whose folder went away."""
    # On a clock that stands still it is never tried again.
    options: dict[str, Any] = {"timeout_s": 60, "clock": lambda: 0.0}
    if request.param == "valkey":
        yield ValkeyStore(f"valkey://127.0.0.1:{free_port()}", **options)
    elif request.param == "mooncake":
        yield MooncakeStore(f"127.0.0.1:{free_port()}", **options)
    else:
        store = FileStore(tmp_path / "folder", **options)
        (tmp_path / "folder").rename(tmp_path / "gone")
        yield store


async def test_an_unreachable_store_is_left_alone_said_once_and_shown(
    unreachable: Any, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    with caplog.at_level(logging.WARNING, "aradix"):
        async with started(unreachable) as worker:
            with CacheMetrics(worker.cache, registry):
                for first in range(100, 1100, 100):
                    assert await worker.request(key(range(first, first + 8))) == 0
                    await worker.archived()
                    assert await worker.request(key(range(first, first + 8))) == 8
                seen = figures(registry)
                faults = worker.cache.take_faults()
    assert seen["reachable"] == 0
    assert seen["failed_calls_total"] == NUM_FAILURES
    assert seen["skipped_calls_total"] >= 10
    assert {fault.operation for fault in faults} <= {"exists", "put"}
    assert len(faults) == NUM_FAILURES
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    await unreachable.aclose()


def spoil(folder: Path, how: str, page_hash: bytes, other_hash: bytes) -> None:
    """Makes something else of the file of a page."""
    page, other = (next(folder.rglob(f"*{each.hex()}*")) for each in (page_hash, other_hash))
    frame = page.read_bytes()
    spoiled = {
        "one bit": frame[:-1] + bytes([frame[-1] ^ 1]),
        "foreign": b"somebody else's file",
        "another page": other.read_bytes(),
        "cut short": frame[:-4],
    }
    page.write_bytes(spoiled[how])


@pytest.mark.parametrize("how", ["one bit", "foreign", "another page", "cut short"])
async def test_a_page_that_is_not_what_it_should_be_ends_the_prefix_and_is_told(how: str, tmp_path: Path) -> None:
    store = FileStore(tmp_path, timeout_s=60)
    async with started(store) as worker:
        await worker.request(WANTED)
    spoil(tmp_path, how, *WANTED.hash_chain(PAGE)[2:4])
    registry = CollectorRegistry()
    async with started(store) as worker:
        with CacheMetrics(worker.cache, registry):
            assert await worker.request(WANTED) == 2 * PAGE  # whose KV is right
            (fault,) = worker.cache.take_faults()
            assert (fault.operation, fault.num_tokens) == ("get", PAGE)
            assert isinstance(fault.error, StorageCorruptError)
            assert figures(registry)["corrupt_pages_total"] == 1
            assert figures(registry)["reachable"] == 1
    async with started(store) as worker:  # it was deleted, computed again and put anew
        assert await worker.request(WANTED) == 6 * PAGE
        assert not worker.cache.take_faults()
    await store.aclose()


async def test_a_page_of_the_wrong_size_is_a_miss_and_told() -> None:
    store = MemoryStore()
    async with started(store) as worker:
        await worker.request(WANTED)
    spoilt = list(store.pages)[3]
    store.pages[spoilt] += b"?"
    async with started(store) as worker:
        assert await worker.request(WANTED) == 3 * PAGE
        (fault,) = worker.cache.take_faults()
        assert (fault.operation, fault.num_tokens) == ("get", PAGE)
        assert isinstance(fault.error, StorageCorruptError)
