"""The audit names the invariant that was broken, for each way to break one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from aradix.keys import Namespace, RadixKey
from aradix.tree.audit import audit_tree
from aradix.tree.node import TreeNode
from aradix.tree.protocol import Gate
from aradix.tree.radix_tree import RadixTree

ELSEWHERE = Namespace(salt="elsewhere")


class Tree:
    """[1,2,3,4] with the tails [5,6] (pinned) and [7,8], and [1,2] elsewhere; pages of two, hashes on."""

    def __init__(self) -> None:
        self.core = RadixTree(page_size=2, record_events=True)
        self.core.insert(RadixKey([1, 2, 3, 4, 5, 6]), np.arange(6))
        self.core.insert(RadixKey([1, 2, 3, 4, 7, 8]), np.arange(10, 16))
        self.core.insert(RadixKey([1, 2], ELSEWHERE), np.arange(20, 22))
        self.pinned = self.core.match(RadixKey([1, 2, 3, 4, 5, 6]), pin=True).node_id
        self.pins = {self.pinned: 1}

    def node(self, *ids: int, namespace: Namespace | None = None) -> TreeNode:
        """The node that ends with these ids."""
        match = self.core.match(RadixKey(ids, namespace))
        return self.core._nodes[match.node_id]

    def problems(self, pins: Mapping[int, int] | None = None) -> list[str]:
        return audit_tree(self.core, self.pins if pins is None else pins).problems


@pytest.fixture
def tree() -> Tree:
    made = Tree()
    assert made.problems() == []
    return made


def test_a_tree_in_order_has_no_problems_and_all_its_slots(tree: Tree) -> None:
    audit = audit_tree(tree.core, tree.pins)
    assert audit.problems == []
    assert sorted(audit.cached.tolist()) == [0, 1, 2, 3, 4, 5, 14, 15, 20, 21]
    assert audit.detached.tolist() == []
    tree.core.detach()
    audit = audit_tree(tree.core, tree.pins)
    assert audit.problems == []
    assert audit.cached.tolist() == []
    assert sorted(audit.detached.tolist()) == [0, 1, 2, 3, 4, 5]
    assert audit.cached.dtype == audit.detached.dtype == np.int64


def raise_lock(tree: Tree) -> None:
    tree.node(1, 2, 3, 4).lock_ref += 1


def lose_lock(tree: Tree) -> None:
    tree.core._nodes[tree.pinned].lock_ref = 0


def forget_an_unheld_flushed_node(tree: Tree) -> None:
    tree.core.detach()
    tree.core._nodes[tree.pinned].lock_ref = 0


def gate_without_a_pin(tree: Tree) -> None:
    tree.node(1, 2, 3, 4, 7, 8).gate = Gate.PENDING


def too_many_evictable(tree: Tree) -> None:
    tree.core.evictable_tokens += 2


def too_few_protected(tree: Tree) -> None:
    tree.core.protected_tokens -= 2


def too_many_detached(tree: Tree) -> None:
    tree.core.detached_tokens += 2


def too_many_nodes(tree: Tree) -> None:
    tree.core.num_nodes += 1


def leaf_not_indexed(tree: Tree) -> None:
    tree.core._evictable.discard(tree.node(1, 2, 3, 4, 7, 8))


def pinned_leaf_indexed(tree: Tree) -> None:
    tree.core._evictable.put(tree.core._nodes[tree.pinned], 0)


def inner_node_indexed(tree: Tree) -> None:
    tree.core._evictable.put(tree.node(1, 2, 3, 4), 0)


def flushed_leaf_indexed(tree: Tree) -> None:
    tree.core.detach()
    tree.core._evictable.put(tree.core._nodes[tree.pinned], 0)


def siblings_alike(tree: Tree) -> None:
    parent = tree.node(1, 2, 3, 4)
    twin = TreeNode(tree.core._new_id(), parent, parent.namespace, RadixKey([7, 8]).data, np.arange(30, 32))
    parent.children[b"another page"] = twin
    tree.core.num_nodes += 1
    tree.core.evictable_tokens += 2
    tree.core._refile(twin)


def node_there_twice(tree: Tree) -> None:
    parent = tree.node(1, 2, 3, 4)
    parent.children[b"another page"] = tree.node(1, 2, 3, 4, 7, 8)


def phantom_child(tree: Tree) -> None:
    leaf = tree.node(1, 2, namespace=ELSEWHERE)
    leaf.children[b"page"] = TreeNode(tree.core._new_id(), leaf, leaf.namespace, b"", np.empty(0, np.int64))


def part_of_a_page(tree: Tree) -> None:
    leaf = tree.node(1, 2, namespace=ELSEWHERE)
    leaf.tokens += RadixKey([3]).data
    leaf.slots.append(22)
    tree.core.evictable_tokens += 1


def wrong_depth(tree: Tree) -> None:
    tree.node(1, 2, namespace=ELSEWHERE).depth += 8


def child_in_another_namespace(tree: Tree) -> None:
    tree.node(1, 2, 3, 4, 7, 8).namespace = ELSEWHERE


def child_flushed_alone(tree: Tree) -> None:
    tree.node(1, 2, 3, 4, 7, 8).detached = True


def two_roots(tree: Tree) -> None:
    root = tree.core._roots[ELSEWHERE]
    root.namespace = Namespace()


def wrong_hash(tree: Tree) -> None:
    hashes = tree.node(1, 2, 3, 4).hashes
    assert hashes is not None
    hashes[0] = b"?" * 32


def missing_hash(tree: Tree) -> None:
    hashes = tree.node(1, 2, 3, 4).hashes
    assert hashes is not None
    del hashes[-1]


def parent_gone(tree: Tree) -> None:
    gone = TreeNode(tree.core._new_id(), None, Namespace(), b"", np.empty(0, np.int64))
    tree.node(1, 2, 3, 4, 7, 8).parent = gone


def slots_too_many(tree: Tree) -> None:
    tree.node(1, 2, 3, 4).slots.extend((50, 51))
    tree.core.protected_tokens += 2


def empty_namespace_left(tree: Tree) -> None:
    tree.core._new_root(Namespace(salt="nobody"))


def unmerged(tree: Tree) -> None:
    tree.core.insert(RadixKey([5, 5, 6, 6]), np.arange(40, 44))
    tree.core._split(tree.node(5, 5, 6, 6), 8)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (raise_lock, "I2: node {} has lock_ref 2, 1 pins are at or below"),
        (lose_lock, "has lock_ref 0, 1 pins are at or below"),
        (forget_an_unheld_flushed_node, "was flushed and nobody holds it"),
        (gate_without_a_pin, "has a gate but no pin of it"),
        (too_many_evictable, "I3: evictable_tokens is 6, a recount gives 4"),
        (too_few_protected, "I3: protected_tokens is 4, a recount gives 6"),
        (too_many_detached, "I3: detached_tokens is 2, a recount gives 0"),
        (too_many_nodes, "I3: num_nodes is 5, a recount gives 4"),
        (leaf_not_indexed, "is not indexed as evictable, but it has 0 children on the device and lock_ref 0"),
        (pinned_leaf_indexed, "is indexed as evictable, but it has 0 children on the device and lock_ref 1"),
        (inner_node_indexed, "is indexed as evictable, but it has 2 children on the device and lock_ref 1"),
        (flushed_leaf_indexed, "is indexed as evictable"),
        (siblings_alike, "begins with the same page as a sibling"),
        (node_there_twice, "is in the tree twice"),
        (phantom_child, "holds 0 tokens, no whole pages of 2"),
        (part_of_a_page, "holds 3 tokens, no whole pages of 2"),
        (wrong_depth, "ends at 4, its parent at 0, with 2 between"),
        (child_in_another_namespace, "differ in namespace or in being flushed"),
        (child_flushed_alone, "differ in namespace or in being flushed"),
        (two_roots, "has two roots"),
        (wrong_hash, "the page hashes of node"),
        (missing_hash, "the page hashes of node"),
        (parent_gone, "has no parent"),
        (slots_too_many, "keeps 16 bytes for 6 tokens"),
        (empty_namespace_left, "is empty and unpinned, but still there"),
        (unmerged, "is an only child and differs in nothing from its parent"),
    ],
)
def test_what_was_broken_is_named(tree: Tree, damage: Callable[[Tree], None], said: str) -> None:
    names: dict[Callable[[Tree], None], str] = {
        raise_lock: "I2", lose_lock: "I2", forget_an_unheld_flushed_node: "I2", gate_without_a_pin: "I2",
        too_many_evictable: "I3", too_few_protected: "I3", too_many_detached: "I3", too_many_nodes: "I3",
        leaf_not_indexed: "I3", pinned_leaf_indexed: "I3", inner_node_indexed: "I3", flushed_leaf_indexed: "I3",
        parent_gone: "I6", slots_too_many: "I8", empty_namespace_left: "I8", unmerged: "I8",
    }  # fmt: skip
    damage(tree)
    problems = tree.problems()
    said = said.format(next((problem.split()[2] for problem in problems), ""))
    assert any(problem.startswith(f"{names.get(damage, 'I4')}: ") and said in problem for problem in problems), problems


def test_a_pin_on_a_node_that_is_gone_is_named(tree: Tree) -> None:
    assert tree.problems({**tree.pins, 999: 3}) == ["I2: 3 pins end at node 999, which is gone"]


def test_a_forgotten_pin_shows_on_the_whole_path(tree: Tree) -> None:
    problems = tree.problems({})
    assert len(problems) == 3
    assert all("has lock_ref 1, 0 pins are at or below" in problem for problem in problems)


def test_a_child_count_that_is_off_is_named(tree: Tree) -> None:
    gone = TreeNode(tree.core._new_id(), None, Namespace(), b"", np.empty(0, np.int64))
    tree.node(1, 2, 3, 4, 7, 8).parent = gone
    assert any(p.startswith("I4: ") and "counts 2 children, 1 found" in p for p in tree.problems())


def test_whole_leaves_need_not_be_merged() -> None:
    core = RadixTree(evict_unit="node")
    core.insert(RadixKey([1, 2]), np.arange(2))
    core.insert(RadixKey([1, 2, 3]), np.arange(3))
    assert core.num_nodes == 2
    assert audit_tree(core, {}).problems == []


def test_an_audit_changes_nothing(tree: Tree) -> None:
    before = [(view.node_id, view.last_access, view.hit_count, view.lock_ref) for view in tree.core.walk()]
    audit_tree(tree.core, tree.pins)
    assert [(view.node_id, view.last_access, view.hit_count, view.lock_ref) for view in tree.core.walk()] == before
