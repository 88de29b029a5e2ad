"""Runs side by side find what they find one by one; a process that fails or dies says so."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aradix.cli import main
from aradix.errors import ConfigError, InvariantError
from aradix.replay.request import ReplayError
from aradix.replay.runs import OnProgress, Outcome, run_jobs
from tests.replay.test_command import PROMPTS, complaint, lines_of
from tests.replay.traces import mooncake_line, write_lines


@dataclass
class Task:
    """A job that counts its steps and then does what it is told to."""

    name: str
    then: Exception | int | None = None
    num_steps: int = 128
    num_bytes: int = 0

    def run(self, on_progress: OnProgress | None) -> Outcome:
        for done in range(1, self.num_steps + 1):
            if on_progress is not None:
                on_progress(done)
        if isinstance(self.then, Exception):
            raise self.then
        if self.then is not None:
            os.kill(os.getpid(), self.then)
        return Outcome(())


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_job_is_done_and_every_step_is_told(num_processes: int) -> None:
    jobs = [Task("a"), Task("b", num_steps=64), Task("c", num_steps=0, num_bytes=2**60), Task("d", num_steps=200)]
    told: list[int] = []
    done = [number for number, _ in run_jobs(jobs, num_processes=num_processes, on_progress=told.append)]
    assert sorted(done) == [0, 1, 2, 3]
    assert told == sorted(told)
    assert told[-1] == 128 + 64 + 200


@pytest.mark.parametrize("error", [ReplayError("no such file"), ConfigError("no"), InvariantError("a slot is missing")])
def test_what_fails_in_a_process_fails_here(error: Exception) -> None:
    jobs = [Task("a", error), Task("b")]
    with pytest.raises(type(error), match=str(error)):
        list(run_jobs(jobs, num_processes=2))


def test_a_process_that_dies_is_named() -> None:
    jobs = [Task("--policy lru --capacity 1e9", signal.SIGKILL)]
    with pytest.raises(ReplayError, match=r"--policy lru --capacity 1e9: its process ended with -9, .* --jobs 1"):
        list(run_jobs([*jobs, *jobs], num_processes=2))


def test_processes_find_what_one_finds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t", map(mooncake_line, PROMPTS * 3))
    argv: list[str | Path] = [trace, "--policy", "slru,optimal,lru", "--capacity", "inf,2048,4096"]

    def found(jobs: str) -> list[dict[str, Any]]:
        runs = lines_of(capsys, *argv, "--jobs", jobs)
        return [
            {name: value for name, value in run.items() if not name.endswith(("_us", "_s", "seconds"))} for run in runs
        ]

    alone = found("1")
    assert [(run["policy"], run["capacity"]) for run in alone] == [
        (policy, capacity) for policy in ("slru", "optimal", "lru") for capacity in ("inf", "2048", "4096")
    ]
    assert found("3") == alone


def test_a_broken_trace_is_one_line_whoever_reads_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t", [mooncake_line([1]), "{broken"])
    said = complaint(capsys, "replay", trace, "--policy", "lru,slru", "--jobs", "2")
    assert f"{trace}:2: not JSON" in said


def test_lines_are_worth_what_was_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t", map(mooncake_line, PROMPTS))
    (plain,) = lines_of(capsys, trace, "--capacity", "4096")
    worth = ("--model", "deepseek-v3", "--kv-dtype", "fp8", "--prefill-tokens-per-s", "512")
    (run,) = lines_of(capsys, trace, "--capacity", "4096", *worth)
    assert run.keys() - plain.keys() == {"kv_bytes_per_token", "capacity_bytes", "prefill_seconds_saved"}
    assert run["kv_bytes_per_token"] == 61 * 576
    assert run["capacity_bytes"] == 4096 * 61 * 576
    assert run["prefill_seconds_saved"] == run["hit_tokens"] / 512
    assert main(["replay", str(trace), "--policy", "lru,optimal", "--capacity", "4096,inf", *worth]) == 0
    _, heads, lru, _, bound, _ = capsys.readouterr().out.splitlines()
    assert " ".join(heads.split()) == "policy capacity KV hit ratio saved evicted waits p50 us p99 us req/s"
    assert lru.split()[:4] == ["lru", "4,096", "137", "MiB"]
    assert bound.split()[-4:] == ["-"] * 4


def test_people_see_a_comparison_and_programs_what_a_cache_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = write_lines(tmp_path / "t", map(mooncake_line, PROMPTS))
    assert main(["replay", str(trace), "--capacity", "2048"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert shown == ["lru", "tenure"]
    assert main(["replay", str(trace), "--capacity", "2048", "--json"]) == 0
    assert [json.loads(line)["policy"] for line in capsys.readouterr().out.splitlines()] == ["lru"]
