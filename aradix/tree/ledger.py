"""`Ledger`: the nodes of a tree, and the counters, the index and the events that must always agree with them.

The steps in `radix_tree.py` decide; whatever makes, splits, pins, merges or removes a node happens here, once, with
all that follows from it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from aradix.events import BlockRemoved, BlockStored, KVCacheEvent
from aradix.keys import TOKEN_BYTES, Namespace, extend_hash_chain
from aradix.policies import LRU, EvictionPolicy, state_reader
from aradix.tree.evictable import EvictableIndex
from aradix.tree.node import TreeNode, newest_ready
from aradix.tree.protocol import Freed, Ready, Slots

__all__ = ["NO_SLOTS", "Ledger"]

NO_SLOTS: Slots = np.empty(0, np.int64)


class Ledger:
    """The state of the Python core. `RadixTree` explains the arguments."""

    def __init__(
        self,
        page_size: int = 1,
        item_bytes: int = TOKEN_BYTES,
        policy: EvictionPolicy | None = None,
        evict_unit: Literal["page", "node"] = "page",
        record_events: bool = False,
    ) -> None:
        self.page_size = page_size
        self.failure: BaseException | None = None
        self.on_event: Callable[[], None] | None = None
        self.version = 0
        self.evictable_tokens = 0
        self.protected_tokens = 0
        self.detached_tokens = 0
        self.num_nodes = 0
        self._item_bytes = item_bytes
        self._page_bytes = page_size * item_bytes
        self._policy: EvictionPolicy = policy or LRU()
        self._state_of = state_reader(self._policy)
        self._whole_nodes = evict_unit == "node"
        self.merges = not self._whole_nodes
        self._events: list[KVCacheEvent] | None = [] if record_events else None
        self._tick = 0
        self._last_id = 0
        self._roots: dict[Namespace, TreeNode] = {}
        self._detached_roots: dict[int, TreeNode] = {}
        self._nodes: dict[int, TreeNode] = {}
        self._evictable = EvictableIndex()

    # ---- making and unmaking nodes ----

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _new_root(self, namespace: Namespace) -> TreeNode:
        root = TreeNode(self._new_id(), None, namespace, b"", NO_SLOTS)
        self._roots[namespace] = self._nodes[root.node_id] = root
        return root

    def _new_leaf(self, parent: TreeNode, tokens: bytes, slots: Slots) -> TreeNode:
        leaf = TreeNode(self._new_id(), parent, parent.namespace, tokens, slots)
        leaf.created = self._tick + 1
        parent.children[tokens[: self._page_bytes]] = leaf
        self._nodes[leaf.node_id] = leaf
        self.num_nodes += 1
        self.version += 1
        self.evictable_tokens += leaf.num_tokens
        self._evictable.discard(parent)
        if self._events is not None:
            self._record_stored(leaf)
        return leaf

    def _split(self, child: TreeNode, size: int) -> TreeNode:
        head = child.split_head(self._new_id(), size, size // self._item_bytes, self._page_bytes)
        self._nodes[head.node_id] = head
        self.num_nodes += not head.detached
        self._refile(child)  # it is smaller now, which a policy may look at
        return head

    def _unlink(self, node: TreeNode) -> TreeNode:
        """Take a node out of its parent's children; gives the parent."""
        parent = node.parent
        assert parent is not None
        del parent.children[bytes(node.tokens[: self._page_bytes])]
        node.parent = None
        return parent

    def _remove_leaf(self, leaf: TreeNode, merge: bool = True) -> None:
        self._evictable.discard(leaf)
        self.evictable_tokens -= leaf.num_tokens
        self.num_nodes -= 1
        del self._nodes[leaf.node_id]
        parent = self._unlink(leaf)
        if parent.parent is None:
            self._prune(parent)
        elif not parent.children:
            self._refile(parent)
        elif len(parent.children) == 1 and merge and self.merges:
            self._try_merge(parent)

    def _trim(self, leaf: TreeNode, num_tokens: int) -> Slots:
        self._record_removed(leaf, (leaf.num_tokens - num_tokens) // self.page_size)
        self._evictable.discard(leaf)
        del self._nodes[leaf.node_id]
        slots = leaf.trim_tail(self._new_id(), num_tokens, num_tokens * self._item_bytes, self._page_bytes)
        self._nodes[leaf.node_id] = leaf
        self.evictable_tokens -= num_tokens
        self._refile(leaf)
        return slots

    def _prune(self, root: TreeNode) -> None:
        """Forget the root of an empty namespace that nobody stands on."""
        if root.parent is None and not root.children and root.lock_ref == 0 and not root.detached:
            del self._roots[root.namespace]
            del self._nodes[root.node_id]

    def _drop_detached(self, node: TreeNode) -> list[Freed]:
        del self._nodes[node.node_id]
        if node.parent is None:
            del self._detached_roots[node.node_id]
            return []
        self._unlink(node)
        self.detached_tokens -= node.num_tokens
        return [Freed(node.slots_copy(), node.streams)]

    @staticmethod
    def _preorder(top: TreeNode) -> Iterator[TreeNode]:
        stack = [top]
        while stack:
            node = stack.pop()
            children = list(node.children.values())
            yield node
            stack.extend(reversed(children))

    # ---- pins and the counters that follow them ----

    def _lock(self, bottom: TreeNode) -> None:
        self._evictable.discard(bottom)
        node: TreeNode | None = bottom
        while node is not None:
            if node.lock_ref == 0:
                self.evictable_tokens -= node.num_tokens
                self.protected_tokens += node.num_tokens
            node.lock_ref += 1
            node = node.parent

    def _unlock(self, bottom: TreeNode) -> list[Freed]:
        freed = []
        node: TreeNode | None = bottom
        while node is not None:
            above = node.parent
            node.lock_ref -= 1
            if node.lock_ref == 0:
                if node.detached:
                    freed.extend(self._drop_detached(node))
                else:
                    self.protected_tokens -= node.num_tokens
                    self.evictable_tokens += node.num_tokens
                    self._refile(node)
                    self._prune(node)
            node = above
        return freed

    # ---- what the policy ranks ----

    def _touch(self, bottom: TreeNode) -> tuple[Ready, ...]:
        """Make a whole path the most recent; gives its ready events."""
        self._tick += 1
        ready: tuple[Ready, ...] = ()
        node: TreeNode | None = bottom
        while node is not None:
            node.last_access = self._tick
            if node.ready:
                ready = newest_ready(ready, node.ready)
            node = node.parent
        self._refile(bottom)
        return ready

    def _refile(self, node: TreeNode) -> None:
        """Put a node into the index of evictable leaves, under its rank of now, or take it out."""
        if node.children or node.lock_ref or node.detached or node.parent is None:
            self._evictable.discard(node)
            return
        try:
            self._evictable.put(node, self._policy.rank(node))
        except Exception as error:
            self._policy_failed(error)
            self._evictable.put(node, self._policy.rank(node))

    def _least(self) -> TreeNode | None:
        try:
            return self._evictable.least()
        except Exception as error:
            self._policy_failed(error)
            return self._evictable.least()

    def _policy_failed(self, error: Exception) -> None:
        """A user's policy raised in the middle of a step: finish the step, and all later ones, by recency."""
        # Kept for the cache's life, the frames of the traceback would keep their callers' leases alive: keep its text.
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
        self.failure = error.with_traceback(None)
        self._policy = LRU()
        self._state_of = self._policy.rank
        self.merges = False  # what the old policy told apart may be equal now, all over the tree
        self._evictable.refile(self._policy.rank)

    def _state(self, node: TreeNode) -> Any:
        try:
            return self._state_of(node)
        except Exception as error:
            self._policy_failed(error)
            return self._state_of(node)

    # ---- merging ----

    def _merge_path(self, bottom: TreeNode) -> int:
        """Merge what became equal at a node and on the path above it; the id that names its end then."""
        if not self.merges:
            return bottom.node_id
        if bottom.parent is not None and len(bottom.children) == 1:
            self._try_merge(bottom)
        holder = node = bottom
        while (parent := node.parent) is not None and parent.parent is not None:
            if len(parent.children) == 1 and self._try_merge(parent) and node is holder:
                holder = parent
            node = parent
        return holder.node_id

    def _try_merge(self, parent: TreeNode) -> bool:
        """Merge an only child into its parent, if lock_ref and the policy's state are equal and neither has a gate."""
        (child,) = parent.children.values()
        if parent.lock_ref != child.lock_ref or parent.gate or child.gate:
            return False
        if not self._are_equal(parent, child):
            return False
        del self._nodes[parent.node_id]
        self._evictable.discard(child)
        parent.absorb_child(child)
        self._nodes[parent.node_id] = parent
        self.num_nodes -= 1
        self._refile(parent)
        return True

    def _are_equal(self, parent: TreeNode, child: TreeNode) -> bool:
        """Whether the policy will never tell the two apart."""
        try:
            return self.merges and bool(self._state_of(parent) == self._state_of(child))
        except Exception as error:
            self._policy_failed(error)
            return False

    # ---- events ----

    def _record_stored(self, leaf: TreeNode) -> None:
        assert self._events is not None
        assert leaf.parent is not None
        parent_hash = leaf.parent.hashes[-1] if leaf.parent.hashes else None
        leaf.hashes = extend_hash_chain(parent_hash or leaf.namespace.digest(), leaf.tokens, self._page_bytes)
        ids = np.frombuffer(bytes(leaf.tokens), np.int32)
        if self._item_bytes != TOKEN_BYTES:
            ids = np.append(ids[::2], ids[-1])
        stored = BlockStored(list(leaf.hashes), parent_hash, ids.tolist(), self.page_size, leaf.namespace)
        self._record(stored)

    def _record_removed(self, node: TreeNode, first_page: int) -> None:
        if self._events is not None and node.hashes:
            self._record(BlockRemoved(node.hashes[first_page:]))

    def _record(self, event: KVCacheEvent) -> None:
        assert self._events is not None
        self._events.append(event)
        if len(self._events) == 1 and self.on_event is not None:
            self.on_event()
