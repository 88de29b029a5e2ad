"""What every test gets: the three event loops, and a header that says which tree core runs."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

pytest.register_assert_rewrite("tests.support")

from tests.support.ci import NothingSkipped  # noqa: E402  (after its asserts were registered)
from tests.support.core import core_name  # noqa: E402
from tests.support.places import SHARED  # noqa: E402

pytest_plugins = ["pytester"]

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


def pytest_configure(config: pytest.Config) -> None:
    if IN_CI:
        config.pluginmanager.register(NothingSkipped(SHARED), "nothing-skipped")


def pytest_report_header() -> str:
    return f"aradix core: {core_name()}"
