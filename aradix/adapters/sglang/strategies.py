"""Eviction strategies under SGLang's names: `get_priority(node)` says which leaf goes first, the lowest."""

from __future__ import annotations

import abc
from typing import Any

from aradix.errors import ConfigError
from aradix.policies import FIFO, FILO, LFU, LRU, MRU, SLRU, EvictionPolicy, NodeStats, Priority

__all__ = [
    "EvictionStrategy",
    "FIFOStrategy",
    "FILOStrategy",
    "LFUStrategy",
    "LRUStrategy",
    "MRUStrategy",
    "PriorityStrategy",
    "SLRUStrategy",
    "get_eviction_strategy",
    "policy_of",
]


class EvictionStrategy(abc.ABC):
    """What ranks the leaves. Write a subclass for an order of your own."""

    @abc.abstractmethod
    def get_priority(self, node: Any) -> Any:
        """Something sortable from `last_access_time`, `creation_time`, `hit_count` and `priority`. Must not wait."""


class LRUStrategy(EvictionStrategy):
    """Least recently used first."""

    def get_priority(self, node: Any) -> Any:
        return node.last_access_time


class LFUStrategy(EvictionStrategy):
    """Least often hit first; ties go by recency."""

    def get_priority(self, node: Any) -> Any:
        return node.hit_count, node.last_access_time


class FIFOStrategy(EvictionStrategy):
    """Oldest first."""

    def get_priority(self, node: Any) -> Any:
        return node.creation_time


class MRUStrategy(EvictionStrategy):
    """Most recently used first."""

    def get_priority(self, node: Any) -> Any:
        return -node.last_access_time


class FILOStrategy(EvictionStrategy):
    """Youngest first."""

    def get_priority(self, node: Any) -> Any:
        return -node.creation_time


class PriorityStrategy(EvictionStrategy):
    """Lowest priority first; ties go by recency."""

    def get_priority(self, node: Any) -> Any:
        return node.priority, node.last_access_time


class SLRUStrategy(EvictionStrategy):
    """What was hit often enough outlives what was not; each of the two goes by recency."""

    def __init__(self, protected_threshold: int = 2) -> None:
        self.protected_threshold = protected_threshold

    def get_priority(self, node: Any) -> Any:
        return int(node.hit_count >= self.protected_threshold), node.last_access_time


_STRATEGIES: dict[str, type[EvictionStrategy]] = {
    "lru": LRUStrategy,
    "lfu": LFUStrategy,
    "fifo": FIFOStrategy,
    "mru": MRUStrategy,
    "filo": FILOStrategy,
    "priority": PriorityStrategy,
    "slru": SLRUStrategy,
}
_NATIVE: dict[type[EvictionStrategy], type[EvictionPolicy]] = {
    LRUStrategy: LRU,
    LFUStrategy: LFU,
    FIFOStrategy: FIFO,
    MRUStrategy: MRU,
    FILOStrategy: FILO,
    PriorityStrategy: Priority,
}


def get_eviction_strategy(name: str, config: dict[str, Any] | None = None) -> EvictionStrategy:
    """The strategy of that name, in whatever case. `ConfigError` (a ValueError) if there is none."""
    kind = _STRATEGIES.get(name.lower())
    if kind is None:
        raise ConfigError(f"Unknown eviction policy: {name!r}; there are {', '.join(_STRATEGIES)}")
    return kind(**(config or {}))


class _Shown:
    """A node's figures under the names that strategies read."""

    __slots__ = ("creation_time", "hit_count", "last_access_time", "num_tokens", "priority")

    def __init__(self, node: NodeStats) -> None:
        self.last_access_time = node.last_access
        self.creation_time = node.created
        self.hit_count = node.hit_count
        self.priority = node.priority
        self.num_tokens = node.num_tokens


class _Ranked:
    """A strategy of the user's as a policy of the tree."""

    def __init__(self, strategy: EvictionStrategy) -> None:
        self._strategy = strategy

    def rank(self, node: NodeStats) -> Any:
        return self._strategy.get_priority(_Shown(node))


def policy_of(strategy: EvictionStrategy) -> EvictionPolicy:
    """The policy that ranks as a strategy does: the tree's own, which is fast, where there is one."""
    native = _NATIVE.get(type(strategy))
    if native is not None:
        return native()
    if isinstance(strategy, SLRUStrategy) and type(strategy) is SLRUStrategy:
        policy = SLRU()
        policy.protected_from = strategy.protected_threshold
        return policy
    return _Ranked(strategy)
