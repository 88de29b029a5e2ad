"""`Ledger`: the nodes of a tree, and the counters, the index and the events that must always agree with them.

The steps in `radix_tree.py` decide; whatever makes, splits, pins, merges or removes a node happens here, once, with
all that follows from it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from aradix.events import DEVICE_MEDIUM, HOST_MEDIUM, BlockRemoved, BlockStored, KVCacheEvent, event_tokens
from aradix.keys import TOKEN_BYTES, Namespace, extend_hash_chain
from aradix.policies import LRU, EvictionPolicy, Tenure, looks_at_priority, state_reader
from aradix.tree.evictable import EvictableIndex
from aradix.tree.node import TreeNode, newest_ready
from aradix.tree.protocol import NO_SLOTS, Freed, Ready, Slots
from aradix.tree.reuse import ReuseRecord, seed_of
from aradix.tree.shares import SharedIndex

__all__ = ["Ledger"]


class Ledger:
    """The state of the Python core. `RadixTree` explains the arguments."""

    def __init__(
        self,
        page_size: int = 1,
        item_bytes: int = TOKEN_BYTES,
        policy: EvictionPolicy | None = None,
        evict_unit: Literal["page", "node"] = "page",
        record_events: bool = False,
        backup_hits: int | None = None,
        shares: Sequence[tuple[str | int | None, int]] = (),
        merge: bool = True,
    ) -> None:
        self.page_size = page_size
        self.failure: BaseException | None = None
        self.on_event: Callable[[], None] | None = None
        self.version = 0
        self.evictable_tokens = 0
        self.protected_tokens = 0
        self.detached_tokens = 0
        self.num_nodes = 0
        self.host_tokens = 0
        self.host_evictable_tokens = 0
        self.detached_host_tokens = 0
        self._item_bytes = item_bytes
        self._page_bytes = page_size * item_bytes
        self._reuse = ReuseRecord(page_size, self._page_bytes) if isinstance(policy, Tenure) else None
        self._policy: EvictionPolicy = self._reuse or policy or LRU()
        self._state_of = state_reader(self._policy)
        self._has_priorities = looks_at_priority(policy or LRU())
        self._whole_nodes = evict_unit == "node"
        self.merges = merge and not self._whole_nodes
        self._events: list[KVCacheEvent] | None = [] if record_events else None
        self._tick = 0
        self._last_id = 0
        self._roots: dict[Namespace, TreeNode] = {}
        self._detached_roots: dict[int, TreeNode] = {}
        self._nodes: dict[int, TreeNode] = {}
        self._shares = SharedIndex(shares) if shares else None
        self._evictable = EvictableIndex() if self._shares is None else self._shares
        self._timed = EvictableIndex()  # what has a priority for a time, by when that ends
        self._host_evictable = EvictableIndex()
        self._backup_hits = backup_hits
        self._due: dict[int, None] = {}
        self._tiered = False

    @property
    def stay(self) -> int:
        return self._reuse.stay if self._reuse is not None else 0

    def _note_capacity(self, num_wanted: int) -> None:
        """So many tokens have to go from the device: what is there now is what fits."""
        if self._reuse is not None and num_wanted > 0:
            self._reuse.note_capacity(self.evictable_tokens + self.protected_tokens)

    # ---- making and unmaking nodes ----

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _new_root(self, namespace: Namespace) -> TreeNode:
        root = TreeNode(self._new_id(), None, namespace, b"", NO_SLOTS)
        self._roots[namespace] = self._nodes[root.node_id] = root
        if self._reuse is not None:
            root.fingerprint = seed_of(namespace)
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
        self._count_share(leaf, leaf.num_tokens)
        self._record_stored(leaf, DEVICE_MEDIUM)
        return leaf

    def _split(self, child: TreeNode, size: int) -> TreeNode:
        head = child.split_head(self._new_id(), size, size // self._item_bytes, self._page_bytes)
        self._nodes[head.node_id] = head
        self.num_nodes += not head.detached
        if self._reuse is not None:
            self._reuse.split(head, child)
        if head.timed is not None:
            self._timed.put(head, head.timed[0])
        self._refile(child)  # it is smaller now, which a policy may look at
        return head

    def _unlink(self, node: TreeNode) -> TreeNode:
        """Take a node out of its parent's children; gives the parent."""
        parent = node.parent
        assert parent is not None
        del parent.children[bytes(node.tokens[: self._page_bytes])]
        parent.num_host_only -= not node.slots
        node.parent = None
        return parent

    def _remove_leaf(self, leaf: TreeNode, merge: bool = True) -> Freed:
        """Take out a node with nothing below it, from whatever tiers it is on; gives what it owned."""
        freed = Freed(leaf.slots_copy(), leaf.streams, leaf.host_copy())
        self._record_removed(leaf, 0, DEVICE_MEDIUM)
        self._record_removed(leaf, 0, HOST_MEDIUM)
        if self._reuse is not None:
            self._reuse.leave(leaf, leaf.num_tokens)
        if leaf.slots:
            self._evictable.discard(leaf)
            self.evictable_tokens -= leaf.num_tokens
            self._count_share(leaf, -leaf.num_tokens)
        self._untime(leaf)
        if leaf.host is not None:
            self.host_tokens -= leaf.num_tokens
            if not leaf.slots:
                self._host_evictable.discard(leaf)
                self.host_evictable_tokens -= leaf.num_tokens
        self.num_nodes -= 1
        del self._nodes[leaf.node_id]
        parent = self._unlink(leaf)
        if parent.parent is None:
            self._prune(parent)
            return freed
        if parent.is_device_leaf:
            self._refile(parent)
        if len(parent.children) == 1 and merge and self.merges:
            self._try_merge(parent)
        return freed

    def _trim(self, leaf: TreeNode, num_tokens: int) -> Slots:
        """Cut the tail off a leaf that is on one tier alone; gives the tail's slots there."""
        first_page = (leaf.num_tokens - num_tokens) // self.page_size
        self._record_removed(leaf, first_page, DEVICE_MEDIUM if leaf.slots else HOST_MEDIUM)
        if self._reuse is not None:
            self._reuse.leave(leaf, num_tokens)
        old_id = leaf.node_id
        self._evictable.discard(leaf)
        self._host_evictable.discard(leaf)
        slots = leaf.trim_tail(self._new_id(), num_tokens, num_tokens * self._item_bytes, self._page_bytes)
        self._rename(leaf, old_id)
        if leaf.slots:
            self.evictable_tokens -= num_tokens
            self._count_share(leaf, -num_tokens)
        else:
            self.host_tokens -= num_tokens
            self.host_evictable_tokens -= num_tokens
        self._refile(leaf)
        return slots

    def _rename(self, node: TreeNode, old_id: int) -> None:
        """Find a node under its new id, and no longer under the old one."""
        del self._nodes[old_id]
        self._nodes[node.node_id] = node
        if self._backup_hits is not None:
            self._move_due(old_id, node.node_id)

    def _move_due(self, old_id: int, new_id: int) -> None:
        """What was due under an id that is no more is due under another."""
        if old_id in self._due:
            del self._due[old_id]
            self._due[new_id] = None

    def _prune(self, root: TreeNode) -> None:
        """Forget the root of an empty namespace that nobody stands on."""
        if root.parent is None and not root.children and root.lock_ref == 0 and not root.detached:
            del self._roots[root.namespace]
            del self._nodes[root.node_id]

    def _detach_node(self, node: TreeNode) -> list[Freed]:
        """Make a node unmatchable, its parent before it; gives what nobody holds. The rest stays for now."""
        if node.parent is None:
            del self._roots[node.namespace]
            if node.lock_ref or node.host_ref:
                self._detached_roots[node.node_id] = node
        else:
            self.num_nodes -= 1
            if self._reuse is not None:
                self._reuse.drop(node)
            self._evictable.discard(node)
            self._host_evictable.discard(node)
            self._untime(node)
            if node.host is not None:
                self.host_tokens -= node.num_tokens
                self.detached_host_tokens += node.num_tokens
                if not node.slots and not node.host_ref:
                    self.host_evictable_tokens -= node.num_tokens
            if node.lock_ref:
                self.protected_tokens -= len(node.slots)
            else:
                self.evictable_tokens -= len(node.slots)
            self.detached_tokens += len(node.slots)
        node.detached = True
        if node.parent is None:
            if not node.lock_ref and not node.host_ref:
                del self._nodes[node.node_id]
            return []
        return self._drop_detached(node)

    def _drop_detached(self, node: TreeNode) -> list[Freed]:
        """Give up what a flushed node owns on the tiers on which nobody holds it now, and the node with the last."""
        slots = host_slots = NO_SLOTS
        streams = node.streams
        if node.slots and node.lock_ref == 0:
            slots = node.leave_device()
            self.detached_tokens -= len(slots)
            self._count_share(node, -len(slots))
        if node.host is not None and node.host_ref == 0:
            host_slots, node.host = node.host_copy(), None
            self.detached_host_tokens -= len(host_slots)
        if node.lock_ref == 0 and node.host_ref == 0:
            del self._nodes[node.node_id]
            if node.parent is None:
                del self._detached_roots[node.node_id]
            else:
                self._unlink(node)
        return [Freed(slots, streams, host_slots)] if len(slots) or len(host_slots) else []

    @staticmethod
    def _preorder(top: TreeNode) -> Iterator[TreeNode]:
        stack = [top]
        while stack:
            node = stack.pop()
            children = list(node.children.values())
            yield node
            stack.extend(reversed(children))

    # ---- what follows a node about ----

    def _count_share(self, node: TreeNode, num_tokens: int) -> None:
        """So many more tokens of a node (fewer, below 0) are on the device."""
        if self._shares is not None:
            self._shares.cached(node.namespace, num_tokens)

    def _untime(self, node: TreeNode) -> None:
        """A priority that was given for a time has none any more."""
        if node.timed is not None:
            node.timed = None
            self._timed.discard(node)

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
        if self._reuse is not None and self._reuse.advance(self._tick):
            self._evictable.refile(self._reuse.rank)
            self._host_evictable.refile(self._reuse.rank)
        ready: tuple[Ready, ...] = ()
        node: TreeNode | None = bottom
        while node is not None:
            node.last_access = self._tick
            if node.ready:
                ready = newest_ready(ready, node.ready)
            node = node.parent
        self._refile(bottom)
        if self._tiered and not bottom.on_device:
            self._refile(self._device_end(bottom))
        return ready

    def _hit(self, node: TreeNode, num_hits: int = 1) -> None:
        if self._reuse is not None:
            self._reuse.hit(node, num_hits, self._tick)
        node.hit_count += num_hits

    def _recall(self, leaf: TreeNode) -> None:
        """Give a new leaf the uses that are known of its tokens; parts of it that differ become nodes of their own."""
        if self._reuse is None:
            return
        runs = self._reuse.welcome(leaf, self._tick)
        for num_tokens, uses in runs[:-1]:
            self._split(leaf, num_tokens * self._item_bytes).past_uses = uses
        leaf.past_uses = runs[-1][1]

    @staticmethod
    def _device_end(node: TreeNode) -> TreeNode:
        """The nearest node on a path that is on the device, perhaps a leaf there."""
        while not node.on_device:
            assert node.parent is not None
            node = node.parent
        return node

    def _refile(self, node: TreeNode) -> None:
        """Put a node into the index of its tier's evictable leaves, under its rank of now, or take it out."""
        index = self._evictable if node.slots or node.parent is None else self._host_evictable
        # On the host alone there are no pins and no children but such, on the device no holds that count.
        if (
            len(node.children) != (node.num_host_only if node.slots else 0)
            or node.lock_ref
            or node.detached
            or node.parent is None
            or (node.host_ref and not node.slots)
        ):
            index.discard(node)
            return
        try:
            index.put(node, self._policy.rank(node))
        except Exception as error:
            self._policy_failed(error)
            index.put(node, self._policy.rank(node))

    def _least(self, index: EvictableIndex | SharedIndex) -> TreeNode | None:
        try:
            return index.least()
        except Exception as error:
            self._policy_failed(error)
            return index.least()

    def _policy_failed(self, error: Exception) -> None:
        """A user's policy raised in the middle of a step: finish the step, and all later ones, by recency."""
        # Kept for the cache's life, the frames of the traceback would keep their callers' leases alive: keep its text.
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
        self.failure = error.with_traceback(None)
        self._policy = LRU()
        self._state_of = self._policy.rank
        self.merges = False  # what the old policy told apart may be equal now, all over the tree
        self._evictable.refile(self._policy.rank)
        self._host_evictable.refile(self._policy.rank)

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
        """Merge an only child into its parent, if lock_ref, tiers and the policy's state are equal, and no gate, latch
        or hold on the host tells them apart."""
        (child,) = parent.children.values()
        if parent.lock_ref != child.lock_ref or parent.gate or child.gate or parent.timed != child.timed:
            return False
        if self._tiered and not self._may_share_tiers(parent, child):
            return False
        if not self._are_equal(parent, child):
            return False
        old_id = parent.node_id
        self._evictable.discard(child)
        self._host_evictable.discard(child)
        if self._reuse is not None:
            self._reuse.merge(parent, child)
        if child.timed is not None:
            self._timed.discard(child)
        parent.absorb_child(child)
        if parent.timed is not None:
            self._timed.put(parent, parent.timed[0])
        self._rename(parent, old_id)
        self.num_nodes -= 1
        self._refile(parent)
        return True

    @staticmethod
    def _may_share_tiers(parent: TreeNode, child: TreeNode) -> bool:
        """Whether two neighbours are on the same tiers, and in the hands of no job there."""
        return (
            bool(parent.slots) == bool(child.slots)
            and (parent.host is None) == (child.host is None)
            and parent.job is None
            and child.job is None
            and not parent.host_ref
            and not child.host_ref
        )

    def _are_equal(self, parent: TreeNode, child: TreeNode) -> bool:
        """Whether the policy will never tell the two apart."""
        try:
            return self.merges and bool(self._state_of(parent) == self._state_of(child))
        except Exception as error:
            self._policy_failed(error)
            return False

    # ---- events ----

    def _record_stored(self, node: TreeNode, medium: str) -> None:
        if self._events is None:
            return
        assert node.parent is not None
        parent_hash = node.parent.hashes[-1] if node.parent.hashes else None
        if node.hashes is None:
            node.hashes = extend_hash_chain(parent_hash or node.namespace.digest(), node.tokens, self._page_bytes)
        tokens = event_tokens(node.tokens, self._item_bytes)
        self._record(BlockStored(b"".join(node.hashes), parent_hash, tokens, self.page_size, node.namespace, medium))

    def _record_removed(self, node: TreeNode, first_page: int, medium: str) -> None:
        """Say that pages are gone from a medium, if the node is on it."""
        if self._events is None or not node.hashes or not (node.slots if medium == DEVICE_MEDIUM else node.host):
            return
        self._record(BlockRemoved(b"".join(node.hashes[first_page:]), medium))

    def _record(self, event: KVCacheEvent) -> None:
        assert self._events is not None
        self._events.append(event)
        if len(self._events) == 1 and self.on_event is not None:
            self.on_event()
