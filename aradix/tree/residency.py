"""`Residency`: the host copies of nodes, and the counters, the index, events and jobs that must agree with them.

A job names its path by its bottom node and the depth at which it begins. Splits need not be told (the bottom stays the
tail), merges cannot happen to it (a latched or held node is never merged), and nobody may remove it (a store is pinned
on the device, anything else is held on the host).
"""

from __future__ import annotations

from array import array
from typing import Any

from aradix.events import DEVICE_MEDIUM, HOST_MEDIUM
from aradix.params import NodeRef
from aradix.tree.ledger import Ledger
from aradix.tree.node import TreeNode
from aradix.tree.protocol import NO_SLOTS, NOWHERE, Freed, Latch, Ready, Slots
from aradix.tree.tiered import JobView

__all__ = ["Job", "Residency"]


class Job:
    """A copy under way. `start` and `end` are depths in bytes; `anchor_id` is the pinned node, 0 for none."""

    __slots__ = ("anchor_id", "blocked", "bottom", "end", "job_id", "latch", "start")

    def __init__(self, job_id: int, latch: Latch, bottom: TreeNode, start: int, anchor_id: int) -> None:
        self.job_id = job_id
        self.latch = latch
        self.bottom = bottom
        self.start = start
        self.end = bottom.depth
        self.anchor_id = anchor_id
        self.blocked: dict[int, None] = {}
        """Ids of nodes due for a store, which wait until this job has ended."""

    def parts(self) -> list[TreeNode]:
        """The nodes it covers by now, the highest first."""
        parts = []
        node = self.bottom
        while node.parent is not None and node.depth > self.start:
            parts.append(node)
            node = node.parent
        return parts[::-1]


class Residency(Ledger):
    """The effects of the host tier on nodes; `RadixTree` explains the arguments."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._last_job_id = 0
        self._jobs: dict[int, Job] = {}
        self._blocked: dict[int, Job] = {}

    # ---- coming and going ----

    def _demote(self, leaf: TreeNode) -> Freed:
        """A leaf of the device leaves it and stays on the host, under a new id."""
        self._record_removed(leaf, 0, DEVICE_MEDIUM)
        self._evictable.discard(leaf)
        self.evictable_tokens -= leaf.num_tokens
        streams = leaf.streams
        slots = leaf.leave_device()
        self._count_share(leaf, -len(slots))
        old_id, leaf.node_id = leaf.node_id, self._new_id()
        self._rename(leaf, old_id)
        if not leaf.host_ref:
            self.host_evictable_tokens += leaf.num_tokens
        self._refile(leaf)
        parent = leaf.parent
        assert parent is not None
        if parent.parent is not None and parent.is_device_leaf:
            self._refile(parent)
        if self.merges and len(leaf.children) == 1:
            self._try_merge(leaf)
        return Freed(slots, streams)

    def _promote(self, node: TreeNode, slots: Slots, ready: tuple[Ready, ...]) -> None:
        """A node on the host alone, whose parent is on the device, is on both from now on."""
        self._host_evictable.discard(node)
        if not node.host_ref:
            self.host_evictable_tokens -= node.num_tokens
        node.enter_device(slots, ready)
        parent = node.parent
        assert parent is not None
        self._evictable.discard(parent)
        self.evictable_tokens += node.num_tokens
        self._count_share(node, node.num_tokens)
        self.version += 1
        self._record_stored(node, DEVICE_MEDIUM)
        self._refile(node)

    def _give_host_copy(self, node: TreeNode, host_slots: Slots) -> None:
        """A node on the device gets its copy on the host."""
        self._tiered = True
        node.host = array("q", host_slots.tobytes())
        self.host_tokens += len(host_slots)
        self._record_stored(node, HOST_MEDIUM)

    def _new_host_leaf(self, parent: TreeNode, tokens: bytes, host_slots: Slots) -> TreeNode:
        leaf = TreeNode(self._new_id(), parent, parent.namespace, tokens, NO_SLOTS)
        leaf.created = self._tick + 1
        parent.children[tokens[: self._page_bytes]] = leaf
        parent.num_host_only += 1
        self._nodes[leaf.node_id] = leaf
        self.num_nodes += 1
        self.version += 1
        self._host_evictable.discard(parent)
        self._give_host_copy(leaf, host_slots)
        self.host_evictable_tokens += len(host_slots)
        self._recall(leaf)
        return leaf

    # ---- holds on host copies ----

    def _hold(self, bottom: TreeNode) -> None:
        """Keep the host copies of a path."""
        self._tiered = True
        self._host_evictable.discard(bottom)
        node: TreeNode | None = bottom
        while node is not None:
            if node.host_ref == 0 and not node.on_device:
                self.host_evictable_tokens -= node.num_tokens
            node.host_ref += 1
            node = node.parent

    def _unhold(self, bottom: TreeNode) -> list[Freed]:
        freed = []
        node: TreeNode | None = bottom
        while node is not None:
            above = node.parent
            node.host_ref -= 1
            if node.host_ref == 0:
                if node.detached:
                    freed.extend(self._drop_detached(node))
                elif not node.on_device:
                    self.host_evictable_tokens += node.num_tokens
                    self._refile(node)
            node = above
        return freed

    # ---- jobs ----

    def _new_job(self, latch: Latch, bottom: TreeNode, start: int, anchor: TreeNode | None) -> Job:
        """Begin: latch the path from byte `start` to a node, pin the anchor on the device, or hold the host copies."""
        self._tiered = True
        self._last_job_id += 1
        job = Job(self._last_job_id, latch, bottom, start, anchor.node_id if anchor is not None else 0)
        self._jobs[job.job_id] = job
        if latch is not Latch.NONE:
            for part in job.parts():
                part.job = job
        if anchor is not None:
            self._lock(anchor)
        if latch is not Latch.WRITING:
            self._hold(bottom)
        return job

    def _take_job(self, job_id: int, latch: Latch) -> tuple[Job, list[TreeNode]]:
        """End: the job and its parts, which are latched no longer. KeyError if there is no such job."""
        job = self._jobs[job_id]
        if job.latch is not latch:
            raise KeyError(job_id)
        del self._jobs[job_id]
        parts = job.parts()
        if latch is not Latch.NONE:
            for part in parts:
                part.job = None
        for node_id in job.blocked:
            del self._blocked[node_id]
            self._due[node_id] = None
        return job, parts

    def _let_go(self, job: Job) -> list[Freed]:
        """End a job's pin and hold; what was flushed meanwhile comes back."""
        freed = self._unhold(job.bottom) if job.latch is not Latch.WRITING else []
        if job.anchor_id:
            freed += self._unlock(self._nodes[job.anchor_id])
        return freed

    def _place_after(self, job: Job, end: int) -> NodeRef:
        """Merge what became equal along a job's path, and name the place at byte `end` of it."""
        if job.bottom.detached:
            return NOWHERE
        node = self._nodes[self._merge_path(job.bottom)]
        while node.parent is not None and node.depth - len(node.tokens) >= end:
            node = node.parent
        return NodeRef(node.node_id, end // self._item_bytes) if end else NOWHERE

    def _move_due(self, old_id: int, new_id: int) -> None:
        super()._move_due(old_id, new_id)
        job = self._blocked.pop(old_id, None)
        if job is not None:
            del job.blocked[old_id]
            job.blocked[new_id] = None
            self._blocked[new_id] = job

    def _note_due(self, bottom: TreeNode) -> None:
        """Note the deepest node of a path that was found often enough and has no host copy; it stands for all above."""
        assert self._backup_hits is not None
        node = bottom
        while node.parent is not None and node.host is None and node.job is None:
            if node.hit_count >= self._backup_hits:
                if node.node_id not in self._blocked:
                    self._due[node.node_id] = None
                return
            node = node.parent

    def jobs(self) -> list[JobView]:
        item = self._item_bytes
        return [
            JobView(
                job.job_id,
                job.latch,
                job.anchor_id,
                0 if job.latch is Latch.WRITING else job.bottom.node_id,
                job.start // item,
                job.end // item,
            )
            for job in self._jobs.values()
        ]

    @property
    def num_due(self) -> int:
        return len(self._due) + len(self._blocked)
