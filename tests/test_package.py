"""The package as people meet it: its metadata, its two commands, its public names, and the tests' own ground."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import anyio
import pytest
import sniffio

import aradix
from tests.support.ci import NothingSkipped
from tests.support.places import ROOT

PUBLIC = {
    "AradixError",
    "BasePrefixCache",
    "CacheInitParams",
    "CacheStats",
    "ChunkCache",
    "EvictParams",
    "EvictResult",
    "HostKVPool",
    "InsertParams",
    "InsertResult",
    "Lease",
    "MHAKVPool",
    "MLAKVPool",
    "MatchPrefixParams",
    "MatchResult",
    "Namespace",
    "RadixCache",
    "RadixKey",
    "SlotAllocator",
}
TRY_IT = "python3 -m venv .venv && .venv/bin/pip install '.[cli]' && .venv/bin/aradix replay"
TEST_IT = "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest -n logical"


def test_the_readme_has_the_two_commands_on_lines_of_their_own() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines.count(TRY_IT) == 1
    assert lines.count(TEST_IT) == 1


def test_ci_runs_the_readme_command_and_nothing_it_made_up() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    pattern = re.search(r"^readme_command='(.+)'$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert pattern is not None
    found = [
        line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if re.search(pattern[1], line)
    ]
    assert found == [TEST_IT]


def test_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = metadata.metadata("aradix")
    assert installed["Version"] == project["version"]
    assert installed["License-Expression"] == project["license"] == "Apache-2.0"
    assert installed["Requires-Python"] == ">=3.11"
    assert set(installed.get_all("Provides-Extra") or []) == set(project["optional-dependencies"])
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    (script,) = metadata.distribution("aradix").entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("aradix", "aradix.cli:main")


def test_the_package_is_the_checkout_and_carries_types() -> None:
    assert Path(aradix.__file__).parent == ROOT / "aradix"
    assert (ROOT / "aradix" / "py.typed").exists()


def test_public_names() -> None:
    assert set(aradix.__all__) >= PUBLIC
    assert sorted(aradix.__all__) == list(aradix.__all__)
    undocumented = [name for name in aradix.__all__ if not (getattr(aradix, name).__doc__ or "").strip()]
    assert undocumented == []


@pytest.mark.anyio
async def test_anyio_tests_run_on_three_loops(anyio_backend: tuple[str, dict[str, object]]) -> None:
    name, options = anyio_backend
    assert sniffio.current_async_library() == name
    if name == "asyncio":
        import asyncio

        assert type(asyncio.get_running_loop()).__module__.startswith("uvloop") == bool(options)
    await anyio.lowlevel.checkpoint()


@pytest.mark.asyncio
async def test_pytest_asyncio_works_beside_anyio() -> None:
    assert sniffio.current_async_library() == "asyncio"


def test_the_header_names_the_core(pytestconfig: pytest.Config) -> None:
    from tests.support.core import core_name

    lines = pytestconfig.hook.pytest_report_header(config=pytestconfig, start_path=ROOT, startdir=None)
    assert f"aradix core: {core_name()}" in lines


SKIPPING = """
    import pytest

    @pytest.mark.skipif(True, reason="no such thing here")
    {marks}
    def test_one():
        raise AssertionError

    def test_two():
        pass
"""


@pytest.mark.parametrize(("marks", "code"), [("", 1), ("@pytest.mark.gpu", 0), ("@pytest.mark.sglang", 0)])
def test_in_ci_only_what_is_marked_so_may_be_skipped(pytester: pytest.Pytester, marks: str, code: int) -> None:
    pytester.makeini("[pytest]\nmarkers =\n gpu: needs a GPU\n sglang: needs SGLang\n")
    pytester.makepyfile(SKIPPING.format(marks=marks))
    result = pytester.runpytest_inprocess("-p", "no:asyncio", plugins=[NothingSkipped(pytester.path)])
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == code
    assert ("test_one" in "".join(line for line in result.outlines if "skipped in CI" in line)) == bool(code)


def test_in_ci_the_traces_must_be_there(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_one(): pass")
    result = pytester.runpytest_inprocess("-p", "no:asyncio", plugins=[NothingSkipped(pytester.path / "none")])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "CI needs the traces" in str(result.stderr) + str(result.stdout)


def test_warnings_are_errors(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("filterwarnings") == ["error"]
    assert sys.version_info >= (3, 11)
