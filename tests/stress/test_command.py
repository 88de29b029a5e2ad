"""`python -m stress`: what it prints, and its exit status."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from stress.cli import main
from stress.harness import campaign
from stress.harness.outcome import Outcome
from stress.harness.play import play
from stress.harness.script import FailureScript
from stress.harness.worlds import Act, World
from stress.planted.catalog import CATALOG


def test_a_run_prints_its_seed_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--seed", "3", "--seeds", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("seed 3\n")
    assert "4 seeds from 3 on" in printed
    assert "0 failed" in printed


def test_a_run_in_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--seed", "5", "--seeds", "2", "--backend", "trio", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["seed"], report["seeds"], report["failed"], report["failures"]) == (5, 2, 0, [])
    assert report["acts"] > 0


def test_no_time_is_no_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--seed", "1", "--seconds", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds"] == 0


def test_what_was_done_before_an_interrupt_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted_at_25(world: World) -> Outcome:
        if world.seed == 25:
            raise KeyboardInterrupt
        return play(world)

    monkeypatch.setattr(campaign, "play", interrupted_at_25)
    assert main(["run", "--seed", "1", "--seeds", "60", "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert (report["seeds"], report["failed"], report["interrupted"]) == (20, 0, True)


def test_an_interrupt_of_all_processes_ends_the_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends Ctrl-C to the whole group."""
    parent = os.getpid()

    def with_a_signal(world: World) -> Outcome:
        assert os.getpid() != parent
        os.kill(os.getpid(), signal.SIGINT)
        return play(world)

    def interrupt(_: campaign.Campaign) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "play", with_a_signal)
    done = campaign.run_campaign(1, 60, None, num_jobs=2, on_progress=interrupt)
    assert done.interrupted
    assert 20 <= done.num_seeds < 60
    assert not done.found


def test_a_replay_shows_the_operations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(seed=1, num_streams=0, keys=((0, (1, 2)),), tasks=((Act("request", (0,), (Act("grow", (2, 0)),)),),))
    path = tmp_path / "script.json"
    path.write_text(FailureScript(world, ()).to_json())
    assert main(["replay", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "allocate(2)" in printed
    assert printed.endswith("nothing is wrong\n")


def test_the_survey_ends_with_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    main(["planted", "--seeds", "1", "--jobs", "1"])
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert len(report["bugs"]) == len(CATALOG) >= 16
    assert report["clean"] == {"found": 0, "seeds": 1}
    assert len(lines) == len(CATALOG) + 4


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--seed", "-1"],
        ["run", "--seconds", "nan"],
        ["run", "--seeds", "0"],
        ["run", "--backend", "uvloop"],
        ["planted", "--seeds", "many"],
        ["replay", "/nowhere/to/be/found.json"],
        ["nonsense"],
        [],
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    shown = capsys.readouterr()
    assert status == 2
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"world": {"seed": 1, "kind": "odd"}}', '{"world": {"seed": 1, "x": 2}}']
)
def test_a_broken_script_is_told(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    assert main(["replay", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_bench_measures_and_draws_the_figure_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "figure.svg"
    assert main(["bench", "contention", "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    p99 = {row["protocol"]: row["match_p99_us"] for row in found["rows"]}
    assert p99["leases (aradix)"] * 10 < p99["a lock a root child"] < p99["one global lock"]
    assert "<svg" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize("options", ["nothing", "lease eviction --plot a.svg", "lease --plot a.txt"])
def test_bench_refuses_what_it_cannot_draw(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options.split()]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
