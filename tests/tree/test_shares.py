"""Tenants with shares: the one most above its own gives first, and all that is counted equals a recount."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from aradix.keys import Namespace, RadixKey
from aradix.policies import POLICIES
from aradix.tree import cpp_core_error
from aradix.tree.protocol import ShareView, TreeCore
from tests.support.share_model import SharedModel
from tests.tree.lockstep import CoreFactory, Lockstep
from tests.tree.test_cores_agree import BothCores, BySize, Strict, WearsOut
from tests.tree.test_cost import num_calls
from tests.tree.twins import NAMESPACES, Twins

SHARES: list[tuple[str | int | None, int]] = [("a", 16), ("b", 8), (None, 8)]
SPACES = st.sampled_from([*NAMESPACES, Namespace(tenant="a"), Namespace(tenant="c")])
PAGES = st.lists(st.integers(1, 3), max_size=5)
WHICH = st.integers(0, 20)


class SharedLockstep(Lockstep):
    """A core with shares and the model of it."""

    model: SharedModel

    def __init__(self, factory: CoreFactory, **settings: Any) -> None:
        super().__init__(factory, shares=SHARES, **settings)

    def make_model(self, page_size: int, policy: str, evict_unit: str) -> SharedModel:
        return SharedModel(page_size, policy, evict_unit, SHARES)

    def charge(self, namespace: Namespace, num_tokens: int) -> None:
        share = self.core.share_of(namespace)
        assert SHARES[share][0] == self.model.tenant(namespace)
        self.core.charge(share, num_tokens)
        self.model.leased[self.model.tenant(namespace)] += num_tokens
        self.check()

    def evict_for(self, num_tokens: int, namespace: Namespace | None, demand: int, only_excess: bool) -> None:
        if namespace is not None:
            self.model.demand[self.model.tenant(namespace)] = demand
        self.model.only_excess = only_excess
        streams = self._streams(list(self.model.live.values()))
        got = self.core.evict(num_tokens, namespace=namespace, demand=demand, only_excess=only_excess)
        self._expect(got, self.model.evict(num_tokens), streams)
        self.model.demand.clear()
        self.model.only_excess = False
        self.check()

    def check(self) -> None:
        super().check()
        assert self.core.shares() == [
            ShareView(tenant, claim, self.model.cached(tenant), self.model.leased[tenant], self.model.evicted[tenant])
            for tenant, claim in SHARES
        ]


class WithShares(RuleBasedStateMachine):
    factory: CoreFactory
    settings: dict[str, Any]

    @initialize()
    def make(self) -> None:
        self.steps = SharedLockstep(type(self).factory, **self.settings)

    def tokens(self, pages: list[int]) -> list[int]:
        return [page for page in pages for _ in range(self.steps.page_size)]

    @rule(pages=PAGES, space=SPACES, priority=st.integers(0, 2))
    def insert(self, pages: list[int], space: Namespace, priority: int) -> None:
        self.steps.insert(self.tokens(pages), space, priority)

    @rule(pages=PAGES, space=SPACES, pin=st.booleans())
    def match(self, pages: list[int], space: Namespace, pin: bool) -> None:
        self.steps.match(self.tokens(pages), space, pin=pin)

    @rule(which=WHICH, pages=PAGES)
    def extend(self, which: int, pages: list[int]) -> None:
        self.steps.extend(which, self.tokens(pages))

    @rule(which=WHICH)
    def unpin(self, which: int) -> None:
        self.steps.unpin(which)

    @rule(space=SPACES)
    def detach(self, space: Namespace) -> None:
        self.steps.detach(space)

    @rule(space=SPACES, pages=st.integers(0, 6))
    def charge(self, space: Namespace, pages: int) -> None:
        held = self.steps.model.leased[self.steps.model.tenant(space)]
        self.steps.charge(space, pages * self.steps.page_size - held)

    @rule(
        num_tokens=st.integers(0, 20),
        space=st.none() | SPACES,
        demand=st.integers(0, 20),
        only_excess=st.sampled_from([False, False, True]),
    )
    def evict(self, num_tokens: int, space: Namespace | None, demand: int, only_excess: bool) -> None:
        self.steps.evict_for(num_tokens, space, demand, only_excess)


@pytest.mark.parametrize("evict_unit", ["page", "node"])
@pytest.mark.parametrize(("policy", "page_size"), [("lru", 1), ("lru", 4), ("slru", 2), ("filo", 1), ("lfu", 2)])
def test_the_victims_are_those_of_a_full_count(
    core_factory: CoreFactory, policy: str, page_size: int, evict_unit: str
) -> None:
    made = {"policy": policy, "page_size": page_size, "evict_unit": evict_unit}
    kind = type("Machine", (WithShares,), {"factory": staticmethod(core_factory), "settings": made})
    chosen = settings(max_examples=25, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(kind, settings=chosen)


class BothWithShares(BothCores):
    """The machine that compares the two cores, with tenants that are above their shares, and below."""

    @initialize(bigrams=st.booleans(), record_events=st.booleans())
    def make(self, bigrams: bool, record_events: bool) -> None:
        self.twins = Twins(
            type(self).policy,
            page_size=self.page_size,
            bigrams=bigrams,
            evict_unit=self.evict_unit,
            record_events=record_events,
            shares=SHARES,
        )

    @rule(space=SPACES, num_tokens=st.integers(-20, 20))
    def charge(self, space: Namespace, num_tokens: int) -> None:
        self.twins.step("charge", self.twins.step("share_of", space), num_tokens)

    @rule(
        num_tokens=st.integers(-1, 60),
        space=st.none() | SPACES,
        demand=st.integers(0, 20),
        only_excess=st.booleans(),
    )
    def evict_for(self, num_tokens: int, space: Namespace | None, demand: int, only_excess: bool) -> None:
        self.twins.step("evict", num_tokens, namespace=space, demand=demand, only_excess=only_excess)


@pytest.mark.skipif(cpp_core_error() is not None, reason="the core was not compiled")
@pytest.mark.parametrize("evict_unit", ["page", "node"])
@pytest.mark.parametrize(
    "policy",
    [
        *(pytest.param(lambda name=name: name, id=name) for name in POLICIES),
        pytest.param(BySize, id="by size"),
        pytest.param(Strict, id="strict"),
        *(pytest.param(lambda way=way: WearsOut(15, way), id=f"wears out in {way}") for way in ("rank", "mixed")),
    ],
)
def test_the_cores_agree(policy: Callable[[], Any], evict_unit: str) -> None:
    made = {"policy": staticmethod(policy), "page_size": 2, "evict_unit": evict_unit}
    chosen = settings(max_examples=15, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(type("Machine", (BothWithShares,), made), settings=chosen)


def filled(factory: CoreFactory, num_leaves: int, num_tenants: int) -> TreeCore:
    core = factory(shares=[*((tenant, 1) for tenant in range(num_tenants)), (None, 1)])
    for number in range(num_leaves):
        core.insert(RadixKey([number], Namespace(tenant=number % num_tenants)), np.array([number]))
    return core


def test_a_thousand_tenants_cost_no_more_than_ten(core_factory: CoreFactory) -> None:
    def churn(core: TreeCore) -> None:
        for number in range(200):
            core.evict(1)
            core.insert(RadixKey([10_000 + number], Namespace(tenant=number % 10)), np.array([10_000 + number]))

    few, many = filled(core_factory, 5000, 10), filled(core_factory, 5000, 1000)
    assert num_calls(lambda: churn(many)) < 1.5 * num_calls(lambda: churn(few))


def test_without_shares_there_is_nothing_to_count(core_factory: CoreFactory) -> None:
    core = core_factory()
    core.insert(RadixKey([1, 2], Namespace(tenant="a")), np.array([1, 2]))
    assert core.share_of(Namespace(tenant="a")) == 0
    core.charge(0, 5)
    assert core.shares() == []
    assert sum(len(freed.slots) for freed in core.evict(2, namespace=Namespace(tenant="a"), only_excess=True)) == 2
