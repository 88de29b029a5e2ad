"""Reuse distances say what a block LRU of any capacity finds."""

from __future__ import annotations

import random

import numpy as np
import pytest

from aradix.replay.request import Request
from aradix.replay.reuse import LookedUpTrace, Lookup, ReuseDistances, reuse_distances
from tests.replay.traces import BlockLRU, block_request

PAGE = 4


def grown(source: random.Random, num_requests: int) -> list[list[int]]:
    """Prompts that share prefixes: equal ids mean equal prefixes, as in traces of block ids."""
    prompts: list[list[int]] = []
    fresh = 0
    for _ in range(num_requests):
        known = source.choice(prompts) if prompts and source.random() < 0.8 else []
        kept = known[: source.randrange(len(known) + 1)]
        num_new = source.randrange(0 if kept else 1, 4)
        prompts.append(kept + list(range(fresh, fresh + num_new)))
        fresh += num_new
    return prompts


def distances_of(requests: list[Request], capacities: list[int]) -> ReuseDistances:
    paged = LookedUpTrace(requests, PAGE)
    return reuse_distances(
        paged.lookups(), PAGE, num_requests=len(requests), num_pages=paged.num_pages, capacities=capacities
    )


@pytest.mark.parametrize("seed", range(12))
def test_what_returns_within_a_capacity_is_what_an_lru_of_it_finds(seed: int) -> None:
    source = random.Random(seed)
    prompts = grown(source, 60)
    requests = [block_request(prompt, block_size=PAGE, short_by=source.randrange(PAGE)) for prompt in prompts]
    longest = max(map(len, prompts))
    sizes = [longest, longest + 3, longest + 10, 4 * longest, 10_000]
    found = distances_of(requests, [size * PAGE for size in sizes])
    for size, (capacity, tokens) in zip(sizes, found.within, strict=True):
        lru = BlockLRU(size)
        hits = [
            min(lru.request(prompt) * PAGE, request.input_tokens)
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        assert (capacity, tokens) == (size * PAGE, sum(hits))
    assert found.reused_tokens == found.within[-1][1]
    assert found.input_tokens == sum(request.input_tokens for request in requests)
    # Bins double, so their edges are capacities too.
    edges = [upto for _, upto, _ in found.bins if upto >= longest * PAGE]
    for edge, (_, tokens) in zip(edges, distances_of(requests, edges).within, strict=True):
        assert sum(count for _, upto, count in found.bins if upto <= edge) == tokens


def test_what_is_decoded_is_used_but_not_looked_up() -> None:
    def pages(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array(numbers, np.int32)

    lookups = [Lookup(pages(0, 1, 2), 1, 4), Lookup(pages(5), 1, 4), Lookup(pages(0, 1, 2), 2, 8)]
    told: list[int] = []
    found = reuse_distances(lookups, 4, num_requests=3, num_pages=6, capacities=[8, 12], on_progress=told.append)
    # Pages 0 and 1 lie behind page 5; page 2 is in the output again.
    assert found.within == ((8, 4), (12, 8))
    assert found.reused_tokens == 8
    assert told == [1, 2, 3]
