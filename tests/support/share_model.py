"""The model of a tree whose tenants have shares: every question is answered by counting all pages again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from aradix.keys import Namespace
from tests.support.tree_model import ModelTree, Place, Space

__all__ = ["SharedModel"]

Tenant = str | int | None


class SharedModel(ModelTree):
    """A `ModelTree` in which the tenant most above its share gives first, down to its share.

    Args:
        page_size: items a page.
        policy: a name in `RANKS`.
        evict_unit: `"page"` or `"node"`.
        shares: tenants and what each has a claim on, in tokens; the last one for all others.
    """

    def __init__(self, page_size: int, policy: str, evict_unit: str, shares: Sequence[tuple[Tenant, int]]) -> None:
        super().__init__(page_size, policy, evict_unit)
        self.shares = dict(shares)
        self.leased: Counter[Tenant] = Counter()
        self.demand: Counter[Tenant] = Counter()
        self.evicted: Counter[Tenant] = Counter()
        self.only_excess = False

    def tenant(self, namespace: Namespace) -> Tenant:
        return namespace.tenant if namespace.tenant in self.shares else None

    def cached(self, tenant: Tenant) -> int:
        spaces = [*self.live.values(), *self.flushed]
        return self.page_size * sum(len(s.pages) for s in spaces if self.tenant(s.namespace) == tenant)

    def excess(self, tenant: Tenant) -> int:
        return self.cached(tenant) + self.leased[tenant] + self.demand[tenant] - self.shares[tenant]

    def evict(self, num_tokens: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_tokens:
            giving = [tenant for tenant in self.shares if self._leaves(tenant)]
            if not giving:
                break
            tenant = max(giving, key=self.excess)  # of equals the first
            above = self.excess(tenant)
            if above <= 0 and self.only_excess:
                break
            space, place = min(self._leaves(tenant), key=lambda leaf: self.rank(leaf[0].pages[leaf[1]]))
            wanted = num_tokens - len(freed)
            gone = self._cut(space, place, min(wanted, above) if above > 0 else wanted)
            self.evicted[tenant] += len(gone)
            freed += gone
        return freed

    def _leaves(self, tenant: Tenant) -> list[tuple[Space, Place]]:
        return [
            (space, place)
            for space in self.live.values()
            if self.tenant(space.namespace) == tenant
            for place in space.pages
            if not space.children(place) and not space.lock(place)
        ]

    def _cut(self, space: Space, place: Place, num_tokens: int) -> list[int]:
        """Take pages off the end of one leaf: so many tokens, or all of it; with whole leaves always all of it."""
        if self.state is None:
            return self._remove(space, place)
        num_pages = 1
        while len(place) > num_pages * self.page_size and not space.is_end(
            place[: -num_pages * self.page_size], self.state
        ):
            num_pages += 1
        freed: list[int] = []
        while num_pages and len(freed) < num_tokens:
            freed += self._remove(space, place)
            place = place[: -self.page_size]
            num_pages -= 1
        return freed
