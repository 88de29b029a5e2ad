"""Priorities of parts of a path: they split at pages, stand in for what inserts gave, and end in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from aradix.keys import RadixKey
from aradix.policies import LRU, NodeStats
from aradix.tree import cpp_core_error
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import TreeCore
from tests.support.tree_model import ModelTree, Place, Space
from tests.tree.lockstep import NAMESPACES, CoreFactory, Lockstep
from tests.tree.test_cores_agree import BothCores, WearsOut
from tests.tree.test_cost import num_calls

PAGES = st.lists(st.integers(1, 3), max_size=6)
SPACES = st.sampled_from(NAMESPACES)
WHICH = st.integers(0, 20)
STARTS = st.integers(0, 5)
LENGTHS = st.integers(1, 6)
PRIORITIES = st.integers(-2, 3)
LASTS = st.integers(0, 3)


class TimedModel(ModelTree):
    """A model under the policy "priority" in which each page knows what priority it falls back to, and when."""

    def __init__(self, page_size: int, evict_unit: str) -> None:
        super().__init__(page_size, "priority", evict_unit)
        self.timed: dict[tuple[int, ...], tuple[int, int]] = {}
        if self.state is not None:
            self.state = lambda page: (page.priority, page.last, *self.timed.get(page.slots, (0, 0)))

    def grow(self, space: Space, origin: Place, items: Place, *args: Any) -> Place:
        before = {page.slots: page.priority for page in space.pages.values() if page.slots in self.timed}
        held = super().grow(space, origin, items, *args)
        for page in space.path(held):
            if page.slots in self.timed:
                expires, after = self.timed[page.slots]
                self.timed[page.slots] = expires, max(after, args[1])
                page.priority = before[page.slots]
        return held

    def prioritize(self, space: Space, place: Place, start: int, stop: int, priority: int, expires: int) -> None:
        for number, page in enumerate(space.path(place)):
            if start <= number * self.page_size < stop:
                after = self.timed.pop(page.slots, (0, page.priority))[1]
                page.priority = priority
                if expires:
                    self.timed[page.slots] = expires, after
        for end in (start, min(stop, len(place))):
            if 0 < end < len(place):
                space.cuts.add(place[:end])

    def decay(self, now: int) -> None:
        pages = {p.slots: p for s in self.live.values() for p in s.pages.values()}
        for slots, (expires, after) in list(self.timed.items()):
            if slots in pages and expires <= now:
                pages[slots].priority = after
                del self.timed[slots]


class TimedLockstep(Lockstep):
    """A core and the model, with a clock."""

    model: TimedModel

    def __init__(self, factory: CoreFactory, page_size: int, evict_unit: str) -> None:
        super().__init__(factory, page_size=page_size, policy="priority", evict_unit=evict_unit)
        self.now = 1

    def make_model(self, page_size: int, policy: str, evict_unit: str) -> TimedModel:
        return TimedModel(page_size, evict_unit)

    def prioritize(self, which: int, start: int, length: int, priority: int, lasts: int) -> None:
        held = self._pick(self.held, which)
        if held is None or held.space.detached:
            return
        start, stop = start * self.page_size, (start + length) * self.page_size
        expires = self.now + lasts if lasts else 0
        self.core.prioritize(held.node_id, start, stop, priority, expires)
        self.model.prioritize(held.space, held.place, start, stop, priority, expires)
        self.check()

    def decay(self, seconds: int) -> None:
        self.now += seconds
        self.core.decay(self.now)
        self.model.decay(self.now)
        self.check()

    def check(self) -> None:
        super().check()
        pages = {page.slots: page for space in self.model.live.values() for page in space.pages.values()}
        for view in self.core.walk():
            for begin in range(0, view.num_tokens, self.page_size):
                page = pages[tuple(view.slots[begin : begin + self.page_size].tolist())]
                assert view.priority == page.priority
                assert view.timed == self.model.timed.get(page.slots)


@pytest.mark.parametrize("evict_unit", ["page", "node"])
@pytest.mark.parametrize("page_size", [1, 2])
def test_what_counts_is_what_a_model_of_pages_says(core_factory: CoreFactory, page_size: int, evict_unit: str) -> None:
    class Machine(RuleBasedStateMachine):
        @initialize()
        def make(self) -> None:
            self.steps = TimedLockstep(core_factory, page_size, evict_unit)

        def tokens(self, pages: list[int]) -> list[int]:
            return [page for page in pages for _ in range(page_size)]

        @rule(pages=PAGES, space=SPACES, priority=st.integers(-1, 2))
        def insert(self, pages: list[int], space: Any, priority: int) -> None:
            self.steps.insert(self.tokens(pages), space, priority)

        @rule(pages=PAGES, space=SPACES)
        def match(self, pages: list[int], space: Any) -> None:
            self.steps.match(self.tokens(pages), space, pin=True)

        @rule(which=WHICH, pages=PAGES, priority=st.integers(-1, 2))
        def extend(self, which: int, pages: list[int], priority: int) -> None:
            self.steps.extend(which, self.tokens(pages), priority)

        @rule(which=WHICH)
        def unpin(self, which: int) -> None:
            self.steps.unpin(which)

        @rule(which=WHICH, start=STARTS, length=LENGTHS, priority=PRIORITIES, lasts=LASTS)
        def prioritize(self, which: int, start: int, length: int, priority: int, lasts: int) -> None:
            self.steps.prioritize(which, start, length, priority, lasts)

        @rule(seconds=st.integers(0, 2))
        def decay(self, seconds: int) -> None:
            self.steps.decay(seconds)

        @rule(num_tokens=st.integers(0, 8))
        def evict(self, num_tokens: int) -> None:
            self.steps.evict(num_tokens)

        @rule(space=SPACES)
        def detach(self, space: Any) -> None:
            self.steps.detach(space)

    chosen = settings(max_examples=40, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(Machine, settings=chosen)


class ByPriorityAlone:
    """A user's policy whose states do not tell all that a merge must respect."""

    def rank(self, node: NodeStats) -> tuple[int, int]:
        return -node.priority, node.last_access

    def state(self, node: NodeStats) -> int:
        return node.last_access


class BothWithPriorities(BothCores):
    """The machine that compares the two cores, with priorities that come and end."""

    now = 1

    @rule(which=WHICH, start=STARTS, length=LENGTHS, priority=PRIORITIES, lasts=LASTS)
    def prioritize(self, which: int, start: int, length: int, priority: int, lasts: int) -> None:
        twins = self.twins
        if not twins.pins:
            return
        pinned = twins.pins[which % len(twins.pins)]
        if not twins.step("is_detached", pinned.node_id):
            pages = start * twins.page_size, (start + length) * twins.page_size
            twins.step("prioritize", pinned.node_id, *pages, priority, self.now + lasts if lasts else 0)

    @rule(seconds=st.integers(0, 2))
    def decay(self, seconds: int) -> None:
        self.now += seconds
        self.twins.step("decay", self.now)


@pytest.mark.skipif(cpp_core_error() is not None, reason="the core was not compiled")
@pytest.mark.parametrize("evict_unit", ["page", "node"])
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(lambda: "priority", id="priority"),
        pytest.param(lambda: "lru", id="lru"),
        pytest.param(ByPriorityAlone, id="a user's"),
        *(pytest.param(lambda way=way: WearsOut(15, way), id=f"wears out in {way}") for way in ("rank", "state")),
    ],
)
def test_the_cores_agree(policy: Callable[[], Any], evict_unit: str) -> None:
    made = {"policy": staticmethod(policy), "page_size": 2, "evict_unit": evict_unit}
    chosen = settings(max_examples=30, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(type("Machine", (BothWithPriorities,), made), settings=chosen)


def timed_leaves(factory: CoreFactory, num_leaves: int) -> TreeCore:
    core = factory(policy="priority")
    for number in range(num_leaves):
        core.insert(RadixKey([number]), np.array([number]))
        pinned = core.match(RadixKey([number]), pin=True).node_id
        core.prioritize(pinned, 0, 1, number % 3 + 1, 1000 + number)
        core.unpin(pinned)
    return core


def test_a_priority_that_ends_costs_the_same_in_a_tree_ten_times_as_wide(core_factory: CoreFactory) -> None:
    def live(core: TreeCore) -> None:
        for now in range(1000, 1200):
            core.decay(now)
            core.evict(1)

    narrow, wide = timed_leaves(core_factory, 1000), timed_leaves(core_factory, 10_000)
    assert num_calls(lambda: live(wide)) < 2 * num_calls(lambda: live(narrow))
    assert audit_tree(wide, {}).problems == []


def test_what_has_ended_goes_before_what_lasts(core_factory: CoreFactory) -> None:
    core = timed_leaves(core_factory, 6)
    core.decay(1001)  # of the first two
    assert [core.evict(1)[0].slots.tolist() for _ in range(6)] == [[0], [1], [3], [4], [2], [5]]


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_where_no_policy_looks_nothing_is_split(core_factory: CoreFactory, policy: str) -> None:
    core = core_factory(policy=policy)
    core.insert(RadixKey(range(8)), np.arange(8))
    pinned = core.match(RadixKey(range(8)), pin=True).node_id
    core.prioritize(pinned, 2, 4, 7, 0)
    assert core.num_nodes == 1


def test_a_policy_that_derives_from_one_that_does_not_look_may_look(core_factory: CoreFactory) -> None:
    class Mine(LRU):
        pass

    core = core_factory(policy=Mine())
    core.insert(RadixKey(range(8)), np.arange(8))
    pinned = core.match(RadixKey(range(8)), pin=True).node_id
    core.prioritize(pinned, 2, 4, 7, 5)
    assert core.num_nodes == 3
    core.decay(5)
    assert core.num_nodes == 1
