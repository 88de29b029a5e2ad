"""Every tree test that goes through the interface runs once for each core."""

from __future__ import annotations

from typing import Any

import pytest

from aradix.tree import make_core
from aradix.tree.protocol import TreeCore
from tests.tree.lockstep import CORES, CoreFactory


# Session-wide, as hypothesis wants of a fixture: it holds no state.
@pytest.fixture(scope="session", params=CORES)
def core_factory(request: pytest.FixtureRequest) -> CoreFactory:
    """Makes a tree core: `core_factory(page_size=1, item_bytes=4, policy="lru", evict_unit="page", ...)`."""

    def make(**settings: Any) -> TreeCore:
        return make_core(request.param, **{"policy": "lru", **settings})

    return make
