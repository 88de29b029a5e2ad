"""`Walker`: how a key is followed through the tree, and a place found again. Nothing here changes anything.

How it stays cheap: an edge is compared with one `startswith` (memcmp), the place where two differ is found in blocks,
children are keyed by their first page as `bytes` (a 64-bit hash that the dict then verifies), and nothing recurses or
looks at single tokens.
"""

from __future__ import annotations

import numpy as np

from aradix.keys import TOKEN_BYTES, RadixKey
from aradix.params import NodeRef
from aradix.tree.node import TreeNode
from aradix.tree.protocol import NO_SLOTS, Gate, Slots
from aradix.tree.residency import Residency

__all__ = ["NOTHING_STOPS", "Walker"]

_BLOCK_BYTES = 1 << 16
NOTHING_STOPS = Gate.GRANTED + 1


class Walker(Residency):
    """Walks on the device part of a tree, and on below it on the host."""

    def _stop(self, key: RadixKey, limit: int | None) -> int:
        """Bytes of whole pages in the key, or in its first `limit` tokens."""
        num_tokens = len(key) if limit is None else min(limit, len(key))
        return num_tokens // self.page_size * self._page_bytes

    def _enter(
        self, key: RadixKey, root: TreeNode, stop: int, past_pending: bool
    ) -> tuple[TreeNode, TreeNode | None, int, int]:
        """`_descend` from a root, which may have a gate itself."""
        stopped_by = Gate.GRANTED if past_pending else Gate.PENDING
        if root.gate >= stopped_by:
            return root, None, 0, root.node_id
        return self._descend(key, root, stop, stopped_by)

    def _descend(
        self, key: RadixKey, node: TreeNode, stop: int, stopped_by: int = Gate.PENDING
    ) -> tuple[TreeNode, TreeNode | None, int, int]:
        """Walk down from a node's end, on the device: (last whole node, child matched in part, by how many bytes, gate
        met)."""
        data, base, page_bytes = key.data, key.start, self._page_bytes
        while stop - node.depth >= page_bytes:
            begin = base + node.depth
            child = node.children.get(data[begin : begin + page_bytes])
            if child is None or not child.slots:
                break
            if child.gate >= stopped_by:
                return node, None, 0, child.node_id
            edge = child.tokens
            if len(edge) > stop - node.depth or not data.startswith(edge, begin):
                return node, child, self._common(edge, data, begin, stop - node.depth), 0
            node = child
        return node, None, 0, 0

    def _descend_host(self, key: RadixKey, node: TreeNode, stop: int) -> tuple[TreeNode, TreeNode | None, int]:
        """Walk on below where the device part ends, on the host: as `_descend`, but there are no gates."""
        data, base, page_bytes = key.data, key.start, self._page_bytes
        while stop - node.depth >= page_bytes:
            begin = base + node.depth
            child = node.children.get(data[begin : begin + page_bytes])
            if child is None or child.slots:
                break
            edge = child.tokens
            if len(edge) > stop - node.depth or not data.startswith(edge, begin):
                return node, child, self._common(edge, data, begin, stop - node.depth)
            node = child
        return node, None, 0

    def _common(self, edge: bytearray, data: bytes, begin: int, limit: int) -> int:
        """How many bytes of whole pages an edge has in common with a key, found in blocks."""
        size = min(len(edge), limit)
        for done in range(0, size, _BLOCK_BYTES):
            count = min(_BLOCK_BYTES, size - done) // TOKEN_BYTES
            differ = np.frombuffer(edge, np.int32, count, done) != np.frombuffer(data, np.int32, count, begin + done)
            if differ.any():
                return (done + int(differ.argmax()) * TOKEN_BYTES) // self._page_bytes * self._page_bytes
        return size

    def _at(self, ref: NodeRef) -> TreeNode:
        """The node that a place is in. KeyError if the place is no more."""
        node = self._nodes[ref.node_id]
        depth = ref.depth * self._item_bytes
        if not node.depth - len(node.tokens) <= depth <= node.depth or (
            depth < node.depth and depth % self._page_bytes
        ):
            raise KeyError(ref)
        if depth == node.depth - len(node.tokens) and node.parent is not None:
            return node.parent
        return node

    def _slots_between(self, node: TreeNode, start: int, stop: int) -> Slots:
        """The slots from byte `start` to byte `stop` of a path: a copy."""
        parts = []
        while node.parent is not None and node.depth > start:
            begin = node.depth - len(node.tokens)
            slots = np.frombuffer(node.slots, np.int64)
            parts.append(slots[max(0, start - begin) // self._item_bytes : (stop - begin) // self._item_bytes])
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else NO_SLOTS.copy()

    def _host_slots_between(self, node: TreeNode, start: int, stop: int) -> Slots:
        """The host slots from byte `start` to byte `stop` of a path, all of which has a host copy: a copy of them."""
        parts = []
        while node.parent is not None and node.depth > start:
            begin = node.depth - len(node.tokens)
            slots = node.host_copy()
            parts.append(slots[max(0, start - begin) // self._item_bytes : (stop - begin) // self._item_bytes])
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else NO_SLOTS.copy()
