"""`Survey`: a tree of any size, summed up a little at a time.

The walk goes from node to node by id, so the tree may change under it: what has gone meanwhile is left out, and what
came is seen next time. Of each subtree its sums are known when it is done; only the large ones keep their parts, so
that what is kept is bounded, however many nodes there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aradix.observe.labels import namespace_label
from aradix.tree.protocol import Gate, Glance, Latch, TreeCore

__all__ = ["OtherRoots", "Summary", "Survey", "summary_dict"]

_MIN_PART = 1 / 2_000
"""A subtree with a smaller part of all cached tokens is not kept one by one: about what a pixel shows."""
_MAX_PARTS = 200
"""Children that a node keeps one by one; the others are summed up. So are namespaces."""


class Summary:
    """A node, and the sums of what is at or below it. `age` is in ticks of the tree."""

    __slots__ = (
        "age",
        "glance",
        "num_gates",
        "num_host",
        "num_nodes",
        "num_pinned",
        "num_rest",
        "num_tokens",
        "num_working",
        "parts",
        "rest_tokens",
    )

    def __init__(self, glance: Glance, tick: int) -> None:
        own = glance.num_tokens
        self.glance = glance
        self.num_tokens = own
        self.num_nodes = 1
        self.num_pinned = own if glance.lock_ref else 0
        self.num_host = own if glance.residency == "host" else 0
        self.num_gates = int(glance.gate != Gate.NONE)
        self.num_working = int(glance.latch != Latch.NONE)
        self.age = max(0, tick - glance.last_access)
        self.parts: list[Summary] = []
        self.num_rest = 0
        self.rest_tokens = 0

    def add_leaf(self, leaf: Glance, age: int) -> None:
        """Take in a leaf that is too small to be kept: most nodes of a large tree are."""
        own = leaf.num_tokens
        self.num_tokens += own
        self.num_nodes += 1
        self.num_rest += 1
        self.rest_tokens += own
        if leaf.lock_ref:
            self.num_pinned += own
        if leaf.residency == "host":
            self.num_host += own
        if leaf.gate:
            self.num_gates += 1
        if leaf.latch:
            self.num_working += 1
        if age < self.age:
            self.age = age

    def add(self, part: Summary, keep: bool) -> None:
        """Take in a subtree that is done, and keep it or its sums only."""
        self.num_tokens += part.num_tokens
        self.num_nodes += part.num_nodes
        self.num_pinned += part.num_pinned
        self.num_host += part.num_host
        self.num_gates += part.num_gates
        self.num_working += part.num_working
        self.age = min(self.age, part.age)
        if not keep:
            self._put_away(part)
            return
        self.parts.append(part)
        if len(self.parts) > 2 * _MAX_PARTS:
            self.trim()

    def trim(self) -> None:
        """Keep the largest parts one by one."""
        self.parts.sort(key=lambda part: part.num_tokens, reverse=True)
        for part in self.parts[_MAX_PARTS:]:
            self._put_away(part)
        del self.parts[_MAX_PARTS:]

    def _put_away(self, part: Summary) -> None:
        self.num_rest += part.num_nodes
        self.rest_tokens += part.num_tokens


@dataclass(slots=True)
class OtherRoots:
    """The sums of the namespaces that are not kept one by one: how many they are, and what they hold."""

    num_roots: int = 0
    num_nodes: int = 0
    num_tokens: int = 0
    num_pinned: int = 0
    num_host: int = 0

    def add(self, root: Summary) -> None:
        """Take in a namespace."""
        self.num_roots += 1
        self.num_nodes += root.num_nodes
        self.num_tokens += root.num_tokens
        self.num_pinned += root.num_pinned
        self.num_host += root.num_host


class _Frame:
    """A node on the way down, and the children that are still to be seen."""

    __slots__ = ("children", "summary")

    def __init__(self, summary: Summary) -> None:
        self.summary = summary
        self.children = summary.glance.children


class Survey:
    """Walks through a tree again and again, a few nodes at a time. Nothing here waits.

    `done` has the largest roots of the last complete walk, `others` the sums of the rest, `progress` how far the walk
    under way is.
    """

    def __init__(self, core: TreeCore) -> None:
        self._core = core
        self._stack: list[_Frame] = []
        self._roots: list[int] | None = None
        self._found: list[Summary] = []
        self._others = OtherRoots()
        self._num_seen = 0
        self.done: list[Summary] = []
        self.others = OtherRoots()
        self.num_walks = 0

    @property
    def progress(self) -> float:
        """The part of the tree that the walk under way has seen, from 0 to 1."""
        return min(1.0, self._num_seen / max(1, self._core.num_nodes))

    def step(self, num_nodes: int) -> bool:
        """See so many more nodes; whether a walk was completed with that."""
        core = self._core
        if self._roots is None:
            self._roots, self._found, self._others, self._num_seen = core.roots(), [], OtherRoots(), 0
        least = (core.evictable_tokens + core.protected_tokens) * _MIN_PART
        for _ in range(num_nodes):
            if self._stack:
                frame = self._stack[-1]
                if frame.children:
                    self._enter(frame.children.pop(), least)
                else:
                    self._leave(self._stack.pop().summary, least)
            elif self._roots:
                self._enter(self._roots.pop(), 0.0)
            else:
                self._keep_largest()
                self.done, self.others = self._found, self._others
                self._roots = None
                self.num_walks += 1
                return True
        return False

    def _enter(self, node_id: int, least: float) -> None:
        glance = self._core.glance(node_id)
        self._num_seen += 1
        if glance is None:
            return
        if not glance.children and glance.num_tokens < least:
            self._stack[-1].summary.add_leaf(glance, max(0, self._core.tick - glance.last_access))
        else:
            self._stack.append(_Frame(Summary(glance, self._core.tick)))

    def _leave(self, summary: Summary, least: float) -> None:
        if len(summary.parts) > _MAX_PARTS:
            summary.trim()
        summary.parts.sort(key=lambda part: part.glance.created)
        if self._stack:
            self._stack[-1].summary.add(summary, summary.num_tokens >= least)
        else:
            self._found.append(summary)
            if len(self._found) > 2 * _MAX_PARTS:
                self._keep_largest()

    def _keep_largest(self) -> None:
        """Keep the largest namespaces one by one, in that order."""
        self._found.sort(key=lambda root: root.num_tokens, reverse=True)
        for root in self._found[_MAX_PARTS:]:
            self._others.add(root)
        del self._found[_MAX_PARTS:]


def summary_dict(top: Summary, *, show_tokens: bool) -> dict[str, Any]:
    """A summary as the page takes it: plain dicts with short names, since there may be thousands."""
    shown = _node_dict(top, show_tokens)
    stack = [(top, shown)]
    while stack:
        summary, into = stack.pop()
        for part in summary.parts:
            into["k"].append(inner := _node_dict(part, show_tokens))
            stack.append((part, inner))
    return shown


def _node_dict(summary: Summary, show_tokens: bool) -> dict[str, Any]:
    glance = summary.glance
    shown: dict[str, Any] = {
        "id": glance.node_id,
        "n": glance.num_tokens,
        "t": summary.num_tokens,
        "c": summary.num_nodes,
        "d": glance.depth,
        "p": glance.lock_ref,
        "pt": summary.num_pinned,
        "ht": summary.num_host,
        "r": glance.residency,
        "h": glance.hit_count,
        "a": summary.age,
        "k": [],
    }
    if glance.gate != Gate.NONE:
        shown["g"] = glance.gate.name.lower()
    if glance.latch != Latch.NONE:
        shown["l"] = glance.latch.name.lower()
    if summary.num_gates:
        shown["ng"] = summary.num_gates
    if summary.num_working:
        shown["nl"] = summary.num_working
    if glance.priority:
        shown["pr"] = glance.priority
    if summary.num_rest:
        shown["rc"], shown["rt"] = summary.num_rest, summary.rest_tokens
    if not glance.parent_id:
        shown["ns"] = namespace_label(glance.namespace)
    if show_tokens and glance.first_tokens:
        shown["tok"] = np.frombuffer(glance.first_tokens, np.int32).tolist()
    return shown
