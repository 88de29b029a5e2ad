"""Any sequence of steps leaves a core as a brute-force model says: lengths, slots, victims, sums, nodes, events."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from aradix.keys import Namespace
from tests.support.tree_model import GRANTED, PASSING, RANKS
from tests.tree.lockstep import NAMESPACES, CoreFactory, Lockstep

PAGE_SIZES = (1, 2, 4, 16)


def prompt(page_size: int, pages: Sequence[int], rest: int) -> list[int]:
    """Pages that begin alike and differ at their ends, as far as one token lets them, and a part of one more."""
    tokens = [token for page in pages for token in [7] * (page_size - 1) + [page]]
    return tokens + [7] * min(rest, page_size - 1)


def configurations() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "page_size": st.sampled_from(PAGE_SIZES),
            "item_bytes": st.sampled_from((4, 8)),
            "policy": st.sampled_from(sorted(RANKS)),
            "evict_unit": st.sampled_from(("page", "page", "node")),
            "record_events": st.booleans(),
        }
    )


NUMBERS = st.integers(0, 15)
PAGES = st.lists(st.integers(0, 1), max_size=8)
REST = st.integers(0, 3)
SPACES = st.sampled_from((NAMESPACES[0], *NAMESPACES))
FLUSHED = st.sampled_from((None, *NAMESPACES))
PRIORITIES = st.integers(-1, 1)
STREAMS = st.integers(0, 1)
LEVELS = st.integers(PASSING, GRANTED)
LIMITS = st.none() | st.integers(-1, 40)


class Steps:
    """The steps of `Lockstep` with arguments that can be drawn before the tree is known."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep = lockstep

    def prompt(self, pages: Sequence[int], rest: int) -> list[int]:
        return prompt(self.lockstep.page_size, pages, rest)

    def match(self, pages: list[int], rest: int, space: Namespace, limit: int | None, *flags: bool) -> None:
        self.lockstep.match(self.prompt(pages, rest), space, limit, *flags)

    def insert(self, pages: list[int], rest: int, space: Namespace, *more: Any) -> None:
        self.lockstep.insert(self.prompt(pages, rest), space, *more)

    def extend(self, which: int, pages: list[int], rest: int, priority: int, stream: int) -> None:
        self.lockstep.extend(which, self.prompt(pages, rest), priority, stream)

    def close_gate(self, pages: list[int], rest: int, space: Namespace) -> None:
        self.lockstep.close_gate(self.prompt(pages, rest), space)

    def evict(self, num_pages: int, more: int) -> None:
        self.lockstep.evict(num_pages * self.lockstep.page_size - more)


ARGUMENTS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "match": (PAGES, REST, SPACES, LIMITS, st.booleans(), st.booleans()),
    "insert": (PAGES, REST, SPACES, PRIORITIES, STREAMS, st.booleans()),
    "extend": (NUMBERS, PAGES, REST, PRIORITIES, STREAMS),
    "unpin": (NUMBERS, st.booleans()),
    "pin": (NUMBERS,),
    "record_hit": (NUMBERS,),
    "mark_streams": (NUMBERS, STREAMS),
    "evict": (st.integers(0, 6), REST),
    "detach": (FLUSHED,),
    "close_gate": (PAGES, REST, SPACES),
    "set_gate": (NUMBERS, LEVELS),
    "open_gate": (NUMBERS,),
    "pin_below": (NUMBERS,),
    "evict_below": (NUMBERS,),
}


def take(lockstep: Lockstep, name: str, arguments: Sequence[Any]) -> None:
    target = Steps(lockstep) if hasattr(Steps, name) else lockstep
    step: Callable[..., None] = getattr(target, name)
    step(*arguments)


ONE_STEP = st.one_of([st.tuples(st.just(name), st.tuples(*drawn)) for name, drawn in ARGUMENTS.items()])


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(configuration=configurations(), steps=st.lists(ONE_STEP, min_size=5, max_size=60))
def test_any_steps_leave_the_core_as_the_model_says(
    core_factory: CoreFactory, configuration: dict[str, Any], steps: list[tuple[str, tuple[Any, ...]]]
) -> None:
    lockstep = Lockstep(core_factory, **configuration)
    for name, arguments in steps:
        take(lockstep, name, arguments)


class TreeMachine(RuleBasedStateMachine):
    """The same steps, as rules: hypothesis learns which orders lead somewhere."""

    def __init__(self, factory: CoreFactory) -> None:
        super().__init__()
        self.factory = factory
        self.lockstep = Lockstep(factory)

    @initialize(configuration=configurations())
    def configure(self, configuration: dict[str, Any]) -> None:
        self.lockstep = Lockstep(self.factory, **configuration)

    @rule(arguments=st.tuples(*ARGUMENTS["match"]))
    def match(self, arguments: tuple[Any, ...]) -> None:
        take(self.lockstep, "match", arguments)

    @rule(arguments=st.tuples(*ARGUMENTS["insert"]))
    def insert(self, arguments: tuple[Any, ...]) -> None:
        take(self.lockstep, "insert", arguments)

    @rule(arguments=st.tuples(*ARGUMENTS["extend"]))
    def extend(self, arguments: tuple[Any, ...]) -> None:
        take(self.lockstep, "extend", arguments)

    @rule(arguments=st.tuples(*ARGUMENTS["unpin"]))
    def unpin(self, arguments: tuple[Any, ...]) -> None:
        take(self.lockstep, "unpin", arguments)

    @rule(arguments=st.tuples(*ARGUMENTS["pin"]))
    def pin(self, arguments: tuple[Any, ...]) -> None:
        take(self.lockstep, "pin", arguments)

    @rule(arguments=st.tuples(*ARGUMENTS["evict"]))
    def evict(self, arguments: tuple[Any, ...]) -> None:
        take(self.lockstep, "evict", arguments)

    @rule(step=st.sampled_from(("record_hit", "mark_streams")), which=NUMBERS, stream=STREAMS)
    def mark(self, step: str, which: int, stream: int) -> None:
        take(self.lockstep, step, (which, stream)[: len(ARGUMENTS[step])])

    @rule(which=NUMBERS, level=LEVELS)
    def set_gate(self, which: int, level: int) -> None:
        self.lockstep.set_gate(which, level)

    @rule(arguments=st.tuples(*ARGUMENTS["close_gate"]))
    def close_gate(self, arguments: tuple[Any, ...]) -> None:
        take(self.lockstep, "close_gate", arguments)

    @rule(step=st.sampled_from(("open_gate", "pin_below", "evict_below")), which=NUMBERS)
    def at_a_gate(self, step: str, which: int) -> None:
        take(self.lockstep, step, (which,))

    @rule(namespace=FLUSHED)
    def detach(self, namespace: Namespace | None) -> None:
        self.lockstep.detach(namespace)

    def teardown(self) -> None:
        empty_out(self.lockstep)


def empty_out(lockstep: Lockstep) -> None:
    """When all pins and gates are gone, everything can be evicted and nothing stays behind."""
    while lockstep.gates:
        lockstep.open_gate(0)
    while lockstep.held:
        lockstep.unpin(0)
    lockstep.evict(lockstep.core.evictable_tokens)
    core = lockstep.core
    assert (core.num_nodes, core.num_namespaces) == (0, 0)
    assert (core.evictable_tokens, core.protected_tokens, core.detached_tokens) == (0, 0, 0)
    assert [*core.walk(), *core.walk(detached=True)] == []


def test_rules_in_any_order_leave_the_core_as_the_model_says(core_factory: CoreFactory) -> None:
    class Machine(TreeMachine):
        def __init__(self) -> None:
            super().__init__(core_factory)

    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]),
    )


def drawn_at_random(source: random.Random, name: str) -> tuple[Any, ...]:
    """What `ARGUMENTS` describes, drawn plainly: long runs need no shrinking."""
    which, flag, rest = source.randrange(16), source.random() < 0.5, source.randrange(4)
    pages = [source.randrange(2) for _ in range(source.randrange(7))]
    space = source.choice(NAMESPACES)
    priority, stream, past = source.randrange(-1, 2), source.randrange(2), source.random() < 0.3
    return {
        "match": (pages, rest, space, source.choice((None, None, source.randrange(20))), flag, past),
        "insert": (pages, rest, space, priority, stream, past),
        "extend": (which, pages[:3], rest, priority, stream),
        "unpin": (which, flag),
        "pin": (which,),
        "record_hit": (which,),
        "mark_streams": (which, stream),
        "evict": (source.randrange(6), rest),
        "detach": (source.choice((None, *NAMESPACES)),),
        "close_gate": (pages, rest, space),
        "set_gate": (which, source.randrange(PASSING, GRANTED + 1)),
        "open_gate": (which,),
        "pin_below": (which,),
        "evict_below": (which,),
    }[name]


WEIGHTS = {"match": 16, "insert": 24, "extend": 6, "unpin": 10, "evict": 4, "record_hit": 4, "pin": 4, "close_gate": 4}
WEIGHTS |= {"set_gate": 4, "open_gate": 4}


@pytest.mark.parametrize("evict_unit", ["page", "node"])
@pytest.mark.parametrize("policy", sorted(RANKS))
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_long_runs_leave_the_core_as_the_model_says(
    core_factory: CoreFactory, policy: str, evict_unit: str, page_size: int
) -> None:
    source = random.Random(f"{policy} {evict_unit} {page_size}")
    lockstep = Lockstep(
        core_factory,
        page_size=page_size,
        item_bytes=source.choice((4, 8)),
        policy=policy,
        evict_unit=evict_unit,
    )
    names = source.choices(list(ARGUMENTS), [WEIGHTS.get(name, 1) for name in ARGUMENTS], k=120)
    for name in names:
        take(lockstep, name, drawn_at_random(source, name))
    empty_out(lockstep)
