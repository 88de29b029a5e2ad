"""Coding-agent sessions (`cc_weka_*`): ids of 64-token blocks, local to their session, lines grouped by session.

A line keeps the first `k` ids of the session's line before it and adds runs of consecutive ones. Sessions say only how
long after their own beginning a request came. Here session i begins 60 s x i after the first, so that they overlap as
they would on a server; a seed above 0 moves each of them by up to a minute. What is held at any time is the text of
the live sessions and the ids of each one's last request: the whole trace is a thousand times that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np

from aradix.replay.interleave import Session, interleave
from aradix.replay.lines import TraceFile
from aradix.replay.request import MAX_BLOCK_ID, MAX_TOKEN, NO_TOKENS, Request

__all__ = ["SESSION_GAP_S", "SessionBlockTrace"]

SESSION_GAP_S = 60.0

_Lines = deque[tuple[int, bytes]]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID // 2)]


class _Name(msgspec.Struct):
    s: str


class _Line(msgspec.Struct):
    s: str
    t: Annotated[float, msgspec.Meta(ge=0)]
    num_input: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN)] = msgspec.field(name="in")
    k: Annotated[int, msgspec.Meta(ge=0)]
    n: list[tuple[_Count, _Count]]


class SessionBlockTrace:
    """The requests of all sessions, interleaved in the order of time.

    Args:
        file: the trace.
        seed: 0 begins sessions exactly a minute apart; any other moves them within that minute.
    """

    block_size = 64
    has_outputs = False

    def __init__(self, file: TraceFile, seed: int = 0) -> None:
        self._file = file
        self._seed = seed
        self.name = file.path.name

    def requests(self) -> Iterator[Request]:
        """See `Trace.requests`."""
        return interleave(self._sessions())

    def _sessions(self) -> Iterator[Session]:
        jitter = np.random.default_rng(self._seed) if self._seed else None
        for index, lines in enumerate(self._groups()):
            begin = (index + (jitter.random() if jitter is not None else 0.0)) * SESSION_GAP_S
            yield begin, self._turns(begin, lines)

    def _groups(self) -> Iterator[_Lines]:
        """The lines of one session after another; they must lie together, for only then can they be streamed."""
        decoder = msgspec.json.Decoder(_Name)
        seen: set[str] = set()
        session, lines = "", _Lines()
        for number, text in self._file.lines():
            name = self._file.decode(number, text, decoder).s
            if name != session or not lines:
                if name in seen:
                    raise self._file.error(number, f"session {name!r} goes on after another began")
                if lines:
                    yield lines
                seen.add(name)
                session, lines = name, _Lines()
            lines.append((number, text))
        if lines:
            yield lines

    def _turns(self, begin: float, lines: _Lines) -> Iterator[tuple[float, Request]]:
        decoder = msgspec.json.Decoder(_Line)
        ids = np.empty(0, np.int64)
        last = 0.0
        while lines:
            number, text = lines.popleft()
            line = self._file.decode(number, text, decoder)
            if line.t < last:
                raise self._file.error(number, f"t runs backwards: {line.t} after {last}")
            if line.k > len(ids):
                raise self._file.error(number, f"k is {line.k}, but the line before has {len(ids)} ids")
            num_new = sum(count for _, count in line.n)
            num_blocks = line.num_input // self.block_size
            if line.k + num_new != num_blocks:
                raise self._file.error(
                    number, f"{line.num_input} input tokens need {num_blocks} ids, got {line.k + num_new}"
                )
            runs = [np.arange(first, first + count, dtype=np.int64) for first, count in line.n]
            ids = np.concatenate((ids[: line.k], *runs))
            last = line.t
            yield (
                begin + line.t,
                Request(
                    session=line.s,
                    extra_key=line.s,
                    ids=ids,
                    block_size=self.block_size,
                    input_tokens=line.num_input,
                    output=NO_TOKENS,
                    fresh_tokens=num_new * self.block_size,
                ),
            )
