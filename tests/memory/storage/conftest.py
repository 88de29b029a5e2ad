"""The three stores, as fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from aradix.memory.storage.file_store import FileStore
from aradix.memory.storage.protocol import PageSpace
from aradix.memory.storage.store import BackedStore
from aradix.memory.storage.valkey_store import ValkeyStore
from tests.memory.storage.servers import needs_mooncake_master, needs_valkey


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
