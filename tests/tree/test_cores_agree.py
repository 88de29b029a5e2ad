"""Whatever happens, the compiled core and the Python one answer alike, keep the same nodes, and name them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from aradix.policies import LRU, POLICIES, SLRU, NodeStats
from aradix.tree import cpp_core_error
from aradix.tree.protocol import Gate
from tests.tree.twins import NAMESPACES, Twins

pytestmark = pytest.mark.skipif(cpp_core_error() is not None, reason="the core was not compiled")

PAGES = st.lists(st.integers(1, 4), max_size=6)
SPACES = st.sampled_from(NAMESPACES)
WHICH = st.integers(0, 30)
STREAMS = st.lists(st.sampled_from([1, 2]), max_size=2, unique=True)


class BySize:
    """Ranks by something no history tells, and has no `state`."""

    def rank(self, node: NodeStats) -> tuple[int, int]:
        return -node.num_tokens, node.last_access


class Recency(LRU):
    """A subclass of what the core knows is a user's policy."""


class Strict(SLRU):
    protected_from = 3


class WearsOut:
    """Raises after so many questions, in `rank` or in `state`, or names what cannot be compared."""

    def __init__(self, patience: int, way: str) -> None:
        self.patience = patience
        self.way = way

    def rank(self, node: NodeStats) -> Any:
        self.patience -= 1
        if self.patience < 0 and self.way == "rank":
            raise ValueError("no more")
        return str(node.last_access) if self.patience < 0 and self.way == "mixed" else node.last_access

    def state(self, node: NodeStats) -> Any:
        self.patience -= 1
        if self.patience < 0 and self.way == "state":
            raise ValueError("no more")
        return node.last_access


class BothCores(RuleBasedStateMachine):
    policy: Callable[[], Any]
    page_size: int
    evict_unit: str

    @initialize(bigrams=st.booleans(), record_events=st.booleans(), merge=st.booleans())
    def make(self, bigrams: bool, record_events: bool, merge: bool) -> None:
        self.twins = Twins(
            type(self).policy,
            page_size=self.page_size,
            bigrams=bigrams,
            evict_unit=self.evict_unit,
            record_events=record_events,
            merge=merge,
        )

    @rule(
        pages=PAGES,
        rest=WHICH,
        space=SPACES,
        limit=st.none() | st.integers(-1, 40),
        pin=st.booleans(),
        past=st.booleans(),
    )
    def match(self, pages: list[int], rest: int, space: Any, limit: int | None, pin: bool, past: bool) -> None:
        self.twins.match(self.twins.tokens(pages, rest), space, limit, pin, past)

    @rule(
        pages=PAGES,
        rest=WHICH,
        space=SPACES,
        priority=st.integers(-2, 2),
        paged=st.booleans(),
        streams=STREAMS,
        past=st.booleans(),
        hits=st.sampled_from([(1, 0), (1, 1), (0, 0)]),
    )
    def insert(
        self,
        pages: list[int],
        rest: int,
        space: Any,
        priority: int,
        paged: bool,
        streams: list[int],
        past: bool,
        hits: tuple[int, int],
    ) -> None:
        self.twins.insert(self.twins.tokens(pages, rest), space, priority, paged, streams, past, hits)

    @rule(which=WHICH, more=PAGES, priority=st.integers(-2, 2), paged=st.booleans(), streams=STREAMS)
    def extend(self, which: int, more: list[int], priority: int, paged: bool, streams: list[int]) -> None:
        self.twins.extend(which, more, priority, paged, streams)

    @rule(which=WHICH, inside=st.integers(0, 40))
    def pin(self, which: int, inside: int) -> None:
        self.twins.pin(which, inside)

    @rule(which=WHICH, touch=st.booleans())
    def unpin(self, which: int, touch: bool) -> None:
        self.twins.unpin(which, touch)

    @rule(which=WHICH)
    def record_hit(self, which: int) -> None:
        self.twins.tell(which, "record_hit")

    @rule(which=WHICH, streams=st.frozensets(st.integers(1, 3)))
    def mark_streams(self, which: int, streams: frozenset[int]) -> None:
        self.twins.tell(which, "mark_streams", streams)

    @rule(which=WHICH, other=WHICH, start=st.integers(0, 40))
    def look(self, which: int, other: int, start: int) -> None:
        self.twins.look(which, other, start)

    @rule(num_tokens=st.integers(-1, 60))
    def evict(self, num_tokens: int) -> None:
        self.twins.step("evict", num_tokens)

    @rule(space=st.none() | SPACES)
    def detach(self, space: Any) -> None:
        self.twins.step("detach", space)

    @rule(pages=PAGES, space=SPACES)
    def close_gate(self, pages: list[int], space: Any) -> None:
        self.twins.close_gate(self.twins.tokens(pages), space)

    @rule(which=WHICH, gate=st.sampled_from([Gate.PASSING, Gate.PENDING, Gate.GRANTED]))
    def set_gate(self, which: int, gate: Gate) -> None:
        self.twins.set_gate(which, gate)

    @rule(which=WHICH)
    def open_gate(self, which: int) -> None:
        self.twins.open_gate(which)

    @rule(which=WHICH, evict=st.booleans())
    def below_gate(self, which: int, evict: bool) -> None:
        self.twins.below_gate(which, evict)

    @invariant()
    def audit(self) -> None:
        if hasattr(self, "twins"):
            self.twins.audit()


def _run(policy: Callable[[], Any], page_size: int, evict_unit: str, examples: int) -> None:
    kind = type(
        "Machine", (BothCores,), {"policy": staticmethod(policy), "page_size": page_size, "evict_unit": evict_unit}
    )
    # A step audits both trees, and a sanitizer or a busy machine makes that slow.
    slow = [HealthCheck.too_slow]
    chosen = settings(max_examples=examples, stateful_step_count=40, suppress_health_check=slow)
    run_state_machine_as_test(kind, settings=chosen)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_under_every_policy(policy: str, page_size: int) -> None:
    _run(lambda: policy, page_size, "page", 15)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", ["lru", "slru", "filo"])
def test_where_whole_leaves_are_evicted(policy: str, page_size: int) -> None:
    _run(lambda: policy, page_size, "node", 15)


@pytest.mark.parametrize("policy", [BySize, Recency, Strict])
def test_under_a_policy_of_the_users(policy: Callable[[], Any]) -> None:
    _run(policy, 2, "page", 30)


@pytest.mark.parametrize("way", ["rank", "state", "mixed"])
@pytest.mark.parametrize("patience", [0, 7, 40])
def test_when_a_policy_fails(way: str, patience: int) -> None:
    _run(lambda: WearsOut(patience, way), 2, "page", 15)
