"""`RadixTree`: the reference core, in Python. Short and obviously right before it is fast.

How it stays small: a single child is merged into its parent as soon as nothing tells the two apart (`_try_merge`
has the rule). Every step ends with merging along the path it touched, since only there anything can have become equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from aradix.events import DEVICE_MEDIUM, HOST_MEDIUM, AllBlocksCleared, KVCacheEvent
from aradix.keys import Namespace, RadixKey
from aradix.params import NodeRef
from aradix.tree.keeping import KeepingSteps
from aradix.tree.node import TreeNode, newest_ready
from aradix.tree.protocol import (
    NO_SLOTS,
    NOWHERE,
    Closed,
    Detached,
    Freed,
    Gate,
    Glance,
    Inserted,
    Latch,
    Match,
    NodeView,
    Ready,
    Slots,
)
from aradix.tree.walking import NOTHING_STOPS

__all__ = ["RadixTree"]

_SHOWN_ITEMS = 8
"""Tokens or bigrams of a node that a glance shows."""

_NO_MATCH = Match(0, 0, NOWHERE, 0, ())


class RadixTree(KeepingSteps):
    """The Python core; `TreeCore` says what each method promises, and `TieredCore` of those in `tier_steps.py`.

    Args:
        page_size: tokens a page.
        item_bytes: bytes of key a slot stands for: 4, or 8 for bigrams.
        policy: ranks the evictable leaves.
        evict_unit: `"page"` trims tails, `"node"` takes whole leaves and then never merges nodes either, so that a
            leaf is what was inserted.
        record_events: whether `take_events` has anything to tell.
        backup_hits: the hits that tokens need to be due for a store on the host; `None` is never.
        shares: tenants and the tokens each has a claim on, the last one standing for all others; none: no claims.
        merge: whether neighbours that became equal are made one; without it a node keeps its id until it is trimmed.
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
        if child is None and node.num_host_only:
            return self._match_on_host(key, node, self._stop(key, limit))
        ready = self._touch(node)
        num_matched = node.depth // self._item_bytes
        node_id = self._merge_path(node)
        last = NodeRef(node_id, num_matched) if num_matched else NOWHERE
        return Match(num_matched, node_id, last, 0, ready, 0, last)

    def peek(self, key: RadixKey) -> int:
        root = self._roots.get(key.namespace)
        if root is None:
            return 0
        node, _, size, _ = self._descend(key, root, self._stop(key, None), NOTHING_STOPS)
        return (node.depth + size) // self._item_bytes

    # ---- growing ----

    def insert(
        self,
        key: RadixKey,
        slots: Slots,
        *,
        priority: int = 0,
        ready: tuple[Ready, ...] = (),
        past_pending: bool = False,
        held_hits: int = 1,
        new_hits: int = 0,
    ) -> Inserted | int:
        stop = self._stop(key, None)
        root = self._roots.get(key.namespace) or self._new_root(key.namespace)
        node, child, size, gate = self._enter(key, root, stop, past_pending)
        if gate:
            return gate
        hits = held_hits, new_hits
        result, node = self._grow(root, key, slots, stop, (node, child, size), priority, ready, hits)
        node_id = self._merge_path(node)
        if self._backup_hits is not None:
            self._note_due(self._nodes[node_id])
        self._prune(root)
        return result._replace(last=NodeRef(node_id, result.end) if result.end else NOWHERE)

    def extend(
        self, node_id: int, key: RadixKey, slots: Slots, *, priority: int = 0, ready: tuple[Ready, ...] = ()
    ) -> Inserted | None:
        origin = self._nodes[node_id]
        if origin.detached:
            return None
        stop = self._stop(key, None)
        node, child, size, gate = self._descend(key, origin, stop)
        if gate:
            stop = node.depth
        result, node = self._grow(origin, key, slots, stop, (node, child, size), priority, ready)
        if node is not origin:
            self._lock(node)
            self._unlock(origin)
        node_id = self._merge_path(node)
        if self._backup_hits is not None:
            self._note_due(self._nodes[node_id])
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
        hits: tuple[int, int] = (1, 0),
    ) -> tuple[Inserted, TreeNode]:
        """Add what is missing of a key below where its walk from `origin` ended; gives the node where it ends."""
        node, child, size = found
        if child is not None:
            node = self._split(child, size)
        held = node.depth
        known_ready: tuple[Ready, ...] = ()
        walked: TreeNode = node
        while walked is not origin:
            self._hit(walked, hits[0])
            known_ready = newest_ready(known_ready, walked.ready)
            assert walked.parent is not None
            walked = walked.parent
        existing = self._slots_between(node, origin.depth, held)
        if node.num_host_only:
            node = self._promote_along(key, node, stop, slots, origin.depth, ready)
        if node.depth < stop:
            first, last = node.depth, stop
            adopted = slots[(first - origin.depth) // self._item_bytes : (last - origin.depth) // self._item_bytes]
            node = self._new_leaf(node, key.data[key.start + first : key.start + last], adopted)
            node.ready = ready
            node.priority = priority
            node.hit_count = hits[1]
            self._recall(node)
        above: TreeNode | None = node
        while above is not None:
            if above.timed is None:
                above.priority = max(above.priority, priority)
            else:
                above.timed = above.timed[0], max(above.timed[1], priority)
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
        if not node.on_device:
            raise KeyError(ref)
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

    # ---- what is said of a path ----

    def record_hit(self, node_id: int) -> None:
        bottom = self._nodes[node_id]
        node: TreeNode | None = bottom
        while node is not None:
            self._hit(node)
            node = node.parent
        if not bottom.detached:
            self._refile(bottom)
            node_id = self._merge_path(bottom)
            if self._backup_hits is not None:
                self._note_due(self._nodes[node_id])

    def mark_streams(self, node_id: int, streams: frozenset[Hashable]) -> None:
        node: TreeNode | None = self._nodes[node_id]
        while node is not None:
            node.streams |= streams
            node = node.parent

    # ---- shrinking ----

    def detach(self, namespace: Namespace | None = None) -> Detached:
        if namespace is None:
            roots = list(self._roots.values())
        else:
            roots = [self._roots[namespace]] if namespace in self._roots else []
        freed: list[Freed] = []
        evictable, protected = self.evictable_tokens, self.protected_tokens
        for node in [node for root in roots for node in self._preorder(root)]:
            if namespace is not None:
                self._record_removed(node, 0, DEVICE_MEDIUM)
                self._record_removed(node, 0, HOST_MEDIUM)
            freed.extend(self._detach_node(node))
        if namespace is None and self._events is not None:
            self._record(AllBlocksCleared())
        return Detached(freed, evictable - self.evictable_tokens, protected - self.protected_tokens)

    # ---- gates ----

    def close_gate(self, key: RadixKey) -> Closed:
        root = self._roots.get(key.namespace) or self._new_root(key.namespace)
        stop = self._stop(key, None)
        node: TreeNode = root
        child: TreeNode | None = None
        size = 0
        if not root.gate:
            node, child, size, _ = self._descend(key, root, stop, NOTHING_STOPS)
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
        nodes = self._preorder(self._nodes[node_id])
        leaves = [node for node in nodes if node.on_device and node.is_device_leaf]
        for leaf in leaves:
            self._lock(leaf)
        return [leaf.node_id for leaf in leaves]

    def evict_below(self, node_id: int) -> list[Freed]:
        below = list(self._preorder(self._nodes[node_id]))[1:]
        freed = []
        for leaf in reversed(below):
            if not leaf.host_ref:
                freed.append(self._remove_leaf(leaf, merge=False))
            elif leaf.slots:
                freed.append(self._demote(leaf))
            else:
                continue
            if self._shares is not None:
                self._shares.of(leaf.namespace).evicted += len(freed[-1].slots)
        return freed

    # ---- looking ----

    def slots_of(self, ref: NodeRef, start: int = 0) -> Slots:
        if ref.node_id == 0:
            return NO_SLOTS.copy()  # the caller's to write, as every answer here
        node = self._at(ref)
        if not node.on_device:
            raise KeyError(ref)
        return self._slots_between(node, start * self._item_bytes, ref.depth * self._item_bytes)

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

    def namespaces(self) -> list[Namespace]:
        return list(self._roots)

    def take_events(self) -> list[KVCacheEvent]:
        if not self._events:
            return []
        taken, self._events = self._events, []
        return taken

    def take_recorded(self) -> list[KVCacheEvent]:
        return self.take_events()

    def view(self, node_id: int) -> NodeView:
        return self._view(self._nodes[node_id])

    def child_ids(self, node_id: int) -> list[int]:
        nodes = self._nodes[node_id].children if node_id else self._roots
        return [node.node_id for node in nodes.values()]

    @property
    def tick(self) -> int:
        return self._tick

    def roots(self) -> list[int]:
        return [root.node_id for root in self._roots.values()]

    def glance(self, node_id: int, *, children: bool = True) -> Glance | None:
        node = self._nodes.get(node_id)
        if node is None:
            return None
        return Glance(
            node_id=node_id,
            parent_id=node.parent.node_id if node.parent is not None else 0,
            namespace=node.namespace,
            depth=node.depth // self._item_bytes,
            num_tokens=node.num_tokens,
            first_tokens=bytes(node.tokens[: _SHOWN_ITEMS * self._item_bytes]),
            lock_ref=node.lock_ref,
            gate=node.gate,
            latch=node.job.latch if node.job is not None else Latch.NONE,
            residency="device" if node.host is None else "both" if node.slots else "host",
            detached=node.detached,
            hit_count=node.hit_count,
            priority=node.priority,
            last_access=node.last_access,
            created=node.created,
            children=[child.node_id for child in node.children.values()] if children else [],
        )

    def look(self, key: RadixKey) -> list[int]:
        root = self._roots.get(key.namespace)
        if root is None:
            return []
        node, child, size, _ = self._descend(key, root, self._stop(key, None), NOTHING_STOPS)
        path = [] if child is None or not size else [child.node_id]
        above: TreeNode | None = node
        while above is not None:
            path.append(above.node_id)
            above = above.parent
        return path[::-1]

    def next_victim(self) -> int:
        leaf = self._least(self._evictable)
        return 0 if leaf is None else leaf.node_id

    def walk(self, *, detached: bool = False) -> Iterator[NodeView]:
        for root in list(self._detached_roots.values() if detached else self._roots.values()):
            for node in self._preorder(root):
                yield self._view(node)

    def _view(self, node: TreeNode) -> NodeView:
        return NodeView(
            node_id=node.node_id,
            parent_id=node.parent.node_id if node.parent is not None else 0,
            namespace=node.namespace,
            depth=node.depth // self._item_bytes,
            num_tokens=node.num_tokens,
            tokens=bytes(node.tokens),
            slots=node.slots_copy() if node.slots else NO_SLOTS,
            host_slots=node.host_copy() if node.host is not None else None,
            host_ref=node.host_ref,
            latch=node.job.latch if node.job is not None else Latch.NONE,
            host_indexed=node in self._host_evictable,
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
            timed=node.timed,
        )
