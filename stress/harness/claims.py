"""The oracle of quotas and pins: who has which slot, who may be evicted from, and what has to stay.

It is told what the harness asked for and was answered, and sees slots pass the allocator's door. Nothing here is shared
with the cache. Where it cannot know (a slot that was handed out, and nobody has shown it yet) it takes the side of the
cache: a tenant may have more than is known, never less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aradix import Namespace, SlotAllocator
from aradix.cache.pins import Pin
from stress.harness.outcome import Violation

__all__ = ["Claims", "Kept", "Standing", "WatchedAllocator"]


class WatchedAllocator(SlotAllocator):
    """An allocator that shows what passes its door."""

    claims: Claims

    def alloc_held(self, n: int, stream: Any = None, host_visible: bool = False) -> Any:
        slots = super().alloc_held(n, stream, host_visible)
        if slots is not None:
            self.claims.handed_out(slots.tolist())
        return slots

    def free_held(self, slots: Any, streams: Iterable[Any] = (), *, fence: Any = None) -> None:
        self.claims.came_back(slots.tolist())
        super().free_held(slots, streams, fence=fence)


class Standing:
    """What one lease shows: its slots, of which the first `published` are cached."""

    def __init__(self, namespace: Namespace, slots: Sequence[int], published: int) -> None:
        self.namespace = namespace
        self.slots = list(slots)
        self.published = published


class Kept:
    """A pin, the slots of what it keeps, and until when."""

    def __init__(self, pin: Pin, namespace: Namespace, tokens: Sequence[int], slots: list[int], until: float) -> None:
        self.pin = pin
        self.namespace = namespace
        self.tokens = tokens
        self.slots = slots
        self.until = until

    def must_hold(self, now: float) -> bool:
        """Whether nothing that may end it has come: its time, or, where it has none, the need of others."""
        return now < self.until and not (self.until == float("inf") and self.pin.ended == "taken back")


class Claims:
    """What is known of one run.

    Args:
        shares: tokens that each tenant has a claim on; `None` stands for the rest.
        clock: the cache's.
        page_size: slots are handed out in such.
    """

    def __init__(self, shares: Mapping[str | int | None, int], clock: Any, page_size: int) -> None:
        self.shares = dict(shares)
        self.violation: Violation | None = None
        self.num_evicted: Counter[str | int | None] = Counter()
        self.num_judged = 0
        """Tokens evicted while somebody else was surely above his share, so that a wrong choice would have shown."""
        self.standing: list[Standing] = []
        self.kept: list[Kept] = []
        self.is_flushing = False
        self._clock = clock
        self._page_size = page_size
        self._in_transit: set[int] = set()
        self._own: dict[int, str | int | None] = {}
        self._cached: dict[int, tuple[Namespace, bool]] = {}
        self._asked: list[tuple[str | int | None, int, int]] = []

    def fail(self, oracle: str, message: str) -> Violation:
        """The first finding, kept: the cache may be in the middle of a step, which must not be broken off."""
        found = Violation(oracle, message)
        self.violation = self.violation or found
        return found

    def tenant(self, namespace: Namespace) -> str | int | None:
        """Whose share a namespace counts to."""
        return namespace.tenant if namespace.tenant in self.shares else None

    # ---- what is asked and answered ----

    @contextmanager
    def asks(self, namespace: Namespace, num_tokens: int, num_matched: int) -> Iterator[None]:
        """Meanwhile a tenant may be given so many tokens, and may stand on so many that are cached."""
        asked = (self.tenant(namespace), num_tokens and num_tokens + self._page_size - 1, num_matched)
        self._asked.append(asked)
        try:
            yield
        finally:
            self._asked.remove(asked)

    def shown(self, standing: Standing, slots: Sequence[int], published: int) -> None:
        """A lease shows these slots, of which so many are cached by now."""
        tenant = self.tenant(standing.namespace)
        for slot in slots[:published]:
            self._own.pop(slot, None)
            self._in_transit.discard(slot)
            self._cached.setdefault(slot, (standing.namespace, False))
        for slot in slots[published:]:
            self._in_transit.discard(slot)
            self._own[slot] = tenant
        standing.slots, standing.published = list(slots), published

    def ended(self, standing: Standing) -> None:
        """A lease is about to end."""
        self.standing.remove(standing)

    def flushed(self, namespaces: Iterable[Namespace]) -> None:
        """What is cached there cannot be found any more, and comes back when nobody stands on it."""
        gone = set(namespaces)
        self._cached = {
            slot: (namespace, stale or namespace in gone) for slot, (namespace, stale) in self._cached.items()
        }
        self.kept = [kept for kept in self.kept if kept.namespace not in gone]

    # ---- what passes the door ----

    def handed_out(self, slots: list[int]) -> None:
        """The allocator gave slots to the cache, for whom it does not say."""
        self._in_transit.update(slots)

    def came_back(self, slots: list[int]) -> None:
        """The cache gave slots to the allocator, in the order in which they were let go."""
        stood = {slot for standing in self.standing for slot in standing.slots[: standing.published]}
        for slot in slots:
            namespace, stale = self._cached.get(slot, (Namespace(), True))
            if slot in stood:
                self.fail("under a lease", f"slot {slot} was given back while a lease stands on it")
            if slot in self._cached and not stale and not self.is_flushing:
                self._evicted(slot, namespace, stood)
            self._cached.pop(slot, None)
            self._own.pop(slot, None)
            self._in_transit.discard(slot)

    def _evicted(self, slot: int, namespace: Namespace, stood: set[int]) -> None:
        now = self._clock()
        for kept in self.kept:
            if slot in kept.slots and kept.must_hold(now):
                self.fail("kept", f"slot {slot} was evicted at {now}, but {kept.pin!r} keeps it until {kept.until}")
        tenant = self.tenant(namespace)
        self.num_evicted[tenant] += 1
        known: Counter[str | int | None] = Counter(self._own.values())
        free_to_go: Counter[str | int | None] = Counter()
        for other, (its, stale) in self._cached.items():
            known[self.tenant(its)] += 1
            free_to_go[self.tenant(its)] += not stale and other not in stood
        for kept in self.kept:
            free_to_go[self.tenant(kept.namespace)] -= len(kept.tokens)
        coming: Counter[str | int | None] = Counter()
        for asking, num_tokens, num_matched in self._asked:
            coming[asking] += num_tokens
            free_to_go[asking] -= num_matched
        above = [
            other
            for other, share in self.shares.items()
            if other != tenant and known[other] > share and free_to_go[other] > 0
        ]
        self.num_judged += bool(above)
        most = known[tenant] + coming[tenant] + len(self._in_transit)
        if above and most <= self.shares[tenant]:
            self.fail(
                "quota",
                f"slot {slot} was evicted from tenant {tenant!r}, who has at most {most} of {self.shares[tenant]}; "
                f"but {above[0]!r} has at least {known[above[0]]} of {self.shares[above[0]]}, and "
                f"{free_to_go[above[0]]} of them could have gone",
            )
