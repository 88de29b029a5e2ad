"""`Tenants`: what each tenant with a quota holds outside of the tree, and how it is served.

The tree chooses by shares what has to go; it has to be told what leases hold beside it, so leases have holds that tell.
Without quotas there are no accounts, and nobody counts anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from aradix.cache.hold import Hold
from aradix.keys import Namespace, RadixKey
from aradix.params import TenantStats
from aradix.tree.protocol import Slots, TreeCore

__all__ = ["Account", "AccountedHold", "Tenants"]


class Account:
    """One share: what the leases of its tenants hold, and their queries so far."""

    __slots__ = ("_core", "hit_tokens", "queries", "query_tokens", "share")

    def __init__(self, core: TreeCore, share: int) -> None:
        self._core = core
        self.share = share
        self.queries = 0
        self.query_tokens = 0
        self.hit_tokens = 0

    def charge(self, num_slots: int) -> None:
        """A lease holds so many more slots of its own, or fewer (below 0)."""
        self._core.charge(self.share, num_slots)

    def count_query(self, num_tokens: int, num_hit: int) -> None:
        """A lease was admitted."""
        self.queries += 1
        self.query_tokens += num_tokens
        self.hit_tokens += num_hit


class AccountedHold(Hold):
    """A hold that charges its own slots to its tenant."""

    __slots__ = ("account",)

    account: Account

    def add(self, slots: Slots, num_tokens: int) -> None:
        super().add(slots, num_tokens)
        self.account.charge(len(slots))

    def take_front(self, num_slots: int) -> None:
        super().take_front(num_slots)
        self.account.charge(-num_slots)

    def cut(self, num_own: int) -> Slots:
        freed = super().cut(num_own)
        self.account.charge(-len(freed))
        return freed


class Tenants:
    """The accounts of a cache; empty where no quotas are set."""

    def __init__(self, core: TreeCore) -> None:
        self._core = core
        self._accounts = [Account(core, share) for share in range(len(core.shares()))]

    def __bool__(self) -> bool:
        return bool(self._accounts)

    def account_of(self, namespace: Namespace) -> Account:
        """The account that a namespace's leases are charged to."""
        return self._accounts[self._core.share_of(namespace)]

    def make_hold(self, order: int, key: RadixKey, *rest: Any) -> Hold:
        """A `Hold` with these values, on its tenant's account."""
        hold = AccountedHold(order, key, *rest)
        hold.account = self.account_of(key.namespace)
        return hold

    def count_query(self, hold: Hold) -> None:
        """A lease was admitted."""
        self.account_of(hold.key.namespace).count_query(hold.given.num_items, hold.num_matched)

    def stats(self) -> dict[str | int | None, TenantStats]:
        """By tenant; `None` stands for all that have no quota."""
        return {
            view.tenant: TenantStats(
                share=view.num_tokens,
                cached=view.cached,
                leased=view.leased,
                evicted=view.evicted,
                queries=account.queries,
                query_tokens=account.query_tokens,
                hit_tokens=account.hit_tokens,
            )
            for view, account in zip(self._core.shares(), self._accounts, strict=True)
        }

    def audit(self, holds: Iterable[Hold]) -> list[str]:
        """I1: what leases hold is charged to their tenants."""
        if not self._accounts:
            return []
        held: Counter[int] = Counter()
        for hold in holds:
            held[self._core.share_of(hold.key.namespace)] += len(hold.own)
        return [
            f"I1: {view.leased} slots are charged to leases of tenant {view.tenant!r}, {held[share]} found"
            for share, view in enumerate(self._core.shares())
            if view.leased != held[share]
        ]
