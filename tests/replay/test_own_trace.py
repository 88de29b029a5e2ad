"""Traces of one's own: token ids, or texts and a tokenizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from aradix.keys import Namespace
from aradix.replay.detect import open_trace
from aradix.replay.request import ReplayError, Request
from tests.replay.traces import mooncake_line, write_lines

WORDS = ["<unk>", "you", "are", "helpful", "what", "is", "rain", "snow", "water"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    # A tokenizer that adds to what it gets: a trace must not be told so.
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<unk> $A <unk>", special_tokens=[("<unk>", 0)]
    )
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def read(path: Path, tokenizer: Path | None = None) -> list[Request]:
    trace = open_trace(path, tokenizer=tokenizer)
    requests = list(trace.requests())
    again = list(trace.requests())
    assert [request.ids.tolist() for request in again] == [request.ids.tolist() for request in requests]
    assert (trace.block_size, trace.has_outputs, trace.name) == (1, True, path.name)
    return requests


def broken(path: Path, tokenizer: Path | None = None) -> str:
    with pytest.raises(ReplayError) as caught:
        list(open_trace(path, tokenizer=tokenizer).requests())
    return str(caught.value)


@pytest.mark.parametrize("zipped", [False, True])
def test_token_ids_bare_or_with_what_is_known_of_them(tmp_path: Path, zipped: bool) -> None:
    lines: list[dict[str, Any] | str] = [
        "[5, 6, 7]",
        {"tokens": [5, 6, 8, 9], "output": [1, 2], "session": "a", "tenant": "acme"},
        {"tokens": [5, 6, 8, 9, 1, 2, 3], "session": "a", "tenant": "acme"},
        {"tokens": [], "tenant": 7, "comment": "of no interest"},
    ]
    bare, first, second, empty = read(write_lines(tmp_path / "t", lines, zipped=zipped))
    assert (bare.ids.tolist(), bare.session, bare.extra_key, bare.tenant) == ([5, 6, 7], None, None, "")
    assert (first.ids.tolist(), first.output.tolist()) == ([5, 6, 8, 9], [1, 2])
    assert first.extra_key == Namespace(tenant="acme")
    assert (first.tenant, empty.tenant) == ("acme", "7")
    assert first.session == second.session is not None
    assert [request.fresh_tokens for request in (bare, first, second, empty)] == [3, 4, 3, 0]
    assert second.input_tokens == 7


def test_sessions_of_two_tenants_are_two(tmp_path: Path) -> None:
    lines = [{"tokens": [1], "session": 1, "tenant": tenant} for tenant in ("a", "b")]
    first, second = read(write_lines(tmp_path / "t", lines))
    assert first.session != second.session


def test_texts_become_the_tokens_that_an_engine_sees(tmp_path: Path, tokenizer: Path) -> None:
    lines: list[dict[str, Any] | str] = [
        '"you are helpful"',
        *({"text": "you are", "output": "snow", "tenant": "t"} for _ in range(100)),
    ]
    first, *others = read(write_lines(tmp_path / "t", lines), tokenizer)
    assert (first.ids.tolist(), first.output.tolist()) == ([1, 2, 3], [])
    assert [(request.ids.tolist(), request.output.tolist()) for request in others] == [([1, 2], [7])] * 100


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["[1]", "[-1]"], "t:2: JSON, but not of this format"),
        (["[1]", f"[{2**31}]"], "t:2: JSON, but not of this format"),
        (["[1]", '{"tokens": "x"}'], "t:2: JSON, but not of this format"),
        (["[1]", '{"session": 1}'], "t:2: a line has either tokens or text"),
        (["[1]", '{"tokens": [1], "text": "x"}'], "t:2: a line has either tokens or text"),
        (["[1]", '{"tokens": [1], "output": "x"}'], "t:2: an output is token ids where"),
        (["[1]", '"x"'], "t:2: text in a file of token ids"),
        (["[1]", "[1"], "t:2: not JSON"),
        (['"x"'], "holds texts; give --tokenizer FILE"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, lines: list[str], problem: str) -> None:
    assert problem in broken(write_lines(tmp_path / "t", lines))


def test_a_tokenizer_must_be_one_and_be_needed(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_lines(tmp_path / "texts", ['"you are"', "[1]"])
    ids = write_lines(tmp_path / "ids", ["[1]"])
    blocks = write_lines(tmp_path / "blocks", [mooncake_line([1])])
    assert "texts:2: token ids in a file of texts" in broken(texts, tokenizer)
    assert "holds token ids; leave it out" in broken(ids, tokenizer)
    assert "holds no texts; leave it out" in broken(blocks, tokenizer)
    assert f"--tokenizer {tmp_path}/none: no such file" in broken(texts, tmp_path / "none")
    nonsense = tmp_path / "nonsense.json"
    nonsense.write_text(json.dumps({"a": 1}))
    assert f"--tokenizer {nonsense}: no tokenizer.json: " in broken(texts, nonsense)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setattr("aradix.replay.own_trace.find_spec", lambda _name: None)
    assert broken(texts, tokenizer) == "--tokenizer needs tokenizers: pip install 'aradix[tokenizers]'"
