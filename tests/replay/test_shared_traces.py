"""The real traces give the figures that a block LRU gives on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from aradix.cli import main
from aradix.replay.detect import open_trace
from aradix.replay.survey import survey
from tests.replay.traces import BlockLRU
from tests.support.places import SHARED

TRACES = SHARED / "traces"

pytestmark = pytest.mark.skipif(not TRACES.exists(), reason="there is no shared folder beside the checkout")

MOONCAKE = "mooncake_conversation.jsonl.gz"
SESSIONS = "cc_weka_dev.jsonl.gz"
FEW_SHOT = "bbh_cot3.tok.jsonl.gz"
DIALOGUES = "taubench_airline_gpt4o.tok.jsonl.gz"


def runs(capsys: pytest.CaptureFixture[str], *argv: str) -> Iterator[dict[str, Any]]:
    exact = ["--concurrency", "1", "--watermarks", "0:0", "--json"]
    trace, *options = argv
    assert main(["replay", str(TRACES / trace), *exact, *options]) == 0
    return map(json.loads, capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("name", "num_requests", "input_tokens"),
    [
        (MOONCAKE, 12_031, 144_793_823),
        (SESSIONS, 30_382, 3_526_130_631),
        (FEW_SHOT, 6_511, 5_674_595),
        (DIALOGUES, 2_454, 7_697_924),
    ],
)
def test_all_of_a_trace_is_read(name: str, num_requests: int, input_tokens: int) -> None:
    trace = open_trace(TRACES / name)
    found = survey(trace.requests(), max(trace.block_size, 16), outputs=False)
    assert (found.num_requests, found.input_tokens) == (num_requests, input_tokens)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([FEW_SHOT, "--page-size", "1"], 0.9210),
        ([FEW_SHOT, "--page-size", "16"], 0.9129),
        ([DIALOGUES, "--page-size", "1", "--no-outputs"], 0.9269),
        ([DIALOGUES, "--page-size", "1", "--outputs"], 0.9510),
        ([DIALOGUES, "--page-size", "16"], 0.9245),
        ([DIALOGUES, "--page-size", "16", "--outputs"], 0.9487),
    ],
)
def test_an_endless_cache_finds_every_repeated_token(
    capsys: pytest.CaptureFixture[str], argv: list[str], expected: float
) -> None:
    (run,) = runs(capsys, *argv, "--capacity", "inf")
    assert run["hit_ratio"] == pytest.approx(expected, abs=0.0002)
    assert run["evicted_tokens"] == 0


def block_lru(name: str, capacity: float, limit: int | None = None) -> float:
    """The hit ratio of a plain LRU list of blocks, without the cache."""
    trace = open_trace(TRACES / name)
    oracle = BlockLRU(int(min(capacity, 1e12)) // trace.block_size)
    hit_tokens = input_tokens = 0
    for request in islice(trace.requests(), limit):
        num_hits = oracle.request(request.ids.tolist(), request.extra_key)
        hit_tokens += min(num_hits * trace.block_size, request.input_tokens)
        input_tokens += request.input_tokens
    return hit_tokens / input_tokens


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(1e5, 0.0427), (1e6, 0.0543), (4e6, 0.1783), (8e6, 0.2663), (5e7, 0.3707), (1e8, 0.3736), (float("inf"), 0.3736)],
)
def test_block_ids_are_read_as_published(capacity: float, expected: float) -> None:
    assert block_lru(MOONCAKE, capacity) == pytest.approx(expected, abs=0.0001)


def test_block_ids_give_a_block_lru(capsys: pytest.CaptureFixture[str]) -> None:
    expected = {"1e6": 0.0543, "5e6": 0.2111}
    found = {run["capacity"]: run["hit_ratio"] for run in runs(capsys, MOONCAKE, "--capacity", ",".join(expected))}
    assert found == pytest.approx(expected, abs=0.0001)


@pytest.mark.parametrize(
    ("argv", "capacities", "at_least"),
    [
        ([MOONCAKE, "--limit", "4000"], "1e6,2e6", 1.2),
        ([FEW_SHOT, "--limit", "2000"], "5e3,1e4,4e4", 0.999),
        ([DIALOGUES, "--limit", "400"], "8e3,2e4", 1.0),
        ([SESSIONS, "--limit", "700"], "3e5,1e6,3e6", 0.99),
    ],
)
def test_the_policy_that_learns_loses_no_more_to_recency_than_learning_costs(
    capsys: pytest.CaptureFixture[str], argv: list[str], capacities: str, at_least: float
) -> None:
    found = list(runs(capsys, *argv, "--policy", "lru,tenure", "--capacity", capacities))
    lru, tenure = found[: len(found) // 2], found[len(found) // 2 :]
    assert [run["policy"] for run in tenure] == ["tenure"] * len(lru)
    for recent, learned in zip(lru, tenure, strict=True):
        assert learned["hit_tokens"] >= at_least * recent["hit_tokens"], learned["capacity"]


def test_conversations_in_flight_that_join_find_what_they_find_alone(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--capacity", "inf", "--limit", "1500"]
    (alone,) = runs(capsys, MOONCAKE, *options)
    (together,) = runs(capsys, MOONCAKE, *options, "--concurrency", "64")
    (joined,) = runs(capsys, MOONCAKE, *options, "--concurrency", "64", "--join")
    assert joined["prefill_tokens"] == alone["prefill_tokens"] < together["prefill_tokens"]
    assert joined["joins"] > 0
    assert joined["joined_tokens"] >= together["prefill_tokens"] - joined["prefill_tokens"]


def test_interleaved_sessions_give_a_block_lru(capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = runs(capsys, SESSIONS, "--capacity", "1e6", "--limit", "1000")
    assert run["hit_ratio"] == pytest.approx(block_lru(SESSIONS, 1e6, 1000), abs=1e-6)
    assert run["evicted_tokens"] > 0


def test_sessions_in_flight_together_find_what_they_find_alone(capsys: pytest.CaptureFixture[str]) -> None:
    (alone,) = runs(capsys, DIALOGUES, "--capacity", "inf", "--limit", "600")
    (together,) = runs(capsys, DIALOGUES, "--capacity", "inf", "--limit", "600", "--concurrency", "16")
    # Of requests that start together none finds what another is about to compute.
    assert together["hit_ratio"] == pytest.approx(alone["hit_ratio"], abs=0.05)
    assert together["requests"] == 600


def test_a_host_behind_the_device_gives_the_hits_of_a_device_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    limit = 1500
    options = ["--host-capacity", "1e7", "--write-policy", "write_through", "--limit", str(limit)]
    (run,) = runs(capsys, MOONCAKE, "--capacity", "1e6", *options)
    assert run["hit_ratio"] == pytest.approx(block_lru(MOONCAKE, 1e7, limit), abs=0.01)
    assert run["load_back_tokens"] > 0
