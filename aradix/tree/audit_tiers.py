"""The part of the tree's audit that is about host copies and jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeGuard

from aradix.tree.protocol import Latch, NodeView, TreeCore
from aradix.tree.tiered import JobView, TieredCore

__all__ = ["audit_tiers", "with_job_pins"]


def with_job_pins(core: TreeCore, pins: Mapping[int, int]) -> Counter[int]:
    """The pins given, and those of the jobs under way."""
    together = Counter(pins)
    if _is_tiered(core):
        together.update(job.pinned for job in core.jobs() if job.pinned)
    return together


def audit_tiers(core: TreeCore, live: list[NodeView], detached: list[NodeView]) -> list[str]:
    """I2, I3 and I6 on the host: holds, sums and index, prefixes without holes; and latches that belong to a job."""
    jobs = core.jobs() if _is_tiered(core) else []
    problems = []
    for views in (live, detached):
        problems += _audit_prefixes(views)
        problems += _audit_holds(views, jobs)
    known = {view.node_id for view in live} | {view.node_id for view in detached}
    problems += [
        f"I2: job {job.job_id} has a node {job.pinned or job.held}, which is gone"
        for job in jobs
        if {job.pinned, job.held} - known - {0}
    ]
    problems += _audit_latches(live + detached, jobs)
    if _is_tiered(core):
        problems += _audit_counters(core, live, detached)
    return problems


def _is_tiered(core: TreeCore) -> TypeGuard[TieredCore]:
    # An isinstance of a protocol asks for every one of its members, and took a third of an audit's time.
    return hasattr(core, "jobs")


def _audit_prefixes(views: list[NodeView]) -> list[str]:
    problems = []
    parents = {view.node_id: view for view in views}
    for view in views:
        parent = parents.get(view.parent_id)
        if view.host_slots is not None and len(view.host_slots) != view.num_tokens:
            problems.append(
                f"I8: node {view.node_id} has {view.num_tokens} tokens but {len(view.host_slots)} host slots"
            )
        if parent is None or not parent.parent_id:
            continue
        if len(view.slots) and not len(parent.slots):
            problems.append(f"I6: node {view.node_id} is on the device, its parent {parent.node_id} is not")
        if view.host_slots is not None and parent.host_slots is None:
            problems.append(f"I6: node {view.node_id} has a host copy, its parent {parent.node_id} has none")
    return problems


def _audit_holds(views: list[NodeView], jobs: list[JobView]) -> list[str]:
    """host_ref is the number of holds at or below; who holds nothing that was flushed is gone."""
    ends = Counter(job.held for job in jobs if job.held)
    expected: Counter[int] = Counter()
    problems = []
    for view in reversed(views):
        expected[view.node_id] += ends[view.node_id]
        expected[view.parent_id] += expected[view.node_id]
        if view.host_ref != expected[view.node_id]:
            problems.append(
                f"I2: node {view.node_id} has host_ref {view.host_ref}, {expected[view.node_id]} holds are at or below"
            )
        if view.detached and view.host_slots is not None and not view.host_ref:
            problems.append(f"I2: the host copy of node {view.node_id} was flushed and nobody holds it")
        if view.detached and len(view.slots) and not view.lock_ref:
            problems.append(f"I2: the slots of node {view.node_id} were flushed and nobody holds them")
    return problems


def _audit_latches(views: list[NodeView], jobs: list[JobView]) -> list[str]:
    """The nodes of a job, and no others, have its latch, and are where the copy needs them."""
    by_id = {view.node_id: view for view in views}
    expected: dict[int, Latch] = {}
    problems = []
    for job in jobs:
        view = by_id.get(job.held or job.pinned)
        while view is not None and view.parent_id and view.depth > job.start:
            if job.latch is not Latch.NONE:
                if view.node_id in expected:
                    problems.append(f"I2: node {view.node_id} is in two jobs")
                expected[view.node_id] = job.latch
            if job.latch is Latch.WRITING and (not len(view.slots) or view.host_slots is not None):
                problems.append(f"I2: node {view.node_id} is being stored, but is on {view.residency}")
            if job.latch is not Latch.WRITING and view.host_slots is None:
                problems.append(f"I2: node {view.node_id} is being read, but has no host copy")
            view = by_id.get(view.parent_id)
    problems += [
        f"I2: node {view.node_id} has the latch {view.latch!r}, its jobs say {expected.get(view.node_id, Latch.NONE)!r}"
        for view in views
        if view.latch is not expected.get(view.node_id, Latch.NONE)
    ]
    return problems


def _audit_counters(core: TieredCore, live: list[NodeView], detached: list[NodeView]) -> list[str]:
    on_host = [view for view in live if view.host_slots is not None]
    counted = {
        "host_tokens": sum(view.num_tokens for view in on_host),
        "host_evictable_tokens": sum(
            view.num_tokens for view in on_host if view.residency == "host" and not view.host_ref
        ),
        "detached_host_tokens": sum(view.num_tokens for view in detached if view.host_slots is not None),
    }
    problems = [
        f"I3: {name} is {getattr(core, name)}, a recount gives {count}"
        for name, count in counted.items()
        if getattr(core, name) != count
    ]
    for view in live + detached:
        leaf = view.residency == "host" and not view.num_children and not view.host_ref and not view.detached
        if view.host_indexed != leaf:
            problems.append(
                f"I3: node {view.node_id} is {'' if view.host_indexed else 'not '}indexed as evictable on the host, "
                f"but it is on {view.residency}, has {view.num_children} children and host_ref {view.host_ref}"
            )
    return problems
