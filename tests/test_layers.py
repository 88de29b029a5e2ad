"""The floors of the package hold, and the checker that says so finds what it should."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch

import pytest

from tests.support.layers import (
    COUNTED_SUFFIXES,
    MAX_LINES,
    import_violations,
    imported_modules,
    shape_violations,
    wait_violations,
)
from tests.support.places import ROOT

BUILT = {"__pycache__", "CMakeFiles"}
"""Folders of what an editable install leaves beside the sources."""


def _files(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in COUNTED_SUFFIXES and not BUILT & set(path.parts):
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def _python_files(*folders: str) -> list[tuple[str, str]]:
    return [(path, text) for path, text in _files(*folders) if path.endswith(".py")]


def test_files_import_only_from_lower_floors() -> None:
    files = _python_files("aradix")
    assert {"aradix/errors.py", "aradix/tree/__init__.py"} <= {path for path, _ in files}
    assert [found for path, text in files for found in import_violations(text, path)] == []


def test_nothing_waits_below_the_cache() -> None:
    assert [found for path, text in _python_files("aradix") for found in wait_violations(text, path)] == []


def test_the_package_imports_neither_tests_nor_stress() -> None:
    names = [
        f"{path}:{line}: {name}"
        for path, text in _python_files("aradix")
        for line, name in imported_modules(text, path)
    ]
    assert [name for name in names if name.split(": ")[1].split(".")[0] in {"tests", "stress"}] == []


def test_files_are_short_and_named_after_something() -> None:
    assert [found for path, text in _files("aradix", "tests", "stress") for found in shape_violations(text, path)] == []


def test_the_top_level_is_fixed() -> None:
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines() if line]
    names = {entry.name for entry in ROOT.iterdir()} - {".git"}
    top = {name for name in names if not any(fnmatch(name, pattern) for pattern in ignored)}
    allowed = {"aradix", "tests", "stress", "pyproject.toml", "README.md", "LICENSE", ".gitignore", ".ci"}
    assert top - allowed == set()


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("aradix/keys.py", "import torch\n", "keys must not import torch"),
        ("aradix/errors.py", "from anyio import Event\n", "errors must not import anyio"),
        (
            "aradix/params.py",
            "from aradix.tree.node import TreeNode\n",
            "params (floor 0) must not import tree (floor 1)",
        ),
        ("aradix/tree/node.py", "import torch.cuda\n", "tree must not import torch"),
        ("aradix/tree/node.py", "def f():\n    import anyio\n", "tree must not import anyio"),
        (
            "aradix/tree/node.py",
            "from aradix.memory import fences\n",
            "tree (floor 1) must not import memory (floor 1)",
        ),
        ("aradix/tree/node.py", "from aradix import memory\n", "tree (floor 1) must not import memory (floor 1)"),
        ("aradix/tree/node.py", "from ..memory import fences\n", "tree (floor 1) must not import memory (floor 1)"),
        ("aradix/tree/cpp/build.py", "from ...cache import lease\n", "tree (floor 1) must not import cache (floor 2)"),
        ("aradix/memory/transfer.py", "import anyio\n", "memory must not import anyio"),
        ("aradix/memory/storage/file.py", "import asyncio\n", "memory/storage must not import asyncio"),
        ("aradix/memory/fences.py", "import aradix.tree.node\n", "memory (floor 1) must not import tree (floor 1)"),
        ("aradix/cache/lease.py", "from aradix.observe import metrics\n", "cache (floor 2) must not import observe"),
        ("aradix/cache/lease.py", "from aradix import RadixKey\n", "imports aradix.RadixKey through the facade"),
        ("aradix/cache/lease.py", "import aradix\n", "imports aradix through the facade"),
        (
            "aradix/replay/driver.py",
            "from aradix.observe.metrics import x\n",
            "replay (floor 3) must not import observe",
        ),
        ("aradix/replay/driver.py", "import_module('aradix.cli')\n", "replay (floor 3) must not import cli (floor 6)"),
        ("aradix/engine/text.py", "from aradix.serve import app\n", "engine (floor 4) must not import serve (floor 5)"),
        ("aradix/serve/app.py", "from aradix.cli import main\n", "serve (floor 5) must not import cli (floor 6)"),
        ("aradix/__init__.py", "from aradix.replay.driver import run\n", "the facade must not import replay"),
        ("aradix/extras/thing.py", "", "extras stands on no floor"),
        (
            "aradix/keys.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import torch\n",
            "keys must not import torch",
        ),
    ],
)
def test_the_checker_finds_a_wrong_import(path: str, source: str, complaint: str) -> None:
    found = import_violations(source, path)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("aradix/params.py", "from aradix.keys import RadixKey\n"),
        ("aradix/params.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"),
        ("aradix/params.py", "import typing\nif typing.TYPE_CHECKING:\n    from aradix.cache import lease\n"),
        ("aradix/tree/node.py", "from aradix.tree.protocol import NodeView\nfrom aradix.errors import UsageError\n"),
        ("aradix/tree/node.py", "from .protocol import NodeView\nfrom . import policies\n"),
        ("aradix/tree/ledger.py", "from aradix.policies import LRU\n"),
        ("aradix/memory/storage/file.py", "import torch\nimport anyio\nfrom ..fences import Fence\n"),
        ("aradix/cache/lease.py", "import anyio\nimport aradix.memory.allocator\nfrom aradix.tree import radix_tree\n"),
        ("aradix/__init__.py", "from aradix.cache.radix_cache import RadixCache\nfrom aradix.keys import RadixKey\n"),
        ("aradix/cli.py", "from aradix.replay import driver\nimport asyncio\n"),
        ("aradix/cli.py", "from aradix.serve import command\n"),
        ("aradix/serve/app.py", "from aradix.engine.engine import AsyncEngine\n"),
    ],
)
def test_the_checker_accepts_a_right_import(path: str, source: str) -> None:
    assert import_violations(source, path) == []


def test_the_checker_names_the_line() -> None:
    assert import_violations("import os\n\nimport torch\n", "aradix/keys.py") == [
        "aradix/keys.py:3: keys must not import torch"
    ]


def test_the_checker_finds_coroutines_below_the_cache() -> None:
    source = "async def f(x):\n    await x\n    async with x:\n        async for _ in x:\n            ...\n"
    assert len(wait_violations(source, "aradix/tree/node.py")) == 4
    assert len(wait_violations(source, "aradix/memory/transfer.py")) == 4
    assert wait_violations(source, "aradix/memory/storage/store.py") == []
    assert wait_violations(source, "aradix/cache/lease.py") == []


def test_the_checker_finds_long_files_and_empty_names() -> None:
    assert shape_violations("x\n" * MAX_LINES, "tests/test_x.py") == []
    assert shape_violations("x\n" * MAX_LINES + "x", "tests/test_x.py") == [
        f"tests/test_x.py: 501 lines, of at most {MAX_LINES}"
    ]
    assert shape_violations("x\n" * 501, "aradix/tree/cpp_radix_tree/tree.cpp") != []
    assert shape_violations("x\n" * 501, "aradix/tree/notes.txt") == []
    assert shape_violations("", "aradix/utils.py") == ["aradix/utils.py: named utils"]
    assert shape_violations("", "aradix/utils/x.py") == ["aradix/utils/x.py: named utils"]
