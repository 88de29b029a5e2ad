"""Eviction policies, by name or as objects: the public face of `aradix.tree.policies`."""

from aradix.tree.policies import (
    FIFO,
    FILO,
    LFU,
    LRU,
    MRU,
    POLICIES,
    SLRU,
    EvictionPolicy,
    NodeStats,
    Priority,
    policy_named,
)

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
    "policy_named",
]
