"""`RadixTree`: the reference core, in Python. Short and obviously right before it is fast.

How it stays cheap all the same: an edge is compared with one `startswith` (memcmp), the place where two differ is
found in blocks, children are keyed by their first page as `bytes` (a 64-bit hash that the dict then verifies), and
nothing recurses or looks at single tokens.

How it stays small: a single child is merged into its parent as soon as nothing tells the two apart (`_try_merge`
has the rule). Every step ends with merging along the path it touched, since only there anything can have become equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from aradix.events import AllBlocksCleared, KVCacheEvent
from aradix.keys import TOKEN_BYTES, Namespace, RadixKey
from aradix.params import NodeRef
from aradix.tree.ledger import NO_SLOTS, Ledger
from aradix.tree.node import TreeNode, newest_ready
from aradix.tree.protocol import (
    NOWHERE,
    Closed,
    Detached,
    Freed,
    Gate,
    Inserted,
    Match,
    NodeView,
    Ready,
    Slots,
)

__all__ = ["RadixTree"]

_BLOCK_BYTES = 1 << 16
_NOTHING_STOPS = Gate.GRANTED + 1
_NO_MATCH = Match(0, 0, NOWHERE, 0, ())


class RadixTree(Ledger):
    """The Python core; `TreeCore` says what each method promises.

    Args:
        page_size: tokens a page.
        item_bytes: bytes of key a slot stands for: 4, or 8 for bigrams.
        policy: ranks the evictable leaves.
        evict_unit: `"page"` trims tails, `"node"` takes whole leaves and then never merges nodes either, so that a
            leaf is what was inserted.
        record_events: whether `take_events` has anything to tell.
    """

    name = "python"

    # ---- walking ----

    def match(self, key: RadixKey, *, limit: int | None = None, pin: bool = False, past_pending: bool = False) -> Match:
        root = self._roots.get(key.namespace)
        if root is None:
            if not pin:
                return _NO_MATCH
            root = self._new_root(key.namespace)
        node, child, size, gate = self._enter(key, root, self._stop(key, limit), past_pending)
        if gate:
            return Match(0, 0, NOWHERE, gate, ())
        if child is not None:
            node = self._split(child, size)
        if pin:
            self._lock(node)
        ready = self._touch(node)
        num_matched = node.depth // self._item_bytes
        node_id = self._merge_path(node)
        return Match(num_matched, node_id, NodeRef(node_id, num_matched) if num_matched else NOWHERE, 0, ready)

    def peek(self, key: RadixKey) -> int:
        root = self._roots.get(key.namespace)
        if root is None:
            return 0
        node, _, size, _ = self._descend(key, root, self._stop(key, None), _NOTHING_STOPS)
        return (node.depth + size) // self._item_bytes

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
        """Walk down from a node's end: (last whole node, child matched in part, by how many bytes, gate met)."""
        data, base, page_bytes = key.data, key.start, self._page_bytes
        while stop - node.depth >= page_bytes:
            begin = base + node.depth
            child = node.children.get(data[begin : begin + page_bytes])
            if child is None:
                break
            if child.gate >= stopped_by:
                return node, None, 0, child.node_id
            edge = child.tokens
            if len(edge) > stop - node.depth or not data.startswith(edge, begin):
                return node, child, self._common(edge, data, begin, stop - node.depth), 0
            node = child
        return node, None, 0, 0

    def _common(self, edge: bytearray, data: bytes, begin: int, limit: int) -> int:
        """How many bytes of whole pages an edge has in common with a key, found in blocks."""
        size = min(len(edge), limit)
        for done in range(0, size, _BLOCK_BYTES):
            count = min(_BLOCK_BYTES, size - done) // TOKEN_BYTES
            differ = np.frombuffer(edge, np.int32, count, done) != np.frombuffer(data, np.int32, count, begin + done)
            if differ.any():
                return (done + int(differ.argmax()) * TOKEN_BYTES) // self._page_bytes * self._page_bytes
        return size

    # ---- growing ----

    def insert(
        self,
        key: RadixKey,
        slots: Slots,
        *,
        priority: int = 0,
        ready: tuple[Ready, ...] = (),
        past_pending: bool = False,
    ) -> Inserted | int:
        stop = self._stop(key, None)
        root = self._roots.get(key.namespace) or self._new_root(key.namespace)
        node, child, size, gate = self._enter(key, root, stop, past_pending)
        if gate:
            return gate
        result, node = self._grow(root, key, slots, stop, (node, child, size), priority, ready)
        node_id = self._merge_path(node)
        self._prune(root)
        return result._replace(last=NodeRef(node_id, result.end) if result.end else NOWHERE)

    def extend(
        self, node_id: int, key: RadixKey, slots: Slots, *, priority: int = 0, ready: tuple[Ready, ...] = ()
    ) -> Inserted:
        origin = self._nodes[node_id]
        stop = self._stop(key, None)
        node, child, size, gate = self._descend(key, origin, stop)
        if gate:
            stop = node.depth
        result, node = self._grow(origin, key, slots, stop, (node, child, size), priority, ready)
        if node is not origin:
            self._lock(node)
            self._unlock(origin)
        node_id = self._merge_path(node)
        return result._replace(last=NodeRef(node_id, result.end) if result.end else NOWHERE, node_id=node_id)

    def _grow(
        self,
        origin: TreeNode,
        key: RadixKey,
        slots: Slots,
        stop: int,
        found: tuple[TreeNode, TreeNode | None, int],
        priority: int,
        ready: tuple[Ready, ...],
    ) -> tuple[Inserted, TreeNode]:
        """Add what is missing of a key below where its walk from `origin` ended; gives the node where it ends."""
        node, child, size = found
        if child is not None:
            node = self._split(child, size)
        held = node.depth
        known_ready: tuple[Ready, ...] = ()
        walked: TreeNode = node
        while walked is not origin:
            walked.hit_count += 1
            known_ready = newest_ready(known_ready, walked.ready)
            assert walked.parent is not None
            walked = walked.parent
        existing = self._slots_between(node, origin.depth, held)
        if held < stop:
            adopted = slots[(held - origin.depth) // self._item_bytes : (stop - origin.depth) // self._item_bytes]
            node = self._new_leaf(node, key.data[key.start + held : key.start + stop], adopted)
            node.ready = ready
            node.priority = priority
        above = node.parent if held < stop else node
        while above is not None:
            above.priority = max(above.priority, priority)
            above = above.parent
        self._touch(node)
        item = self._item_bytes
        return Inserted(held // item, node.depth // item, existing, NOWHERE, 0, known_ready), node

    # ---- pins ----

    def pin(self, ref: NodeRef) -> int:
        if ref.node_id == 0:
            return 0
        node = self._at(ref)
        depth = ref.depth * self._item_bytes
        if depth < node.depth:
            node = self._split(node, depth - node.depth + len(node.tokens))
        self._lock(node)
        return node.node_id

    def unpin(self, node_id: int, *, touch: bool = True) -> list[Freed]:
        if node_id == 0:
            return []
        node = self._nodes[node_id]
        if touch:
            self._touch(node)
        freed = self._unlock(node)
        if not node.detached:
            self._merge_path(node)
        return freed

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

    # ---- what is said of a path ----

    def record_hit(self, node_id: int) -> None:
        bottom = self._nodes[node_id]
        node: TreeNode | None = bottom
        while node is not None:
            node.hit_count += 1
            node = node.parent
        if not bottom.detached:
            self._refile(bottom)
            self._merge_path(bottom)

    def mark_streams(self, node_id: int, streams: frozenset[Hashable]) -> None:
        node: TreeNode | None = self._nodes[node_id]
        while node is not None:
            node.streams |= streams
            node = node.parent

    # ---- shrinking ----

    def evict(self, num_tokens: int) -> list[Freed]:
        freed: list[Freed] = []
        missing = num_tokens
        while missing > 0 and (leaf := self._least()) is not None:
            num_wanted = -(-missing // self.page_size) * self.page_size
            if self._whole_nodes or leaf.num_tokens <= num_wanted:
                missing -= leaf.num_tokens
                freed.append(Freed(leaf.slots_copy(), leaf.streams))
                self._record_removed(leaf, 0)
                self._remove_leaf(leaf)
            else:
                missing -= num_wanted
                freed.append(Freed(self._trim(leaf, num_wanted), leaf.streams))
        return freed

    def detach(self, namespace: Namespace | None = None) -> Detached:
        if namespace is None:
            roots = list(self._roots.values())
        else:
            roots = [self._roots[namespace]] if namespace in self._roots else []
        freed: list[Freed] = []
        num_freed = num_held = 0
        for node in [node for root in roots for node in self._preorder(root)]:
            if node.parent is None:
                del self._roots[node.namespace]
                if node.lock_ref:
                    self._detached_roots[node.node_id] = node
            else:
                self.num_nodes -= 1
                self._evictable.discard(node)
                if namespace is not None:
                    self._record_removed(node, 0)
            node.detached = True
            if node.lock_ref:
                num_held += node.num_tokens
                continue
            del self._nodes[node.node_id]
            if node.parent is not None:
                num_freed += node.num_tokens
                freed.append(Freed(node.slots_copy(), node.streams))
                if node.parent.lock_ref:
                    self._unlink(node)
        self.evictable_tokens -= num_freed
        self.protected_tokens -= num_held
        self.detached_tokens += num_held
        if namespace is None and self._events is not None:
            self._record(AllBlocksCleared())
        return Detached(freed, num_freed, num_held)

    # ---- gates ----

    def close_gate(self, key: RadixKey) -> Closed:
        root = self._roots.get(key.namespace) or self._new_root(key.namespace)
        stop = self._stop(key, None)
        node: TreeNode = root
        child: TreeNode | None = None
        size = 0
        if not root.gate:
            node, child, size, _ = self._descend(key, root, stop, _NOTHING_STOPS)
        above: TreeNode | None = child if child is not None else node
        while above is not None:
            if above.gate:
                return Closed(above.node_id, 0, True)
            above = above.parent
        if child is not None:
            node = self._split(child, size)
        node.gate = Gate.PENDING
        self._lock(node)
        return Closed(node.node_id, node.depth // self._item_bytes, False)

    def set_gate(self, node_id: int, gate: Gate) -> None:
        self._nodes[node_id].gate = gate

    def open_gate(self, node_id: int) -> list[Freed]:
        self._nodes[node_id].gate = Gate.NONE
        return self.unpin(node_id, touch=False)

    def pin_below(self, node_id: int) -> list[int]:
        leaves = [node for node in self._preorder(self._nodes[node_id]) if not node.children]
        for leaf in leaves:
            self._lock(leaf)
        return [leaf.node_id for leaf in leaves]

    def evict_below(self, node_id: int) -> list[Freed]:
        below = list(self._preorder(self._nodes[node_id]))[1:]
        freed = []
        for leaf in reversed(below):
            freed.append(Freed(leaf.slots_copy(), leaf.streams))
            self._record_removed(leaf, 0)
            self._remove_leaf(leaf, merge=False)
        return freed

    # ---- looking ----

    def slots_of(self, ref: NodeRef, start: int = 0) -> Slots:
        if ref.node_id == 0:
            return NO_SLOTS
        return self._slots_between(self._at(ref), start * self._item_bytes, ref.depth * self._item_bytes)

    def _slots_between(self, node: TreeNode, start: int, stop: int) -> Slots:
        """The slots from byte `start` to byte `stop` of a path: a copy."""
        parts = []
        while node.parent is not None and node.depth > start:
            begin = node.depth - len(node.tokens)
            slots = np.frombuffer(node.slots, np.int64)
            parts.append(slots[max(0, start - begin) // self._item_bytes : (stop - begin) // self._item_bytes])
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else NO_SLOTS

    def is_detached(self, node_id: int) -> bool:
        return node_id != 0 and self._nodes[node_id].detached

    def lock_ref(self, node_id: int) -> int:
        return self._nodes[node_id].lock_ref

    def is_below(self, node_id: int, ancestor_id: int) -> bool:
        node: TreeNode | None = self._nodes.get(node_id)
        while node is not None and node.node_id != ancestor_id:
            node = node.parent
        return node is not None

    @property
    def num_namespaces(self) -> int:
        return len(self._roots)

    def take_events(self) -> list[KVCacheEvent]:
        if not self._events:
            return []
        taken, self._events = self._events, []
        return taken

    def walk(self, *, detached: bool = False) -> Iterator[NodeView]:
        item = self._item_bytes
        roots = list(self._detached_roots.values() if detached else self._roots.values())
        for root in roots:
            for node in self._preorder(root):
                yield NodeView(
                    node_id=node.node_id,
                    parent_id=node.parent.node_id if node.parent is not None else 0,
                    namespace=node.namespace,
                    depth=node.depth // item,
                    num_tokens=node.num_tokens,
                    tokens=bytes(node.tokens),
                    slots=node.slots_copy() if node.slots else NO_SLOTS,
                    lock_ref=node.lock_ref,
                    gate=node.gate,
                    detached=node.detached,
                    hit_count=node.hit_count,
                    priority=node.priority,
                    last_access=node.last_access,
                    created=node.created,
                    num_children=len(node.children),
                    indexed=node in self._evictable,
                    state=self._state(node),
                    hashes=node.hashes,
                )
