"""What is shown of a tree node by node, on both cores: the same as a walk shows, and nothing is changed by looking."""

from __future__ import annotations

import random
from typing import Literal

import numpy as np
import pytest

from aradix.keys import Namespace, RadixKey
from aradix.tree import make_core
from aradix.tree.protocol import Gate, TreeCore
from tests.tree.lockstep import CORES

Core = Literal["python", "cpp"]
SPACES = (Namespace(), Namespace(salt="x"))


def grown(name: Core, item_bytes: int = 4, page_size: int = 2) -> TreeCore:
    core = make_core(name, policy="lru", page_size=page_size, item_bytes=item_bytes)
    rng = random.Random(5)
    for number in range(40):
        ids = [0] * rng.randrange(12) + [rng.randrange(3) for _ in range(rng.randrange(20))]
        key = RadixKey(ids, SPACES[number % 2]).maybe_to_bigram_view(item_bytes == 8)
        size = len(key) // page_size * page_size
        core.insert(key, np.arange(1000 * number, 1000 * number + size), priority=number % 3)
        if number % 5 == 0:
            core.match(key, pin=True)
    return core


@pytest.mark.parametrize("item_bytes", [4, 8])
@pytest.mark.parametrize("name", CORES)
def test_glances_add_up_to_a_walk(name: Core, item_bytes: int) -> None:
    core = grown(name, item_bytes)
    core.set_gate(core.close_gate(RadixKey([0] * 4).maybe_to_bigram_view(item_bytes == 8)).node_id, Gate.PENDING)
    views = {view.node_id: view for view in core.walk()}
    seen = []
    stack = core.roots()
    assert len(stack) == core.num_namespaces == 2
    while stack:
        glance = core.glance(stack.pop())
        assert glance is not None
        view = views[glance.node_id]
        for field in set(glance._fields) - {"first_tokens", "children"}:
            assert getattr(glance, field) == getattr(view, field), field
        assert glance.first_tokens == view.tokens[: 8 * item_bytes]
        assert glance.children == [each for each, other in views.items() if other.parent_id == glance.node_id]
        assert glance.last_access <= core.tick
        assert core.glance(glance.node_id, children=False) == glance._replace(children=[])
        seen.append(glance.node_id)
        stack += glance.children
    assert sorted(seen) == sorted(views)
    assert core.glance(max(views) + 100) is None
    assert core.glance(0) is None


@pytest.mark.parametrize("name", CORES)
def test_a_look_names_the_path_of_a_match_and_changes_nothing(name: Core) -> None:
    core = make_core(name, policy="lru", page_size=2)
    core.insert(RadixKey([1, 2, 3, 4, 5, 6]), np.arange(6))
    core.insert(RadixKey([1, 2, 3, 4, 7, 8]), np.arange(6, 12))
    (root,) = core.roots()
    before = [repr(view) for view in core.walk()]
    top, *_ = core.glance(root).children  # type: ignore[union-attr]
    first, second = core.glance(top).children  # type: ignore[union-attr]
    assert core.look(RadixKey([1, 2, 3, 4, 7, 8, 9, 9])) == [root, top, second]
    assert core.look(RadixKey([1, 2, 3, 4, 5])) == [root, top]
    assert core.look(RadixKey([1, 2, 9, 9])) == [root, top]  # matched in part
    assert core.look(RadixKey([9, 9])) == [root]
    assert core.look(RadixKey([1, 2], Namespace(salt="x"))) == []
    assert core.look(RadixKey([1, 2, 3, 4, 5, 6])) == [root, top, first]
    assert [repr(view) for view in core.walk()] == before
    assert core.num_nodes == 3


@pytest.mark.parametrize("name", CORES)
def test_the_next_victim_is_what_an_eviction_begins_with(name: Core) -> None:
    core = make_core(name, policy="lru", page_size=2)
    assert core.next_victim() == 0
    core = grown(name)
    while victim := core.next_victim():
        glance = core.glance(victim)
        assert glance is not None
        assert glance.lock_ref == 0
        assert glance.children == []
        core.evict(glance.num_tokens)
        assert core.glance(victim) is None
    assert core.evict(2) == []
