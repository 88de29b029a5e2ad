"""The audit behind `cache.check()`: every slot in one place, every pin accounted for, every counter recounted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from aradix.errors import InvariantError
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import Slots

if TYPE_CHECKING:
    from aradix.cache.radix_cache import RadixCache
    from aradix.cache.tiering import Tiers
    from aradix.memory.allocator import SlotAllocator

__all__ = ["audit_cache"]

_MAX_SHOWN = 10


def audit_cache(cache: RadixCache) -> None:
    """Audit a cache. `aradix/README.md` lists the invariants.

    Raises:
        InvariantError: naming what differs.
    """
    cache._params.allocator.check()
    tree = audit_tree(cache._core, _live_pins(cache))
    problems = [*tree.problems, *_audit_holds(cache), *_audit_gates(cache)]
    problems += cache._leases.pins.audit()
    problems += cache._leases.joins.audit({waiter.hold.order for waiter in cache._pressure.admission})
    problems += cache._leases.tenants.audit(cache._holds.values())
    leased = [hold.own for hold in cache._holds.values()]
    places = {"cached": tree.cached, "detached": tree.detached, "leased": _join(leased)}
    tiers = cache._leases.tiers
    if tiers is not None:
        places["loading"] = _join(tiers.loads.targets)
    problems += _audit_slots(places, cache._params.allocator, cache._pool.num_held)
    if tiers is not None:
        on_host = {"cached": tree.host, "detached": tree.host_detached, "storing": _join(tiers.storing)}
        problems += [f"{line} (host)" for line in _audit_slots(on_host, tiers.host.allocator, tiers.host.num_held)]
        problems += _audit_copies(tiers)
    if problems:
        shown = "; ".join(problems[:_MAX_SHOWN])
        more = f"; and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise InvariantError(f"{len(problems)} invariants do not hold: {shown}{more}")


def _join(parts: list[Slots]) -> Slots:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _live_pins(cache: RadixCache) -> Counter[int]:
    """Everything that pins a node: leases, entered or waiting, low-level pins, idle prefixes that are kept, gates."""
    pins = Counter(hold.node_id for hold in cache._holds.values() if hold.node_id)
    pins.update(waiter.hold.node_id for waiter in cache._pressure.admission if waiter.hold.node_id)
    pins.update(cache._low_pins.node_ids())
    pins.update(cache._leases.pins.node_ids())
    pins.update(passing.node_id for passing in cache._leases.passing if passing.node_id)
    for gate in cache._gates.standing:
        pins[gate.node_id] += 1
        pins.update(gate.leaves)
    return pins


def _audit_slots(places: dict[str, Slots], allocator: SlotAllocator, num_held: int) -> list[str]:
    """I1 and I5: the places are disjoint, and the allocator agrees that these slots, and no others, are held."""
    problems = []
    page_size = allocator.page_size
    owned = _join(list(places.values()))
    sizes = ", ".join(f"{len(slots)} {name}" for name, slots in places.items())
    # Marked in a table and not sorted: a pool has many millions of slots.
    times = np.bincount(owned, minlength=allocator.num_slots + page_size)
    if times.max() > 1:
        shown = np.flatnonzero(times > 1)[:_MAX_SHOWN].tolist()
        problems.append(f"I1: slots {shown} are in two places at once ({sizes})")
    if len(owned) != num_held:
        problems.append(f"I1: {num_held} slots were taken and not given back, {len(owned)} found ({sizes})")
    held = np.zeros(allocator.num_slots // page_size + 1, np.bool_)
    held[allocator.pages_in("held")] = True
    strange = np.flatnonzero(times.reshape(-1, page_size).any(axis=1) & ~held)
    if len(strange):
        problems.append(f"I5: {len(strange)} pages are in use here, but the allocator does not count them as held")
    if len(owned) > allocator.held_size():
        problems.append(f"I1: {len(owned)} slots are in use here, the allocator counts {allocator.held_size()}")
    return problems


def _audit_copies(tiers: Tiers) -> list[str]:
    """I2: every job of the tree is somebody's who will end it, and nobody has one that the tree does not know."""
    jobs = {job.job_id for job in tiers.core.jobs()}
    known = tiers.job_ids
    return [
        f"I2: job {job} of the tree is {'to be ended by nobody' if job in jobs else 'over, but still waited for'}"
        for job in sorted(jobs ^ known)
    ]


def _audit_holds(cache: RadixCache) -> list[str]:
    problems = []
    page_size = cache._params.page_size
    for hold in cache._holds.values():
        name = f"the lease opened at {hold.where}"
        if hold.released or not hold.entered or not hold.held:
            problems.append(f"I2: {name} is listed, but not held")
        if hold.num_own_slots % page_size or not 0 <= hold.num_own <= hold.num_own_slots:
            problems.append(
                f"I1: {name} uses {hold.num_own} of {hold.num_own_slots} slots of its own, in pages of {page_size}"
            )
        if hold.published and len(cache._core.slots_of(hold.ref)) != hold.published:
            problems.append(f"I2: {name} has {hold.published} tokens in the tree, but its node ends elsewhere")
    for queue in (cache._pressure.growth, cache._pressure.admission):
        problems += [
            f"I7: the lease opened at {waiter.hold.where} is queued, but was decided already"
            for waiter in queue
            if waiter.granted or waiter.error is not None or not waiter.hold.waiting
        ]
    return problems


def _audit_gates(cache: RadixCache) -> list[str]:
    """I7: a task holds at most one subtree, and waits for nothing meanwhile."""
    owners = Counter(gate.task_id for gate in cache._gates.standing)
    problems = [f"I7: task {task} holds {number} subtrees" for task, number in owners.items() if number > 1]
    granted = {gate.task_id for gate in cache._gates.standing if gate.granted}
    problems += [
        f"I7: a task waits for slots while it holds a subtree (lease opened at {waiter.hold.where})"
        for waiter in (*cache._pressure.growth, *cache._pressure.admission)
        if waiter.task_id in granted
    ]
    return problems
