"""Which tree core runs."""

from __future__ import annotations

from aradix.tree import make_core

__all__ = ["core_name"]


def core_name() -> str:
    """The core that `tree_core="auto"` picks in this installation."""
    return make_core("auto", policy="lru", page_size=1, item_bytes=4, evict_unit="page", record_events=False).name
