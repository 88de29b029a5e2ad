"""A tiered core and the brute-force model of it, taken through the same steps and compared after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aradix.events import AllBlocksCleared, KVCacheEvent
from aradix.keys import Namespace
from aradix.params import NodeRef
from aradix.tree import make_tiered_core
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import NOWHERE, Freed, TreeCore
from aradix.tree.tiered import Landed, StoreJob, TieredCore
from tests.support.tier_model import LOADING, READING, WRITING, TierJob, TierModel, TierSpace, tier
from tests.support.tree_model import PENDING, ModelTree, Place
from tests.tree.lockstep import EventMirror, Lockstep

__all__ = ["TierLockstep", "empty_out"]


@dataclass
class _Node:
    node_id: int
    space: TierSpace
    place: Place


class TierLockstep(Lockstep):
    """The steps of `Lockstep`, and those of the host tier; a job may stay open over any other steps.

    Args:
        backup_hits: given to the core.
        settings: as for `Lockstep`.
    """

    core: TieredCore
    model: TierModel

    def __init__(self, *, backup_hits: int | None = None, **settings: Any) -> None:
        def make(**more: Any) -> TreeCore:
            return make_tiered_core("python", backup_hits=backup_hits, **more)

        super().__init__(make, **settings)
        item_bytes = 8 if self.bigrams else 4
        self.host_mirror = EventMirror(self.page_size, item_bytes, "CPU")
        self.jobs: list[TierJob] = []

    def make_model(self, page_size: int, policy: str, evict_unit: str) -> ModelTree:
        return TierModel(page_size, policy, evict_unit)

    # ---- what is there ----

    def nodes(self) -> list[_Node]:
        """Every node of the core that can be matched, by the place at which it ends."""
        found: list[_Node] = []
        places: dict[int, Place] = {}
        for view in self.core.walk():
            space = tier(self.model.live[view.namespace])
            parent = places.get(view.parent_id, ())
            place = next(
                (p for p in space.pages if len(p) == view.depth and p[: len(parent)] == parent and self._is(p, view)),
                (),
            )
            places[view.node_id] = place
            if place:
                found.append(_Node(view.node_id, space, place))
        return found

    def _is(self, place: Place, view: Any) -> bool:
        tail = place[len(place) - view.num_tokens :]
        flat = [token for item in tail for token in (item if isinstance(item, tuple) else (item,))]
        return bool(view.tokens == b"".join(token.to_bytes(4, "little") for token in flat))

    # ---- stores ----

    def begin_store(self, which: int) -> None:
        node = self._pick(self.nodes(), which)
        if node is None:
            return
        space, place = node.space, node.place
        start = space.host_end(place)
        missing = [place[:end] for end in self.model.ends(start, len(place))]
        found = self.core.begin_store(node.node_id)
        if not missing or any(space.latched(part) for part in missing):
            assert found is None
        else:
            assert found is not None
            self._begun(found)
        self.check()

    def begin_stores(self, which: int) -> None:
        for job in self.core.begin_stores(None if which % 2 else which * self.page_size):
            self._begun(job)
        self.check()

    def _begun(self, job: StoreJob) -> None:
        """A store is of all that is missing on a path, and of nothing that somebody copies already."""
        space = tier(self.model.live[job.namespace])
        places = [
            place
            for place in space.pages
            if len(place) == job.end and space.slots(place)[job.start :] == job.slots.tolist()
        ]
        (place,) = [place for place in places if space.on_device(place)]
        assert space.host_end(place) == job.start < job.end
        parts = [place[:end] for end in self.model.ends(job.start, job.end)]
        assert not any(space.latched(part) for part in parts)
        assert not any(part in space.host for part in parts)
        assert job.last.depth == job.end
        self._check_ready(job.ready, [space.pages[part] for part in parts])
        self._add(TierJob(job.job_id, WRITING, space, job.start, place, job.slots.tolist()))

    def _add(self, job: TierJob) -> None:
        self.model.begin(job)
        self.jobs.append(job)

    def end_store(self, which: int, num_pages: int, given: int) -> None:
        """`given` counts from the end: 0 is all slots, and 3 is none at all."""
        job = self._pick([job for job in self.jobs if job.latch == WRITING], which)
        if job is None:
            return
        self.jobs.remove(job)
        slots = self.fresh(max(0, len(job.slots) - given * self.page_size))
        num_ok = num_pages * self.page_size + num_pages % 2 if num_pages < 6 else None
        done = self.core.end_store(job.job_id, None if given == 3 else slots.copy(), num_ok=num_ok)
        usable = [] if given == 3 or job.space.detached else slots.tolist()[:num_ok]
        end = job.start + len(usable) // self.page_size * self.page_size
        for stop in self.model.ends(job.start, end):
            at = stop - self.page_size - job.start
            job.space.host[job.place[:stop]] = tuple(usable[at : at + self.page_size])
        if job.start < end < len(job.place):
            job.space.split_at(job.place[:end])
        assert done.unused.tolist() == ([] if given == 3 else slots.tolist()[end - job.start :])
        self._landed(done, job, end, end - job.start)

    def _landed(self, done: Landed, job: TierJob, end: int, num_tokens: int) -> None:
        streams = self._streams([job.space])
        self._expect(done.freed, self.model.let_go(job), streams)
        assert (done.num_tokens, done.end) == (num_tokens, end)
        if job.space.detached or not end:
            assert done.last == NOWHERE
        else:
            assert self.core.slots_of(done.last).tolist() == job.space.slots(job.place[:end])
        self.check()

    def write_back(self, num_pages: int) -> None:
        done = self.core.write_back(num_pages * self.page_size)
        gone = [slot for freed in done.freed for slot in freed.slots.tolist()]
        for space in map(tier, self.model.live.values()):
            for place in sorted(space.pages, key=len, reverse=True):
                if space.pages[place].slots and space.pages[place].slots[0] in gone:
                    assert place in space.host
                    assert not space.lock(place)
                    assert not space.children(place)
                    for slot in space.leave_device(place):
                        gone.remove(slot)
        assert gone == []
        for job in done.jobs:
            self._begun(job)
        got = sum(len(freed.slots) for freed in done.freed)
        assert got + done.num_coming >= num_pages * self.page_size or done.num_coming or not self.core.evictable_tokens
        self.check()

    # ---- loads ----

    def begin_load(self, which: int, more: Sequence[int], limit: int | None, at_least: int) -> None:
        held = self._pick(self.held, which)
        if held is None:
            return
        space = tier(held.space)
        tokens = self._tokens(held.place, more)
        key, items = self.key(tokens, space.namespace), self.model.aligned(self.items(tokens)[:limit])
        found = self.core.begin_load(held.node_id, key, limit=limit, at_least=at_least)
        place, best = space.held(items), space.found(items)
        if len(place) < len(held.place):
            place = best = held.place
        first = best[: len(place) + self.page_size]
        gate = self.model.gate_met(space.namespace, items, held.place) if not space.detached else None
        if space.detached or gate is not None or len(best) - len(place) < max(1, at_least):
            assert found.job_id == 0
        elif space.latched(first):
            job = next(job for job in self.jobs if job.latch == LOADING and job.space is space and job.covers(first))
            assert (found.job_id, found.joined, len(found.host_slots)) == (job.job_id, True, 0)
        else:
            assert (found.joined, found.start, found.end) == (False, len(place), len(best))
            assert found.host_slots.tolist() == space.host_slots(best, len(place))
            self._add(TierJob(found.job_id, LOADING, space, len(place), best, found.host_slots.tolist()))
        self.check()

    def end_load(self, which: int, num_pages: int, given: int, stream: int) -> None:
        job = self._pick([job for job in self.jobs if job.latch == LOADING], which)
        if job is None:
            return
        self.jobs.remove(job)
        slots = self.fresh(max(0, len(job.slots) - given * self.page_size))
        num_ok = num_pages * self.page_size + num_pages % 2
        ready, model_ready = self.ready(stream)
        done = self.core.end_load(job.job_id, slots.copy(), num_ok, ready=ready)
        space, usable = job.space, [] if job.space.detached else slots.tolist()[:num_ok]
        end = job.start + len(usable) // self.page_size * self.page_size
        unused: list[int] = []
        num_tokens = 0
        for stop in self.model.ends(job.start, end):
            at = stop - self.page_size - job.start
            piece = tuple(usable[at : at + self.page_size])
            if space.on_device(job.place[:stop]):
                unused += piece
            else:
                page = space.pages[job.place[:stop]]
                page.slots, page.ready = piece, dict(model_ready)
                num_tokens += self.page_size
        if job.start < end < len(job.place) and num_tokens:
            space.split_at(job.place[:end])
        assert done.unused.tolist() == [*unused, *slots.tolist()[end - job.start :]]
        self._landed(done, job, end, num_tokens)

    # ---- the host alone ----

    def evict_host(self, num_tokens: int) -> None:
        got = self.core.evict_host(num_tokens)
        self.model.evict_host(num_tokens)
        self._expect(got, [], {})
        self.check()

    def insert_host(self, tokens: Sequence[int], namespace: Namespace, start_pages: int) -> None:
        key, items = self.key(tokens, namespace), self.model.aligned(self.items(tokens))
        start = min(start_pages * self.page_size, len(items))
        slots = self.fresh(len(items) - start)
        model_space = self.model.space(namespace)
        had = model_space.host_end(items)
        end = had
        if had >= start:
            for stop in self.model.ends(had, len(items)):
                place = items[:stop]
                gate = model_space.gate_over(place)
                if model_space.latched(place) or (gate is not None and model_space.gates[gate].level >= PENDING):
                    break
                end = stop
        for stop in self.model.ends(0, min(had, end)):
            gate = model_space.gate_over(items[:stop])
            if gate is not None and model_space.gates[gate].level >= PENDING:
                end = had
        gate = model_space.gate_over(())
        if gate is not None and model_space.gates[gate].level >= PENDING:
            end = had
        done = self.core.insert_host(key, start, slots.copy())
        if end > had:
            assert (done.num_tokens, done.end) == (end - had, end)
            assert done.unused.tolist() == [*slots.tolist()[: had - start], *slots.tolist()[end - start :]]
            found = model_space.found(items[:end])
            model_space.split_at(found)
            model_space.cuts.add(items[:end])
            self.model.adopt_host(model_space, items[:end], had, slots.tolist()[had - start :])
        else:
            assert (done.num_tokens, done.last) == (0, NOWHERE)
            assert done.unused.tolist() == slots.tolist()
        self.model.prune(model_space)
        self.check()

    def begin_read(self, which: int, less: int) -> None:
        node = self._pick(self.nodes(), which)
        if node is None:
            return
        place = node.place
        start = min(less, len(place) // self.page_size) * self.page_size
        ref = NodeRef(node.node_id, len(place))
        try:
            found = self.core.begin_read(ref, start)
        except KeyError:
            assert place not in node.space.host
        else:
            assert (found.start, found.end) == (start, len(place))
            assert found.host_slots.tolist() == node.space.host_slots(place, start)
            self._add(TierJob(found.job_id, READING, node.space, start, place, found.host_slots.tolist()))
        self.check()

    def end_read(self, which: int) -> None:
        job = self._pick([job for job in self.jobs if job.latch == READING], which)
        if job is None:
            return
        self.jobs.remove(job)
        streams = self._streams([job.space])
        self._expect(self.core.end_read(job.job_id), self.model.let_go(job), streams)
        self.check()

    # ---- comparing ----

    def _expect(self, got: list[Freed], expected: list[int], streams: dict[int, set[Any]]) -> None:
        super()._expect(got, expected, streams)
        host = [slot for freed in got for slot in freed.host_slots.tolist()]
        assert sorted(host) == sorted(self.model.host_freed)
        self.model.host_freed.clear()

    def check(self) -> None:
        for job in self.jobs:
            job.space.remember_ends(job, self.model.state)
        super().check()
        core, model = self.core, self.model
        assert core.host_tokens == model.host_tokens()
        assert core.host_evictable_tokens == model.host_evictable()
        assert core.detached_host_tokens == model.host_tokens(flushed=True)
        audit = audit_tree(core, self._pins())
        live = [slot for space in model.live.values() for slots in tier(space).host.values() for slot in slots]
        flushed = [slot for space in model.flushed for slots in tier(space).host.values() for slot in slots]
        assert sorted(audit.host.tolist()) == sorted(live)
        assert sorted(audit.host_detached.tolist()) == sorted(flushed)
        assert [view.job_id for view in core.jobs()] == sorted(job.job_id for job in self.jobs)
        for space in map(tier, model.live.values()):
            for place in space.pages:
                above = place[: -self.page_size]
                assert not space.on_device(place) or space.on_device(above)
                assert place not in space.host or not above or above in space.host

    def check_events(self, events: list[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.host_mirror.read([event])
            mirror = self.host_mirror if getattr(event, "medium", "GPU") == "CPU" else self.mirror
            assert mirror is not None
            mirror.read([event])
        assert self.mirror is not None
        assert self.mirror.parents == self.expected_blocks(lambda space, place: tier(space).on_device(place))
        assert self.host_mirror.parents == self.expected_blocks(lambda space, place: place in tier(space).host)

    def peek(self, tokens: Sequence[int], namespace: Namespace) -> None:
        found = self.core.peek_tiers(self.key(tokens, namespace))
        space = self.model.live.get(namespace)
        items = self.items(tokens)
        device = len(space.held(items)) if space is not None else 0
        assert found.device == device
        assert found.device + found.host == (len(tier(space).found(items)) if space is not None else 0)


def empty_out(lockstep: TierLockstep) -> None:
    """When all jobs, pins and gates are gone, everything can be evicted and nothing stays behind."""
    for job in list(lockstep.jobs):
        if job.latch == WRITING:
            lockstep.end_store(0, 6, job.job_id % 4)
        elif job.latch == LOADING:
            lockstep.end_load(0, 2, 0, 0)
        else:
            lockstep.end_read(0)
    assert lockstep.jobs == []
    while lockstep.gates:
        lockstep.open_gate(0)
    while lockstep.held:
        lockstep.unpin(0)
    core = lockstep.core
    while stores := core.begin_stores():
        for store in stores:
            core.end_store(store.job_id, None)
    assert core.num_due == 0
    core.evict(core.evictable_tokens)
    assert core.host_evictable_tokens == core.host_tokens
    core.evict_host(core.host_tokens)
    assert (core.num_nodes, core.num_namespaces, core.host_tokens, core.detached_host_tokens) == (0, 0, 0, 0)
    assert [*core.walk(), *core.walk(detached=True)] == []
