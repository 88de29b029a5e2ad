"""The index of evictable leaves gives the least one, whatever became of the ranks, and keeps nothing else alive."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aradix.keys import Namespace
from aradix.tree.evictable import EvictableIndex
from aradix.tree.node import TreeNode


def leaf(number: int) -> TreeNode:
    return TreeNode(number, None, Namespace(), b"", np.empty(0, np.int64))


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "put", "put", "discard", "take", "refile"]), st.integers(0, 7), st.integers())
    )
)
def test_the_least_is_that_of_a_full_sort(steps: list[tuple[str, int, int]]) -> None:
    index, leaves, ranks = EvictableIndex(), [leaf(number) for number in range(1, 9)], dict[int, int]()
    for step, number, rank in steps:
        if step == "put":
            index.put(leaves[number], rank)
            ranks[number] = rank
        elif step == "discard":
            index.discard(leaves[number])
            ranks.pop(number, None)
        elif step == "refile":
            ranks = {known: (old * rank) % 7 for known, old in ranks.items()}
            new = {leaves[known]: value for known, value in ranks.items()}
            index.refile(lambda node, new=new: new[node])  # type: ignore[misc]
        expected = min(((value, known) for known, value in ranks.items()), default=None)
        least = index.least()
        assert (least is None) == (expected is None)
        if least is not None and expected is not None:
            assert least is leaves[expected[1]]
            if step == "take":
                index.discard(least)
                del ranks[expected[1]]
        assert len(index) == len(ranks)
        assert [node in index for node in leaves] == [known in ranks for known in range(8)]


def test_ties_go_to_the_older_node() -> None:
    index = EvictableIndex()
    nodes = [leaf(number) for number in (3, 1, 2)]
    for node in nodes:
        index.put(node, (0, "same"))
    order = []
    while (least := index.least()) is not None:
        order.append(least.order)
        index.discard(least)
    assert order == [1, 2, 3]


def test_a_node_filed_again_under_another_order_moves() -> None:
    index = EvictableIndex()
    first, second = leaf(1), leaf(2)
    index.put(first, 0)
    index.put(second, 0)
    first.order = 3
    index.put(first, 0)
    assert index.least() is second
    assert len(index) == 2


def test_ranks_that_cannot_be_compared_leave_the_index_usable() -> None:
    index = EvictableIndex()
    nodes = [leaf(number) for number in range(1, 6)]
    index.put(nodes[0], 1)
    with pytest.raises(TypeError):
        index.put(nodes[1], "one")
    index.refile(lambda node: node.order)
    for node in nodes:
        index.put(node, node.order)
    assert [index.least() is nodes[0], len(index)] == [True, 5]


@pytest.mark.parametrize("leave", ["discard", "refile", "put again"])
def test_what_left_is_not_kept_alive(leave: str) -> None:
    index = EvictableIndex()
    index.put(leaf(1000), -1)
    nodes = [leaf(number) for number in range(50)]
    idle = [sys.getrefcount(node) for node in nodes]
    for node in nodes:
        index.put(node, node.order)
    if leave == "put again":
        for rank in range(40):
            for node in nodes:
                index.put(node, rank)
    if leave == "refile":
        index.refile(lambda node: -node.order)
    for node in nodes:
        index.discard(node)
    del node
    assert [sys.getrefcount(held) for held in nodes] == idle


def test_the_heap_stays_as_long_as_the_index() -> None:
    index = EvictableIndex()
    nodes = [leaf(number) for number in range(100)]
    longest = 0
    for rank in range(200):
        for node in nodes:
            index.put(node, -rank if rank % 2 else rank)
            longest = max(longest, len(index._heap))
    assert longest <= 2 * len(nodes) + 65
