"""The three stores, as fixtures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from aradix.memory.storage.file_store import FileStore
from aradix.memory.storage.mooncake_store import MooncakeStore
from aradix.memory.storage.protocol import PageSpace
from aradix.memory.storage.store import BackedStore
from aradix.memory.storage.valkey_store import ValkeyStore
from tests.memory.storage.servers import mooncake_master, needs_mooncake_master, needs_valkey, valkey_server

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


@pytest.fixture(
    params=[
        "file",
        pytest.param("valkey", marks=needs_valkey),
        pytest.param("mooncake", marks=needs_mooncake_master),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BackedStore]:
    """Each store in turn, slow only where it hangs."""
    if request.param == "mooncake":
        yield request.getfixturevalue("joined_store")
        return
    made: BackedStore
    if request.param == "file":
        made = FileStore(tmp_path / "store", timeout_s=60)
    else:
        made = ValkeyStore(request.getfixturevalue("valkey_url"), timeout_s=60)
    yield made
    anyio.run(made.aclose)


@pytest.fixture
def space(request: pytest.FixtureRequest) -> PageSpace:
    """A space of the test's own: servers outlive it."""
    return PageSpace(f"model of {request.node.nodeid}", "format-1")
