"""`KeepingSteps`: what the Python core chooses by when something has to go: shares, and priorities of token ranges."""

from __future__ import annotations

from aradix.keys import Namespace
from aradix.tree.node import TreeNode
from aradix.tree.protocol import Freed, ShareView
from aradix.tree.tier_steps import TierSteps

__all__ = ["KeepingSteps"]


class KeepingSteps(TierSteps):
    """The steps of `TreeCore` that choose what goes, and what they choose by."""

    # ---- priorities ----

    def prioritize(self, node_id: int, start: int, stop: int, priority: int, expires: int) -> None:
        bottom = self._nodes[node_id]
        if not self._has_priorities:
            return
        first, last = start * self._item_bytes, stop * self._item_bytes
        node = bottom
        while node.parent is not None and node.depth > first:
            begin = node.depth - len(node.tokens)
            if begin < last < node.depth:
                node = self._split(node, last - begin)
                continue
            if begin < first:
                self._split(node, first - begin)
            if node.depth <= last:
                self._set_priority(node, priority, expires)
            assert node.parent is not None
            node = node.parent
        self._refile(bottom)
        self._merge_path(bottom)

    def _set_priority(self, node: TreeNode, priority: int, expires: int) -> None:
        after = node.priority if node.timed is None else node.timed[1]
        self._untime(node)
        node.priority = priority
        if expires:
            node.timed = expires, after
            self._timed.put(node, expires)

    def decay(self, now: int) -> None:
        while (node := self._timed.least()) is not None and node.timed is not None and node.timed[0] <= now:
            node.priority = node.timed[1]
            self._untime(node)
            self._refile(node)
            if not self.merges:
                continue
            if len(node.children) == 1:
                self._try_merge(node)
            if node.parent is not None and node.parent.parent is not None and len(node.parent.children) == 1:
                self._try_merge(node.parent)

    # ---- shares ----

    def evict(
        self, num_tokens: int, *, namespace: Namespace | None = None, demand: int = 0, only_excess: bool = False
    ) -> list[Freed]:
        if self._shares is None:
            return self._evict(num_tokens)
        if namespace is None:
            return self._evict(num_tokens, only_excess)
        demanding = self._shares.of(namespace)
        self._shares.demand(demanding, demand)
        try:
            return self._evict(num_tokens, only_excess)
        finally:
            self._shares.demand(demanding, 0)

    def _evict(self, num_tokens: int, only_excess: bool = False) -> list[Freed]:
        freed: list[Freed] = []
        missing = num_tokens
        self._note_capacity(num_tokens)
        while missing > 0 and (leaf := self._least(self._evictable)) is not None:
            share = None if self._shares is None else self._shares.of(leaf.namespace)
            wanted = missing
            if share is not None and share.excess > 0:
                wanted = min(missing, share.excess)
            elif share is not None and only_excess:
                break
            freed.append(self._evict_from(leaf, wanted))
            missing -= len(freed[-1].slots)
            if share is not None:
                share.evicted += len(freed[-1].slots)
        return freed

    def share_of(self, namespace: Namespace) -> int:
        return 0 if self._shares is None else self._shares.of(namespace).order

    def charge(self, share: int, num_tokens: int) -> None:
        if self._shares is not None:
            self._shares.leased(self._shares.shares[share], num_tokens)

    def shares(self) -> list[ShareView]:
        return [] if self._shares is None else self._shares.views()
