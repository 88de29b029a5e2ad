"""The Python core and the compiled one side by side: every step on both, and all that can be seen compared after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aradix.keys import Namespace, RadixKey
from aradix.params import NodeRef
from aradix.tree import make_core
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import NOWHERE, Closed, Inserted, Match, Ready, Slots

__all__ = ["NAMESPACES", "Pinned", "Twins", "plain"]

NAMESPACES = (Namespace(), Namespace(lora="a", tenant="a"), Namespace(salt="a", tenant="b"))
COUNTERS = (
    "evictable_tokens",
    "protected_tokens",
    "detached_tokens",
    "num_nodes",
    "num_namespaces",
    "version",
    "merges",
    "stay",
)


def plain(value: Any) -> Any:
    """A result with its arrays as lists, and the names of its records."""
    if isinstance(value, np.ndarray):
        assert value.dtype == np.int64
        return value.tolist()
    if isinstance(value, tuple):
        return type(value).__name__, *map(plain, value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, BaseException):
        return type(value).__name__, str(value)
    return value


@dataclass
class Pinned:
    """A pin: the node's id, the tokens to its end, and the namespace."""

    node_id: int
    tokens: list[int]
    namespace: Namespace


class Twins:
    """Both cores, with the same settings.

    Args:
        policy: gives a policy for each of them, by name or a new object.
        page_size: tokens (or bigrams) a page.
        bigrams: whether keys are bigrams.
        evict_unit: `"page"` or `"node"`.
        record_events: whether events are compared.
        shares: of tenants.
        merge: whether neighbours that became equal are one node.
    """

    def __init__(
        self,
        policy: Callable[[], Any],
        *,
        page_size: int = 1,
        bigrams: bool = False,
        evict_unit: str = "page",
        record_events: bool = True,
        shares: Sequence[tuple[str | int | None, int]] = (),
        merge: bool = True,
    ) -> None:
        self.cores = [
            make_core(
                name,
                policy=policy(),
                page_size=page_size,
                item_bytes=8 if bigrams else 4,
                evict_unit=evict_unit,
                record_events=record_events,
                shares=shares,
                merge=merge,
            )
            for name in ("python", "cpp")
        ]
        self.page_size = page_size
        self.bigrams = bigrams
        self.pins: list[Pinned] = []
        self.gates: list[Pinned] = []
        self.places: list[NodeRef] = [NOWHERE]
        self.num_slots = 0
        self.sequence = 0

    # ---- what steps are made of ----

    def tokens(self, pages: Sequence[int], rest: int = 0) -> list[int]:
        """Pages that differ from one another in their first or in their last token, and a part of one."""
        made: list[int] = []
        for page in pages:
            made += [0] * self.page_size
            made[-self.page_size if page % 2 else -1] = page
        made += [1] * (rest % self.page_size)
        return [0, *made] if self.bigrams else made

    def key(self, tokens: Sequence[int], namespace: Namespace) -> RadixKey:
        key = RadixKey([3, *tokens, 3], namespace)[1 : len(tokens) + 1]
        return key.maybe_to_bigram_view(self.bigrams)

    def slots(self, count: int, paged: bool) -> Slots:
        """New slots: whole pages, as allocators give them, or any order at all."""
        pages = -(-count // self.page_size)
        first, self.num_slots = self.num_slots, self.num_slots + pages * self.page_size
        slots = np.arange(first, first + pages * self.page_size, dtype=np.int64)[:count]
        return slots if paged else slots[::-1] + 2**40

    def ready(self, streams: Sequence[int]) -> tuple[Ready, ...]:
        made = []
        for stream in streams:
            self.sequence += 1
            made.append(Ready(stream, f"event {self.sequence}", self.sequence))
        return tuple(made)

    def step(self, name: str, *args: Any, **settings: Any) -> Any:
        """One step on both; gives the result of the Python core, which may be an error that both raised."""
        results: list[Any] = []
        for core in self.cores:
            own = [arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args]
            try:
                results.append(getattr(core, name)(*own, **settings))
            except KeyError as error:
                results.append(error)
        assert plain(results[0]) == plain(results[1]), name
        self.check()
        return results[0]

    def check(self) -> None:
        first, second = self.cores
        for name in COUNTERS:
            assert getattr(first, name) == getattr(second, name), name
        assert plain(first.shares()) == plain(second.shares())
        assert plain(first.take_events()) == plain(second.take_events())
        assert str(first.failure) == str(second.failure)
        for detached in (False, True):
            assert plain(list(first.walk(detached=detached))) == plain(list(second.walk(detached=detached)))

    def audit(self) -> None:
        pins = Counter(pinned.node_id for pinned in [*self.pins, *self.gates])
        for core in self.cores:
            assert audit_tree(core, pins).problems == []

    # ---- steps ----

    def match(self, tokens: list[int], namespace: Namespace, limit: int | None, pin: bool, past: bool) -> None:
        key = self.key(tokens, namespace)
        self.step("peek", key)
        found: Match = self.step("match", key, limit=limit, pin=pin, past_pending=past)
        self.places.append(found.last)
        if pin and not found.gate:
            num_ids = found.num_matched + (self.bigrams and found.num_matched > 0)
            self.pins.append(Pinned(found.node_id, tokens[:num_ids], namespace))

    def insert(
        self,
        tokens: list[int],
        namespace: Namespace,
        priority: int,
        paged: bool,
        streams: Sequence[int],
        past: bool,
        hits: tuple[int, int] = (1, 0),
    ) -> None:
        key = self.key(tokens, namespace)
        slots = self.slots(len(key), paged)
        held_hits, new_hits = hits
        done: Inserted | int = self.step(
            "insert",
            key,
            slots,
            priority=priority,
            ready=self.ready(streams),
            past_pending=past,
            held_hits=held_hits,
            new_hits=new_hits,
        )
        if not isinstance(done, int):
            self.places.append(done.last)

    def extend(self, which: int, more: Sequence[int], priority: int, paged: bool, streams: Sequence[int]) -> None:
        """Grow the tokens of a pin; as a lease does, also after a flush: nothing comes of it then."""
        if not self.pins:
            return
        pinned = self.pins[which % len(self.pins)]
        is_detached = self.step("is_detached", pinned.node_id)
        pages = self.tokens(more)
        tokens = [*pinned.tokens, *(pages[1:] if self.bigrams and pinned.tokens else pages)]
        key = self.key(tokens, pinned.namespace)
        depth = max(0, len(pinned.tokens) - self.bigrams)
        slots = self.slots(len(key) - depth, paged)
        done: Inserted | None = self.step(
            "extend", pinned.node_id, key, slots, priority=priority, ready=self.ready(streams)
        )
        assert (done is None) == is_detached
        if done is None:
            return
        pinned.node_id = done.node_id
        pinned.tokens = tokens[: done.end + (self.bigrams and done.end > 0)]
        self.places.append(done.last)

    def pin(self, which: int, inside: int) -> None:
        """Pin a place, or one further up in the same node; a stale one is refused by both."""
        ref = self.places[which % len(self.places)]
        ref = NodeRef(ref.node_id, ref.depth - inside)
        found = self.step("pin", ref)
        if isinstance(found, KeyError) or found == 0:
            return
        tokens, namespace = self._path_of(found)
        self.pins.append(Pinned(found, tokens, namespace))

    def unpin(self, which: int, touch: bool) -> None:
        if self.pins:
            self.step("unpin", self.pins.pop(which % len(self.pins)).node_id, touch=touch)

    def tell(self, which: int, name: str, *args: Any) -> Any:
        """A step on a pinned node."""
        return self.step(name, self.pins[which % len(self.pins)].node_id, *args) if self.pins else None

    def look(self, which: int, other: int, start: int) -> None:
        ref = self.places[which % len(self.places)]
        self.step("slots_of", ref, start)
        self.step("is_below", ref.node_id, self.places[other % len(self.places)].node_id)
        self.step("lock_ref", ref.node_id)
        self.step("is_detached", ref.node_id)
        self.step("child_ids", ref.node_id)
        self.step("view", ref.node_id)

    def close_gate(self, tokens: list[int], namespace: Namespace) -> None:
        closed: Closed = self.step("close_gate", self.key(tokens, namespace))
        if not closed.met:
            num_ids = closed.num_matched + (self.bigrams and closed.num_matched > 0)
            self.gates.append(Pinned(closed.node_id, tokens[:num_ids], namespace))

    def set_gate(self, which: int, gate: Any) -> None:
        if self.gates:
            self.step("set_gate", self.gates[which % len(self.gates)].node_id, gate)

    def open_gate(self, which: int) -> None:
        if self.gates:
            self.step("open_gate", self.gates.pop(which % len(self.gates)).node_id)

    def below_gate(self, which: int, evict: bool) -> None:
        """Pin the leaves below a gate, or evict them where nothing but the gate holds anything there."""
        if not self.gates:
            return
        gate = self.gates[which % len(self.gates)]
        if not evict:
            for node_id in self.step("pin_below", gate.node_id):
                self.pins.append(Pinned(node_id, *self._path_of(node_id)))
        elif self.step("lock_ref", gate.node_id) == 1 and not self.step("is_detached", gate.node_id):
            self.step("evict_below", gate.node_id)

    def _path_of(self, node_id: int) -> tuple[list[int], Namespace]:
        for detached in (False, True):
            above: dict[int, bytes] = {}
            views, _ = (list(core.walk(detached=detached)) for core in self.cores)  # a policy may count its questions
            for view in views:
                above[view.node_id] = path = above.get(view.parent_id, b"") + view.tokens
                if view.node_id == node_id:
                    ids = np.frombuffer(path, np.int32).tolist()
                    return ([*ids[::2], ids[-1]] if self.bigrams and ids else ids), view.namespace
        raise AssertionError(node_id)
