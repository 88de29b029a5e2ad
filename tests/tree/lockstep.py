"""A tree core and the brute-force model of it, taken through the same steps and compared after each."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from aradix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from aradix.keys import Namespace, RadixKey
from aradix.params import NodeRef
from aradix.tree import cpp_core_error
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import NOWHERE, Freed, Gate, Ready, Slots, TreeCore
from tests.support.tree_model import GRANTED, PENDING, ModelTree, Page, Place, Space

__all__ = ["CORES", "NAMESPACES", "CoreFactory", "EventMirror", "Held", "Lockstep", "page_hash"]

CORES: tuple[Literal["python", "cpp"], ...] = ("python",) if cpp_core_error() else ("python", "cpp")
"""Every core that is there, by the name that `make_core` knows it by."""

NAMESPACES = (Namespace(), Namespace(lora="a"), Namespace(salt="a"))


class CoreFactory(Protocol):
    """What the fixture `core_factory` gives."""

    def __call__(self, **settings: Any) -> TreeCore: ...


def page_hash(previous: bytes, items: Sequence[Any]) -> bytes:
    """SHA-256 over the digest before and the page's ids as u32 little-endian, written out."""
    ids = [token for item in items for token in (item if isinstance(item, tuple) else (item,))]
    return hashlib.sha256(previous + struct.pack(f"<{len(ids)}I", *ids)).digest()


class EventMirror:
    """What a reader of the events knows: the blocks that are there, and the block before each."""

    def __init__(self, page_size: int, item_bytes: int, medium: str = "GPU") -> None:
        self.page_size = page_size
        self.medium = medium
        self.bigrams = item_bytes == 8
        self.parents: dict[bytes, bytes | None] = {}

    def read(self, events: Iterable[object]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    assert event.block_hashes
                    assert event.medium == self.medium
                    for block in event.block_hashes:
                        del self.parents[block]
                case AllBlocksCleared():
                    self.parents.clear()
                case _:
                    raise AssertionError(event)

    def _stored(self, event: BlockStored) -> None:
        assert event.block_size == self.page_size
        assert event.medium == self.medium
        assert event.parent_block_hash is None or event.parent_block_hash in self.parents
        ids = event.token_ids
        items: Sequence[Any] = list(pairwise(ids)) if self.bigrams else ids
        assert len(items) == len(event.block_hashes) * self.page_size > 0
        before = event.parent_block_hash
        for number, block in enumerate(event.block_hashes):
            page = items[number * self.page_size :][: self.page_size]
            assert block == page_hash(before or event.namespace.digest(), page)
            assert block not in self.parents, "a block was stored twice"
            self.parents[block] = before
            before = block


@dataclass
class Held:
    """A live pin: what the core calls it, and where it is."""

    node_id: int
    space: Space
    place: Place


@dataclass
class Known:
    """A place that an earlier step named, not pinned."""

    ref: NodeRef
    space: Space
    slots: list[int]


class Lockstep:
    """Each method is one step on both. After it `check` compares everything that can be seen.

    Args:
        factory: of the core.
        page_size: tokens (or bigrams) a page.
        item_bytes: 4, or 8 for bigrams.
        policy: by name.
        evict_unit: `"page"` or `"node"`.
        record_events: whether a mirror reads the events.
        core_policy: given to the core in place of `policy`; it must rank as `policy` does, until it fails.
        more: settings of the core, which `make_model` knows of.
    """

    def __init__(
        self,
        factory: CoreFactory,
        *,
        page_size: int = 1,
        item_bytes: int = 4,
        policy: str = "lru",
        evict_unit: str = "page",
        record_events: bool = True,
        core_policy: Any = None,
        **more: Any,
    ) -> None:
        self.core = factory(
            page_size=page_size,
            item_bytes=item_bytes,
            policy=core_policy or policy,
            evict_unit=evict_unit,
            record_events=record_events,
            **more,
        )
        self.model = self.make_model(page_size, policy, evict_unit)
        self.mirror = EventMirror(page_size, item_bytes) if record_events else None
        self.page_size = page_size
        self.bigrams = item_bytes == 8
        self.merges = evict_unit == "page"
        self.may_fail = core_policy is not None
        self.held: list[Held] = []
        self.gates: list[Held] = []
        self.known: list[Known] = []
        self.num_slots = 0
        self.sequence = 0

    def make_model(self, page_size: int, policy: str, evict_unit: str) -> ModelTree:
        return ModelTree(page_size, policy, evict_unit)

    # ---- keys and slots ----

    def key(self, tokens: Sequence[int], namespace: Namespace) -> RadixKey:
        # Cut out of something longer, so that a core which forgets where a key begins or stops shows it.
        key = RadixKey([3, *tokens, 3], namespace)[1 : len(tokens) + 1]
        return key.maybe_to_bigram_view(self.bigrams)

    def items(self, tokens: Sequence[int]) -> Place:
        return tuple(pairwise(tokens)) if self.bigrams else tuple(tokens)

    def fresh(self, count: int) -> Slots:
        self.num_slots += count
        return np.arange(self.num_slots - count, self.num_slots, dtype=np.int64)

    def ready(self, stream: int) -> tuple[tuple[Ready, ...], dict[Any, int]]:
        self.sequence += 1
        return (Ready(stream, f"event {self.sequence}", self.sequence),), {stream: self.sequence}

    # ---- steps ----

    def match(
        self,
        tokens: Sequence[int],
        namespace: Namespace,
        limit: int | None = None,
        pin: bool = False,
        past_pending: bool = False,
    ) -> None:
        key, items = self.key(tokens, namespace), self.items(tokens)
        space = self.model.live.get(namespace)
        assert self.core.peek(key) == len(space.held(items) if space else ())
        asked = self.model.aligned(items if limit is None else items[: max(limit, 0)])
        gate = self.model.gate_met(namespace, asked, stopped_by=GRANTED if past_pending else PENDING)
        found = self.core.match(key, limit=limit, pin=pin, past_pending=past_pending)
        if gate is not None:
            assert (found.num_matched, found.node_id, found.last) == (0, 0, NOWHERE)
            assert found.gate == self._gate_id(namespace, gate)
        else:
            space, place = self.model.match(namespace, asked, pin)
            assert found.gate == 0
            assert found.num_matched == len(place)
            self._check_found(found.last, space, place)
            self._check_ready(found.ready, space.path(place) if space else [])
            if pin:
                assert space is not None
                self.held.append(Held(found.node_id, space, place))
        self.check()

    def insert(
        self,
        tokens: Sequence[int],
        namespace: Namespace,
        priority: int = 0,
        stream: int = 0,
        past_pending: bool = False,
    ) -> None:
        key, items = self.key(tokens, namespace), self.items(tokens)
        slots = self.fresh(len(items))
        asked = self.model.aligned(items)
        gate = self.model.gate_met(namespace, asked, stopped_by=GRANTED if past_pending else PENDING)
        version = self.core.version
        ready, model_ready = self.ready(stream)
        done = self.core.insert(key, slots.copy(), priority=priority, ready=ready, past_pending=past_pending)
        if gate is not None:
            assert done == self._gate_id(namespace, gate)
            assert self.core.version == version
        else:
            assert not isinstance(done, int)
            space = self.model.space(namespace)
            held = space.held(asked)
            self._check_ready(done.ready, space.path(held))
            existing = space.slots(held)
            self.model.grow(space, (), asked, slots.tolist(), priority, model_ready)
            self.model.prune(space)
            assert (done.prefix_len, done.end) == (len(held), len(asked))
            assert done.existing.tolist() == existing
            assert (self.core.version != version) or held == asked
            self._check_found(done.last, space, asked)
        self.check()

    def extend(self, which: int, more: Sequence[int], priority: int = 0, stream: int = 0) -> None:
        """Grow a pinned place by what fits below it, as a lease does at a commit."""
        held = self._pick(self.held, which)
        if held is None or held.space.detached:
            return
        tokens = self._tokens(held.place, more)
        key, items = self.key(tokens, held.space.namespace), self.model.aligned(self.items(tokens))
        assert items[: len(held.place)] == held.place
        gate = self.model.gate_met(held.space.namespace, items, held.place)
        slots = self.fresh(len(self.items(tokens)) - len(held.place))
        ready, model_ready = self.ready(stream)
        done = self.core.extend(held.node_id, key, slots.copy(), priority=priority, ready=ready)
        assert done is not None
        if gate is not None:
            items = items[: held.space.gates[gate].start]
            assert len(items) >= len(held.place)
        end = held.space.held(items, len(held.place))
        existing = held.space.slots(end, len(held.place))
        self._check_ready(done.ready, held.space.path(end)[len(held.place) // self.page_size :])
        self.model.grow(held.space, held.place, items, slots.tolist(), priority, model_ready)
        held.space.pins[held.place] -= 1
        held.space.pins[items] += 1
        held.space.pins = +held.space.pins
        held.node_id, held.place = done.node_id, items
        assert (done.prefix_len, done.end) == (len(end), len(items))
        assert done.existing.tolist() == existing
        self._check_found(done.last, held.space, items)
        self.check()

    def pin(self, which: int) -> None:
        """Pin a place named earlier: the core may refuse what is stale, but never pin something else."""
        known = self._pick(self.known, which)
        if known is None:
            return
        pages = known.space.pages
        place: Place | None = next((p for p in pages if pages[p].slots and known.space.slots(p) == known.slots), None)
        try:
            detached = self.core.is_detached(known.ref.node_id)
            if not detached:
                node_id = self.core.pin(known.ref)
        except KeyError:
            self.known.remove(known)
        else:
            assert detached == known.space.detached
            if not detached:
                assert place is not None
                known.space.split_at(place)
                known.space.pins[place] += 1
                self.held.append(Held(node_id, known.space, place))
        self.check()

    def unpin(self, which: int, touch: bool = True) -> None:
        held = self._pick(self.held, which)
        if held is None:
            return
        self.held.remove(held)
        streams = self._streams([held.space])
        got = self.core.unpin(held.node_id, touch=touch)
        self._expect(got, self.model.unpin(held.space, held.place, touch), streams)
        self.check()

    def record_hit(self, which: int) -> None:
        held = self._pick(self.held, which)
        if held is None:
            return
        self.core.record_hit(held.node_id)
        for page in held.space.path(held.place):
            page.hits += 1
        self.check()

    def mark_streams(self, which: int, stream: int) -> None:
        held = self._pick(self.held, which)
        if held is None:
            return
        self.core.mark_streams(held.node_id, frozenset({stream}))
        for page in held.space.path(held.place):
            page.streams.add(stream)
        self.check()

    def evict(self, num_tokens: int) -> None:
        spaces = list(self.model.live.values())
        streams = self._streams(spaces)
        evictable = self.core.evictable_tokens
        got = self.core.evict(num_tokens)
        self._expect(got, self.model.evict(num_tokens), streams)
        if self.merges:
            wanted = -(-max(num_tokens, 0) // self.page_size) * self.page_size
            assert sum(len(freed.slots) for freed in got) == min(wanted, evictable)
        self.check()

    def detach(self, namespace: Namespace | None) -> None:
        namespaces = list(self.model.live) if namespace is None else [namespace]
        spaces = [self.model.live[name] for name in namespaces if name in self.model.live]
        streams = self._streams(spaces)
        done = self.core.detach(namespace)
        expected = self.model.detach(namespaces)
        self._expect(done.freed, expected, streams)
        assert done.num_freed == len(expected)
        assert done.num_held == sum(len(page.slots) for space in spaces for page in space.pages.values())
        self.check()

    def close_gate(self, tokens: Sequence[int], namespace: Namespace) -> None:
        key, items = self.key(tokens, namespace), self.model.aligned(self.items(tokens))
        met = self.model.gates_on_path(namespace, items)
        closed = self.core.close_gate(key)
        assert closed.met == bool(met)
        if met:
            assert closed.node_id in {self._gate_id(namespace, gate) for gate in met}
        else:
            space, place = self.model.close_gate(namespace, items)
            assert closed.num_matched == len(place)
            self.gates.append(Held(closed.node_id, space, place))
        self.check()

    def set_gate(self, which: int, level: int) -> None:
        gate = self._pick(self.gates, which)
        if gate is None:
            return
        self.core.set_gate(gate.node_id, Gate(level))
        gate.space.gates[gate.place].level = level
        self.check()

    def open_gate(self, which: int) -> None:
        gate = self._pick(self.gates, which)
        if gate is None:
            return
        self.gates.remove(gate)
        streams = self._streams([gate.space])
        got = self.core.open_gate(gate.node_id)
        del gate.space.gates[gate.place]
        self._expect(got, self.model.unpin(gate.space, gate.place, False), streams)
        self.check()

    def pin_below(self, which: int) -> None:
        gate = self._pick(self.gates, which)
        if gate is None or gate.space.detached:
            return
        got = self.core.pin_below(gate.node_id)
        leaves = self.model.leaves_below(gate.space, gate.place)
        assert len(got) == len(leaves)
        by_slots = {tuple(gate.space.slots(place)): place for place in leaves}
        depths = {view.node_id: view.depth for view in self.core.walk()}
        for node_id in got:
            place = by_slots.pop(tuple(self.core.slots_of(NodeRef(node_id, depths[node_id])).tolist()))
            gate.space.pins[place] += 1
            self.held.append(Held(node_id, gate.space, place))
        self.check()

    def evict_below(self, which: int) -> None:
        gate = self._pick(self.gates, which)
        if gate is None or gate.space.detached or gate.space.lock(gate.place) != gate.space.pins[gate.place]:
            return
        streams = self._streams([gate.space])
        got = self.core.evict_below(gate.node_id)
        self._expect(got, self.model.evict_below(gate.space, gate.place), streams)
        self.check()

    # ---- comparing ----

    @staticmethod
    def _pick(choices: list[Any], which: int) -> Any:
        return choices[which % len(choices)] if choices else None

    def _tokens(self, place: Place, more: Sequence[int]) -> list[int]:
        if self.bigrams and place:
            return [place[0][0], *(pair[1] for pair in place), *more]
        return [*place, *more]

    def _gate_id(self, namespace: Namespace, place: Place) -> int:
        space = self.model.live[namespace]
        return next(gate.node_id for gate in self.gates if gate.space is space and gate.place == place)

    def _check_found(self, ref: NodeRef, space: Space | None, place: Place) -> None:
        if not place:
            assert ref == NOWHERE
            return
        assert space is not None
        assert ref.depth == len(place)
        assert self.core.slots_of(ref).tolist() == space.slots(place)
        self.known.append(Known(ref, space, space.slots(place)))
        del self.known[:-20]

    @staticmethod
    def _check_ready(ready: tuple[Ready, ...], pages: Iterable[Page]) -> None:
        """One event a stream, none earlier than any that stands for one of the pages."""
        newest = {known.stream: known.sequence for known in ready}
        assert len(newest) == len(ready)
        for page in pages:
            assert all(newest[stream] >= sequence for stream, sequence in page.ready.items())

    @staticmethod
    def _streams(spaces: list[Space]) -> dict[int, set[Any]]:
        return {slot: set(page.streams) for space in spaces for page in space.pages.values() for slot in page.slots}

    def _expect(self, got: list[Freed], expected: list[int], streams: dict[int, set[Any]]) -> None:
        slots = [slot for freed in got for slot in freed.slots.tolist()]
        assert sorted(slots) == sorted(expected)
        for freed in got:
            for slot in freed.slots.tolist():
                assert freed.streams >= streams.get(slot, set())

    def _pins(self) -> Counter[int]:
        return Counter(held.node_id for held in [*self.held, *self.gates])

    def check(self) -> None:
        """Everything that can be seen from outside is as in the model."""
        core, model = self.core, self.model
        audit = audit_tree(core, self._pins())
        assert audit.problems == []
        assert core.failure is None or self.may_fail
        assert core.merges == (self.merges and core.failure is None)
        assert core.evictable_tokens == model.evictable()
        assert core.protected_tokens == model.protected()
        assert core.detached_tokens == model.detached()
        assert core.num_namespaces == len(model.live)
        live = [slot for space in model.live.values() for page in space.pages.values() for slot in page.slots]
        flushed = [slot for space in model.flushed for page in space.pages.values() for slot in page.slots]
        assert sorted(audit.cached.tolist()) == sorted(live)
        assert sorted(audit.detached.tolist()) == sorted(flushed)
        if core.failure is None:
            self._check_nodes()
        for held in [*self.held, *self.gates]:
            ref = NodeRef(held.node_id, len(held.place))
            assert core.slots_of(ref).tolist() == held.space.slots(held.place)
            assert core.lock_ref(held.node_id) == held.space.lock(held.place)
            assert core.is_detached(held.node_id) == held.space.detached
        if self.mirror is not None:
            self.check_events(core.take_events())

    def _check_nodes(self) -> None:
        """Nodes begin and end exactly where the rules say."""
        ends: dict[Namespace, set[Place]] = {namespace: set() for namespace in self.model.live}
        places: dict[int, Place] = {}
        for view in self.core.walk():
            ids = np.frombuffer(view.tokens, np.int32).tolist()
            items = tuple(zip(ids[::2], ids[1::2], strict=True)) if self.bigrams else tuple(ids)
            places[view.node_id] = places.get(view.parent_id, ()) + items
            if view.parent_id:
                ends[view.namespace].add(places[view.node_id])
        assert ends == {name: space.ends(self.model.state) for name, space in self.model.live.items()}
        assert self.core.num_nodes == sum(map(len, ends.values()))

    def check_events(self, events: list[KVCacheEvent]) -> None:
        assert self.mirror is not None
        self.mirror.read(events)
        assert self.mirror.parents == self.expected_blocks(lambda space, place: True)

    def expected_blocks(self, is_there: Callable[[Space, Place], bool]) -> dict[bytes, bytes | None]:
        blocks: dict[bytes, bytes | None] = {}
        for namespace, space in self.model.live.items():
            hashes: dict[Place, bytes] = {}
            for place in sorted(space.pages, key=len):
                before = hashes.get(place[: -self.page_size])
                hashes[place] = page_hash(before or namespace.digest(), place[-self.page_size :])
                if is_there(space, place):
                    blocks[hashes[place]] = before
        return blocks
