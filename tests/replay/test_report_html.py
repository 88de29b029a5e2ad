"""The report: a page that is whole, loads nothing, and says what the runs found."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from aradix.cli import main
from aradix.replay.figures import Curve, distance_figure, hit_ratio_figure, percent, tokens_text
from aradix.replay.models import Worth
from aradix.replay.report_page import save_report
from aradix.replay.request import ReplayError
from aradix.replay.reuse import ReuseDistances
from tests.replay.test_command import PROMPTS
from tests.replay.test_report import result
from tests.replay.traces import mooncake_line, write_lines

LEAVES = {"line", "circle", "rect", "polyline", "polygon"}


class Page(HTMLParser):
    """Reads a page, and complains of what is not closed or comes from elsewhere."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in LEAVES
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and "style" not in self.open:
            self.words.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " | ".join(self.words)

    def count(self, tag: str, kind: str) -> int:
        return sum(name == tag and kind in (attrs.get("class") or "").split() for name, attrs in self.tags)


def report(trace: Path, *argv: str | Path) -> Page:
    path = trace.with_suffix(".html")
    assert main(["replay", str(trace), "--report", str(path), *map(str, argv)]) == 0
    return Page(path)


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    lines = [
        {"tokens": [*range(100 * tenant, 100 * tenant + 32), turn], "tenant": f"<b>{tenant}&", "session": tenant}
        for turn in range(3)
        for tenant in range(14)
    ]
    return write_lines(tmp_path / "own & mine.jsonl", lines)


def test_it_says_what_memory_and_policy_buy(tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t.jsonl", map(mooncake_line, PROMPTS))
    argv = "--policy lru,lfu --capacity 2048,inf --concurrency 1 --model llama-3.1-8b --prefill-tokens-per-s 64"
    page = report(trace, *argv.split())
    assert "6 requests | 7,680 input tokens | pages of 512 | 1 in flight" in page.text
    assert "131,072 B of KV a token (Llama-3.1-8B, bf16)" in page.text
    assert page.count("polyline", "line") == 3
    assert page.count("polyline", "bound") == 1
    assert page.count("polygon", "gap") == 1
    assert "256 MiB" in page.text
    # 8 of 15 blocks came before, and 4,096 tokens are 64 s of prefill.
    assert "53.3 % | of input tokens came before" in page.text
    assert "1 min 04 s | of 2 min 00 s of prefill saved there" in page.text
    assert page.count("rect", "bar") > 0
    assert "46.7 % of the input tokens are seen for the first time." in page.text
    assert "name no tenants" in page.text


def test_it_loads_nothing(tenants: Path) -> None:
    page = report(tenants, "--policy", "lru", "--capacity", "512")
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "use", "image"}
    assert not [attrs for _, attrs in page.tags if attrs.keys() & {"src", "href", "xlink:href", "onload"}]
    assert not re.search(r"url\(|@import|https?://", page.source)


def test_it_has_a_dark_side(tenants: Path) -> None:
    page = report(tenants, "--policy", "lru", "--capacity", "512")
    light, dark = re.findall(r":root \{([^}]*)\}", page.source)
    names = [set(re.findall(r"(--[\w-]+):", style)) for style in (light, dark)]
    assert names[0] == names[1]
    assert set(re.findall(r"var\((--[\w-]+)\)", page.source)) <= names[0] | {"--at", "--of"}


def test_tenants_are_told_apart_by_name_whatever_it_holds(tenants: Path) -> None:
    page = report(tenants, "--policy", "lru", "--capacity", "512,inf", "--concurrency", "1")
    assert "<b>0& | 3 | 99 |" in page.text
    assert "own & mine.jsonl" in page.text
    assert "2 tenants with fewer input tokens are not shown." in page.text
    assert page.count("td", "heat") == 12 * 2
    # Endless: two of three turns find two pages of sixteen.
    assert page.text.count(percent(64 / 99)) >= 12


def test_a_capacity_alone_and_nothing_found_are_drawn_as_well(tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "t.jsonl", ["[1, 2, 3]", "[4, 5]"])
    page = report(trace, "--policy", "lru", "--capacity", "64")
    assert page.count("circle", "dot") == 2
    assert page.count("rect", "bar") == 0
    assert "0 % | of input tokens came before" in page.text
    page = report(trace, "--policy", "optimal", "--capacity", "64")
    assert page.count("polyline", "bound") == 1


def test_a_report_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "taken.html").mkdir()
    with pytest.raises(ReplayError, match="Is a directory"):
        save_report(tmp_path / "taken.html", [("1e3", result())], trace="t", worth=Worth(), distances=None)


def heights(drawn: str, names: list[str]) -> list[float]:
    found = []
    for name in names:
        match = re.search(rf'y="([\d.]+)"[^>]*>{name}</text>', drawn)
        assert match is not None, name
        found.append(float(match[1]))
    return found


def test_names_of_lines_that_meet_do_not_cover_each_other() -> None:
    names = [f"policy{number}" for number in range(8)]
    for ratio in (0.0, 0.3, 1.0):
        curves = [Curve(name, "red", False, ((1000, 0.1), (2000, ratio))) for name in names]
        drawn = hit_ratio_figure(curves, [("1k", 1000), ("2k", 2000)], lambda _: None)
        placed = sorted(heights(drawn, names))
        assert all(after - before >= 16.9 for before, after in pairwise(placed))
        assert placed[0] > 0
        assert placed[-1] < 400


def test_names_of_capacities_do_not_cover_each_other() -> None:
    capacities = [(f"n{tokens}", tokens) for tokens in (1000, 1001, 1500, 1000_000)]
    curve = Curve("lru", "red", False, tuple((tokens, 0.5) for _, tokens in capacities))
    drawn = hit_ratio_figure([curve], capacities, lambda tokens: f"{tokens} B")
    assert [name for name, _ in capacities if f">{name}<" in drawn] == ["n1000", "n1000000"]
    distances = ReuseDistances(100, ((0, 16, 10), (16, 32, 0), (32, 64, 30)), ((20, 10), (21, 10), (999, 40)))
    drawn = distance_figure(distances, [("here", 20), ("there", 21), ("beyond", 999)])
    assert "16 to 32 tokens: 0 % of all" in drawn
    assert ">beyond<" not in drawn
    assert len(set(heights(drawn, ["here", "there"]))) == 2


@pytest.mark.parametrize(
    ("tokens", "text"), [(512, "512"), (999_936, "1M"), (65_536, "65.5k"), (1e9, "1B"), (2.5e12, "2,500B")]
)
def test_tokens_are_short(tokens: float, text: str) -> None:
    assert tokens_text(tokens) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(0, "0 %"), (0.054, "5.40 %"), (0.13149, "13.1 %"), (0.9999, "100 %"), (1, "100 %")]
)
def test_ratios_have_three_digits(ratio: float, text: str) -> None:
    assert percent(ratio) == text
