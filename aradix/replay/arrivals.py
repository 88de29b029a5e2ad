"""Arrivals (`TIMESTAMP,ContextTokens,GeneratedTokens`): when requests came and how long they were, nothing else.

Format: https://github.com/Azure/AzurePublicDataset, the LLM inference traces of 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from aradix.replay.lines import TraceFile

__all__ = ["ARRIVALS_HEADER", "Arrival", "read_arrivals"]

ARRIVALS_HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"


class Arrival(NamedTuple):
    """The lengths of one request, in tokens."""

    input_tokens: int
    output_tokens: int


def read_arrivals(file: TraceFile) -> Iterator[Arrival]:
    """The rows of a file in their order, which is that of time.

    Raises:
        ReplayError: another header, a broken row, or one earlier than the row before it.
    """
    last: datetime | None = None
    for number, text in file.lines():
        if number == 1:
            if text != ARRIVALS_HEADER:
                raise file.error(number, f"an arrivals file begins with {ARRIVALS_HEADER.decode()}")
            continue
        try:
            stamp, context, generated = text.decode().split(",")
            at, arrival = datetime.fromisoformat(stamp), Arrival(int(context), int(generated))
            backwards = last is not None and at < last
        except (ValueError, TypeError) as error:
            raise file.error(number, f"not a row of time, context tokens and generated tokens: {error}") from error
        if backwards:
            raise file.error(number, f"time runs backwards: {at} after {last}")
        if arrival.input_tokens < 1 or arrival.output_tokens < 0:
            raise file.error(number, f"a request has at least 1 token and its output at least 0, got {tuple(arrival)}")
        last = at
        yield arrival
