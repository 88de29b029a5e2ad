"""What several tests of the adapters are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aradix.adapters.sglang import HiRadixCache
from tests.adapters.two_tiers import Make, assert_all_slots_are_somewhere, drain, make


@pytest.fixture(scope="session")
def tiny_llama() -> Iterator[Any]:
    """A tiny model of Hugging Face's; on one thread, since more would wait for each other longer than it computes."""
    from tests.adapters import generation  # reading transformers takes seconds, which most tests need not wait for

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield generation.tiny_llama()
    torch.set_num_threads(num_threads)


@pytest.fixture
def make_tiered() -> Iterator[Make]:
    """Makes caches with a host tier; audited and shut down at the end."""
    caches: list[HiRadixCache] = []

    def made(**params: Any) -> HiRadixCache:
        caches.append(make(**params))
        return caches[-1]

    yield made
    for cache in caches:
        drain(cache)
        cache.check()
        assert_all_slots_are_somewhere(cache)
        cache.shutdown()
        cache.shutdown()
