"""What a cache shows of itself: counters, the tree as plain data, the tree as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aradix.params import CacheStats
from aradix.tree.protocol import NodeView, TreeCore

if TYPE_CHECKING:
    from aradix.cache.pins import Pins
    from aradix.cache.radix_cache import RadixCache

__all__ = ["make_snapshot", "make_stats", "print_tree"]

_SHOWN_TOKENS = 8


def make_stats(cache: RadixCache) -> CacheStats:
    """All counters of a cache."""
    core, pool, pressure = cache._core, cache._pool, cache._pressure
    allocator = pool.allocator
    return CacheStats(
        num_slots=allocator.num_slots,
        free=allocator.available_size(),
        fenced=allocator.fenced_size(),
        evictable=core.evictable_tokens,
        protected=core.protected_tokens,
        leased=pool.num_held - core.evictable_tokens - core.protected_tokens,
        detached=core.detached_tokens,
        outside=allocator.outside_size() + allocator.held_size() - pool.num_held,
        quarantined=allocator.quarantined_size(),
        num_nodes=core.num_nodes,
        num_namespaces=core.num_namespaces,
        num_leases=len(cache._holds),
        num_slot_waiters=len(pressure),
        num_pins=len(cache._leases.pins),
        pinned=cache._leases.pins.num_tokens,
        queries=cache._leases.num_queries,
        query_tokens=cache._leases.num_query_tokens,
        hit_tokens=cache._leases.num_hit_tokens,
        evicted=cache._leases.num_evicted,
        resumes=cache._leases.num_resumes,
        retracts=pressure.num_retracts,
        slot_waits=pressure.num_waits,
        gate_waits=cache._gates.num_waits,
        num_joiners=cache._leases.joins.num_waiting,
        joins=cache._leases.joins.num_joins,
        joined_tokens=cache._leases.joins.num_tokens,
        join_takeovers=cache._leases.joins.num_takeovers,
        **(cache._leases.tiers.stats() if cache._leases.tiers is not None else {}),
    )


def _shown(view: NodeView, tokens: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": view.node_id, "num_tokens": view.num_tokens}
    if tokens:
        ids = np.frombuffer(view.tokens, np.int32)
        pairs = view.num_tokens and len(ids) == 2 * view.num_tokens
        shown["tokens"] = (ids.reshape(-1, 2) if pairs else ids).tolist()
    return shown | {
        "lock_ref": view.lock_ref,
        "residency": view.residency,
        "priority": view.priority,
        "hit_count": view.hit_count,
        "children": [],
    }


def make_snapshot(core: TreeCore, tokens: bool, pins: Pins) -> dict[str, Any]:
    """The tree as plain dicts and lists; a root is a node without tokens. Pins are listed where there are any."""
    by_id: dict[int, dict[str, Any]] = {}
    namespaces = []
    for view in core.walk():
        by_id[view.node_id] = shown = _shown(view, tokens)
        if view.parent_id:
            by_id[view.parent_id]["children"].append(shown)
        else:
            namespaces.append({"namespace": view.namespace._asdict(), "root": shown})
    return {"namespaces": namespaces} | ({"pins": pins.snapshot()} if pins else {})


def print_tree(core: TreeCore) -> None:
    """A line for each node: its end, its first tokens, its pins."""
    levels: dict[int, int] = {}
    for view in core.walk():
        level = levels[view.node_id] = levels.get(view.parent_id, -1) + 1
        if not view.parent_id:
            print(f"{view.namespace} lock_ref={view.lock_ref}")
            continue
        ids = np.frombuffer(view.tokens, np.int32)
        if len(ids) == 2 * view.num_tokens:  # pairs, each of which ends in what the next begins with
            ids = np.append(ids[::2], ids[-1])
        shown = " ".join(map(str, ids[:_SHOWN_TOKENS].tolist())) + (" ..." if len(ids) > _SHOWN_TOKENS else "")
        print(f"{'  ' * level}{view.num_tokens} tokens to {view.depth}: [{shown}] lock_ref={view.lock_ref}")
