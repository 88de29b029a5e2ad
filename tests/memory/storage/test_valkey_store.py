"""Pages in a Valkey server: away, back, full, shared."""

from __future__ import annotations

import logging
from pathlib import Path

import anyio
import pytest

from aradix.errors import ConfigError
from aradix.keys import Namespace
from aradix.memory.storage.protocol import PageSpace
from aradix.memory.storage.valkey_store import ValkeyStore
from tests.memory.storage.servers import free_port, needs_valkey, valkey_server

HASHES = [bytes([i]) * 32 for i in range(8)]
PAGES = [bytes([i]) * 100 for i in range(8)]


@needs_valkey
@pytest.mark.anyio
async def test_a_server_that_is_not_there_slows_nobody_and_is_found_when_it_comes(
    tmp_path: Path, space: PageSpace, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    port = free_port()
    store = ValkeyStore(f"valkey://127.0.0.1:{port}", timeout_s=60, clock=lambda: now[0])
    for _ in range(20):
        assert await store.put(space, HASHES, PAGES) == [False] * 8
        assert await store.get(space, HASHES) == [None] * 8
    stats = store.stats()
    assert (stats.failed_calls, stats.skipped_calls) == (3, 37)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    with valkey_server(tmp_path, port=port):
        assert await store.put(space, HASHES, PAGES) == [False] * 8
        now[0] += 1
        assert await store.put(space, HASHES, PAGES) == [True] * 8
        assert await store.get(space, HASHES) == PAGES
        assert store.stats().is_reachable
    for _ in range(4):
        assert await store.get(space, HASHES) == [None] * 8
    assert not store.stats().is_reachable
    await store.aclose()


@needs_valkey
@pytest.mark.anyio
async def test_a_full_server_refuses_pages_and_is_still_read(tmp_path: Path, space: PageSpace) -> None:
    with valkey_server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as url:
        store = ValkeyStore(url, timeout_s=60)
        page = bytes(1 << 20)
        hashes = [i.to_bytes(32, "big") for i in range(32)]
        stored = await store.put(space, hashes, [page] * 32)
        assert stored.count(True) >= 2
        assert stored.count(False) >= 20
        stats = store.stats()
        assert stats.refused == stored.count(False)
        assert stats.is_reachable
        found = await store.get(space, hashes)
        assert found == [page if done else None for done in stored]
        await store.aclose()


@needs_valkey
@pytest.mark.anyio
async def test_a_clear_touches_only_its_own_keys(valkey_url: str, space: PageSpace) -> None:
    """Many keys, so that the server is asked more than once."""
    import valkey

    store = ValkeyStore(valkey_url, prefix="a*:", timeout_s=60)
    others = ValkeyStore(valkey_url, prefix="ab:", timeout_s=60)
    hashes = [i.to_bytes(32, "big") for i in range(2500)]
    mine = space._replace(namespace=Namespace(lora="mine"))
    assert await store.put(mine, hashes, [b"x"] * 2500) == [True] * 2500
    await others.put(mine, hashes[:1], [b"x"])
    client = valkey.Valkey.from_url(valkey_url)
    await anyio.to_thread.run_sync(client.set, "a*:foreign", b"1")
    assert await store.clear(mine)
    assert await store.exists(mine, hashes) == [False] * 2500
    assert await others.exists(mine, hashes[:1]) == [True]
    assert await anyio.to_thread.run_sync(client.get, "a*:foreign") == b"1"
    await anyio.to_thread.run_sync(client.close)
    for each in (store, others):
        await each.aclose()


@needs_valkey
@pytest.mark.anyio
async def test_a_value_of_another_kind_under_the_name_of_a_page_is_a_miss(valkey_url: str, space: PageSpace) -> None:
    import valkey

    store = ValkeyStore(valkey_url, timeout_s=60)
    client = valkey.Valkey.from_url(valkey_url)
    name = f"aradix:{space.prefix()}{HASHES[0].hex()}"
    await anyio.to_thread.run_sync(client.rpush, name, b"not a page")
    await store.put(space, HASHES[1:2], PAGES[1:2])
    assert await store.get(space, HASHES[:2]) == [None, PAGES[1]]
    assert await store.put(space, HASHES[:1], PAGES[:1]) == [True]
    assert await store.get(space, HASHES[:2]) == PAGES[:2]
    await anyio.to_thread.run_sync(client.close)
    await store.aclose()


def test_a_password_is_never_told() -> None:
    store = ValkeyStore("valkey://user:secret@127.0.0.1:1/0")
    assert store.name == "valkey at 127.0.0.1:1"
    assert "secret" not in repr(store)


@pytest.mark.parametrize("url", ["http://127.0.0.1", "127.0.0.1:6379", ""])
def test_an_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no Valkey"):
        ValkeyStore(url)
