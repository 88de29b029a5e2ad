"""The cache of SGLang's release and ours, operation by operation. Runs where `sglang` can be imported."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from aradix.adapters import sglang as ours
from stress.bench.peers.sglang_release import load_sglang
from tests.adapters.lives import Life, Shaped

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]

NUM_STEPS = 10_000


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The names of the release, from where it has them."""
    load_sglang()  # its import asks for more than its cache needs
    names: dict[str, Any] = {}
    for module in ("base_prefix_cache", "radix_cache", "cache_init_params"):
        names.update(vars(importlib.import_module(f"sglang.srt.mem_cache.{module}")))
    return SimpleNamespace(**names)


@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "mru", "priority"])
def test_they_agree_operation_by_operation(theirs: Any, policy: str, page_size: int, is_eagle: bool) -> None:
    settings: dict[str, Any] = {"page_size": page_size, "is_eagle": is_eagle, "eviction_policy": policy}
    release, adapter = Shaped(theirs, **settings), Shaped(ours, evict_unit="node", **settings)
    life = Life(policy, page_size)
    num_hits = num_evicted = 0
    for number in range(NUM_STEPS):
        step = life.step(adapter.cache.evictable_size())
        told = adapter.do(step)
        assert release.do(step) == told, (number, step)
        assert release.seen() == adapter.seen(), (number, step)
        num_hits += len(told) if step.kind == "match" else 0
        num_evicted += told[0] if step.kind == "evict" else 0
    adapter.cache.check()
    assert num_hits > NUM_STEPS // 2
    assert num_evicted > NUM_STEPS // 2
