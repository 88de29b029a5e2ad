"""A brute-force model of the radix tree: dictionaries of whole prefixes, scanned anew for every question.

It shares no code with the cores. A *place* is the tuple of items from the root to the end of a page; a page is named by
the place at which it ends, and has its own slots and statistics, so that nodes, splits and merges do not exist here.
Where a node begins and ends is derived from the rules (`Space.ends`), to be compared with what a core has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aradix.keys import Namespace

__all__ = ["GRANTED", "PASSING", "PENDING", "RANKS", "STATES", "GateSpan", "ModelTree", "Page", "Place", "Space"]

Place = tuple[Any, ...]

PASSING, PENDING, GRANTED = 1, 2, 3
"""How shut a gate is: everybody may pass, only who was let in before, nobody."""


@dataclass
class Page:
    """One page of a prefix."""

    slots: tuple[int, ...]
    created: int
    priority: int
    last: int = 0
    hits: int = 0
    ready: dict[Hashable, int] = field(default_factory=dict)
    streams: set[Hashable] = field(default_factory=set)


RANKS: dict[str, Callable[[Page], tuple[int, ...]]] = {
    "lru": lambda page: (page.last,),
    "mru": lambda page: (-page.last,),
    "fifo": lambda page: (page.created,),
    "filo": lambda page: (-page.created,),
    "lfu": lambda page: (page.hits, page.last),
    "slru": lambda page: (1 if page.hits >= 2 else 0, page.last),
    "priority": lambda page: (page.priority, page.last),
}
"""What goes first under each policy, said once more: the lowest."""

STATES: dict[str, Callable[[Page], tuple[int, ...]]] = {
    **RANKS,
    "slru": lambda page: (min(page.hits, 2), page.last),
}
"""What has to be equal for two pages to lie in one node."""


@dataclass
class GateSpan:
    """A gate: on the node of pages that begins after `start` items and ends at the gate's place."""

    start: int
    level: int = PENDING


class Space:
    """One epoch of one namespace: from its first page to its flush."""

    def __init__(self, namespace: Namespace, page_size: int) -> None:
        self.namespace = namespace
        self.page_size = page_size
        self.pages: dict[Place, Page] = {}
        self.pins: Counter[Place] = Counter()
        self.cuts: set[Place] = set()
        self.gates: dict[Place, GateSpan] = {}
        self.detached = False

    def path(self, place: Place) -> list[Page]:
        return [self.pages[place[:end]] for end in range(self.page_size, len(place) + 1, self.page_size)]

    def lock(self, place: Place) -> int:
        return sum(count for pinned, count in self.pins.items() if pinned[: len(place)] == place)

    def children(self, place: Place) -> list[Place]:
        return [other for other in self.pages if other[: -self.page_size] == place]

    def slots(self, place: Place, start: int = 0) -> list[int]:
        return [slot for page in self.path(place) for slot in page.slots][start:]

    def held(self, items: Place, start: int = 0) -> Place:
        """The longest place that is a prefix of `items`."""
        end = start
        while items[: end + self.page_size] in self.pages and len(items) >= end + self.page_size:
            end += self.page_size
        return items[:end]

    def gate_over(self, place: Place) -> Place | None:
        """The gate on whose node the page that ends at `place` lies; for the root a gate on the root."""
        for gate, span in self.gates.items():
            if gate == place == () or (span.start < len(place) <= len(gate) and gate[: len(place)] == place):
                return gate
        return None

    def split_at(self, place: Place) -> None:
        """A node ends here from now on, and a gate on the node that was cut stays with the tail."""
        self.cuts.add(place)
        for gate, span in self.gates.items():
            if span.start < len(place) < len(gate) and gate[: len(place)] == place:
                span.start = len(place)

    def is_end(self, place: Place, state: Callable[[Page], tuple[int, ...]] | None) -> bool:
        """Whether a node ends at a page: for good where it was cut (`state` is None), else where neighbours differ."""
        children = self.children(place)
        if state is None or len(children) != 1:
            return state is not None or place in self.cuts
        (child,) = children
        return (
            self.lock(place) != self.lock(child)
            or state(self.pages[place]) != state(self.pages[child])
            or place in self.gates
            or any(gate[: len(child)] == child and span.start == len(place) for gate, span in self.gates.items())
        )

    def ends(self, state: Callable[[Page], tuple[int, ...]] | None) -> set[Place]:
        return {place for place in self.pages if self.is_end(place, state)}


class ModelTree:
    """The model of a whole tree.

    Args:
        page_size: items a page.
        policy: a name in `RANKS`.
        evict_unit: `"page"` or `"node"`.
    """

    def __init__(self, page_size: int, policy: str, evict_unit: str) -> None:
        self.page_size = page_size
        self.rank = RANKS[policy]
        self.state = STATES[policy] if evict_unit == "page" else None
        self.tick = 0
        self.live: dict[Namespace, Space] = {}
        self.flushed: list[Space] = []

    # ---- sums ----

    def evictable(self) -> int:
        return self.page_size * sum(not s.lock(place) for s in self.live.values() for place in s.pages)

    def protected(self) -> int:
        return self.page_size * sum(bool(s.lock(place)) for s in self.live.values() for place in s.pages)

    def detached(self) -> int:
        return self.page_size * sum(len(space.pages) for space in self.flushed)

    # ---- steps ----

    def aligned(self, items: Place) -> Place:
        return items[: len(items) // self.page_size * self.page_size]

    def space(self, namespace: Namespace) -> Space:
        return self.live.setdefault(namespace, Space(namespace, self.page_size))

    def prune(self, space: Space) -> None:
        if not space.pages and not +space.pins:
            if space.detached:
                self.flushed.remove(space)
            elif self.live.get(space.namespace) is space:
                del self.live[space.namespace]

    def touch(self, space: Space, place: Place) -> None:
        self.tick += 1
        for page in space.path(place):
            page.last = self.tick

    def gate_met(
        self, namespace: Namespace, items: Place, origin: Place | None = None, stopped_by: int = PENDING
    ) -> Place | None:
        """The gate that stops a walk along `items`, from the root or from a pinned place on."""
        space = self.live.get(namespace)
        if space is None:
            return None
        first = 0 if origin is None else len(origin) + self.page_size
        for end in range(first, len(space.held(items)) + 1, self.page_size):
            gate = space.gate_over(items[:end])
            if gate is not None and space.gates[gate].level >= stopped_by:
                return gate
        return None

    def match(self, namespace: Namespace, items: Place, pin: bool) -> tuple[Space | None, Place]:
        """Walk; the caller asked `gate_met` before."""
        space = self.space(namespace) if pin else self.live.get(namespace)
        if space is None:
            return None, ()
        place = space.held(items)
        space.split_at(place)
        space.pins[place] += pin
        self.touch(space, place)
        return space, place

    def grow(
        self,
        space: Space,
        origin: Place,
        items: Place,
        slots: Iterable[int],
        priority: int,
        ready: dict[Hashable, int],
    ) -> Place:
        """Add `items` below `origin`; `slots` are those beyond it. Gives the place up to which it was held."""
        held = space.held(items, len(origin))
        offered = list(slots)
        space.split_at(held)
        self.tick += 1
        for end in range(len(origin) + self.page_size, len(held) + 1, self.page_size):
            space.pages[items[:end]].hits += 1
        for end in range(len(held) + self.page_size, len(items) + 1, self.page_size):
            begin = end - self.page_size - len(origin)
            adopted = tuple(offered[begin : begin + self.page_size])
            space.pages[items[:end]] = Page(adopted, self.tick, priority, ready=dict(ready))
        space.cuts.add(items)
        for page in space.path(items):
            page.priority = max(page.priority, priority)
            page.last = self.tick
        return held

    def unpin(self, space: Space, place: Place, touch: bool) -> list[int]:
        """Undo a pin; the slots that come back."""
        if touch:
            self.touch(space, place)
        space.pins[place] -= 1
        space.pins = +space.pins
        freed = self._drop_unheld(space) if space.detached else []
        self.prune(space)
        return freed

    def _drop_unheld(self, space: Space) -> list[int]:
        gone = [place for place in space.pages if not space.lock(place)]
        return [slot for place in gone for slot in space.pages.pop(place).slots]

    def detach(self, namespaces: Iterable[Namespace]) -> list[int]:
        freed: list[int] = []
        for namespace in list(namespaces):
            space = self.live.pop(namespace, None)
            if space is not None:
                space.detached = True
                self.flushed.append(space)
                freed += self._drop_unheld(space)
                self.prune(space)
        return freed

    # ---- eviction, by sorting all leaves for every page ----

    def evict(self, num_tokens: int) -> list[int]:
        """The slots that go."""
        freed: list[int] = []
        while len(freed) < num_tokens:
            leaves = [
                (space, place) for space in self.live.values() for place in space.pages if self.is_leaf(space, place)
            ]
            if not leaves:
                break
            leaves.sort(key=lambda leaf: self.rank(leaf[0].pages[leaf[1]]))
            ranks = [self.rank(space.pages[place]) for space, place in leaves]
            assert len(set(ranks)) == len(ranks), "the oracle must not depend on how ties go"
            freed += self._remove(*leaves[0])
        return freed

    def is_leaf(self, space: Space, place: Place) -> bool:
        return not space.children(place) and not space.lock(place)

    def _remove(self, space: Space, place: Place) -> list[int]:
        freed: list[int] = []
        while place:
            freed += space.pages.pop(place).slots
            space.cuts.discard(place)
            place = place[: -self.page_size]
            if self.state is not None or place in space.cuts:
                break
        self.prune(space)
        return freed

    def evict_below(self, space: Space, place: Place) -> list[int]:
        below = [other for other in space.pages if other[: len(place)] == place and other != place]
        space.cuts -= set(below)
        return [slot for other in below for slot in space.pages.pop(other).slots]

    # ---- gates ----

    def gates_on_path(self, namespace: Namespace, items: Place) -> set[Place]:
        """The gates, shut or not, any of which `close_gate` may name as met."""
        space = self.live.get(namespace)
        if space is None:
            return set()
        held = space.held(items)
        over = {space.gate_over(held[:end]) for end in range(0, len(held) + 1, self.page_size)}
        return {gate for gate in over if gate is not None}

    def close_gate(self, namespace: Namespace, items: Place) -> tuple[Space, Place]:
        space = self.space(namespace)
        place = space.held(items)
        start = len(place) - self.page_size if place else 0
        while start > 0 and not space.is_end(place[:start], self.state):
            start -= self.page_size
        space.split_at(place)
        space.gates[place] = GateSpan(start)
        space.pins[place] += 1
        return space, place

    def leaves_below(self, space: Space, place: Place) -> list[Place]:
        at_or_below = [place, *(p for p in space.pages if p[: len(place)] == place and p != place)]
        return [p for p in at_or_below if not space.children(p)]
