"""Which leaf is worth the least: an eviction policy ranks nodes, and the lowest rank goes first.

A policy reads `NodeStats` and returns something sortable. Times in it are ticks of the tree's own counter, one a
step, so the order never depends on a clock. Your own policy is any object with a `rank` method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from aradix.errors import ConfigError

__all__ = [
    "FIFO",
    "FILO",
    "LFU",
    "LRU",
    "MRU",
    "POLICIES",
    "SLRU",
    "EvictionPolicy",
    "NodeStats",
    "Priority",
    "Tenure",
    "looks_at_priority",
    "policy_named",
    "state_reader",
    "use_class",
    "use_credit",
]


class NodeStats(Protocol):
    """What a policy may look at."""

    @property
    def last_access(self) -> int:
        """Tick of the last match, insert or release that went through the node."""

    @property
    def created(self) -> int:
        """Tick at which the node's tokens were inserted; a split keeps it."""

    @property
    def hit_count(self) -> int:
        """How often its tokens were found again by an admitted lease or an insert."""

    @property
    def uses(self) -> int:
        """How often its tokens are known to have been used: once, every hit, and under `Tenure` what was before they
        were last evicted."""

    @property
    def priority(self) -> int:
        """The highest priority among the inserts that went through it."""

    @property
    def num_tokens(self) -> int:
        """Tokens in this node alone."""


@runtime_checkable
class EvictionPolicy(Protocol):
    """Anything that ranks nodes.

    A policy may also have `state(node)`: all of the node's history that its ranks will ever depend on, sizes aside. An
    only child is merged into its parent where their states are equal; without the method, where their histories are.
    """

    def rank(self, node: NodeStats, /) -> Any:
        """Something sortable; the lowest is evicted first. Must not wait and must not change the node."""


class LRU:
    """Least recently used first."""

    def rank(self, node: NodeStats) -> int:
        return node.last_access

    state = rank


class MRU:
    """Most recently used first."""

    def rank(self, node: NodeStats) -> int:
        return -node.last_access

    state = rank


class FIFO:
    """Oldest first."""

    def rank(self, node: NodeStats) -> int:
        return node.created

    state = rank


class FILO:
    """Youngest first."""

    def rank(self, node: NodeStats) -> int:
        return -node.created

    state = rank


class LFU:
    """Least often hit first; ties go by recency."""

    def rank(self, node: NodeStats) -> tuple[int, int]:
        return node.hit_count, node.last_access

    state = rank


class Priority:
    """Lowest priority first; ties go by recency."""

    def rank(self, node: NodeStats) -> tuple[int, int]:
        return node.priority, node.last_access

    state = rank


class SLRU:
    """Segmented LRU: what was hit twice or more outlives what was not; each segment goes by recency.

    The protected segment may be all of the cache, where the paper bounds it.

    Source: Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (1994).
    """

    protected_from = 2

    def rank(self, node: NodeStats) -> tuple[bool, int]:
        return node.hit_count >= self.protected_from, node.last_access

    def state(self, node: NodeStats) -> tuple[int, int]:
        return min(node.hit_count, self.protected_from), node.last_access


class Tenure:
    """Recency, with a longer stay for what was used more often; how much longer is learned, and may be nothing.

    A leaf's rank is its last use plus a stay for every doubling of its uses. Uses are remembered beyond eviction, in a
    bounded table of fingerprints, because where a cache is short most of what will be used again was evicted before
    its second use. With a stay of nothing this is LRU, with an endless one LFU, and which of them a load wants
    depends on the load and on the capacity. So the tree counts, for a ladder of stays at once, which of the tokens
    that are used a cache of its capacity would have held (ranks change only where something is used, so what each
    would hold is all above a level, and one table of token counts has the levels of all). It goes towards the one that
    would have found the most, a rung at a time, and leaves LRU only for one whose lead is a clear part of what LRU
    finds, or half of that and above the noise in it. O(log n) a step; when the stay changes, which is seldom, all
    leaves are ranked anew.

    Sources: the spectrum from LRU to LFU is Lee et al., "LRFU" (2001); remembering what was evicted, Johnson and
    Shasha, "2Q" (1994), and Megiddo and Modha, "ARC" (2003); judging all candidates from one pass, Mattson et al.,
    "Evaluation techniques for storage hierarchies" (1970); choosing between recency and frequency by regret, Vietri et
    al., "LeCaR" (2018).
    """

    def rank(self, node: NodeStats) -> int:
        """As long as nothing is learned: recency. The tree asks its own record."""
        return 2 * node.last_access

    def state(self, node: NodeStats) -> tuple[int, int]:
        return use_class(node.uses), node.last_access


def use_class(uses: int) -> int:
    """Uses by half doublings: 1, 2, 3, 4-5, 6-7, 8-11, ... are classes 0, 1, 2, 3, 4, 5, ...; 15 is the last."""
    if uses < 2:
        return 0
    doublings = uses.bit_length() - 1
    return min(15, 2 * doublings + (uses >> (doublings - 1) & 1) - 1)


def use_credit(of_uses: int) -> int:
    """Half doublings of uses that a class stands for."""
    return of_uses + 1 if of_uses else 0


POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "slru": SLRU,
    "fifo": FIFO,
    "mru": MRU,
    "filo": FILO,
    "priority": Priority,
    "tenure": Tenure,
}


def looks_at_priority(policy: EvictionPolicy) -> bool:
    """Whether priorities can matter: not to those here that are known to look at something else."""
    return type(policy) not in (LRU, MRU, FIFO, FILO, LFU, SLRU, Tenure)


def state_reader(policy: EvictionPolicy) -> Callable[[NodeStats], Any]:
    """What tells two neighbours apart under a policy."""
    return getattr(policy, "state", _whole_history)


def _whole_history(node: NodeStats) -> tuple[int, int, int, int]:
    return node.last_access, node.created, node.hit_count, node.priority


def policy_named(policy: str | EvictionPolicy) -> EvictionPolicy:
    """The policy of that name, or the object itself if it has a `rank` method.

    Raises:
        ConfigError: no such name, or an object that cannot rank.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ConfigError(
                f"eviction_policy must be one of {', '.join(POLICIES)} or an object with rank(node), got {policy!r}"
            )
        return POLICIES[policy]()
    if isinstance(policy, type) or not isinstance(policy, EvictionPolicy):
        raise ConfigError(f"eviction_policy needs a rank(node) method, got {policy!r}")
    return policy
