"""The clairvoyant bound is what the best choices of victims reach, tried one by one, and no policy beats it."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from aradix.policies import POLICIES
from aradix.replay.driver import ReplaySetup, replay
from aradix.replay.optimal import PagedTrace, optimal_hit_tokens
from aradix.replay.request import Request
from tests.replay.test_command import lines_of
from tests.replay.traces import block_request, mooncake_line, token_request, write_lines


def best_by_trial(prompts: list[tuple[int, ...]], num_pages: int) -> int:
    """Pages found if every choice of what stays is tried. A page is a prefix."""
    paths = [[prompt[: end + 1] for end in range(len(prompt))][:num_pages] for prompt in prompts]

    @cache
    def most(number: int, held: frozenset[tuple[int, ...]]) -> int:
        if number == len(paths):
            return 0
        path = paths[number]
        hits = next((place for place, page in enumerate(path) if page not in held), len(path))
        others = sorted(held - set(path))
        room = num_pages - len(path)
        best = 0
        for kept in combinations(others, min(room, len(others))):
            now = frozenset(kept) | frozenset(path)
            # What lies below a hole cannot be found: a choice with one is never better than the same without.
            best = max(best, most(number + 1, now))
        return hits + best

    return most(0, frozenset())


def drawn(source: random.Random, num_requests: int) -> list[tuple[int, ...]]:
    return [tuple(source.randrange(2) for _ in range(source.randrange(1, 5))) for _ in range(num_requests)]


def requests_of(prompts: list[tuple[int, ...]], page_size: int) -> list[Request]:
    return [token_request([token for token in prompt for _ in range(page_size)]) for prompt in prompts]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_finds_more_than_the_bound_and_something_finds_as_much(seed: int) -> None:
    source = random.Random(seed)
    prompts = drawn(source, 8)
    num_pages = source.randrange(2, 8)
    assert optimal_hit_tokens(requests_of(prompts, 2), num_pages, 2) == 2 * best_by_trial(prompts, num_pages)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_beats_it(policy: str) -> None:
    source = random.Random(policy)
    requests = requests_of(drawn(source, 120), 4)
    for num_pages in (4, 6, 9, 14):
        setup = ReplaySetup(policy=policy, num_pages=num_pages, page_size=4, low_watermark=0, high_watermark=0)
        found = anyio.run(replay, iter(requests), setup).hit_tokens
        assert found <= optimal_hit_tokens(requests, num_pages, 4)


def test_with_room_for_all_it_is_what_any_cache_finds() -> None:
    requests = [block_request([1, 2, 3]), block_request([1, 2, 4], short_by=1), block_request([1, 2, 4], short_by=1)]
    trace = PagedTrace(requests, 2)
    assert trace.num_pages == 8
    assert trace.hit_tokens(8) == (8 + 11, 0)
    assert trace.hit_tokens(6)[0] == 8 + 11


def test_namespaces_do_not_meet() -> None:
    requests = [block_request([1, 2], extra_key=key, session=key) for key in ("a", "b", "a")]
    assert optimal_hit_tokens(requests, 100, 4) == 8


def test_outputs_take_room_and_can_be_found() -> None:
    requests = [token_request([1, 2], output=[3, 4]), token_request([1, 2, 3, 4])]
    assert optimal_hit_tokens(requests, 4, 1, outputs=True) == 4
    assert optimal_hit_tokens(requests, 4, 1) == 2


def test_a_prompt_longer_than_the_pool_is_found_as_far_as_it_goes() -> None:
    requests = [token_request(range(10)), token_request(range(10))]
    assert optimal_hit_tokens(requests, 4, 1) == 4


def test_it_is_a_policy_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = random.Random(0)
    prompts = [[page + 10 * place for place, page in enumerate(prompt)] for prompt in drawn(source, 40)]
    trace = write_lines(tmp_path / "trace.jsonl", map(mooncake_line, prompts))
    arguments: list[Any] = ["--concurrency", "1", "--watermarks", "0:0", "--capacity", "3072,inf"]
    runs = lines_of(capsys, trace, *arguments, "--policy", "lru,tenure,optimal")
    assert [run["policy"] for run in runs] == ["lru", "lru", "tenure", "tenure", "optimal", "optimal"]
    assert runs[4]["hit_tokens"] >= max(runs[0]["hit_tokens"], runs[2]["hit_tokens"])
    assert runs[5]["hit_tokens"] == runs[1]["hit_tokens"]
    assert runs[4]["requests"] == 40
    assert np.isfinite(runs[4]["requests_per_s"])
