"""Small traces for tests: writing them, and a block LRU to compare replays with."""

from __future__ import annotations

import gzip
import json
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from aradix.keys import Namespace
from aradix.replay.request import NO_TOKENS, Request

__all__ = ["BlockLRU", "block_request", "mooncake_line", "token_request", "write_lines"]


def write_lines(path: Path, records: Iterable[dict[str, Any] | str], *, zipped: bool = False) -> Path:
    """A file of these records, one a line; a `str` is written as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


def mooncake_line(ids: list[int], *, short_by: int = 0) -> dict[str, Any]:
    """A line of a Mooncake trace whose last block is `short_by` tokens from full."""
    return {"timestamp": 0, "input_length": len(ids) * 512 - short_by, "output_length": 1, "hash_ids": ids}


def token_request(
    tokens: Iterable[int], *, output: Iterable[int] = (), session: str | None = None, extra_key: str | None = None
) -> Request:
    """A request of plain tokens."""
    ids = np.array(list(tokens), np.int32)
    return Request(session, extra_key, ids, 1, len(ids), np.array(list(output), np.int32), len(ids))


def block_request(
    ids: list[int], *, block_size: int = 4, short_by: int = 0, session: str | None = None, extra_key: str | None = None
) -> Request:
    """A request of whole blocks, the last of which is `short_by` tokens from full."""
    num_tokens = len(ids) * block_size
    return Request(
        session, extra_key, np.array(ids, np.int64), block_size, num_tokens - short_by, NO_TOKENS, num_tokens
    )


class BlockLRU:
    """What a replay must find, by another road: a plain LRU list of blocks, no tree.

    Equal ids mean equal prefixes. A request touches its deepest block first, so a prefix never goes before what
    follows it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[tuple[str | Namespace | None, int], None] = OrderedDict()
        self.num_evicted = 0

    def request(self, ids: list[int], extra_key: str | Namespace | None = None) -> int:
        """The number of leading blocks that were there; then the request is cached, as far as the pool goes."""
        blocks = [(extra_key, block) for block in ids]
        num_hits = 0
        for block in blocks[: self._num_blocks]:
            if block not in self._blocks:
                break
            num_hits += 1
        for block in reversed(blocks[: self._num_blocks]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)
            self.num_evicted += 1
        return num_hits
