"""`TierSteps`: how the Python core moves KV between device and host. `TieredCore` says what each step promises."""

from __future__ import annotations

import numpy as np

from aradix.keys import RadixKey, extend_hash_chain
from aradix.params import NodeRef
from aradix.tree.node import TreeNode, newest_ready
from aradix.tree.protocol import NO_SLOTS, NOWHERE, Freed, Gate, Latch, Match, Ready, Slots
from aradix.tree.residency import Job
from aradix.tree.tiered import HostRead, Landed, LoadJob, Peeked, StoreJob, WrittenBack
from aradix.tree.walking import NOTHING_STOPS, Walker

__all__ = ["TierSteps"]


class TierSteps(Walker):
    """Stores, loads, host eviction, and what the other steps do on the host."""

    # ---- walking ----

    def _match_on_host(self, key: RadixKey, node: TreeNode, stop: int) -> Match:
        """The rest of a match whose device part ends at a node, pinned or not."""
        item = self._item_bytes
        bottom, child, size = self._descend_host(key, node, stop)
        if child is not None:
            bottom = self._split(child, size)
        num_matched, num_best = node.depth // item, bottom.depth // item
        loading = self._job_below(key, node) if bottom is not node else 0
        ready = self._touch(bottom)
        best_id = self._merge_path(bottom)
        # Where there is a host part, its first node keeps the two apart: the device end keeps its id through merges.
        node_id = node.node_id if bottom is not node else best_id
        last = NodeRef(node_id, num_matched) if num_matched else NOWHERE
        best = NodeRef(best_id, num_best) if num_best else NOWHERE
        return Match(num_matched, node_id, last, 0, ready, num_best - num_matched, best, loading)

    def _job_below(self, key: RadixKey, node: TreeNode) -> int:
        """The job that loads the first page below where the device part of a key ends."""
        begin = key.start + node.depth
        job = node.children[key.data[begin : begin + self._page_bytes]].job
        return job.job_id if job is not None else 0

    def peek_tiers(self, key: RadixKey) -> Peeked:
        root = self._roots.get(key.namespace)
        if root is None:
            return Peeked(0, 0)
        stop = self._stop(key, None)
        node, child, size, _ = self._descend(key, root, stop, NOTHING_STOPS)
        if child is not None:
            return Peeked((node.depth + size) // self._item_bytes, 0)
        bottom, _, size = self._descend_host(key, node, stop)
        return Peeked(node.depth // self._item_bytes, (bottom.depth + size - node.depth) // self._item_bytes)

    def _promote_along(
        self, key: RadixKey, node: TreeNode, stop: int, slots: Slots, origin: int, ready: tuple[Ready, ...]
    ) -> TreeNode:
        """Put device slots under what a key finds on the host alone; `slots` begin at byte `origin` of the path."""
        while node.num_host_only and node.depth < stop:
            begin = key.start + node.depth
            child = node.children.get(key.data[begin : begin + self._page_bytes])
            if child is None:
                break
            size = self._common(child.tokens, key.data, begin, stop - node.depth)
            if size < len(child.tokens):
                child = self._split(child, size)
            first, last = (node.depth - origin) // self._item_bytes, (child.depth - origin) // self._item_bytes
            self._promote(child, slots[first:last], ready)
            node = child
        return node

    # ---- eviction ----

    def _evict_from(self, leaf: TreeNode, num_tokens: int) -> Freed:
        """Take so many tokens off a leaf of the device, in whole pages: the whole leaf, or its tail."""
        num_wanted = -(-num_tokens // self.page_size) * self.page_size
        whole = self._whole_nodes or leaf.num_tokens <= num_wanted
        if leaf.host is not None:
            if not whole:
                self._split(leaf, len(leaf.tokens) - num_wanted * self._item_bytes)
            return self._demote(leaf)
        if whole:
            return self._remove_leaf(leaf)
        return Freed(self._trim(leaf, num_wanted), leaf.streams)

    def evict_host(self, num_tokens: int) -> list[Freed]:
        freed: list[Freed] = []
        missing = num_tokens
        while missing > 0 and (leaf := self._least(self._host_evictable)) is not None:
            num_wanted = -(-missing // self.page_size) * self.page_size
            if self._whole_nodes or leaf.num_tokens <= num_wanted:
                freed.append(self._remove_leaf(leaf))
            else:
                freed.append(Freed(NO_SLOTS, frozenset(), self._trim(leaf, num_wanted)))
            missing -= len(freed[-1].host_slots)
        return freed

    def write_back(self, num_tokens: int) -> WrittenBack:
        freed: list[Freed] = []
        jobs: list[StoreJob] = []
        put_off: list[TreeNode] = []
        missing, num_coming = num_tokens, 0
        self._note_capacity(num_tokens)
        while missing > 0 and (leaf := self._least(self._evictable)) is not None:
            if leaf.host is not None:
                freed.append(self._evict_from(leaf, missing))
                missing -= len(freed[-1].slots)
                continue
            num_coming += leaf.num_tokens
            missing -= leaf.num_tokens
            job = self._begin_store(leaf)
            if isinstance(job, StoreJob):
                jobs.append(job)
            else:
                self._evictable.discard(leaf)
                put_off.append(leaf)
        for leaf in put_off:
            self._refile(leaf)
        return WrittenBack(freed, jobs, num_coming)

    # ---- stores ----

    def begin_stores(self, max_tokens: int | None = None) -> list[StoreJob]:
        jobs: list[StoreJob] = []
        num_tokens = 0
        for node_id in reversed(list(self._due)):
            node = self._nodes.get(node_id)
            if node is None or node.detached or node.host is not None or node.job is not None:
                del self._due[node_id]
                continue
            missing = self._missing_on_host(node)
            if isinstance(missing, Job):
                del self._due[node_id]
                missing.blocked[node_id] = None
                self._blocked[node_id] = missing
                continue
            num_tokens += (node.depth - missing) // self._item_bytes
            if jobs and max_tokens is not None and num_tokens > max_tokens:
                break
            del self._due[node_id]
            jobs.append(self._store_from(node, missing))
        return jobs

    def begin_store(self, node_id: int) -> StoreJob | None:
        job = self._begin_store(self._nodes[node_id])
        return job if isinstance(job, StoreJob) else None

    def _begin_store(self, node: TreeNode) -> StoreJob | Job | None:
        """Begin to store a path; or the job in the way, or `None` where nothing is missing."""
        if node.host is not None or node.parent is None or node.detached:
            return None
        missing = self._missing_on_host(node)
        return missing if isinstance(missing, Job) else self._store_from(node, missing)

    def _missing_on_host(self, node: TreeNode) -> int | Job:
        """Where the host copies of a path end, in bytes; or the job that a part of the rest is in."""
        above: TreeNode = node
        while above.parent is not None and above.host is None:
            if above.job is not None:
                return above.job
            above = above.parent
        return above.depth

    def _store_from(self, bottom: TreeNode, start: int) -> StoreJob:
        job = self._new_job(Latch.WRITING, bottom, start, bottom)
        ready: tuple[Ready, ...] = ()
        for part in job.parts():
            ready = newest_ready(ready, part.ready)
        item = self._item_bytes
        first, last = start // item, bottom.depth // item
        slots = self._slots_between(bottom, start, bottom.depth)
        return StoreJob(job.job_id, bottom.namespace, first, last, slots, ready, NodeRef(bottom.node_id, last))

    def end_store(self, job_id: int, host_slots: Slots | None, *, num_ok: int | None = None) -> Landed:
        job, parts = self._take_job(job_id, Latch.WRITING)
        given = NO_SLOTS if host_slots is None else host_slots
        end = self._end_of(job, len(given) if num_ok is None else min(num_ok, len(given)))
        for part in parts if end > job.start else ():
            above = part.depth - len(part.tokens)
            if above >= end:
                break
            stored = part if part.depth <= end else self._split(part, end - above)
            self._give_host_copy(stored, self._share(given, job, above, stored.depth))
        return self._landed(job, end, [self._share(given, job, end, None)])

    def _end_of(self, job: Job, num_ok: int) -> int:
        """The depth to which a job's first so many tokens go, in whole pages; nothing of a flushed path."""
        if job.bottom.detached:
            return job.start
        num_tokens = max(0, num_ok) // self.page_size * self.page_size
        return min(job.end, job.start + num_tokens * self._item_bytes)

    def _share(self, slots: Slots, job: Job, first: int, last: int | None) -> Slots:
        """Of slots that begin where a job does, those from byte `first` of the path to byte `last`."""
        stop = None if last is None else (last - job.start) // self._item_bytes
        return slots[(first - job.start) // self._item_bytes : stop]

    def _landed(self, job: Job, end: int, unused: list[Slots]) -> Landed:
        freed = self._let_go(job)
        left = np.concatenate(unused)
        num_adopted = (end - job.start) // self._item_bytes - sum(map(len, unused[:-1]))
        return Landed(num_adopted, end // self._item_bytes, self._place_after(job, end), left, freed)

    # ---- loads ----

    def begin_load(self, node_id: int, key: RadixKey, *, limit: int | None = None, at_least: int = 1) -> LoadJob:
        item, origin = self._item_bytes, self._nodes[node_id]
        none = LoadJob(0, False, origin.depth // item, origin.depth // item, NO_SLOTS)
        if origin.detached:
            return none
        stop = self._stop(key, limit)
        node, child, _, gate = self._descend(key, origin, stop)
        if gate or child is not None:
            return none
        bottom, child, size = self._descend_host(key, node, stop)
        start, end = node.depth // item, (bottom.depth + size) // item
        if end == start or end - start < at_least:
            return none
        if (job_id := self._job_below(key, node)) != 0:
            return LoadJob(job_id, True, start, end, NO_SLOTS)
        if child is not None:
            bottom = self._split(child, size)
        job = self._new_job(Latch.LOADING, bottom, node.depth, node)
        return LoadJob(job.job_id, False, start, end, self._host_slots_between(bottom, job.start, job.end))

    def end_load(self, job_id: int, slots: Slots, num_ok: int, *, ready: tuple[Ready, ...] = ()) -> Landed:
        job, parts = self._take_job(job_id, Latch.LOADING)
        end = self._end_of(job, min(num_ok, len(slots)))
        unused = []
        for part in parts if end > job.start else ():
            above = part.depth - len(part.tokens)
            if above >= end:
                break
            if part.slots:  # inserted by somebody meanwhile
                unused.append(self._share(slots, job, above, min(part.depth, end)))
                continue
            loaded = part if part.depth <= end else self._split(part, end - above)
            self._promote(loaded, self._share(slots, job, above, loaded.depth), ready)
        unused.append(self._share(slots, job, end, None))
        return self._landed(job, end, unused)

    # ---- the host alone ----

    def insert_host(self, key: RadixKey, start: int, host_slots: Slots) -> Landed:
        item, page_bytes = self._item_bytes, self._page_bytes
        first = start * item
        stop = min(self._stop(key, None), first + len(host_slots) // self.page_size * page_bytes)
        node = root = self._roots.get(key.namespace) or self._new_root(key.namespace)
        begin = end = first
        while stop - node.depth >= page_bytes and node.gate < Gate.PENDING:
            top, at = node.depth, key.start + node.depth
            child = node.children.get(key.data[at : at + page_bytes])
            if child is None or child.host is None:
                if top < first or (child is not None and (child.gate >= Gate.PENDING or child.job is not None)):
                    break
                if begin == end:
                    begin = top
                if child is None:
                    node = self._new_host_leaf(
                        node,
                        key.data[at : key.start + stop],
                        host_slots[(top - first) // item : (stop - first) // item],
                    )
                else:
                    size = self._common(child.tokens, key.data, at, stop - top)
                    node = child if size == len(child.tokens) else self._split(child, size)
                    self._give_host_copy(node, host_slots[(top - first) // item : (node.depth - first) // item])
                end = node.depth
                continue
            if child.gate >= Gate.PENDING:
                break
            size = self._common(child.tokens, key.data, at, stop - top)
            if size < len(child.tokens):
                if top + size == stop or top + size < first:
                    break
                child = self._split(child, size)
            node = child
        unused = np.concatenate([host_slots[: (begin - first) // item], host_slots[(end - first) // item :]])
        last = NOWHERE
        if end > begin:
            self._touch(node)
            last = NodeRef(self._merge_path(node), end // item)
        self._prune(root)
        return Landed((end - begin) // item, end // item, last, unused, [])

    def begin_read(self, ref: NodeRef, start: int = 0) -> HostRead:
        node = self._at(ref)
        if node.host is None or node.detached:
            raise KeyError(ref)
        depth = ref.depth * self._item_bytes
        if depth < node.depth:
            node = self._split(node, depth - node.depth + len(node.tokens))
        job = self._new_job(Latch.NONE, node, start * self._item_bytes, None)
        return HostRead(job.job_id, start, ref.depth, self._host_slots_between(node, job.start, job.end))

    def end_read(self, job_id: int) -> list[Freed]:
        job, _ = self._take_job(job_id, Latch.NONE)
        freed = self._let_go(job)
        self._place_after(job, job.end)
        return freed

    def hashes_of(self, ref: NodeRef, start: int = 0) -> list[bytes]:
        node = self._at(ref) if ref.node_id else None
        path: list[TreeNode] = []
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        digests: list[bytes] = []
        for part in reversed(path):
            previous = digests[-1] if digests else part.namespace.digest()
            digests += part.hashes or extend_hash_chain(previous, part.tokens, self._page_bytes)
        return digests[start // self.page_size : ref.depth // self.page_size]
