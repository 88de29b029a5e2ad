"""A replay finds what a plain LRU of blocks finds, and leaves a whole cache behind whatever is in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aradix.errors import ConfigError, InvariantError
from aradix.params import CacheStats
from aradix.replay.driver import ReplayResult, ReplaySetup, check_idle, replay
from aradix.replay.request import ReplayError, Request
from aradix.replay.workload import BuiltInWorkload
from tests.replay.traces import BlockLRU, block_request, token_request


def run(requests: list[Request], num_pages: int, **setup: Any) -> ReplayResult:
    """Replay with only demand evicting, unless the test says otherwise."""
    options = {"policy": "lru", "page_size": 4, "low_watermark": 0.0, "high_watermark": 0.0, **setup}
    return anyio.run(replay, iter(requests), ReplaySetup(num_pages=num_pages, **options))


@st.composite
def prefix_traces(draw: st.DrawFn) -> list[tuple[str | None, list[int], int]]:
    """Requests of blocks whose ids name prefixes: each a walk down a small random forest, in one of two namespaces."""
    children = draw(st.lists(st.integers(0, 5), min_size=1, max_size=40))
    parents = [min(step, index) - 1 if step else -1 for index, step in enumerate(children)]
    ends = draw(st.lists(st.integers(0, len(parents) - 1), min_size=1, max_size=40))
    trace = []
    for end in ends:
        path, node = [], end
        while node >= 0:
            path.append(node)
            node = parents[node]
        extra_key = draw(st.sampled_from([None, "x"]))
        trace.append((extra_key, path[::-1], draw(st.integers(0, 3))))
    return trace


@settings(max_examples=60)
@given(prefix_traces(), st.integers(1, 12))
def test_one_at_a_time_it_is_a_block_lru(trace: list[tuple[str | None, list[int], int]], num_pages: int) -> None:
    oracle = BlockLRU(num_pages)
    hit_tokens = 0
    for extra_key, path, short_by in trace:
        hit_tokens += min(oracle.request(path, extra_key) * 4, len(path) * 4 - short_by)
    requests = [block_request(path, short_by=short, extra_key=extra_key) for extra_key, path, short in trace]
    result = run(requests, num_pages)
    assert result.hit_tokens == hit_tokens
    assert result.evicted_tokens == oracle.num_evicted * 4
    assert result.input_tokens == sum(len(path) * 4 - short for _, path, short in trace)
    assert result.num_requests == len(trace)
    assert result.num_waits == 0


@settings(max_examples=20)
@given(prefix_traces(), st.integers(1, 12))
def test_a_block_may_be_several_pages(trace: list[tuple[str | None, list[int], int]], num_blocks: int) -> None:
    """Finer pages keep no less of a prefix than whole blocks do: with room for everything, exactly as much."""
    requests = [block_request(path, short_by=short, extra_key=extra_key) for extra_key, path, short in trace]
    whole = run(requests, 1000)
    fine = run(requests, 1000, page_size=2)
    assert fine.hit_tokens == whole.hit_tokens
    tight = run(requests, num_blocks * 2, page_size=2)
    assert tight.hit_tokens <= whole.hit_tokens


@settings(max_examples=30)
@given(prefix_traces(), st.integers(1, 12), st.integers(2, 6))
def test_in_flight_together_nothing_is_lost(
    trace: list[tuple[str | None, list[int], int]], num_pages: int, concurrency: int
) -> None:
    requests = [
        block_request(path, short_by=short, extra_key=extra_key, session=extra_key) for extra_key, path, short in trace
    ]
    result = run(requests, num_pages, concurrency=concurrency)
    assert result.num_requests == len(requests)
    assert result.input_tokens == sum(request.input_tokens for request in requests)
    assert result.hit_tokens <= result.input_tokens


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "fifo", "mru", "filo", "priority"])
@pytest.mark.parametrize("concurrency", [1, 16])
def test_outputs_under_pressure_with_every_policy(policy: str, concurrency: int) -> None:
    requests = list(islice(BuiltInWorkload(1).requests(), 150))
    longest = max(len(request.ids) + len(request.output) for request in requests)
    result = run(
        requests,
        num_pages=longest // 16 + 1,
        page_size=16,
        policy=policy,
        concurrency=concurrency,
        outputs=True,
        low_watermark=0.02,
        high_watermark=0.05,
    )
    assert result.num_requests == 150
    assert result.output_tokens == sum(len(request.output) for request in requests)
    assert result.evicted_tokens > 0
    assert 0 < result.hit_ratio < 1


def test_requests_in_flight_wait_for_slots_and_all_get_done() -> None:
    requests = [token_request(range(100 * i, 100 * i + 40)) for i in range(20)]
    alone = run(requests, num_pages=10)
    together = run(requests, num_pages=10, concurrency=5)
    assert alone.num_waits == 0
    assert together.num_waits > 0
    assert together.num_requests == alone.num_requests == 20
    assert together.evicted_tokens == alone.evicted_tokens == 19 * 40


def test_requests_in_flight_that_join_compute_each_token_once() -> None:
    requests = [token_request([*range(64), 100 + number]) for number in range(12)]
    alone = run(requests, 100)
    together = run(requests, 100, concurrency=6)
    joined = run(requests, 100, concurrency=6, join=True)
    assert together.prefill_tokens > alone.prefill_tokens
    assert joined.prefill_tokens == alone.prefill_tokens == 64 + 12
    assert (joined.num_joins, joined.joined_tokens, joined.num_takeovers) == (5, 5 * 64, 0)
    assert together.num_joins == 0


@settings(max_examples=30)
@given(prefix_traces(), st.integers(1, 12), st.integers(2, 6))
def test_joined_in_flight_nothing_is_lost(
    trace: list[tuple[str | None, list[int], int]], num_pages: int, concurrency: int
) -> None:
    requests = [block_request(path, short_by=short, extra_key=extra_key) for extra_key, path, short in trace]
    result = run(requests, num_pages, concurrency=concurrency, join=True)
    assert result.num_requests == len(requests)
    assert result.num_takeovers == 0


def test_outputs_are_found_by_the_next_turn_only_if_inserted() -> None:
    first = token_request(range(8), output=range(100, 108))
    second = token_request([*range(8), *range(100, 108), 7])
    assert run([first, second], 100).hit_tokens == 8
    with_outputs = run([first, second], 100, outputs=True)
    assert (with_outputs.hit_tokens, with_outputs.output_tokens) == (16, 8)


def test_a_long_output_is_decoded_in_steps() -> None:
    first = token_request(range(6), output=range(1000, 1333))
    again = token_request([*range(6), *range(1000, 1333)])
    result = run([first, again], 200, outputs=True, concurrency=1)
    assert result.hit_tokens == (6 + 333) // 4 * 4
    assert result.output_tokens == 333


def test_decodes_that_starve_each_other_give_way_and_come_back() -> None:
    """Two prompts fill the pool; neither can decode, so one must let go for the other to end."""
    one = token_request(range(20), output=range(100, 110))
    other = token_request(range(50, 70), output=range(200, 210))
    result = run([one, other], num_pages=10, concurrency=2, outputs=True)
    assert result.num_retracts > 0
    assert (result.num_requests, result.output_tokens) == (2, 20)


def test_a_request_longer_than_the_pool_is_cached_up_to_the_pool() -> None:
    long = token_request(range(50), output=range(100, 120))
    result = run([long, long], num_pages=5, outputs=True)
    assert (result.hit_tokens, result.input_tokens, result.output_tokens) == (20, 100, 0)
    partly = token_request(range(18), output=range(100, 120))
    assert run([partly, partly], num_pages=5, outputs=True).output_tokens == 4


def test_a_request_without_ids_counts_but_leases_nothing() -> None:
    result = run([token_request([]), token_request(range(4))], num_pages=5)
    assert (result.num_requests, result.input_tokens, result.hit_tokens) == (2, 4, 0)


def test_progress_is_told_after_each_request() -> None:
    told: list[int] = []
    setup = ReplaySetup(policy="lru", num_pages=10, page_size=4)
    anyio.run(replay, iter([token_request(range(8))] * 5), setup, told.append)
    assert told == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_trace_that_breaks_off_is_the_error_itself(concurrency: int) -> None:
    def breaking() -> Iterator[Request]:
        yield token_request(range(8))
        raise ReplayError("trace:2: broken")

    setup = ReplaySetup(policy="lru", num_pages=10, page_size=4, concurrency=concurrency)
    with pytest.raises(ReplayError, match="trace:2: broken"):
        anyio.run(replay, breaking(), setup)


def test_a_setup_that_cannot_work_says_so() -> None:
    with pytest.raises(ConfigError, match="best"):
        run([token_request(range(8))], 10, policy="best")


def test_background_eviction_keeps_slots_free() -> None:
    requests = [token_request(range(100 * i, 100 * i + 8)) for i in range(50)]
    lazy = run(requests, num_pages=100)
    eager = run(requests, num_pages=100, low_watermark=0.5, high_watermark=0.6)
    assert lazy.evicted_tokens == 0
    assert eager.evicted_tokens > 0


def test_an_idle_cache_has_every_slot_free_evictable_or_fenced() -> None:
    nothing = CacheStats(**{field.name: 0 for field in fields(CacheStats)})
    idle = replace(nothing, num_slots=10, free=3, fenced=2, evictable=5)
    check_idle(idle)
    for fault in ({"free": 2}, {"evictable": 6}, {"free": 2, "leased": 1}, {"num_leases": 1}):
        with pytest.raises(InvariantError, match="after the replay"):
            check_idle(replace(idle, **fault))
