"""The size of an endless cache: never less than what the trace can fill, and refused where memory cannot hold it."""

from __future__ import annotations

import os
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aradix.replay.request import ReplayError, Request
from aradix.replay.survey import Survey, check_pool, endless_pages, survey
from aradix.replay.workload import BuiltInWorkload
from tests.replay.traces import block_request, token_request


def distinct_pages(requests: list[Request], page_size: int, *, outputs: bool) -> int:
    """Distinct page-aligned prefixes: what a tree would hold in the end."""
    seen: set[bytes] = set()
    for request in requests:
        tokens = request.prompt().tobytes() + (request.output.tobytes() if outputs else b"")
        page = page_size * 4
        seen.update(tokens[:end] for end in range(page, len(tokens) + 1, page))
    return len(seen)


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_it_bounds_what_the_built_in_workload_fills(page_size: int, outputs: bool) -> None:
    requests = list(islice(BuiltInWorkload(5).requests(), 60))
    found = survey(requests, page_size, outputs=outputs)
    assert found.distinct_pages >= distinct_pages(requests, page_size, outputs=outputs)
    assert found.num_requests == 60
    assert found.input_tokens == sum(request.input_tokens for request in requests)
    longest = max(len(request.ids) + (len(request.output) if outputs else 0) for request in requests)
    assert found.longest_tokens == longest


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=10))
def test_it_bounds_blocks(prompts: list[list[int]]) -> None:
    requests = [block_request(ids) for ids in prompts]
    assert survey(requests, 4, outputs=False).distinct_pages >= distinct_pages(requests, 4, outputs=False)


def test_no_requests_is_an_error() -> None:
    with pytest.raises(ReplayError, match="no requests"):
        survey([], 1, outputs=False)


def test_an_endless_pool_leaves_room_for_flights_and_watermarks() -> None:
    found = Survey(num_requests=1, input_tokens=1, longest_tokens=33, distinct_pages=100)
    pages = endless_pages(found, 16, concurrency=4, high_watermark=0.5)
    assert pages * 0.5 >= 100 + 4 * 3
    assert endless_pages(found, 16, concurrency=1, high_watermark=0.0) >= 103


def test_what_memory_cannot_hold_is_refused() -> None:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    pages = min(memory_bytes // 64, 2**31 - 2)
    page_size = -(-memory_bytes // (8 * pages))
    with pytest.raises(ReplayError, match=r"--capacity 1e12: may need .* GB"):
        check_pool(pages, page_size, capacity="1e12", most_pages=0)


def test_a_pool_that_cannot_be_filled_need_not_fit_as_if_it_were() -> None:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    pages = memory_bytes // (4096 * 16)
    check_pool(pages, 4096, capacity="n", most_pages=100)
    with pytest.raises(ReplayError, match="GB"):
        check_pool(pages, 4096, capacity="n", most_pages=pages)


def test_page_ids_have_an_end() -> None:
    with pytest.raises(ReplayError, match=r"--capacity 1e12: 62,500,000,000 pages of 16.* 34,359,738,336 tokens"):
        check_pool(62_500_000_000, 16, capacity="1e12", most_pages=1)


def test_outputs_count_only_when_they_are_inserted() -> None:
    requests = [token_request(range(10), output=range(10))]
    assert survey(requests, 1, outputs=True).distinct_pages == survey(requests, 1, outputs=False).distinct_pages + 10
