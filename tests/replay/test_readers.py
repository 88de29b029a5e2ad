"""Each format is read to the token, and a broken line is named by file and number."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aradix.replay.arrivals import Arrival, read_arrivals
from aradix.replay.detect import open_trace
from aradix.replay.lines import TraceFile
from aradix.replay.mooncake import MooncakeTrace
from aradix.replay.request import ReplayError
from aradix.replay.session_blocks import SessionBlockTrace
from aradix.replay.token_trace import TokenTrace
from tests.replay.traces import mooncake_line, write_lines

ARRIVALS_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def session_line(session: str, at: float, kept: int, runs: list[list[int]], *, extra_tokens: int = 0) -> dict[str, Any]:
    tokens = (kept + sum(count for _, count in runs)) * 64 + extra_tokens
    return {"s": session, "q": 0, "t": at, "in": tokens, "out": 9, "w": "p", "m": "x", "k": kept, "n": runs}


def token_line(session: str, parent: int, kept: int, new: list[int], output: list[int]) -> dict[str, Any]:
    return {"s": session, "t": 0, "ts": None, "p": parent, "k": kept, "n": new, "o": output}


def broken(path: Path) -> str:
    with pytest.raises(ReplayError) as raised:
        list(open_trace(path).requests())
    message = str(raised.value)
    assert "\n" not in message
    return message


# Files


@pytest.mark.parametrize("zipped", [False, True])
def test_plain_and_zipped_files_read_alike_whatever_their_name(tmp_path: Path, zipped: bool) -> None:
    path = write_lines(tmp_path / "trace.bin", [mooncake_line([1, 2]), mooncake_line([1])], zipped=zipped)
    assert [request.ids.tolist() for request in open_trace(path).requests()] == [[1, 2], [1]]


def test_blank_lines_count_for_the_number_but_hold_nothing(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace", ["", mooncake_line([1]), "", "{"])
    assert broken(path).startswith(f"{path}:4: ")


def test_no_such_file(tmp_path: Path) -> None:
    assert broken(tmp_path / "none") == f"{tmp_path}/none: No such file or directory"


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    assert broken(tmp_path) == f"{tmp_path}: Is a directory"


def test_an_empty_file_is_no_trace(tmp_path: Path) -> None:
    assert "holds no lines" in broken(write_lines(tmp_path / "empty", [], zipped=True))


def test_a_zipped_file_that_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    rng = np.random.default_rng(0)
    records = [mooncake_line(rng.integers(0, 2**40, 50).tolist()) for _ in range(400)]
    whole = write_lines(tmp_path / "whole.gz", records, zipped=True).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    message = broken(path)
    number = int(message.removeprefix(f"{path}:").split(":")[0])
    assert 1 < number <= 400
    assert "gzip" in message


def test_a_zipped_file_whose_bytes_changed(tmp_path: Path) -> None:
    path = tmp_path / "changed.gz"
    data = bytearray(gzip.compress(b"\n".join([b'{"hash_ids": [], "input_length": 0}'] * 100)))
    data[-5] ^= 0xFF
    path.write_bytes(data)
    assert "gzip" in broken(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("hello", "no trace format"),
        ("[1, [2]]", "no trace format"),
        ('{"prompt": "hello"}', "no trace format"),
        ('{"hash_ids": ', "truncated"),
        (ARRIVALS_HEADER, "--arrivals"),
    ],
)
def test_a_first_line_of_no_known_format(tmp_path: Path, line: str, problem: str) -> None:
    path = write_lines(tmp_path / "trace", [line])
    message = broken(path)
    assert message.startswith(str(path))
    assert problem in message


# Mooncake


def test_mooncake_requests(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace", [mooncake_line([0, 1, 2], short_by=500), mooncake_line([0, 2**40])])
    trace = open_trace(path)
    assert isinstance(trace, MooncakeTrace)
    assert (trace.name, trace.block_size, trace.has_outputs) == ("trace", 512, False)
    one, two = trace.requests()
    assert (one.ids.tolist(), one.input_tokens, one.num_tokens, one.fresh_tokens) == ([0, 1, 2], 1036, 1536, 1536)
    assert (one.session, one.extra_key, len(one.output)) == (None, None, 0)
    assert two.prompt()[:512].tolist() == one.prompt()[:512].tolist()
    assert two.prompt()[512:].tolist() == [0, 2**9] * 256


def test_a_mooncake_trace_can_be_read_again(tmp_path: Path) -> None:
    trace = open_trace(write_lines(tmp_path / "trace", [mooncake_line([4]), mooncake_line([5])]))
    first = [request.ids.tolist() for request in trace.requests()]
    assert first == [request.ids.tolist() for request in trace.requests()] == [[4], [5]]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"input_length": 513, "hash_ids": [1]}, "need 2 hash_ids, got 1"),
        ({"input_length": 512, "hash_ids": [1, 2]}, "need 1 hash_ids, got 2"),
        ({"input_length": -1, "hash_ids": []}, "input_length"),
        ({"input_length": 512, "hash_ids": [-1]}, "hash_ids"),
        ({"input_length": 512, "hash_ids": [2**62]}, "hash_ids"),
        ({"input_length": 512, "hash_ids": ["a"]}, "hash_ids"),
        ({"input_length": 512}, "hash_ids"),
        ({"hash_ids": [1]}, "input_length"),
        ('{"input_length": 512, "hash_ids": [1]', "truncated"),
        ("not json", "malformed"),
    ],
)
def test_a_broken_mooncake_line_is_named(tmp_path: Path, line: dict[str, Any] | str, problem: str) -> None:
    path = write_lines(tmp_path / "trace", [mooncake_line([1]), mooncake_line([2]), line, mooncake_line([3])])
    message = broken(path)
    assert message.startswith(f"{path}:3: ")
    assert problem in message


# Token traces


def test_token_requests_are_changes_to_earlier_lines(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "trace",
        [
            token_line("a", -1, 0, [1, 2, 3], [10, 11]),
            token_line("a", 0, 4, [5], [12]),  # keeps a token of the output
            token_line("b", 0, 2, [7, 8], []),  # refers to a line that another referred to before
            token_line("b", 2, 4, [9], [13]),
            token_line("c", -1, 0, [], [14]),
        ],
    )
    trace = open_trace(path)
    assert isinstance(trace, TokenTrace)
    assert (trace.block_size, trace.has_outputs) == (1, True)
    requests = list(trace.requests())
    assert [request.prompt().tolist() for request in requests] == [
        [1, 2, 3],
        [1, 2, 3, 10, 5],
        [1, 2, 7, 8],
        [1, 2, 7, 8, 9],
        [],
    ]
    assert [request.output.tolist() for request in requests] == [[10, 11], [12], [], [13], [14]]
    assert [request.session for request in requests] == ["a", "a", "b", "b", "c"]
    assert [request.input_tokens for request in requests] == [3, 5, 4, 5, 0]
    # An earlier output that was not inserted is no earlier prefix.
    assert [request.fresh_tokens for request in requests] == [3, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (token_line("a", 2, 0, [1], []), "must name an earlier line, got 2 on line 2"),
        (token_line("a", 5, 0, [1], []), "must name an earlier line"),
        (token_line("a", -2, 0, [1], []), "p"),
        (token_line("a", 1, 4, [1], []), "k is 4, but line 1 (from 0) has 3 tokens"),
        (token_line("a", -1, 1, [1], []), "k is 1, but line -1 (from 0) has 0 tokens"),
        (token_line("a", -1, -1, [1], []), "k"),
        (token_line("a", -1, 0, [-1], []), "n["),
        (token_line("a", -1, 0, [2**31], []), "n["),
        (token_line("a", -1, 0, [1], [1.5]), "o["),  # type: ignore[list-item]
        ({"s": "a", "p": -1, "k": 0, "n": []}, "`o`"),
        ("{", "truncated"),
    ],
)
def test_a_broken_token_line_is_named(tmp_path: Path, line: dict[str, Any] | str, problem: str) -> None:
    good = [token_line("a", -1, 0, [1, 2], [3]), token_line("a", 0, 2, [4], [])]
    path = write_lines(tmp_path / "trace", [*good, line, token_line("a", -1, 0, [1], [])])
    message = broken(path)
    assert message.startswith(f"{path}:3: ")
    assert problem in message


# Session blocks


def test_session_requests_are_interleaved_a_minute_apart(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "trace",
        [
            session_line("a", 0.0, 0, [[1, 3]], extra_tokens=5),
            session_line("a", 60.0, 2, [[7, 1], [3, 1]]),
            session_line("a", 200.0, 0, []),
            session_line("b", 0.0, 0, [[1, 1]]),
            session_line("b", 70.0, 1, [[2, 2]]),
            session_line("c", 30.0, 0, [[9, 1]]),
        ],
    )
    trace = open_trace(path)
    assert isinstance(trace, SessionBlockTrace)
    assert (trace.block_size, trace.has_outputs) == (64, False)
    requests = list(trace.requests())
    assert [(request.session, request.ids.tolist()) for request in requests] == [
        ("a", [1, 2, 3]),
        ("a", [1, 2, 7, 3]),  # at 60 s, like the next: the session that came first goes first
        ("b", [1]),
        ("b", [1, 2, 3]),  # at 130 s
        ("c", [9]),  # at 150 s
        ("a", []),
    ]
    assert [request.input_tokens for request in requests] == [197, 256, 64, 192, 64, 0]
    assert [request.fresh_tokens for request in requests] == [192, 128, 64, 128, 64, 0]
    assert {request.extra_key for request in requests} == {"a", "b", "c"}


def test_a_seed_moves_the_sessions_within_their_minute(tmp_path: Path) -> None:
    lines = [session_line(str(s), t, 0, [[1, 1]]) for s in range(30) for t in (0.0, 60.0, 120.0)]
    path = write_lines(tmp_path / "trace", lines)

    def order(seed: int) -> list[str]:
        return [str(request.extra_key) for request in open_trace(path, seed=seed).requests()]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(4)}) == 4
    for seed in range(4):
        firsts = dict.fromkeys(order(seed))
        assert list(firsts) == [str(s) for s in range(30)]


def test_only_live_sessions_are_read(tmp_path: Path) -> None:
    lines: list[dict[str, Any] | str] = [
        session_line(str(s), t, 0, [[1, 1]]) for s in range(5) for t in (0.0, 1.0, 2.0)
    ]
    path = write_lines(tmp_path / "trace", [*lines, "broken"])
    requests = open_trace(path).requests()
    # Three sessions lie far enough before the broken line not to need it: a session ends where the next begins, and
    # one is read ahead.
    assert [next(requests).session for _ in range(9)] == ["0"] * 3 + ["1"] * 3 + ["2"] * 3
    with pytest.raises(ReplayError, match=":16: "):
        list(requests)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (session_line("a", 1.0, 0, [[1, 1]]), "session 'a' goes on after another began"),
        (session_line("b", 4.0, 0, [[1, 1]]), "t runs backwards: 4.0 after 5.0"),
        (session_line("b", 6.0, 3, []), "k is 3, but the line before has 2 ids"),
        ({**session_line("b", 6.0, 0, [[1, 1]]), "in": 128}, "need 2 ids, got 1"),
        (session_line("b", -1.0, 0, [[1, 1]]), "t"),
        (session_line("b", 6.0, 0, [[-1, 1]]), "n["),
        ({**session_line("b", 6.0, 0, []), "n": [[1, 1, 1]]}, "n["),
        ({**session_line("b", 6.0, 0, [[1, 1]]), "in": 2**40}, "in"),
        ({"s": "b"}, "missing"),
        ({"t": 1.0}, "missing"),
        ("{", "truncated"),
    ],
)
def test_a_broken_session_line_is_named(tmp_path: Path, line: dict[str, Any] | str, problem: str) -> None:
    good = [session_line("a", 0.0, 0, [[1, 1]]), session_line("b", 5.0, 0, [[1, 2]])]
    path = write_lines(tmp_path / "trace", [*good, line])
    message = broken(path)
    assert message.startswith(f"{path}:3: ")
    assert problem in message


# Arrivals


def test_arrivals_are_lengths_in_order(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,1,0"]
    path = write_lines(tmp_path / "arrivals", [ARRIVALS_HEADER, *rows], zipped=True)
    assert list(read_arrivals(TraceFile(path))) == [Arrival(4808, 10), Arrival(1, 0)]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("2023-11-16 18:17:03,5", "not a row"),
        ("2023-11-16 18:17:03,5,6,7", "not a row"),
        ("yesterday,5,6", "not a row"),
        ("2023-11-16 18:17:03,five,6", "not a row"),
        ("2023-11-16 18:17:03+00:00,5,6", "not a row"),
        ("2023-11-16 18:17:03,0,6", "at least 1 token"),
        ("2023-11-16 18:17:03,5,-1", "at least 1 token"),
        ("2023-11-16 18:17:00,5,6", "time runs backwards"),
    ],
)
def test_a_broken_row_of_arrivals_is_named(tmp_path: Path, row: str, problem: str) -> None:
    path = write_lines(tmp_path / "arrivals", [ARRIVALS_HEADER, "2023-11-16 18:17:01,4808,10", row])
    with pytest.raises(ReplayError, match=problem) as raised:
        list(read_arrivals(TraceFile(path)))
    assert str(raised.value).startswith(f"{path}:3: ")


def test_arrivals_begin_with_their_header(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "arrivals", ["2023-11-16 18:17:01,4808,10"])
    with pytest.raises(ReplayError, match=":1: an arrivals file begins with"):
        list(read_arrivals(TraceFile(path)))
