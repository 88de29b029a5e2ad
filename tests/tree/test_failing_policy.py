"""A user's policy that raises anywhere: the step is finished, nothing is lost, and the tree says so."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from aradix.keys import RadixKey
from aradix.policies import NodeStats
from tests.tree.lockstep import NAMESPACES, CoreFactory, Lockstep


class OursError(Exception):
    """What the policy raises."""


class Fuse:
    """Counts down and blows once, and for ever after."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.blown = False
        self.wet = False

    def burn(self) -> None:
        if self.wet:
            return
        self.calls -= 1
        if self.calls < 0:
            self.blown = True
            raise OursError


class RaisesInRank:
    """Recency, until the fuse blows."""

    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse

    def rank(self, node: NodeStats, /) -> Any:
        self.fuse.burn()
        return node.last_access

    def state(self, node: NodeStats, /) -> Any:
        return node.last_access


class RaisesInState(RaisesInRank):
    def rank(self, node: NodeStats, /) -> Any:
        return node.last_access

    def state(self, node: NodeStats, /) -> Any:
        self.fuse.burn()
        return node.last_access


class Brittle:
    """A tick that compares like one until the fuse blows."""

    def __init__(self, tick: int, fuse: Fuse) -> None:
        self.tick = tick
        self.fuse = fuse

    def __lt__(self, other: Brittle) -> bool:
        self.fuse.burn()
        return self.tick < other.tick

    def __eq__(self, other: object) -> bool:
        self.fuse.burn()
        return isinstance(other, Brittle) and self.tick == other.tick

    __hash__ = None  # type: ignore[assignment]


class RaisesInOrder(RaisesInRank):
    def rank(self, node: NodeStats, /) -> Any:
        return Brittle(node.last_access, self.fuse)


class RaisesInEquality(RaisesInRank):
    def rank(self, node: NodeStats, /) -> Any:
        return node.last_access

    def state(self, node: NodeStats, /) -> Any:
        return Brittle(node.last_access, self.fuse)


KINDS = (RaisesInRank, RaisesInState, RaisesInOrder, RaisesInEquality)


class Watched(Lockstep):
    """The fuse burns in the steps only, not when the tree is compared between them."""

    def __init__(self, factory: CoreFactory, kind: type[RaisesInRank], fuse: Fuse) -> None:
        super().__init__(factory, core_policy=kind(fuse))
        self.fuse = fuse

    def check(self) -> None:
        self.fuse.wet = True
        super().check()
        self.fuse.wet = False


def walk_of_life(lockstep: Lockstep, fuse: Fuse) -> None:
    """Every kind of step, compared with the model after each; the fuse may blow in any of them."""
    source = random.Random(7)
    for _ in range(60):
        tokens = [source.randrange(2) for _ in range(source.randrange(1, 6))]
        space = NAMESPACES[source.randrange(2)]
        which = source.randrange(16)
        match source.randrange(12):
            case 0 | 1 | 2 | 3:
                lockstep.insert(tokens, space)
            case 4 | 5:
                lockstep.match(tokens, space, pin=True)
            case 6:
                lockstep.match(tokens, space)
            case 7:
                lockstep.extend(which, tokens[:2])
            case 8:
                lockstep.unpin(which)
            case 9:
                lockstep.record_hit(which)
                lockstep.pin(which)
            case 10:
                lockstep.evict(source.randrange(1, 5))
            case _:
                if source.random() < 0.2:
                    lockstep.detach(space)
        if fuse.blown:
            assert isinstance(lockstep.core.failure, OursError)
        else:
            assert lockstep.core.failure is None
    while lockstep.held:
        lockstep.unpin(0)
    lockstep.evict(lockstep.core.evictable_tokens)
    assert (lockstep.core.num_nodes, lockstep.core.num_namespaces) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_may_raise_in_the_middle_of_any_step(core_factory: CoreFactory, kind: type[RaisesInRank]) -> None:
    unlimited = Fuse(10**9)
    walk_of_life(Watched(core_factory, kind, unlimited), unlimited)
    num_calls = 10**9 - unlimited.calls
    assert num_calls >= 20
    for calls in range(0, num_calls, max(1, num_calls // 20)):
        fuse = Fuse(calls)
        walk_of_life(Watched(core_factory, kind, fuse), fuse)
        assert fuse.blown


@pytest.mark.parametrize("ranks", [(1, "a"), (None, 1), ((1, "a"), (1, 2)), (object(), object())])
def test_ranks_that_cannot_be_compared_are_a_failure_of_the_policy(core_factory: CoreFactory, ranks: Any) -> None:
    class Mixed:
        def rank(self, node: NodeStats, /) -> Any:
            return ranks[node.created % 2]

    core = core_factory(policy=Mixed())
    for number in range(4):
        core.insert(RadixKey([number]), np.arange(number, number + 1))
    assert isinstance(core.failure, TypeError)
    assert [core.evict(1)[0].slots.tolist() for _ in range(4)] == [[0], [1], [2], [3]]


def test_states_whose_equality_says_nothing_are_a_failure_of_the_policy(core_factory: CoreFactory) -> None:
    class Arrays:
        def rank(self, node: NodeStats, /) -> int:
            return node.last_access

        def state(self, node: NodeStats, /) -> Any:
            return np.array([node.last_access, node.created])

    core = core_factory(policy=Arrays())
    core.insert(RadixKey([1]), np.arange(1))
    done = core.insert(RadixKey([1, 2]), np.arange(2))
    assert not isinstance(done, int)
    assert isinstance(core.failure, ValueError)
    assert core.evictable_tokens == 2


def test_the_first_failure_is_kept_and_the_policy_is_asked_no_more(core_factory: CoreFactory) -> None:
    fuse = Fuse(1)
    core = core_factory(policy=RaisesInRank(fuse))
    for number in range(5):
        core.insert(RadixKey([number]), np.arange(number, number + 1))
    first = core.failure
    assert isinstance(first, OursError)
    calls = fuse.calls
    core.evict(2)
    core.match(RadixKey([4]))
    assert core.failure is first
    assert fuse.calls == calls


def test_looking_at_the_tree_does_not_raise_what_the_policy_raises(core_factory: CoreFactory) -> None:
    fuse = Fuse(10**9)
    core = core_factory(policy=RaisesInState(fuse))
    core.insert(RadixKey([1]), np.arange(1))
    fuse.calls = 0
    assert len(list(core.walk())) == 2
    assert isinstance(core.failure, OursError)
