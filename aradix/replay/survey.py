"""A first look at a trace: how much there is, so that an endless cache has a size, and that it can be read at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from aradix.replay.request import ReplayError, Request

__all__ = ["Survey", "endless_pages", "survey"]

# Measured at 134 M cached tokens: a token and its slot take 12 bytes, and the audit after the run copies them.
_BYTES_PER_TOKEN = 40
_BYTES_PER_PAGE = 32


@dataclass(frozen=True, slots=True)
class Survey:
    """What one pass over the requests found. `distinct_pages` is the most that a cache could come to hold of them."""

    num_requests: int
    input_tokens: int
    longest_tokens: int
    distinct_pages: int


def survey(requests: Iterable[Request], page_size: int, *, outputs: bool) -> Survey:
    """Read every request once without expanding any. Does not wait; blocks while it reads.

    Raises:
        ReplayError: the trace is broken, or holds no requests.
    """
    num_requests = input_tokens = longest = pages = 0
    for request in requests:
        num_requests += 1
        input_tokens += request.input_tokens
        fresh, length = request.fresh_tokens, request.num_tokens
        if outputs:
            fresh += len(request.output)
            length += len(request.output)
        longest = max(longest, length)
        # New tokens that begin within a page make that page new as well; blocks are whole pages.
        pages += -(-fresh // page_size) + (request.block_size == 1)
    if not num_requests:
        raise ReplayError("there are no requests to replay")
    return Survey(num_requests, input_tokens, longest, pages)


def endless_pages(found: Survey, page_size: int, *, concurrency: int, high_watermark: float) -> int:
    """Pages of a pool in which nothing is ever evicted: an upper bound, not the least.

    Beside all that can be cached it holds the duplicates that requests in flight compute of each other's tokens, and
    what the background evictor wants to see free.

    Raises:
        ReplayError: this machine's memory could not hold it.
    """
    in_flight = concurrency * (-(-found.longest_tokens // page_size) + 1)
    pages = int((found.distinct_pages + in_flight) / (1 - high_watermark)) + 1
    size_bytes = pages * (page_size * _BYTES_PER_TOKEN + _BYTES_PER_PAGE)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size_bytes > memory_bytes:
        raise ReplayError(
            f"an endless cache of this trace may need {size_bytes / 1e9:.1f} GB, "
            f"and there are {memory_bytes / 1e9:.1f} GB; give --capacity a number, or a --limit"
        )
    return pages
