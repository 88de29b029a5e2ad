"""The index of evictable leaves: the least valuable one in O(log n), whatever the policy ranks by.

A lazy heap: a change pushes a new entry and blanks the old one, which is thrown away when it surfaces. So ranks may go
up as well as down (MRU and FILO do), and what left the tree is not kept alive. When more than half of the heap is blank
it is rebuilt, which keeps the cost of a change O(log n) amortised and the size O(n).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from aradix.tree.node import TreeNode

__all__ = ["EvictableIndex"]

_Entry = list[Any]
"""Rank, the node's order, a serial number so that nodes themselves are never compared, the node or `None`."""
_SLACK = 64


class EvictableIndex:
    """Leaves by rank; ties go to the older node. `len` is the number of leaves."""

    __slots__ = ("_current", "_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._current: dict[TreeNode, _Entry] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._current

    def _entry(self, node: TreeNode, rank: Any) -> _Entry:
        self._serial += 1
        return [rank, node.order, self._serial, node]

    def put(self, node: TreeNode, rank: Any) -> None:
        """File a leaf, or file it again under another rank."""
        known = self._current.get(node)
        if known is not None:
            if known[0] == rank and known[1] == node.order:
                return
            known[-1] = None
        entry = self._current[node] = self._entry(node, rank)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._rebuild()

    def discard(self, node: TreeNode) -> None:
        """Take a node out, if it is in."""
        entry = self._current.pop(node, None)
        if entry is not None:
            entry[-1] = None

    def least(self) -> TreeNode | None:
        """The leaf to go first, which stays filed."""
        while self._heap:
            node: TreeNode | None = self._heap[0][-1]
            if node is not None:
                return node
            heapq.heappop(self._heap)
        return None

    def refile(self, rank: Callable[[TreeNode], Any]) -> None:
        """Rank every leaf anew."""
        self._current = {node: self._entry(node, rank(node)) for node in self._current}
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = list(self._current.values())
        heapq.heapify(self._heap)
