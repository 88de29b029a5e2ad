"""What several tests of the adapters are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_llama() -> Iterator[Any]:
    """A tiny model of Hugging Face's; on one thread, since more would wait for each other longer than it computes."""
    from tests.adapters import generation  # reading transformers takes seconds, which most tests need not wait for

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield generation.tiny_llama()
    torch.set_num_threads(num_threads)
