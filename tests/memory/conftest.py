"""The bench of the allocator's tests."""

from __future__ import annotations

import pytest

from tests.memory.bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
