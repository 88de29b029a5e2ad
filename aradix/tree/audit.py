"""A recount of everything the tree keeps count of, from nothing but what `walk` shows.

It shares no code with the core: sums, locks and shapes are computed here the slow way and compared. Problems are
lines that begin with the invariant's name, as `aradix/README.md` lists them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from aradix.keys import extend_hash_chain
from aradix.tree.audit_tiers import audit_tiers, with_job_pins
from aradix.tree.protocol import Gate, NodeView, Slots, TreeCore

__all__ = ["TreeAudit", "audit_tree"]


class TreeAudit(NamedTuple):
    """What is wrong, and the slots found on the way: those that can be matched, and those flushed but still held; the
    same of the host."""

    problems: list[str]
    cached: Slots
    detached: Slots
    host: Slots
    host_detached: Slots


def _join(views: list[NodeView]) -> Slots:
    return np.concatenate([view.slots for view in views]) if views else np.empty(0, np.int64)


def _join_host(views: list[NodeView]) -> Slots:
    copies = [view.host_slots for view in views if view.host_slots is not None]
    return np.concatenate(copies) if copies else np.empty(0, np.int64)


def audit_tree(core: TreeCore, pins: Mapping[int, int]) -> TreeAudit:
    """Recount a tree.

    Args:
        core: the tree; it is not changed.
        pins: how many live pins end at each node, those of the tree's own jobs aside.
    """
    live, detached = list(core.walk()), list(core.walk(detached=True))
    problems: list[str] = audit_tiers(core, live, detached)
    pins = with_job_pins(core, pins)
    for views in (live, detached):
        problems += _audit_shape(core, views)
        problems += _audit_locks(views, pins)
    problems += _audit_counters(core, live, detached)
    problems += _audit_gates(live)
    problems += _audit_shares(core, [*live, *detached])
    if core.merges:
        problems += _audit_merging(live)
    known = {view.node_id for view in live} | {view.node_id for view in detached}
    problems += [
        f"I2: {count} pins end at node {node}, which is gone" for node, count in pins.items() if node not in known
    ]
    return TreeAudit(problems, _join(live), _join(detached), _join_host(live), _join_host(detached))


def _audit_shape(core: TreeCore, views: list[NodeView]) -> list[str]:
    """I4 and I6: parents before children, whole pages, no two siblings alike, no phantom children."""
    problems = []
    seen: dict[int, NodeView] = {}
    num_children: Counter[int] = Counter()
    first_pages: defaultdict[int, set[bytes]] = defaultdict(set)
    namespaces: Counter[object] = Counter()
    for view in views:
        name = f"node {view.node_id}"
        if view.node_id in seen:
            problems.append(f"I4: {name} is in the tree twice")
        seen[view.node_id] = view
        if view.num_tokens != len(view.slots) and (view.host_slots is None or len(view.slots)):
            problems.append(f"I8: {name} has {view.num_tokens} tokens but {len(view.slots)} slots")
        if view.parent_id == 0:
            namespaces[view.namespace] += 1
            if not view.detached and namespaces[view.namespace] > 1:
                problems.append(f"I4: {view.namespace} has two roots")
            if not view.num_children and not view.lock_ref and not view.host_ref:
                problems.append(f"I8: the root of {view.namespace} is empty and unpinned, but still there")
            continue
        parent = seen.get(view.parent_id)
        if parent is None:
            problems.append(f"I6: {name} has no parent {view.parent_id}")
            continue
        num_children[view.parent_id] += 1
        if view.num_tokens == 0 or view.num_tokens % core.page_size:
            problems.append(f"I4: {name} holds {view.num_tokens} tokens, no whole pages of {core.page_size}")
            continue
        problems += _audit_edge(core, view, parent, first_pages[view.parent_id])
    for view in views:
        if view.num_children != num_children[view.node_id]:
            problems.append(
                f"I4: node {view.node_id} counts {view.num_children} children, {num_children[view.node_id]} found"
            )
    return problems


def _audit_edge(core: TreeCore, view: NodeView, parent: NodeView, siblings: set[bytes]) -> list[str]:
    """One node against its parent and the siblings seen so far."""
    problems = []
    name = f"node {view.node_id}"
    item_bytes = len(view.tokens) // view.num_tokens
    page_bytes = core.page_size * item_bytes
    if item_bytes * view.num_tokens != len(view.tokens) or item_bytes not in (4, 8):
        problems.append(f"I8: {name} keeps {len(view.tokens)} bytes for {view.num_tokens} tokens")
    first_page = view.tokens[:page_bytes]
    if first_page in siblings:
        problems.append(f"I4: {name} begins with the same page as a sibling")
    siblings.add(first_page)
    if view.namespace != parent.namespace or view.detached != parent.detached:
        problems.append(f"I4: {name} and its parent {parent.node_id} differ in namespace or in being flushed")
    if view.depth != parent.depth + view.num_tokens:
        problems.append(
            f"I4: {name} ends at {view.depth}, its parent at {parent.depth}, with {view.num_tokens} between"
        )
    if view.hashes is not None:
        previous = parent.hashes[-1] if parent.hashes else view.namespace.digest()
        if view.hashes != extend_hash_chain(previous, view.tokens, page_bytes):
            problems.append(f"I4: the page hashes of {name} are not those of its tokens")
    return problems


def _audit_locks(views: list[NodeView], pins: Mapping[int, int]) -> list[str]:
    """I2: lock_ref is the number of pins at or below."""
    expected: Counter[int] = Counter()
    problems = []
    for view in reversed(views):
        expected[view.node_id] += pins.get(view.node_id, 0)
        expected[view.parent_id] += expected[view.node_id]
        if view.lock_ref != expected[view.node_id]:
            problems.append(
                f"I2: node {view.node_id} has lock_ref {view.lock_ref}, {expected[view.node_id]} pins are at or below"
            )
        if view.detached and not view.lock_ref and not view.host_ref:
            problems.append(f"I2: node {view.node_id} was flushed and nobody holds it, but it is still there")
    return problems


def _audit_counters(core: TreeCore, live: list[NodeView], detached: list[NodeView]) -> list[str]:
    """I3: the sums and the index of evictable leaves."""
    nodes = [view for view in live if view.parent_id]
    counted = {
        "evictable_tokens": sum(len(view.slots) for view in nodes if not view.lock_ref),
        "protected_tokens": sum(len(view.slots) for view in nodes if view.lock_ref),
        "detached_tokens": sum(len(view.slots) for view in detached),
        "num_nodes": len(nodes),
        "num_namespaces": len(live) - len(nodes),
    }
    problems = [
        f"I3: {name} is {getattr(core, name)}, a recount gives {count}"
        for name, count in counted.items()
        if getattr(core, name) != count
    ]
    on_device = Counter(view.parent_id for view in live + detached if len(view.slots))
    for view in live + detached:
        leaf = len(view.slots) > 0 and not on_device[view.node_id] and not view.lock_ref and not view.detached
        if view.indexed != leaf:
            problems.append(
                f"I3: node {view.node_id} is {'' if view.indexed else 'not '}indexed as evictable, but it has "
                f"{on_device[view.node_id]} children on the device and lock_ref {view.lock_ref}"
            )
    return problems


def _audit_gates(live: list[NodeView]) -> list[str]:
    return [
        f"I2: node {view.node_id} has a gate but no pin of it"
        for view in live
        if view.gate is not Gate.NONE and not view.lock_ref
    ]


def _audit_shares(core: TreeCore, views: list[NodeView]) -> list[str]:
    """I3: what each tenant has on the device."""
    shares = core.shares()
    if not shares:
        return []
    named = {share.tenant for share in shares[:-1]}
    found: Counter[object] = Counter()
    for view in views:
        found[view.namespace.tenant if view.namespace.tenant in named else None] += len(view.slots)
    return [
        f"I3: tenant {share.tenant!r} is said to have {share.cached} tokens cached, a recount gives "
        f"{found[share.tenant]}"
        for share in shares
        if share.cached != found[share.tenant]
    ]


def _audit_merging(live: list[NodeView]) -> list[str]:
    """I8: an only child differs from its parent in something."""
    by_id = {view.node_id: view for view in live}
    problems = []
    for view in live:
        parent = by_id.get(view.parent_id)
        if parent is None or not parent.parent_id or parent.num_children != 1:
            continue
        if view.lock_ref != parent.lock_ref or view.gate or parent.gate or view.residency != parent.residency:
            continue
        if view.host_ref or parent.host_ref or view.latch or parent.latch:
            continue
        if view.state == parent.state and view.timed == parent.timed:
            problems.append(
                f"I8: node {view.node_id} is an only child and differs in nothing from its parent {parent.node_id}"
            )
    return problems
