"""The built-in workload: drawn from a seed alone, and shaped as it says."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from aradix.replay.lines import TraceFile
from aradix.replay.request import ReplayError, Request
from aradix.replay.workload import BuiltInWorkload
from tests.replay.traces import write_lines


def take(seed: int, limit: int = 300) -> list[Request]:
    return list(islice(BuiltInWorkload(seed).requests(), limit))


def texts(requests: list[Request]) -> list[tuple[object, bytes, bytes]]:
    return [(request.session, request.prompt().tobytes(), request.output.tobytes()) for request in requests]


def test_the_same_seed_gives_the_same_requests() -> None:
    workload = BuiltInWorkload(3)
    once = texts(list(islice(workload.requests(), 200)))
    assert once == texts(list(islice(workload.requests(), 200)))
    assert once == texts(take(3, 200))
    assert once != texts(take(4, 200))


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    assert texts(take(0, 400))[:100] == texts(take(0, 100))


def test_a_session_goes_on_from_what_was_said() -> None:
    said: dict[object, np.ndarray[tuple[int], np.dtype[np.int32]]] = {}
    num_continued = 0
    for request in take(1, 600):
        prompt = request.prompt()
        if request.session in said:
            before = said[request.session]
            assert prompt[: len(before)].tolist() == before.tolist()
            assert len(prompt) > len(before)
            num_continued += 1
        assert request.input_tokens == len(prompt)
        assert len(request.output) > 0
        said[request.session] = np.concatenate((prompt, request.output))
    assert num_continued > 200


def test_sessions_overlap_and_share_their_prefixes() -> None:
    requests = take(0, 600)
    sessions = [request.session for request in requests]
    changes = sum(one != other for one, other in pairwise(sessions))
    assert changes > 500
    begins: dict[object, bytes] = {}
    for request in requests:
        begins.setdefault(request.session, request.prompt(256).tobytes())
    shared = Counter(begins.values())
    assert len(begins) > 100
    assert 3 < len(shared) < 40


def test_what_is_counted_as_fresh_is_all_that_is_new() -> None:
    """Pages of one token: whatever no earlier prompt of the session held must be counted."""
    sent: dict[object, int] = {}
    for request in take(2):
        assert request.fresh_tokens == request.input_tokens - sent.get(request.session, 0)
        sent[request.session] = request.input_tokens


def arrivals_file(tmp_path: Path, lengths: list[tuple[int, int]]) -> TraceFile:
    rows = [f"2024-01-01 00:00:{i % 60:02},{n},{m}" for i, (n, m) in enumerate(lengths[:60])]
    return TraceFile(write_lines(tmp_path / "arrivals.csv", ["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))


def test_arrivals_give_the_lengths_to_the_token(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = [(int(rng.integers(1, 5000)), int(rng.integers(0, 200))) for _ in range(60)]
    workload = BuiltInWorkload(0, arrivals_file(tmp_path, lengths))
    assert "arrivals.csv" in workload.name
    requests = list(workload.requests())
    assert [(request.input_tokens, len(request.output)) for request in requests] == lengths
    assert [request.num_tokens for request in requests] == [n for n, _ in lengths]
    assert texts(requests) == texts(list(workload.requests()))
    continued = len(requests) - len({request.session for request in requests})
    assert continued > 10


def test_a_broken_arrivals_file_is_named(tmp_path: Path) -> None:
    workload = BuiltInWorkload(0, arrivals_file(tmp_path, [(5, 5), (0, 1)]))
    with pytest.raises(ReplayError, match=r"arrivals\.csv:3: "):
        list(workload.requests())
