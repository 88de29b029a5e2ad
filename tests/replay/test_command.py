"""The command line: what it prints, and one line and exit status 2 for bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from aradix.cli import main
from aradix.errors import ConfigError, InvariantError
from tests.replay.traces import mooncake_line, write_lines

PROMPTS = [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2], [5, 6], [0, 1, 2]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "mooncake.jsonl.gz", map(mooncake_line, PROMPTS), zipped=True)


def lines_of(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> list[dict[str, Any]]:
    assert main(["replay", "--json", *map(str, argv)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return [json.loads(line) for line in captured.out.splitlines()]


def complaint(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    try:
        status = main(list(map(str, argv)))
    except SystemExit as exit_:
        status = exit_.code  # type: ignore[assignment]
    assert status == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("aradix")
    return captured.err


EXACT = ("--concurrency", "1", "--watermarks", "0:0")


def test_a_line_of_json_for_each_policy_and_capacity(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    runs = lines_of(capsys, trace, *EXACT, "--capacity", "2048,3e3,inf", "--policy", "lru,slru")
    assert [(run["policy"], run["capacity"]) for run in runs] == [
        (policy, capacity) for policy in ("lru", "slru") for capacity in ("2048", "3e3", "inf")
    ]
    assert [run["capacity_tokens"] for run in runs[:2]] == [2048, 2560]
    for run in runs:
        assert run["page_size"] == 512
        assert run["requests"] == 6
        assert run["input_tokens"] == 15 * 512
        assert run["hit_ratio"] == pytest.approx(run["hit_tokens"] / run["input_tokens"], abs=1e-6)
    endless = runs[2]
    assert (endless["hit_tokens"], endless["evicted_tokens"]) == (8 * 512, 0)


def test_the_same_run_is_made_once(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    runs = lines_of(capsys, trace, "--capacity", "2048,2.048e3, INF,1e400,infinity", "--policy", "lru, lru,slru")
    assert [(run["policy"], run["capacity"]) for run in runs] == [
        (policy, capacity) for policy in ("lru", "slru") for capacity in ("2048", "inf")
    ]


def test_every_spelling_of_endless_is_shown_as_that(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    assert main(["replay", str(trace), "--capacity", "1e400", "--policy", "lru"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["lru", "endless"]


def test_the_last_block_weighs_its_real_length(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", [mooncake_line([0, 1], short_by=500)] * 2)
    (run,) = lines_of(capsys, path, *EXACT)
    assert (run["input_tokens"], run["hit_tokens"]) == (2 * 524, 524)


def test_a_page_may_be_part_of_a_block(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    (run,) = lines_of(capsys, trace, *EXACT, "--page-size", "128", "--capacity", "inf")
    assert (run["page_size"], run["hit_tokens"]) == (128, 8 * 512)


def test_the_limit_takes_the_first_requests(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    (run,) = lines_of(capsys, trace, *EXACT, "--limit", "2")
    assert (run["requests"], run["input_tokens"], run["hit_tokens"]) == (2, 6 * 512, 2 * 512)


def test_the_built_in_workload_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--limit", "100", "--capacity", "2e5", *EXACT)
    (run,) = lines_of(capsys, *argv)
    (again,) = lines_of(capsys, *argv)
    (other,) = lines_of(capsys, *argv, "--seed", "1")
    (prompts_only,) = lines_of(capsys, *argv, "--no-outputs")
    counts = ("requests", "input_tokens", "hit_tokens", "output_tokens", "evicted_tokens")
    assert [run[name] for name in counts] == [again[name] for name in counts]
    assert run["input_tokens"] != other["input_tokens"]
    assert run["page_size"] == 16
    assert run["output_tokens"] > 0 == prompts_only["output_tokens"]
    assert run["hit_tokens"] > prompts_only["hit_tokens"]


def test_arrivals_bound_the_built_in_workload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,3180,8"]
    path = write_lines(tmp_path / "a.csv", ["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    (run,) = lines_of(capsys, "--arrivals", path)
    assert (run["requests"], run["input_tokens"], run["output_tokens"]) == (2, 7988, 18)


def test_outputs_of_a_trace_are_inserted_when_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = {"s": "a", "t": 0, "ts": None, "p": -1, "k": 0, "n": list(range(16)), "o": list(range(50, 66))}
    path = write_lines(tmp_path / "t", [first, {**first, "t": 1, "p": 0, "k": 32, "n": [9]}])
    (prompts,) = lines_of(capsys, path, *EXACT)
    (outputs,) = lines_of(capsys, path, "--outputs")
    assert (prompts["hit_tokens"], outputs["hit_tokens"]) == (16, 32)


def test_a_table_by_default(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    assert main(["replay", str(trace), "--capacity", "2048,inf", "--policy", "lru"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "mooncake.jsonl.gz: 6 requests, 7,680 input tokens, pages of 512, 8 in flight"
    assert len(lines) == 3
    assert lines[2].split()[:2] == ["lru", "endless"]


def test_the_plot_is_saved(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    lines_of(capsys, trace, "--capacity", "2048,inf", "--plot", plot)
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--capacity", "511"], "less than one page of 512"),
        (["--capacity", "0"], "above 0"),
        (["--capacity", "-5"], "above 0"),
        (["--capacity", "nan"], "above 0"),
        (["--capacity", "1e6,lots"], "'lots' is not a number"),
        (["--capacity", ""], "not a number"),
        (["--page-size", "0"], "at least 1"),
        (["--page-size", "96"], "blocks of 512"),
        (["--page-size", "1024"], "blocks of 512"),
        (["--capacity", "1e13"], "--capacity 1e13: 19,531,250,000 pages of 512, and a pool has at most"),
        (["--capacity", "1e308"], "--capacity 1e308"),
        (["--capacity", "1e12"], "--capacity 1e12: may need "),
        (["--policy", "best"], "argument --policy: 'best' is none of lru, lfu, slru, fifo, mru, filo, priority"),
        (["--policy", "lru,"], "argument --policy: '' is none of"),
        (["--concurrency", "0"], "at least 1"),
        (["--watermarks", "0.2"], "LOW:HIGH"),
        (["--watermarks", "0.2:0.1"], "LOW <= HIGH"),
        (["--watermarks", "0:1"], "HIGH < 1"),
        (["--core", "rust"], "rust"),
        (["--limit", "0"], "at least 1"),
        (["--seed", "-1"], "at least 0"),
        (["--outputs"], "does not hold the ids of its outputs"),
        (["--arrivals", "some.csv"], "--arrivals"),
        (["--plot", "plot.pdf"], ".svg or .png"),
        (["--report", "report.pdf"], "must end in .html"),
        (["--report", "no/such/folder/report.html"], "there is no folder no/such/folder"),
        (["--jobs", "0"], "at least 1"),
        (["--model", "gpt-9"], "--model: 'gpt-9' is none of Llama-3.1-8B, "),
        (["--model", "qwen3-8b", "--kv-bytes-per-token", "9"], "not allowed with argument --model"),
        (["--kv-bytes-per-token", "0"], "KV bytes per token is a number above 0"),
        (["--kv-dtype", "fp8"], "no model is named"),
        (["--model", "qwen3-8b", "--kv-dtype", "int3"], "int3"),
        (["--prefill-tokens-per-s", "fast"], "a rate of prefill is a number above 0, got 'fast'"),
        (["--tokenizer", "tokenizer.json"], "holds no texts; leave it out"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], trace: Path, argv: list[str], problem: str) -> None:
    assert problem in complaint(capsys, "replay", trace, *argv)


def test_bad_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert f"{tmp_path}/none: No such file" in complaint(capsys, "replay", tmp_path / "none")
    assert f"{tmp_path}/none: No such file" in complaint(capsys, "replay", "--arrivals", tmp_path / "none")
    path = write_lines(tmp_path / "t", [mooncake_line([1]), "{broken"])
    assert f"{path}:2: not JSON" in complaint(capsys, "replay", path)
    path = write_lines(tmp_path / "t", [mooncake_line([1]), "[]"])
    assert f"{path}:2: JSON, but not of this format: Expected" in complaint(capsys, "replay", path)


@pytest.mark.parametrize("option", [[], ["--arrivals"]])
def test_a_pipe_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
    reading, writing = os.pipe()
    try:
        said = complaint(capsys, "replay", *option, f"/dev/fd/{reading}")
    finally:
        os.close(reading)
        os.close(writing)
    assert said == f"aradix: /dev/fd/{reading}: a pipe, but a trace is read more than once; give a regular file\n"


def test_a_core_that_is_not_there_names_its_option(
    capsys: pytest.CaptureFixture[str], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(tree_core: str, **_settings: object) -> None:
        raise ConfigError(f"no {tree_core}")

    monkeypatch.setattr("aradix.replay.plan.make_core", missing)
    assert complaint(capsys, "replay", trace, "--core", "cpp") == "aradix: --core cpp: no cpp\n"


def test_too_little_memory_is_bad_input(
    capsys: pytest.CaptureFixture[str], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def large(*_args: object) -> None:
        raise MemoryError("Unable to allocate 6.98 GiB")

    monkeypatch.setattr("aradix.replay.runs.replay", large)
    assert "--capacity 2048: out of memory" in complaint(capsys, "replay", trace, "--capacity", "2048")


def test_help_lists_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["replay", "--help"])
    assert exit_.value.code == 0
    assert "lru, lfu, slru, fifo, mru, filo, priority" in " ".join(capsys.readouterr().out.split())


def test_a_cache_that_is_not_whole_afterwards_is_status_1(
    capsys: pytest.CaptureFixture[str], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_args: object) -> None:
        raise InvariantError("a slot is\nmissing")

    monkeypatch.setattr("aradix.replay.runs.replay", broken)
    assert main(["replay", str(trace)]) == 1
    assert capsys.readouterr() == ("", "aradix: a slot is missing\n")


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in complaint(capsys)
    assert "'reply'" in complaint(capsys, "reply")


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"aradix {version('aradix')}\n"


@pytest.mark.parametrize("module", ["aradix", "aradix.cli"])
def test_it_runs_as_a_program(trace: Path, module: str) -> None:
    argv = [sys.executable, "-m", module, "replay", str(trace), "--json", "--capacity", "100"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "aradix: --capacity 100: less than one page of 512 tokens\n"


def test_a_reader_that_has_had_enough_is_no_error(trace: Path) -> None:
    argv = [sys.executable, "-m", "aradix.cli", "replay", str(trace), "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, b"")


# ---- tiers below the device ----


def test_a_host_holds_what_the_device_has_no_room_for(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    (alone,) = lines_of(capsys, trace, *EXACT, "--capacity", "1536")
    (tiered,) = lines_of(
        capsys, trace, *EXACT, "--capacity", "1536", "--host-capacity", "inf", "--write-policy", "write_through"
    )
    (endless,) = lines_of(capsys, trace, *EXACT, "--capacity", "inf")
    assert alone["hit_tokens"] < tiered["hit_tokens"] == endless["hit_tokens"]
    assert "load_back_tokens" not in alone
    assert tiered["load_back_tokens"] > 0
    assert tiered["write_policy"] == "write_through"


def test_writing_back_keeps_as_much(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    (run,) = lines_of(
        capsys, trace, *EXACT, "--capacity", "1536", "--host-capacity", "1e6", "--write-policy", "write_back"
    )
    assert run["hit_tokens"] == 8 * 512


def test_a_second_replay_finds_what_the_first_put_into_a_store(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    options = ("--capacity", "1536", "--host-capacity", "16384", "--write-policy", "write_through")
    storage = ("--storage", tmp_path / "store")
    first, second = (lines_of(capsys, trace, *EXACT, *options, *storage)[0] for _ in range(2))
    assert first["hit_tokens"] == 8 * 512
    assert second["hit_tokens"] == second["input_tokens"]
    assert second["prefetched_tokens"] > 0


def test_the_table_says_how_much_was_loaded(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    assert main(["replay", str(trace), "--capacity", "1536", "--host-capacity", "1e6"]) == 0
    assert "loaded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--write-policy", "write_back"], "--write-policy: there is no host tier"),
        (["--storage", "x"], "--storage: there is no host tier"),
        (["--host-capacity", "1,2"], "--host-capacity takes one number"),
        (["--host-capacity", "100"], "--host-capacity 100: less than one page"),
        (["--host-capacity", "1e30"], "--host-capacity 1e30"),
        (["--host-capacity", "1e6", "--storage", "/proc/nowhere"], "--storage /proc/nowhere"),
    ],
)
def test_tiers_that_cannot_be_are_one_line(
    capsys: pytest.CaptureFixture[str], trace: Path, argv: list[str], says: str
) -> None:
    assert says in complaint(capsys, "replay", trace, *argv)
