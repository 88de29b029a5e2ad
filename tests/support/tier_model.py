"""The brute-force model of a tree with a host tier: pages that may be on the device, on the host, or on both.

As in `tree_model.py` there are no nodes: a job is a path and two depths, a pin or a hold is a place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aradix.keys import Namespace
from tests.support.tree_model import ModelTree, Page, Place, Space

__all__ = ["LOADING", "READING", "WRITING", "TierJob", "TierModel", "TierSpace", "tier"]

READING, WRITING, LOADING = 0, 1, 2


@dataclass
class TierJob:
    """A copy under way along `place`, from `start` items on. Nodes in its hands are not merged, so `cuts` remembers
    where they once ended."""

    job_id: int
    latch: int
    space: TierSpace
    start: int
    place: Place
    slots: list[int]
    cuts: set[Place] = field(default_factory=set)

    def covers(self, place: Place) -> bool:
        return self.start < len(place) <= len(self.place) and self.place[: len(place)] == place

    def grips(self, place: Place) -> bool:
        """Whether the node that a page is in is latched or held by it."""
        return self.covers(place) if self.latch == WRITING else self.place[: len(place)] == place


class TierSpace(Space):
    """`pages` are those of both tiers; the methods that `Space` has look at the device."""

    def __init__(self, namespace: Namespace, page_size: int) -> None:
        super().__init__(namespace, page_size)
        self.host: dict[Place, tuple[int, ...]] = {}
        self.holds: Counter[Place] = Counter()
        self.jobs: list[TierJob] = []

    def on_device(self, place: Place) -> bool:
        return place == () or (place in self.pages and bool(self.pages[place].slots))

    def children(self, place: Place) -> list[Place]:
        return [child for child in self.all_children(place) if self.on_device(child)]

    def all_children(self, place: Place) -> list[Place]:
        return super().children(place)

    def hold(self, place: Place) -> int:
        return sum(count for held, count in self.holds.items() if held[: len(place)] == place)

    def latched(self, place: Place) -> bool:
        return any(job.latch and job.covers(place) for job in self.jobs)

    def held(self, items: Place, start: int = 0) -> Place:
        found = super().held(items, start)
        while len(found) > start and not self.on_device(found):
            found = found[: -self.page_size]
        return found

    def found(self, items: Place) -> Place:
        """The longest place that is a prefix of `items`, on whatever tier."""
        return super().held(items)

    def host_end(self, items: Place) -> int:
        """How far along a path the host copies go."""
        end = 0
        while items[: end + self.page_size] in self.host and len(items) >= end + self.page_size:
            end += self.page_size
        return end

    def host_slots(self, place: Place, start: int) -> list[int]:
        ends = range(start - start % self.page_size + self.page_size, len(place) + 1, self.page_size)
        return [slot for end in ends for slot in self.host[place[:end]]][start % self.page_size :]

    def is_end(self, place: Place, state: Callable[[Page], tuple[int, ...]] | None) -> bool:
        if state is None:
            return place in self.cuts
        children = self.all_children(place)
        if len(children) != 1:
            return True
        (child,) = children
        return (
            self.lock(place) != self.lock(child)
            or state(self.pages[place]) != state(self.pages[child])
            or place in self.gates
            or any(gate[: len(child)] == child and span.start == len(place) for gate, span in self.gates.items())
            or self.on_device(place) != self.on_device(child)
            or (place in self.host) != (child in self.host)
            or self.hold(place) != self.hold(child)
            or [job for job in self.jobs if job.latch and job.covers(place) != job.covers(child)] != []
            or any(place in job.cuts for job in self.jobs if job.grips(place) and job.grips(child))
        )

    def split_at(self, place: Place) -> None:
        super().split_at(place)
        for job in self.jobs:
            if job.grips(place):
                job.cuts.add(place)

    def remember_ends(self, job: TierJob, state: Callable[[Page], tuple[int, ...]] | None) -> None:
        """Nodes that differ now will not be merged while a job has them."""
        for end in range(self.page_size, len(job.place) + 1, self.page_size):
            if job.place[:end] in self.pages and self.is_end(job.place[:end], state):
                job.cuts.add(job.place[:end])

    def leave_device(self, place: Place) -> tuple[int, ...]:
        page = self.pages[place]
        slots, page.slots = page.slots, ()
        page.ready, page.streams = {}, set()
        return slots


class TierModel(ModelTree):
    """The model of a whole tree on two tiers. `host_freed` collects what comes back on the host."""

    def __init__(self, page_size: int, policy: str, evict_unit: str) -> None:
        super().__init__(page_size, policy, evict_unit)
        self.host_freed: list[int] = []

    # ---- sums ----

    def _count(self, spaces: Iterable[Space], wanted: Callable[[TierSpace, Place], bool]) -> int:
        return self.page_size * sum(wanted(tier(space), place) for space in spaces for place in space.pages)

    def evictable(self) -> int:
        return self._count(self.live.values(), lambda s, place: s.on_device(place) and not s.lock(place))

    def protected(self) -> int:
        return self._count(self.live.values(), lambda s, place: s.on_device(place) and s.lock(place) > 0)

    def detached(self) -> int:
        return self._count(self.flushed, lambda s, place: s.on_device(place))

    def host_tokens(self, *, flushed: bool = False) -> int:
        return self._count(self.flushed if flushed else self.live.values(), lambda s, place: place in s.host)

    def host_evictable(self) -> int:
        return self._count(self.live.values(), lambda s, place: not s.on_device(place) and not s.hold(place))

    # ---- steps ----

    def space(self, namespace: Namespace) -> TierSpace:
        found = self.live.setdefault(namespace, TierSpace(namespace, self.page_size))
        return tier(found)

    def match(self, namespace: Namespace, items: Place, pin: bool) -> tuple[Space | None, Place]:
        found = self.space(namespace) if pin else self.live.get(namespace)
        if found is None:
            return None, ()
        space = tier(found)
        place, best = space.held(items), space.found(items)
        space.split_at(place)
        space.split_at(best)
        space.pins[place] += pin
        self.touch(space, best)
        return space, place

    def grow(
        self, space: Space, origin: Place, items: Place, slots: Iterable[int], priority: int, ready: dict[Any, int]
    ) -> Place:
        tiers = tier(space)
        held, found = tiers.held(items, len(origin)), tiers.found(items)
        kept = {items[:end]: tiers.pages[items[:end]] for end in self.ends(len(held), len(found))}
        tiers.split_at(found)
        for place in kept:
            del tiers.pages[place]
        super().grow(tiers, origin, items, slots, priority, ready)
        for place, page in kept.items():
            made = tiers.pages[place]
            page.slots, page.ready, page.last = made.slots, made.ready, made.last
            page.priority = max(page.priority, priority)
            tiers.pages[place] = page
        return held

    def ends(self, start: int, stop: int) -> range:
        return range(start + self.page_size, stop + 1, self.page_size)

    def _drop_unheld(self, space: Space) -> list[int]:
        tiers = tier(space)
        freed: list[int] = []
        for place in list(tiers.pages):
            if not tiers.lock(place):
                freed += tiers.leave_device(place)
            if place in tiers.host and not tiers.hold(place):
                self.host_freed += tiers.host.pop(place)
            if not tiers.pages[place].slots and place not in tiers.host:
                del tiers.pages[place]
        return freed

    def is_leaf(self, space: Space, place: Place) -> bool:
        return tier(space).on_device(place) and super().is_leaf(space, place)

    def _remove(self, space: Space, place: Place) -> list[int]:
        tiers = tier(space)
        freed: list[int] = []
        while place:
            if place in tiers.host:
                freed += tiers.leave_device(place)
            else:
                freed += tiers.pages.pop(place).slots
                tiers.cuts.discard(place)
            place = place[: -self.page_size]
            if self.state is not None or place in tiers.cuts:
                break
        self.prune(tiers)
        return freed

    def evict_below(self, space: Space, place: Place) -> list[int]:
        tiers = tier(space)
        freed: list[int] = []
        for other in [other for other in tiers.pages if other[: len(place)] == place and other != place]:
            freed += tiers.leave_device(other)
            if not tiers.hold(other):
                self.host_freed += tiers.host.pop(other, ())
                del tiers.pages[other]
                tiers.cuts.discard(other)
        return freed

    def leaves_below(self, space: Space, place: Place) -> list[Place]:
        return [leaf for leaf in super().leaves_below(space, place) if tier(space).on_device(leaf)]

    # ---- the host ----

    def evict_host(self, num_tokens: int) -> None:
        """By sorting all host leaves for every page."""
        num_freed = 0
        while num_freed < num_tokens:
            leaves = [
                (tier(space), place)
                for space in self.live.values()
                for place in space.pages
                if not tier(space).on_device(place)
                and not tier(space).all_children(place)
                and not tier(space).hold(place)
            ]
            if not leaves:
                return
            ranks = [self.rank(space.pages[place]) for space, place in leaves]
            assert len(set(ranks)) == len(ranks), "the oracle must not depend on how ties go"
            space, place = min(leaves, key=lambda leaf: self.rank(leaf[0].pages[leaf[1]]))
            while place and not space.on_device(place):
                self.host_freed += space.host.pop(place)
                num_freed += self.page_size
                del space.pages[place]
                space.cuts.discard(place)
                place = place[: -self.page_size]
                if self.state is not None or place in space.cuts:
                    break
            self.prune(space)

    def adopt_host(self, space: TierSpace, items: Place, start: int, slots: list[int]) -> None:
        """Host copies for the pages of a path from item `start` on, those that are nowhere yet too."""
        self.tick += 1
        for stop in self.ends(start, len(items)):
            at = stop - self.page_size - start
            space.host[items[:stop]] = tuple(slots[at : at + self.page_size])
            if items[:stop] not in space.pages:
                space.pages[items[:stop]] = Page((), self.tick, 0)
        for page in space.path(items):
            page.last = self.tick

    def begin(self, job: TierJob) -> None:
        job.space.split_at(job.place)
        job.space.remember_ends(job, self.state)
        job.space.jobs.append(job)
        if job.latch == WRITING:
            job.space.pins[job.place] += 1
        else:
            job.space.holds[job.place] += 1
        if job.latch == LOADING:
            job.space.pins[job.place[: job.start]] += 1

    def let_go(self, job: TierJob) -> list[int]:
        """End a job's pin and hold; the device slots that come back."""
        space = job.space
        space.jobs.remove(job)
        if job.latch != WRITING:
            space.holds[job.place] -= 1
            space.holds = +space.holds
        if job.latch == READING:
            freed = self._drop_unheld(space) if space.detached else []
            self.prune(space)
            return freed
        return self.unpin(space, job.place[: job.start] if job.latch == LOADING else job.place, False)


def tier(space: Space) -> TierSpace:
    assert isinstance(space, TierSpace)
    return space
