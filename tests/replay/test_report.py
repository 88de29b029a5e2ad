"""What is shown: a line of JSON a run, or a table that needs no terminal."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from pathlib import Path

import pytest

from aradix.replay.driver import ReplayResult, ReplaySetup
from aradix.replay.plot import check_plot, save_plot
from aradix.replay.progress import progress_bar
from aradix.replay.report import as_json, print_table
from aradix.replay.request import ReplayError


class Terminal(io.StringIO):
    """A text file that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def result(policy: str = "lru", num_pages: int = 64, hit_tokens: int = 750) -> ReplayResult:
    return ReplayResult(
        setup=ReplaySetup(policy=policy, num_pages=num_pages, page_size=16),
        num_requests=10,
        input_tokens=1000,
        hit_tokens=hit_tokens,
        output_tokens=5,
        evicted_tokens=12345,
        num_waits=3,
        num_retracts=1,
        lease_p50_us=12.34,
        lease_p99_us=1234.5,
        seconds=0.5,
    )


def test_json_is_one_line_with_the_promised_fields() -> None:
    line = as_json(result(), trace="t", capacity="1e3")
    assert "\n" not in line
    fields = json.loads(line)
    promised = {
        "policy": "lru",
        "capacity_tokens": 1024,
        "page_size": 16,
        "requests": 10,
        "input_tokens": 1000,
        "hit_tokens": 750,
        "hit_ratio": 0.75,
        "evicted_tokens": 12345,
        "lease_p50_us": 12.3,
        "lease_p99_us": 1234.5,
        "requests_per_s": 20.0,
    }
    assert {name: fields[name] for name in promised} == promised
    assert (fields["trace"], fields["capacity"], fields["slot_waits"]) == ("t", "1e3", 3)


def test_ratios_of_nothing_are_zero() -> None:
    setup = ReplaySetup(policy="lru", num_pages=1, page_size=16)
    nothing = ReplayResult(setup, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    assert (nothing.hit_ratio, nothing.requests_per_s) == (0.0, 0.0)


def test_the_plain_table_lines_up() -> None:
    file = io.StringIO()
    print_table([("1e3", result()), ("inf", result("slru", 10**6))], title="the title", file=file)
    title, *lines = file.getvalue().splitlines()
    assert title == "the title"
    assert " ".join(lines[0].split()) == "policy capacity hit ratio evicted waits p50 us p99 us req/s"
    assert lines[1].split() == ["lru", "1,024", "0.7500", "12,345", "3", "12", "1,234", "20"]
    assert lines[2].split()[:2] == ["slru", "endless"]
    assert len({len(line) for line in lines}) == 1


def test_on_a_terminal_rich_draws_it() -> None:
    file = Terminal()
    print_table([("1e3", result())], title="the title", file=file)
    assert "the title" in file.getvalue()
    assert "0.7500" in file.getvalue()
    assert "──" in file.getvalue()


LARGE = dataclasses.replace(
    result("priority", 10**8 // 16), evicted_tokens=3_456_789_012, num_waits=123_456, lease_p99_us=123_456.0
)
SMALL = dataclasses.replace(result(), evicted_tokens=206_789)


@pytest.mark.parametrize("columns", [40, 72, 80, 200])
@pytest.mark.parametrize("run", [SMALL, LARGE])
def test_a_terminal_shows_every_number_whole(monkeypatch: pytest.MonkeyPatch, columns: int, run: ReplayResult) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    file, plain = Terminal(), io.StringIO()
    print_table([("1e8", run)], title="[bold].jsonl: 6 requests", file=file)
    print_table([("1e8", run)], title="[bold].jsonl: 6 requests", file=plain)
    shown = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
    title, heads, *_, row = shown.splitlines()
    assert title.rstrip() == "[bold].jsonl: 6 requests"
    assert [heads.split(), row.split()] == [line.split() for line in plain.getvalue().splitlines()[1:]]
    drawn = "──" in shown
    assert drawn == (columns >= 80 or (columns, run) == (72, SMALL))
    assert not drawn or max(map(len, shown.splitlines())) <= columns


def test_without_rich_there_is_a_plain_table_and_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    file = Terminal()
    print_table([("1e3", result())], title="the title", file=file)
    assert file.getvalue().splitlines()[1].startswith("policy")
    with progress_bar("lru", 10, file) as show:
        assert show is None


def test_a_bar_is_drawn_only_on_a_terminal() -> None:
    with progress_bar("lru 1e6", 128, io.StringIO()) as show:
        assert show is None
    file = Terminal()
    with progress_bar("lru 1e6", 128, file) as show:
        assert show is not None
        for done in range(1, 129):
            show(done)
    assert "lru 1e6" in file.getvalue()
    assert "128/128" in file.getvalue()


@pytest.mark.parametrize(("name", "magic"), [("plot.svg", b"<?xml"), ("plot.PNG", b"\x89PNG")])
def test_a_plot_is_what_its_suffix_says(tmp_path: Path, name: str, magic: bytes) -> None:
    path = tmp_path / name
    check_plot(path)
    runs = [result("lru", 64, 100), result("lru", 128, 200), result("slru", 64, 300), result("slru", 128, 400)]
    save_plot(path, runs, title="the title")
    data = path.read_bytes()
    assert data.startswith(magic)


def test_a_plot_that_cannot_be_saved_is_refused_before_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ReplayError, match=r"\.svg or \.png"):
        check_plot(tmp_path / "plot.pdf")
    with pytest.raises(ReplayError, match="no folder"):
        check_plot(tmp_path / "none" / "plot.svg")
    (tmp_path / "taken.svg").mkdir()
    with pytest.raises(ReplayError, match="Is a directory"):
        save_plot(tmp_path / "taken.svg", [result()], title="")
    monkeypatch.setattr("aradix.replay.plot.find_spec", lambda _name: None)
    with pytest.raises(ReplayError, match=r"pip install 'aradix\[cli\]'"):
        check_plot(tmp_path / "plot.svg")
