"""What steps cost, counted in calls, comparisons, objects and bytes, never in seconds."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from aradix.keys import Namespace, RadixKey
from aradix.policies import POLICIES, NodeStats
from aradix.tree.protocol import TreeCore
from tests.tree.lockstep import CoreFactory


def num_calls(steps: Callable[[], object]) -> int:
    """Calls of Python and C functions that the steps make: each node visited costs at least one."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        steps()
    finally:
        sys.setprofile(None)
    return count


class Counted:
    """A rank that counts how often it is compared."""

    __slots__ = ("counter", "rank")

    def __init__(self, rank: Any, counter: list[int]) -> None:
        self.rank = rank
        self.counter = counter

    def __lt__(self, other: Counted) -> bool:
        self.counter[0] += 1
        return bool(self.rank < other.rank)

    def __eq__(self, other: object) -> bool:
        self.counter[0] += 1
        return isinstance(other, Counted) and bool(self.rank == other.rank)

    __hash__ = None  # type: ignore[assignment]


class Counting:
    """A built-in policy whose comparisons are counted."""

    def __init__(self, name: str) -> None:
        self.policy = POLICIES[name]()
        self.counter = [0]

    def rank(self, node: NodeStats, /) -> Counted:
        return Counted(self.policy.rank(node), self.counter)

    def state(self, node: NodeStats, /) -> Any:
        return self.policy.state(node)  # type: ignore[attr-defined]


def filled(factory: CoreFactory, num_leaves: int, **settings: Any) -> TreeCore:
    core = factory(**settings)
    for number in range(num_leaves):
        core.insert(RadixKey([number]), np.array([number]))
    return core


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_evicting_and_inserting_cost_the_same_in_a_tree_ten_times_as_wide(
    core_factory: CoreFactory, policy: str
) -> None:
    costs = []
    for num_leaves in (2_000, 20_000):
        counting = Counting(policy)
        core = filled(core_factory, num_leaves, policy=counting)

        def churn(core: TreeCore = core, num_leaves: int = num_leaves) -> None:
            for turn in range(20):
                assert sum(len(freed.slots) for freed in core.evict(64)) == 64
                for number in range(64):
                    core.insert(RadixKey([num_leaves + 64 * turn + number]), np.array([number]))

        counting.counter[0] = 0
        costs.append((num_calls(churn), counting.counter[0]))
    (calls, compared), (more_calls, more_compared) = costs
    assert more_calls < 1.5 * calls
    assert more_compared < 1.6 * compared + 100


def test_a_step_on_one_branch_costs_the_same_however_many_there_are(core_factory: CoreFactory) -> None:
    costs = []
    for num_leaves in (100, 10_000):
        core = filled(core_factory, num_leaves)
        core.insert(RadixKey([7, 1, 2]), np.arange(3))

        def steps(core: TreeCore = core) -> None:
            pin = core.match(RadixKey([7, 1, 2]), pin=True).node_id
            done = core.extend(pin, RadixKey([7, 1, 2, 3]), np.arange(1))
            assert done is not None
            pin = done.node_id
            core.record_hit(pin)
            core.unpin(pin)
            core.peek(RadixKey([8]))
            core.insert(RadixKey([9, 9]), np.arange(2))

        costs.append(num_calls(steps))
    assert costs[1] <= costs[0] + 20


@pytest.mark.parametrize("policy", ["lru", "mru", "slru", "priority"])
def test_inserts_each_one_token_longer_cost_the_same_each(core_factory: CoreFactory, policy: str) -> None:
    costs = []
    for count in (500, 1_000):
        core = core_factory(policy=policy)
        key, slots = RadixKey(range(count)), np.arange(count)

        def steps(core: TreeCore = core, key: RadixKey = key, slots: Any = slots, count: int = count) -> None:
            for end in range(1, count + 1):
                core.insert(key[:end], slots[:end])
            core.match(key)
            list(core.walk())
            core.evict(count)

        costs.append(num_calls(steps))
    assert costs[1] < 2.2 * costs[0]


def test_dropping_a_chain_costs_what_it_is_long(core_factory: CoreFactory) -> None:
    """Nothing merges under fifo: the tree is as deep as it can be."""
    for drop in (lambda core: core.evict(10**6), lambda core: core.detach(), lambda core: list(core.walk())):
        costs = []
        for count in (150, 300):
            core = core_factory(policy="fifo")
            for end in range(1, count + 1):
                core.insert(RadixKey(range(end)), np.arange(end))
            assert core.num_nodes == count
            costs.append(num_calls(lambda core=core, drop=drop: drop(core)))  # type: ignore[misc]
        assert costs[1] < 2.3 * costs[0]


def measured(steps: Callable[[], object]) -> tuple[int, int]:
    """Python objects left over, and the most bytes held at once."""
    steps()
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        kept = steps()
        blocks = sys.getallocatedblocks() - before
        del kept
        tracemalloc.start()
        steps()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()
    return blocks, peak


def test_a_match_of_a_million_tokens_makes_no_objects_for_them(core_factory: CoreFactory) -> None:
    core = core_factory(page_size=16)
    key = RadixKey(np.arange(1_000_000))
    before = sys.getallocatedblocks()
    core.insert(key, np.arange(1_000_000))
    assert sys.getallocatedblocks() - before < 300
    blocks, peak = measured(lambda: core.match(key))
    assert blocks < 100
    assert peak < 100_000
    blocks, peak = measured(lambda: core.slots_of(core.match(key).last))
    assert blocks < 100
    assert peak < 8_000_000 + 100_000


def test_waiting_prompts_are_probed_without_copying_them(core_factory: CoreFactory) -> None:
    core = core_factory(page_size=16)
    system = np.arange(30_000) % 1_000
    core.insert(RadixKey(system), np.arange(30_000))
    waiting = [RadixKey(np.concatenate([system, np.full(2_768, number)])) for number in range(100)]
    probed = [core.peek(key) for key in waiting]
    assert probed == [30_000] * 100
    for probe in (core.peek, core.match):

        def all_of_them(probe: Callable[[RadixKey], object] = probe) -> list[object]:
            return [probe(key) for key in waiting]

        blocks, peak = measured(all_of_them)
        assert blocks < 1_500
        assert peak < 200_000


def test_an_empty_tree_holds_no_tokens(core_factory: CoreFactory) -> None:
    """What was evicted, flushed, trimmed or merged away is not kept alive by an index or a table."""
    core = core_factory()
    ids = np.arange(20_000)
    core.insert(RadixKey([1]), np.arange(1))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for turn in range(30):
        space = Namespace(salt=turn)
        core.insert(RadixKey(ids, space), ids)
        core.insert(RadixKey(np.append(ids[:10_000], 7), space), ids)
        pin = core.match(RadixKey(ids[:500], space), pin=True).node_id
        if turn % 3 == 0:
            core.detach(space)
        elif turn % 3 == 1:
            core.evict(core.evictable_tokens)
        core.unpin(pin)
        core.detach()
        core.insert(RadixKey([1]), np.arange(1))
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert core.num_nodes == 1
    assert kept < 150_000


def test_bytes_follow_the_tokens_that_are_there(core_factory: CoreFactory) -> None:
    core = core_factory()
    ids = np.arange(200_000)
    tracemalloc.start()
    core.insert(RadixKey(ids), ids)
    full = tracemalloc.get_traced_memory()[0]
    assert full < 200_000 * 13
    core.evict(190_000)
    gc.collect()
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert left < full / 4
