"""What every test gets: the three event loops, and a header that says which tree core runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

pytest.register_assert_rewrite("tests.support")

from aradix.engine import GGUFFile  # noqa: E402
from tests.support.ci import NothingSkipped  # noqa: E402  (after its asserts were registered)
from tests.support.core import core_name  # noqa: E402
from tests.support.places import SHARED  # noqa: E402
from tests.support.smollm2 import SmolLM2, weights_path  # noqa: E402

pytest_plugins = ["pytester", "tests.support.page_stores"]

# Tests do not depend on the clock, and a run in CI can be repeated.
IN_CI = os.environ.get("CI", "").lower() == "true"
hypothesis.settings.register_profile("aradix", deadline=None, derandomize=IN_CI, print_blob=True)
hypothesis.settings.load_profile("aradix")


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The event loops that tests marked `anyio` run on."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(scope="session")
def smollm2_file() -> GGUFFile:
    """The file of a real language model, parsed once."""
    path = weights_path()
    assert path is not None, "a test that asks for the model is marked `needs_smollm2`"
    return GGUFFile(path)


@pytest.fixture(scope="session")
def smollm2(smollm2_file: GGUFFile) -> Iterator[SmolLM2]:
    """A real language model, read once."""
    # Two threads of torch on a busy core wait for each other longer than one takes for all of it.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SmolLM2(smollm2_file)
    torch.set_num_threads(num_threads)


def pytest_configure(config: pytest.Config) -> None:
    if IN_CI:
        config.pluginmanager.register(NothingSkipped(SHARED), "nothing-skipped")


def pytest_report_header() -> str:
    return f"aradix core: {core_name()}"
