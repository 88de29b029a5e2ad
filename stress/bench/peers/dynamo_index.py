"""NVIDIA Dynamo's index of cached blocks, its `RadixTree`: which worker has how much of a prompt. It owns no slots.

To have it: `pip install --no-deps ai-dynamo-runtime`.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from stress.bench.peers import PeerMissing

__all__ = ["DynamoIndex", "load_dynamo"]


def load_dynamo() -> Any:
    """Dynamo's module. PeerMissing where it is not installed, or cannot be imported."""
    try:
        found = import_module("dynamo._core")
    except ModuleNotFoundError:
        raise PeerMissing("Dynamo is skipped: not installed (stress/README.md says how)") from None
    except ImportError as error:
        raise PeerMissing(f"Dynamo is skipped: {error}") from error
    if not hasattr(found, "RadixTree") or not hasattr(found, "compute_block_hash_for_seq"):
        raise PeerMissing("Dynamo is skipped: this release has no RadixTree")
    return found


class DynamoIndex:
    """Its index with one worker's blocks in it."""

    def __init__(self, dynamo: Any, page_size: int) -> None:
        self._hash = dynamo.compute_block_hash_for_seq
        self._page_size = page_size
        self._tree = dynamo.RadixTree()
        self._names: dict[tuple[int, int], int] = {}

    def hashes(self, tokens: list[int]) -> list[int]:
        """What a look-up is made with: a hash a block."""
        return list(self._hash(tokens, self._page_size))

    def put(self, tokens: list[int]) -> None:
        """Tell it that the worker has all blocks of these tokens."""
        parent, blocks, names = 0, [], self._names
        for block in self.hashes(tokens):
            parent = names.setdefault((parent, block), len(names) + 1)
            blocks.append({"block_hash": parent, "tokens_hash": block})
        event = {"event_id": len(names), "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
        self._tree.apply_event(0, json.dumps(event).encode())

    def find(self, hashes: list[int]) -> int:
        """How many tokens of a prompt the worker has."""
        return self._page_size * max(self._tree.find_matches(hashes).scores.values(), default=0)
