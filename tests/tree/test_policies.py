"""Policies: what goes first is what a full sort would put first, for the built-in ones and for a user's own."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any, Literal

import numpy as np
import pytest

from aradix import policies
from aradix.errors import ConfigError
from aradix.keys import Namespace, RadixKey
from aradix.policies import POLICIES, SLRU, EvictionPolicy, NodeStats, policy_named
from aradix.tree import make_core
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import TreeCore
from tests.support.places import ROOT
from tests.support.tree_model import RANKS
from tests.tree.lockstep import CORES, NAMESPACES, CoreFactory, Lockstep


def insert(core: TreeCore, ids: list[int], first_slot: int, **settings: Any) -> None:
    core.insert(RadixKey(ids), np.arange(first_slot, first_slot + len(ids)), **settings)


def slots_gone(core: TreeCore, num_tokens: int) -> list[int]:
    return [slot for freed in core.evict(num_tokens) for slot in freed.slots.tolist()]


@pytest.mark.parametrize("evict_unit", ["page", "node"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", sorted(RANKS))
def test_victims_are_those_of_a_full_sort(
    core_factory: CoreFactory, policy: str, page_size: int, evict_unit: str
) -> None:
    source = random.Random(f"{policy}{page_size}{evict_unit}")
    lockstep = Lockstep(core_factory, page_size=page_size, policy=policy, evict_unit=evict_unit)
    for _ in range(60):
        length = source.randrange(1, 5) * page_size
        tokens = [source.randrange(3) if place % page_size == 0 else 7 for place in range(length)]
        space = source.choice(NAMESPACES)
        match source.randrange(4):
            case 0 | 1:
                lockstep.insert(tokens, space, priority=source.randrange(-2, 3))
            case 2:
                lockstep.match(tokens, space, pin=source.random() < 0.5)
            case _:
                lockstep.record_hit(source.randrange(100))
    while lockstep.held:
        lockstep.unpin(source.randrange(100), touch=source.random() < 0.5)
    sizes = 0
    while lockstep.core.evictable_tokens:
        sizes += 1
        lockstep.evict(source.randrange(1, 4 * page_size))
    assert sizes > 3


@pytest.mark.parametrize(
    ("policy", "victims"),
    [
        ("lru", [20, 10, 30, 0]),
        ("mru", [0, 30, 10, 20]),
        ("fifo", [0, 10, 20, 30]),
        ("filo", [30, 20, 10, 0]),
        ("lfu", [20, 0, 10, 30]),
        ("slru", [20, 0, 10, 30]),
        ("priority", [30, 20, 10, 0]),
    ],
)
def test_what_each_policy_takes_first(core_factory: CoreFactory, policy: str, victims: list[int]) -> None:
    core = core_factory(policy=policy)
    insert(core, [1], 0, priority=5)
    insert(core, [2], 10, priority=2)
    insert(core, [3], 20)
    insert(core, [4], 30, priority=-1)
    for _ in range(2):
        insert(core, [2], 11)
    for _ in range(3):
        insert(core, [4], 31, priority=-2)
    insert(core, [1], 1)
    assert [slots_gone(core, 1)[0] for _ in range(4)] == victims


def test_a_hot_prefix_survives_a_scan_under_slru(core_factory: CoreFactory) -> None:
    survived = {}
    for policy in ("slru", "lru"):
        core = core_factory(policy=policy)
        insert(core, [1] * 20, 0)
        for _ in range(SLRU.protected_from):
            insert(core, [1] * 20, 100)
        for number in range(500):
            space = Namespace(salt=number)
            core.insert(RadixKey([2] * 5, space), np.arange(5) + 1000)
            core.evict(max(0, core.evictable_tokens - 100))
        survived[policy] = core.peek(RadixKey([1] * 20))
        assert core.num_namespaces <= 21
    assert survived == {"slru": 20, "lru": 0}


def test_a_partial_hit_does_not_refresh_the_tail_it_missed(core_factory: CoreFactory) -> None:
    core = core_factory()
    insert(core, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    insert(core, [20, 21, 22, 23, 24, 25, 26, 27], 20)
    core.match(RadixKey([1, 2, 3, 4]))
    assert sorted(slots_gone(core, 4)) == [4, 5, 6, 7]


def test_the_order_is_that_of_steps_not_of_a_clock(core_factory: CoreFactory) -> None:
    core = core_factory()
    for number in (1, 2, 3):
        insert(core, [number], number)
    core.match(RadixKey([1]))
    assert [slots_gone(core, 1) for _ in range(3)] == [[2], [3], [1]]


def test_a_priority_below_zero_is_below_zero(core_factory: CoreFactory) -> None:
    core = core_factory(policy="priority")
    insert(core, [1], 0, priority=0)
    insert(core, [2], 1, priority=-5)
    insert(core, [3], 2, priority=-4)
    insert(core, [2, 9], 10, priority=-7)
    assert [slots_gone(core, 1) for _ in range(4)] == [[11], [1], [2], [0]]


def test_a_priority_raises_its_whole_path_and_never_lowers(core_factory: CoreFactory) -> None:
    core = core_factory(policy="priority")
    insert(core, [1, 2], 0, priority=1)
    insert(core, [1, 2, 3], 10, priority=4)
    insert(core, [1], 20, priority=-9)
    insert(core, [5], 30, priority=3)
    assert [slots_gone(core, 1) for _ in range(4)] == [[30], [12], [1], [0]]


# ---- a user's own ----


class BySize:
    """Ranks by what only the node's extent says; `sign` -1 takes the biggest first."""

    def __init__(self, sign: int) -> None:
        self.sign = sign

    def rank(self, node: NodeStats, /) -> tuple[int, int]:
        return self.sign * node.num_tokens, node.last_access


class NeverMind:
    def rank(self, node: NodeStats, /) -> int:
        return 0


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("evict_unit", ["page", "node"])
def test_a_policy_may_rank_by_size(core_factory: CoreFactory, sign: int, evict_unit: str) -> None:
    """Splits, trims and merges change sizes; victims are still the least of all leaves as they are now."""
    source = random.Random(sign)
    core = core_factory(policy=BySize(sign), evict_unit=evict_unit)
    lockstep = Lockstep(core_factory)
    for step in range(300):
        ids = [source.randrange(2) for _ in range(source.randrange(1, 9))]
        if source.random() < 0.6:
            core.insert(RadixKey(ids), lockstep.fresh(len(ids)))
        else:
            core.match(RadixKey(ids))
        if step % 3 == 0:
            leaves = [view for view in core.walk() if view.parent_id and not view.num_children]
            leaves.sort(key=lambda view: (sign * view.num_tokens, view.last_access))
            wanted = leaves[0].slots.tolist() if evict_unit == "node" else leaves[0].slots.tolist()[-1:]
            assert slots_gone(core, 1) == wanted
    assert core.failure is None


@pytest.mark.parametrize("policy", [BySize(1), BySize(-1), NeverMind()])
def test_the_audit_stays_clean_under_a_policy_of_the_users(core_factory: CoreFactory, policy: EvictionPolicy) -> None:
    source = random.Random(0)
    core = core_factory(policy=policy)
    lockstep = Lockstep(core_factory)
    for _ in range(300):
        ids = [source.randrange(2) for _ in range(source.randrange(1, 9))]
        match source.randrange(4):
            case 0 | 1:
                core.insert(RadixKey(ids), lockstep.fresh(len(ids)))
            case 2:
                core.match(RadixKey(ids))
            case _:
                core.evict(source.randrange(4))
        assert audit_tree(core, {}).problems == []


def test_ties_go_to_the_older_node(core_factory: CoreFactory) -> None:
    core = core_factory(policy=NeverMind())
    for number in (5, 3, 9, 1):
        insert(core, [number], number)
    insert(core, [5], 50)
    core.match(RadixKey([3]))
    assert [slots_gone(core, 1) for _ in range(4)] == [[5], [3], [9], [1]]


@pytest.mark.parametrize("bad", ["LRU", "", "lru "])
def test_a_name_that_is_none_is_refused_with_those_that_are(bad: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_named(bad)
    assert all(name in str(caught.value) for name in [repr(bad), *POLICIES])
    with pytest.raises(ConfigError):
        make_core("python", policy=bad)


@pytest.mark.parametrize("bad", [object(), 3, None, NeverMind, len])
def test_what_cannot_rank_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="rank"):
        policy_named(bad)


def test_a_name_makes_a_new_policy_and_an_object_is_itself() -> None:
    mine = NeverMind()
    assert policy_named(mine) is mine
    assert {name: type(policy_named(name)) for name in POLICIES} == POLICIES
    assert set(POLICIES) == {*RANKS, "tenure"}, "tenure has its own oracle, in test_tenure.py"
    assert policies.policy_named is policy_named


WITHOUT_THE_COMPILED_CORE = """
import sys

sys.modules["aradix._native"] = None
from aradix.errors import ConfigError
from aradix.tree import core_name, cpp_core_error, make_core

assert core_name() == make_core("auto", policy="lru").name == "python"
assert isinstance(cpp_core_error(), ImportError)
try:
    make_core("cpp", policy="lru")
except ConfigError as error:
    assert "'cpp'" in str(error)
else:
    raise AssertionError
"""


def test_a_core_that_is_not_there_is_refused_by_name_and_auto_does_without() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT_THE_COMPILED_CORE], cwd=ROOT, check=True)


WITH_A_CORE_THAT_DOES_NOT_LOAD = """
import sys, warnings
from importlib.abc import MetaPathFinder

class Broken(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "aradix._native":
            raise ImportError("undefined symbol")

sys.meta_path.insert(0, Broken())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from aradix.tree import core_name

assert core_name() == "python"
assert ["undefined symbol" in str(warning.message) for warning in caught] == [True]
"""


def test_a_core_that_was_compiled_and_does_not_load_is_told_of() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", WITH_A_CORE_THAT_DOES_NOT_LOAD], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", CORES)
def test_each_core_has_its_name(name: Literal["python", "cpp"]) -> None:
    assert make_core(name, policy="lru").name == name
