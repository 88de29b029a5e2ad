"""Token traces (`*.tok.jsonl`): real token ids, each prompt written as a change to an earlier line's.

`p` is the earlier line (from 0, or -1), `k` how many of its tokens (prompt, then output) are kept, `n` the new ones and
`o` the output. Any later line may refer to a line, so one quick pass first notes who refers to it last, and its tokens
are kept no longer than that.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np

from aradix.replay.lines import TraceFile
from aradix.replay.request import MAX_TOKEN, NO_TOKENS, Request, Tokens

__all__ = ["TokenTrace"]

_Token = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN)]


class _Link(msgspec.Struct):
    p: Annotated[int, msgspec.Meta(ge=-1)]


class _Line(msgspec.Struct):
    s: str | int
    p: Annotated[int, msgspec.Meta(ge=-1)]
    k: Annotated[int, msgspec.Meta(ge=0)]
    n: list[_Token]
    o: list[_Token]


class TokenTrace:
    """The requests of a token trace, read as they are asked for."""

    block_size = 1
    has_outputs = True

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self.name = file.path.name

    def _last_uses(self) -> array[int]:
        """For each line the last one that refers to it, or -1."""
        decoder = msgspec.json.Decoder(_Link)
        last_uses = array("q")
        for index, (number, text) in enumerate(self._file.lines()):
            parent = self._file.decode(number, text, decoder).p
            if parent >= index:
                raise self._file.error(number, f"p must name an earlier line, got {parent} on line {index} (from 0)")
            if parent >= 0:
                last_uses[parent] = index
            last_uses.append(-1)
        return last_uses

    def requests(self) -> Iterator[Request]:
        """See `Trace.requests`."""
        last_uses = self._last_uses()
        decoder = msgspec.json.Decoder(_Line)
        kept: dict[int, tuple[Tokens, int]] = {-1: (NO_TOKENS, 0)}
        for index, (number, text) in enumerate(self._file.lines()):
            line = self._file.decode(number, text, decoder)
            parent, parent_prompt = kept[line.p]
            if line.k > len(parent):
                raise self._file.error(number, f"k is {line.k}, but line {line.p} (from 0) has {len(parent)} tokens")
            tokens = np.concatenate((parent[: line.k], np.array(line.n, np.int32), np.array(line.o, np.int32)))
            num_prompt = line.k + len(line.n)
            if line.p >= 0 and last_uses[line.p] == index:
                del kept[line.p]
            if last_uses[index] > index:
                kept[index] = tokens, num_prompt
            yield Request(
                session=line.s,
                extra_key=None,
                ids=tokens[:num_prompt],
                block_size=1,
                input_tokens=num_prompt,
                output=tokens[num_prompt:],
                fresh_tokens=num_prompt - min(line.k, parent_prompt),
            )
