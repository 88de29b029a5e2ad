"""Which leaf goes next, where leaves become evictable in another order than they were used in."""

from __future__ import annotations

import random

import numpy as np
import pytest

from aradix import RadixKey
from aradix.tree import cpp_core_error, make_core

pytestmark = pytest.mark.skipif(cpp_core_error() is not None, reason="needs the compiled core")

POLICIES = ("lru", "mru", "fifo", "filo", "lfu", "slru", "priority", "tenure")
NUM_STEPS = 300


@pytest.mark.parametrize("evict_unit", ["page", "node"])
@pytest.mark.parametrize("policy", POLICIES)
def test_both_cores_name_the_same_next_victim_after_every_step(policy: str, evict_unit: str) -> None:
    rng = random.Random(policy)
    cores = [make_core(which, policy=policy, page_size=1, evict_unit=evict_unit) for which in ("python", "cpp")]
    pinned: list[tuple[int, int]] = []
    for step in range(NUM_STEPS):
        key = RadixKey([rng.randrange(3) for _ in range(rng.randint(1, 6))])
        act = rng.choice(("insert", "insert", "insert", "match", "pin", "pin", "unpin", "unpin", "evict"))
        if act == "insert":
            slots = np.arange(6) + 6 * step
            for core in cores:
                core.insert(key, slots[: len(key)], priority=step % 3)
        elif act == "match":
            for core in cores:
                core.match(key)
        elif act == "pin":
            python, cpp = (core.match(key, pin=True).node_id for core in cores)
            pinned.append((python, cpp))
        elif act == "unpin" and pinned:
            # Some long after their last use, which makes them old at once.
            pins, touch = pinned.pop(rng.randrange(len(pinned))), rng.random() < 0.5
            for core, node_id in zip(cores, pins, strict=True):
                core.unpin(node_id, touch=touch)
        elif act == "evict":
            count = rng.randint(1, 4)
            python_freed, cpp_freed = ([freed.slots.tolist() for freed in core.evict(count)] for core in cores)
            assert python_freed == cpp_freed
        python_next, cpp_next = (core.next_victim() for core in cores)
        assert python_next == cpp_next
    while cores[0].evictable_tokens:
        python_freed, cpp_freed = ([freed.slots.tolist() for freed in core.evict(1)] for core in cores)
        assert python_freed == cpp_freed
    assert cores[1].evictable_tokens == 0
