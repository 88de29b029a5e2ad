"""Deep trees and long lives: nothing recurses, chains stay short, counters stay right."""

from __future__ import annotations

import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from aradix.keys import RadixKey
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import TreeCore
from tests.tree.lockstep import NAMESPACES, CoreFactory, Lockstep


def gone(core: TreeCore, num_tokens: int) -> list[int]:
    return sorted(slot for freed in core.evict(num_tokens) for slot in freed.slots.tolist())


def clean(core: TreeCore, *pins: int) -> bool:
    assert audit_tree(core, Counter(pin for pin in pins if pin)).problems == []
    return True


def shallow(steps: Callable[[], None]) -> None:
    """Run with so little stack that anything recursive fails."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 60)
    try:
        steps()
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
@pytest.mark.parametrize("evict_unit", ["page", "node"])
def test_nothing_recurses_however_deep(core_factory: CoreFactory, policy: str, evict_unit: str) -> None:
    core = core_factory(policy=policy, evict_unit=evict_unit, record_events=True)
    depth = 400
    key = RadixKey(range(depth))

    def steps() -> None:
        pins = []
        for end in range(1, depth + 1):
            core.insert(key[:end], np.arange(end))
            if end % 7 == 0:
                pins.append(core.match(key[:end], pin=True).node_id)
        assert core.num_nodes >= len(pins)
        assert core.match(key).num_matched == core.peek(key) == depth
        assert sum(view.num_tokens for view in core.walk()) == depth
        assert clean(core, *pins)
        core.record_hit(pins[-1])
        core.mark_streams(pins[-1], frozenset({1}))
        gate = core.close_gate(key[:10])
        below = core.pin_below(gate.node_id)
        for pin in [*pins[:-1], *below]:
            core.unpin(pin)
        core.open_gate(gate.node_id)
        assert core.detach().num_held == pins.index(pins[-1]) * 7 + 7
        core.unpin(pins[-1])
        core.insert(key, np.arange(depth))
        core.evict(depth)
        assert core.num_nodes == 0

    shallow(steps)


def test_twenty_thousand_inserts_each_one_longer_stay_one_node(core_factory: CoreFactory) -> None:
    core = core_factory()
    count = 20_000
    key, slots = RadixKey(range(count)), np.arange(count)
    most = 0
    for end in range(1, count + 1):
        core.insert(key[:end], slots[:end])
        most = max(most, core.num_nodes)
    assert most == 1
    found = core.match(key)
    assert found.num_matched == count
    assert core.slots_of(found.last).tolist() == list(range(count))
    assert len(key.hash_chain(1)) == count
    assert [view.num_tokens for view in core.walk()] == [0, count]
    assert gone(core, count) == list(range(count))
    assert core.num_nodes == 0


def test_decoding_token_by_token_on_a_lease_stays_one_node(core_factory: CoreFactory) -> None:
    core = core_factory(page_size=1, record_events=True)
    pin = core.match(RadixKey([]), pin=True).node_id
    key = RadixKey(range(2_000))
    for end in range(1, 2_001):
        done = core.extend(pin, key[:end], np.arange(end - 1, end))
        assert done is not None
        pin = done.node_id
        assert core.num_nodes == 1
    hashes = [block for event in core.take_events() for block in event.block_hashes]  # type: ignore[union-attr]
    assert hashes == key.hash_chain(1)
    assert core.protected_tokens == 2_000
    assert clean(core, pin)


def test_ten_thousand_mixed_steps_keep_every_counter(core_factory: CoreFactory) -> None:
    source = random.Random(1)
    lockstep = Lockstep(core_factory, page_size=2)
    core = lockstep.core
    pins: list[int] = []
    for step in range(10_000):
        key = RadixKey([source.randrange(2) for _ in range(source.randrange(14))], source.choice(NAMESPACES))
        match source.randrange(6):
            case 0 | 1:
                core.insert(key, lockstep.fresh(len(key)))
            case 2:
                pins.append(core.match(key, pin=True).node_id)
            case 3 if pins:
                core.unpin(pins.pop(source.randrange(len(pins))))
            case 4:
                core.evict(source.randrange(6))
            case _:
                core.match(key)
        if step % 250 == 0:
            assert clean(core, *pins)
    for pin in pins:
        core.unpin(pin)
    assert core.protected_tokens == 0
    assert clean(core)
