"""A cache of somebody else's: a dict of whole prompts by their prefixes, one slot a token, no waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from stress.harness.subject import NoRoomError

__all__ = ["TinyCache", "UnpinnedCache"]

Place = tuple[str, tuple[int, ...]]


class TinyHold:
    def __init__(self, cache: TinyCache, namespace: str, tokens: Sequence[int]) -> None:
        self.cache, self.namespace = cache, namespace
        self.own: list[int] = []
        self.places: list[Place] = []
        self.epoch = cache.epochs[namespace]
        for end in range(1, len(tokens) + 1):
            place = (namespace, tuple(tokens[:end]))
            if place not in cache.cached:
                break
            self.places.append(place)
        self.found = [cache.cached[place] for place in self.places]
        cache.pin(self.found)

    def slots(self) -> list[int]:
        return self.found + self.own

    async def grow(self, num_tokens: int) -> None:
        await self.cache.evict(num_tokens - len(self.cache.free))
        if len(self.cache.free) < num_tokens:
            raise NoRoomError
        self.own += [self.cache.free.pop() for _ in range(num_tokens)]

    def publish(self, tokens: Sequence[int]) -> int:
        if self.epoch != self.cache.epochs[self.namespace]:
            return len(self.found)  # flushed since: what it computed is not to be found
        for end in range(len(self.found) + 1, len(tokens) + 1):
            slot = self.own.pop(0)
            kept = self.cache.cached.setdefault((self.namespace, tuple(tokens[:end])), slot)
            if kept != slot:
                self.cache.free.append(slot)
            self.found.append(kept)
            self.cache.pin([kept])
        return len(tokens)


class TinyCache:
    def __init__(self) -> None:
        self.num_slots, self.page_size = 40, 1
        self.free = list(range(1, 41))
        self.cached: dict[Place, int] = {}
        self.pins: Counter[int] = Counter()
        self.epochs: Counter[str] = Counter()

    def pin(self, slots: Sequence[int]) -> None:
        self.pins.update(slots)

    def open(self) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    @asynccontextmanager
    async def hold(self, namespace: str, tokens: Sequence[int]) -> AsyncIterator[TinyHold]:
        hold = TinyHold(self, namespace, tokens)
        try:
            yield hold
        finally:
            self.pins.subtract(hold.found)
            self.free += hold.own
            # What was flushed meanwhile goes back with its last holder.
            left = [slot for slot in hold.found if not self.pins[slot] and slot not in self.cached.values()]
            self.free += dict.fromkeys(left)

    async def flush(self, namespace: str) -> None:
        self.epochs[namespace] += 1
        for place in [place for place in self.cached if place[0] == namespace]:
            slot = self.cached.pop(place)
            if not self.pins[slot]:
                self.free.append(slot)

    async def evict(self, num_tokens: int) -> None:
        for place in sorted(self.cached, key=lambda place: -len(place[1])):
            if num_tokens > 0 and self.pins[self.cached[place]] <= 0:
                self.free.append(self.cached.pop(place))
                num_tokens -= 1

    def places(self) -> Mapping[str, int]:
        held = self.num_slots - len(self.free) - len(self.cached)
        return {"free": len(self.free), "cached": len(self.cached), "held": held}


class UnpinnedCache(TinyCache):
    """The same with the pin forgotten."""

    def pin(self, slots: Sequence[int]) -> None:
        self.pins.update(dict.fromkeys(slots, 0))
