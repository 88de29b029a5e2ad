"""A pytest plugin: the servers of the page stores, started at most once a session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import anyio
import pytest

from aradix.memory.storage.mooncake_store import MooncakeStore
from tests.memory.storage.servers import mooncake_master, valkey_server

__all__ = ["joined_store", "mooncake_address", "valkey_url"]

MIB = 1 << 20


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(scope="session")
def mooncake_address() -> Iterator[str]:
    os.environ.setdefault("GLOG_minloglevel", "2")  # its client would tell stderr about each call
    # Leases longer than any test: what was read stays refused.
    with mooncake_master("--default_kv_lease_ttl=1h") as address:
        yield address


@pytest.fixture(scope="session")
def joined_store(mooncake_address: str) -> Iterator[MooncakeStore]:
    """One member for all tests, since joining and leaving take their time."""
    store = MooncakeStore(mooncake_address, segment_bytes=256 * MIB, buffer_bytes=64 * MIB, timeout_s=60)
    yield store
    anyio.run(store.aclose)
