"""Mooncake traces: one id for each 512 tokens of a prompt, equal ids for equal prefixes.

Format: https://github.com/kvcache-ai/Mooncake, released with Qin et al., "Mooncake" (FAST 2025). Requests carry no
session, so each stands alone and they run in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np

from aradix.replay.lines import TraceFile
from aradix.replay.request import MAX_BLOCK_ID, NO_TOKENS, Request

__all__ = ["MooncakeTrace"]


class _Line(msgspec.Struct):
    input_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)]]


class MooncakeTrace:
    """The requests of a Mooncake file, read as they are asked for."""

    block_size = 512
    has_outputs = False

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self.name = file.path.name

    def requests(self) -> Iterator[Request]:
        """See `Trace.requests`."""
        decoder = msgspec.json.Decoder(_Line)
        for number, text in self._file.lines():
            line = self._file.decode(number, text, decoder)
            num_blocks = -(-line.input_length // self.block_size)
            if len(line.hash_ids) != num_blocks:
                raise self._file.error(
                    number, f"{line.input_length} input tokens need {num_blocks} hash_ids, got {len(line.hash_ids)}"
                )
            yield Request(
                session=None,
                extra_key=None,
                ids=np.array(line.hash_ids, np.int64),
                block_size=self.block_size,
                input_tokens=line.input_length,
                output=NO_TOKENS,
                fresh_tokens=num_blocks * self.block_size,
            )
