"""Which tree core runs."""

from __future__ import annotations

import os
from typing import Any

from aradix.tree import make_core

__all__ = ["TREE_CORE", "core_name"]

TREE_CORE: Any = os.environ.get("ARADIX_TREE_CORE", "auto")
"""The core for caches whose test does not name one: `ARADIX_TREE_CORE=python` runs them on the reference core."""


def core_name() -> str:
    """The core that `TREE_CORE` picks in this installation."""
    return make_core(TREE_CORE, policy="lru", page_size=1, item_bytes=4, evict_unit="page", record_events=False).name
