"""Which reader a file needs, told by what its first line holds."""

from __future__ import annotations

from pathlib import Path

import msgspec

from aradix.replay.arrivals import ARRIVALS_HEADER
from aradix.replay.lines import TraceFile
from aradix.replay.mooncake import MooncakeTrace
from aradix.replay.own_trace import OwnTrace, is_own_line
from aradix.replay.request import ReplayError, Trace
from aradix.replay.session_blocks import SessionBlockTrace
from aradix.replay.token_trace import TokenTrace

__all__ = ["open_trace"]

_FORMATS = (
    "Mooncake block ids (hash_ids), token traces (s p k n o), session blocks (s t in k n), and your own token ids "
    '([1, 2] or {"tokens": [1, 2]}) or texts ({"text": "..."})'
)


def open_trace(path: Path, *, seed: int = 0, tokenizer: Path | None = None) -> Trace:
    """The trace in a file, plain or gzipped. Reads the first line only; `seed` moves sessions that have no start.

    Args:
        path: the file.
        seed: of the sessions' starts.
        tokenizer: a tokenizer.json, for a trace of texts and for no other.

    Raises:
        ReplayError: the file cannot be read, or is of no known format.
    """
    file = TraceFile(path)
    number, first = file.first_line()
    if first.startswith(ARRIVALS_HEADER.split(b",")[0]):
        raise ReplayError(f"{path}: holds arrivals, not requests; give it to --arrivals")
    fields = file.decode(number, first, msgspec.json.Decoder()) if first[:1] in (b"{", b"[", b'"') else None
    if is_own_line(fields):
        return OwnTrace(file, tokenizer)
    if tokenizer is not None:
        raise ReplayError(f"--tokenizer {tokenizer}: {path} holds no texts; leave it out")
    if isinstance(fields, dict):
        if "hash_ids" in fields:
            return MooncakeTrace(file)
        if fields.keys() >= {"s", "t", "in", "k", "n"}:
            return SessionBlockTrace(file, seed)
        if fields.keys() >= {"s", "p", "k", "n", "o"}:
            return TokenTrace(file)
    raise file.error(number, f"no trace format that is known; these, in lines of JSON, are: {_FORMATS}")
