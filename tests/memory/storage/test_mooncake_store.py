"""Pages in a Mooncake Store: leases, a master that goes, other members."""

from __future__ import annotations

import logging

import pytest

from aradix.errors import ConfigError
from aradix.memory.storage.mooncake_store import MooncakeStore
from aradix.memory.storage.protocol import PageSpace
from tests.memory.storage.processes import PROCESSES, lose_master
from tests.memory.storage.servers import free_port, mooncake_master, needs_mooncake, needs_mooncake_master

HASHES = [bytes([i]) * 32 for i in range(8)]
PAGES = [bytes([i + 1]) * 100 for i in range(8)]
MIB = 1 << 20


@needs_mooncake_master
@pytest.mark.anyio
async def test_what_was_just_read_is_not_deleted_while_its_lease_runs(
    joined_store: MooncakeStore, space: PageSpace
) -> None:
    await joined_store.put(space, HASHES[:3], PAGES[:3])
    assert await joined_store.get(space, HASHES[:2]) == PAGES[:2]
    assert await joined_store.delete(space, HASHES[:3]) == [False, False, True]
    assert await joined_store.get(space, HASHES[:3]) == [*PAGES[:2], None]
    assert joined_store.stats().is_reachable
    assert await joined_store.clear(space)
    assert await joined_store.get(space, HASHES[:3]) == [None] * 3


@needs_mooncake_master
@pytest.mark.anyio
async def test_a_page_that_does_not_fit_is_refused_and_the_others_are_stored(
    joined_store: MooncakeStore, space: PageSpace
) -> None:
    pages = [PAGES[0], bytes(65 * MIB), PAGES[2]]
    assert await joined_store.put(space, HASHES[:3], pages) == [True, False, True]
    assert joined_store.stats().is_reachable
    assert joined_store.take_faults()[0].hashes == (HASHES[1],)
    assert await joined_store.get(space, HASHES[:3]) == [PAGES[0], None, PAGES[2]]


@needs_mooncake_master
@pytest.mark.anyio
async def test_a_member_that_lends_nothing_finds_the_pages_of_the_others(
    joined_store: MooncakeStore, mooncake_address: str, space: PageSpace
) -> None:
    await joined_store.put(space, HASHES, PAGES)
    guest = MooncakeStore(mooncake_address, segment_bytes=0, buffer_bytes=16 * MIB, timeout_s=60)
    assert await guest.get(space, HASHES) == PAGES
    assert await guest.put(space._replace(model_id="guest"), HASHES, PAGES) == [True] * 8
    await guest.aclose()
    assert await joined_store.get(space._replace(model_id="guest"), HASHES) == PAGES


@needs_mooncake
@pytest.mark.anyio
async def test_a_master_that_is_not_there_slows_nobody(space: PageSpace, caplog: pytest.LogCaptureFixture) -> None:
    store = MooncakeStore(f"127.0.0.1:{free_port()}", timeout_s=60)
    for _ in range(20):
        assert await store.put(space, HASHES, PAGES) == [False] * 8
        assert await store.get(space, HASHES) == [None] * 8
    stats = store.stats()
    assert (stats.failed_calls, stats.skipped_calls) == (3, 37)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    await store.aclose()


@needs_mooncake_master
def test_a_master_that_went_away_is_a_store_that_does_not_answer() -> None:
    here, there = PROCESSES.Pipe()
    with mooncake_master() as address:
        # The client's own end takes long without a master; the other process ends without it.
        process = PROCESSES.Process(target=lose_master, args=(address, there))
        process.start()
        assert here.recv() == "joined"
    here.send("gone")
    process.join()
    assert process.exitcode == 0


@needs_mooncake
@pytest.mark.parametrize("master", ["127.0.0.1", "127.0.0.1:", ":50051", "host:port", ""])
def test_an_address_that_is_none_is_refused(master: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        MooncakeStore(master)
