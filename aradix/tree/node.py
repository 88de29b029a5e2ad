"""`TreeNode`: an edge of tokens, the slots that hold their KV, and what the policies rank by."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from aradix.keys import Namespace
from aradix.tree.protocol import NO_SLOTS, Gate, Ready, Slots

if TYPE_CHECKING:
    from aradix.tree.residency import Job

__all__ = ["TreeNode", "newest_ready"]


def newest_ready(first: tuple[Ready, ...], second: tuple[Ready, ...]) -> tuple[Ready, ...]:
    """The union of two sets of ready events, one a stream: a stream's later event covers its earlier ones."""
    if not second or first is second:
        return first
    if not first:
        return second
    newest: dict[Any, Ready] = {}
    for ready in first + second:
        known = newest.get(ready.stream)
        if known is None or known.sequence < ready.sequence:
            newest[ready.stream] = ready
    return tuple(newest.values())


class TreeNode:
    """One edge of the tree, ending at `depth` bytes of key from the root.

    Tokens and slots are growable buffers, so that extending a leaf costs what is added. `order` is unique and settles
    ties; `node_id` changes when the tail is trimmed and when the node leaves the device, so that a handle to what is
    gone cannot be used. A priority that is given for a time has in `timed` when that ends, and the priority after it.

    `slots` are empty where it is not on the device, `host` is `None` where it is not on the host. `num_host_only`
    counts the children that are on the host alone: a node on the device with no others is a leaf there.
    """

    __slots__ = (
        "children",
        "created",
        "depth",
        "detached",
        "fingerprint",
        "gate",
        "hashes",
        "hit_count",
        "host",
        "host_ref",
        "job",
        "last_access",
        "last_use",
        "lock_ref",
        "namespace",
        "node_id",
        "num_host_only",
        "order",
        "parent",
        "past_uses",
        "priority",
        "ready",
        "slots",
        "streams",
        "timed",
        "tokens",
    )

    def __init__(
        self, node_id: int, parent: TreeNode | None, namespace: Namespace, tokens: bytes | bytearray, slots: Slots
    ) -> None:
        self.node_id = node_id
        self.order = node_id
        self.parent = parent
        self.namespace = namespace
        self.tokens = bytearray(tokens)
        self.slots = array("q", slots.tobytes())
        self.depth: int = len(self.tokens) + (parent.depth if parent is not None else 0)
        self.children: dict[bytes, TreeNode] = {}
        self.lock_ref = 0
        self.gate = Gate.NONE
        self.detached = False
        self.last_access = 0
        self.last_use = 0
        self.created = 0
        self.hit_count = 0
        self.past_uses = 0
        self.fingerprint = 0
        self.priority = 0
        self.timed: tuple[int, int] | None = None
        self.ready: tuple[Ready, ...] = ()
        self.streams: frozenset[Hashable] = frozenset()
        self.hashes: list[bytes] | None = None
        self.host: array[int] | None = None
        self.host_ref = 0
        self.num_host_only = 0
        self.job: Job | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.slots) or (len(self.host) if self.host is not None else 0)

    @property
    def uses(self) -> int:
        return 1 + self.hit_count + self.past_uses

    @property
    def on_device(self) -> bool:
        return bool(self.slots) or self.parent is None

    @property
    def is_device_leaf(self) -> bool:
        return len(self.children) == self.num_host_only

    def slots_copy(self, start: int = 0) -> Slots:
        """The slots from index `start` of this node on, as an array of its own."""
        return np.frombuffer(self.slots, np.int64)[start:].copy()

    def host_copy(self) -> Slots:
        """The host slots, as an array of its own; none where there is no host copy."""
        return NO_SLOTS if self.host is None else np.array(self.host, np.int64)

    def leave_device(self) -> Slots:
        """Give up the device slots; what used them, or wrote them, says nothing of those that come next."""
        slots = self.slots_copy()
        self.slots = array("q")
        self.ready, self.streams = (), frozenset()
        if self.parent is not None:
            self.parent.num_host_only += 1
        return slots

    def enter_device(self, slots: Slots, ready: tuple[Ready, ...]) -> None:
        """Own device slots again."""
        self.slots = array("q", slots.tobytes())
        self.ready = ready
        if self.parent is not None:
            self.parent.num_host_only -= 1

    def split_head(self, head_id: int, size: int, num_slots: int, page_bytes: int) -> TreeNode:
        """Cut the first `size` bytes off into a new parent; this node stays the tail, so that handles to it hold.

        The head has all that the node has: locks, times, hits, priority, streams, ready events, the job it is in, its
        share of the hashes and of the host copy. Only a gate stays on the tail alone.
        """
        assert self.parent is not None
        head = TreeNode(
            head_id, self.parent, self.namespace, self.tokens[:size], np.frombuffer(self.slots, np.int64)[:num_slots]
        )
        head.lock_ref, head.detached = self.lock_ref, self.detached
        head.last_access, head.created = self.last_access, self.created
        head.hit_count, head.priority, head.timed = self.hit_count, self.priority, self.timed
        head.past_uses, head.last_use = self.past_uses, self.last_use
        head.ready, head.streams = self.ready, self.streams
        if self.hashes is not None:
            num_pages = size // page_bytes
            head.hashes, self.hashes = self.hashes[:num_pages], self.hashes[num_pages:]
        if self.host is not None:
            head.host, self.host = self.host[:num_slots], self.host[num_slots:]
            head.num_host_only = int(not self.slots)
        head.host_ref, head.job = self.host_ref, self.job
        first_page = bytes(self.tokens[:page_bytes])
        self.tokens = self.tokens[size:]
        self.slots = self.slots[num_slots:]
        head.children[bytes(self.tokens[:page_bytes])] = self
        self.parent.children[first_page] = head
        self.parent = head
        return head

    def absorb_child(self, child: TreeNode) -> None:
        """Take over an only child: its tokens, its children and its id, under which handles know the end of both."""
        self.tokens += child.tokens
        self.slots += child.slots
        self.depth = child.depth
        self.node_id = child.node_id
        self.order = child.order
        self.children = child.children
        for grandchild in self.children.values():
            grandchild.parent = self
        self.hit_count = max(self.hit_count, child.hit_count)
        self.past_uses = min(self.past_uses, child.past_uses)
        self.fingerprint = child.fingerprint
        self.priority = max(self.priority, child.priority)
        self.last_access = max(self.last_access, child.last_access)
        self.created = min(self.created, child.created)
        self.ready = newest_ready(self.ready, child.ready)
        self.streams |= child.streams
        if self.hashes is not None and child.hashes is not None:
            self.hashes += child.hashes
        if self.host is not None and child.host is not None:
            self.host += child.host
        self.num_host_only = child.num_host_only
        child.parent = None

    def trim_tail(self, new_id: int, num_tokens: int, size: int, page_bytes: int) -> Slots:
        """Drop the last `num_tokens` slots and `size` bytes of tokens; gives the slots. The node has a new id then.

        Only of a node that is on one tier alone.
        """
        owned = self.host if self.host is not None else self.slots
        keep = len(owned) - num_tokens
        freed = np.array(owned[keep:], np.int64)
        del owned[keep:]
        del self.tokens[-size:]
        self.depth -= size
        self.node_id = new_id
        if self.hashes is not None:
            del self.hashes[len(self.tokens) // page_bytes :]
        return freed
