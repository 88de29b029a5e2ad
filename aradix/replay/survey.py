"""A first look at a trace: how much there is, so that an endless cache has a size, and that it can be read at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from aradix.replay.request import ReplayError, Request

__all__ = ["Survey", "check_pool", "endless_pages", "pool_bytes", "survey"]

# Measured at 134 M cached tokens: a token and its slot take 12 bytes, and the audit after the run copies them. It also
# counts the uses of every slot, and the allocator's tables have an entry a page.
_BYTES_PER_CACHED_TOKEN = 32
_BYTES_PER_SLOT = 8
_BYTES_PER_PAGE = 32
# Page ids are int32, and page 0 is padding.
_MAX_PAGES = 2**31 - 2


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
    what the background evictor wants to see free. Does not wait.
    """
    in_flight = concurrency * (-(-found.longest_tokens // page_size) + 1)
    return int((found.distinct_pages + in_flight) / (1 - high_watermark)) + 1


def pool_bytes(num_pages: int, page_size: int, *, most_pages: int) -> int:
    """Bytes of memory that a run with such a pool takes at most, with what is cached in it. Does not wait.

    Args:
        num_pages: of the pool.
        page_size: in tokens.
        most_pages: so many pages would never fill.
    """
    cached_tokens = min(num_pages, most_pages) * page_size
    return num_pages * (page_size * _BYTES_PER_SLOT + _BYTES_PER_PAGE) + cached_tokens * _BYTES_PER_CACHED_TOKEN


def check_pool(num_pages: int, page_size: int, *, capacity: str, most_pages: int, option: str = "--capacity") -> None:
    """See that this machine can hold a pool and what will be cached in it. Does not wait.

    Args:
        num_pages: of the pool.
        page_size: in tokens.
        capacity: the pool's size as it was asked for.
        most_pages: so many pages would never fill: those of an endless pool.
        option: that asked for it.

    Raises:
        ReplayError: there can be no so large pool, or this machine's memory could not hold it.
    """
    if num_pages > _MAX_PAGES:
        raise ReplayError(
            f"{option} {capacity}: {num_pages:,} pages of {page_size}, and a pool has at most {_MAX_PAGES:,}; "
            f"give at most {_MAX_PAGES * page_size:,} tokens, or a larger --page-size"
        )
    size_bytes = pool_bytes(num_pages, page_size, most_pages=most_pages)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size_bytes > memory_bytes:
        raise ReplayError(
            f"{option} {capacity}: may need {size_bytes / 1e9:.1f} GB, "
            f"and there are {memory_bytes / 1e9:.1f} GB; give fewer tokens, or a --limit"
        )
