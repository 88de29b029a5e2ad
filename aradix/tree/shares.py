"""Who may keep how much: the evictable leaves by tenant, and the tenants by how far they are above their share.

A share is a claim, not a limit: anybody may use what others leave unused. Only what has to go is chosen by it: the
tenant most above its share gives first, its own least valuable leaves, down to its share; where nobody who has
something to give is above, the one nearest to its share gives. How the leaves of one tenant are ranked is the policy's
business alone. Both steps cost O(log n): each tenant has an index of its leaves, and one more index has the tenants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aradix.keys import Namespace
from aradix.tree.evictable import EvictableIndex
from aradix.tree.node import TreeNode
from aradix.tree.protocol import ShareView

__all__ = ["Share", "SharedIndex"]


class Share:
    """What one tenant has a claim on, and what it has. `order` is its place among the others, and settles ties."""

    __slots__ = ("cached", "demand", "evicted", "index", "leased", "num_tokens", "order", "tenant")

    def __init__(self, order: int, tenant: str | int | None, num_tokens: int) -> None:
        self.order = order
        self.tenant = tenant
        self.num_tokens = num_tokens
        self.cached = 0
        self.leased = 0
        self.demand = 0
        self.evicted = 0
        self.index = EvictableIndex()

    @property
    def excess(self) -> int:
        """Tokens above the share; below 0 while some of it is unused."""
        return self.cached + self.leased + self.demand - self.num_tokens


class SharedIndex:
    """An `EvictableIndex` that gives the leaf of the tenant most above its share.

    Args:
        shares: the tenants and the tokens each may keep; the last one stands for everybody not named.
    """

    __slots__ = ("_by_tenant", "_ranked", "_rest", "shares")

    def __init__(self, shares: Sequence[tuple[str | int | None, int]]) -> None:
        self.shares = [Share(order, tenant, num_tokens) for order, (tenant, num_tokens) in enumerate(shares)]
        self._rest = self.shares[-1]
        self._by_tenant = {share.tenant: share for share in self.shares[:-1]}
        # Shares have an `order` as leaves do, which is all that the index looks at.
        self._ranked: Any = EvictableIndex()

    def of(self, namespace: Namespace) -> Share:
        """The share that a namespace counts to."""
        return self._by_tenant.get(namespace.tenant, self._rest)

    # ---- what tenants have ----

    def cached(self, namespace: Namespace, num_tokens: int) -> None:
        """So many more tokens (fewer, below 0) are in the tree, flushed and still held included."""
        share = self.of(namespace)
        share.cached += num_tokens
        self._place(share)

    def leased(self, share: Share, num_tokens: int) -> None:
        """So many more slots (fewer, below 0) are held by leases and not in the tree."""
        share.leased += num_tokens
        self._place(share)

    def demand(self, share: Share, num_tokens: int) -> None:
        """So many tokens count as the tenant's while room is made for them."""
        share.demand = num_tokens
        self._place(share)

    def views(self) -> list[ShareView]:
        """All shares, in order."""
        return [
            ShareView(share.tenant, share.num_tokens, share.cached, share.leased, share.evicted)
            for share in self.shares
        ]

    def _place(self, share: Share) -> None:
        """Rank a tenant that has something to give."""
        if len(share.index):
            self._ranked.put(share, -share.excess)
        else:
            self._ranked.discard(share)

    # ---- what an `EvictableIndex` does ----

    def __len__(self) -> int:
        return sum(len(share.index) for share in self.shares)

    def __contains__(self, node: TreeNode) -> bool:
        return node in self.of(node.namespace).index

    def put(self, node: TreeNode, rank: Any) -> None:
        """File a leaf, or file it again under another rank."""
        share = self.of(node.namespace)
        try:
            share.index.put(node, rank)
        finally:  # ranks of a user's policy may fail to compare
            self._place(share)

    def discard(self, node: TreeNode) -> None:
        """Take a node out, if it is in."""
        share = self.of(node.namespace)
        share.index.discard(node)
        self._place(share)

    def least(self) -> TreeNode | None:
        """The leaf to go first, which stays filed."""
        share: Share | None = self._ranked.least()
        return share.index.least() if share is not None else None

    def refile(self, rank: Callable[[TreeNode], Any]) -> None:
        """Rank every leaf anew."""
        for share in self.shares:
            share.index.refile(rank)
