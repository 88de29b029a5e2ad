"""A brute-force model of a prefix cache: single pages in a dict, and every question answered by looking at all of them.

It knows the policies that rank by one number (LRU, MRU, FIFO, FILO) and evicts by pages. No nodes, no splits, no heap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Call", "Held", "PageModel", "Result"]

Result = tuple[Any, ...]
_Path = tuple[int, ...]
_Place = tuple[int, _Path]
"""A namespace's number, and all tokens up to the end of a page."""


class Call(NamedTuple):
    """One call: its name, the number of the lease it is about, and its numbers."""

    name: str
    lease: int
    args: tuple[Any, ...]


class _Page(NamedTuple):
    used: int
    created: int
    pins: int


class Held(NamedTuple):
    """What one lease holds: its pinned pages (as tokens), what is its own beyond them, and whether it was flushed."""

    namespace: int
    path: _Path
    num_own: int
    num_own_pages: int
    flushed: bool


class PageModel:
    """The state of a cache.

    Args:
        num_pages: of the pool.
        page_size: tokens a page.
        policy: `"lru"`, `"mru"`, `"fifo"` or `"filo"`.
    """

    def __init__(self, num_pages: int, page_size: int, policy: str) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._by_use = policy in ("lru", "mru")
        self._sign = 1 if policy in ("lru", "fifo") else -1
        self._tick = 0
        self._pages: dict[_Place, _Page] = {}
        self._held: dict[int, Held] = {}
        self._detached: dict[tuple[int, _Place], int] = {}
        self._epoch = 0
        self._epochs: dict[int, int] = {}

    def copy(self) -> PageModel:
        """A state of its own."""
        twin = PageModel.__new__(PageModel)
        twin.__dict__.update(self.__dict__)
        for name in ("_pages", "_held", "_detached", "_epochs"):
            setattr(twin, name, dict(getattr(self, name)))
        return twin

    def state(self) -> object:
        """Something hashable; equal for states that behave alike."""
        return (
            tuple(sorted(self._pages.items())),
            tuple(sorted(self._held.items())),
            tuple(sorted(self._detached.items())),
            tuple(sorted(self._epochs.items())),
        )

    # ---- what can be asked

    def apply(self, call: Call) -> Result | None:
        """What a call gives; `None` where it would have to wait, and then nothing has changed."""
        result: Result | None = getattr(self, f"_{call.name}")(call.lease, *call.args)
        return result

    def counts(self) -> dict[str, int]:
        """The counters that `stats()` has too, in tokens."""
        size = self.page_size
        pinned = sum(page.pins > 0 for page in self._pages.values())
        own = sum(held.num_own_pages for held in self._held.values())
        return {
            "free": self._num_free() * size,
            "evictable": (len(self._pages) - pinned) * size,
            "protected": pinned * size,
            "detached": len(self._detached) * size,
            "leased": (own + len(self._detached)) * size,
            "num_leases": len(self._held),
        }

    # ---- calls

    def _open(self, lease: int, namespace: int, tokens: Sequence[int], limit: int) -> Result:
        path = self._longest(namespace, tokens[:limit])
        self._touch(namespace, path)
        self._pin(namespace, path, 1)
        self._held[lease] = Held(namespace, path, 0, 0, False)
        return (len(path),)

    def _grow(self, lease: int, num_tokens: int) -> Result | None:
        held = self._held[lease]
        size = self.page_size
        num_own = held.num_own + num_tokens
        wanted = -(-num_own // size)
        if len(held.path) // size + wanted > self.num_pages:
            return ("too large",)
        missing = wanted - held.num_own_pages - self._num_free()
        if missing > 0:
            if missing > sum(page.pins == 0 for page in self._pages.values()):
                return None
            self._drop(missing)
        self._held[lease] = held._replace(num_own=num_own, num_own_pages=max(wanted, held.num_own_pages))
        return ("grown",)

    def _give_up(self, lease: int) -> Result:
        return ("gave up",)

    def _commit(self, lease: int, tokens: Sequence[int]) -> Result:
        held = self._held[lease]
        size, start = self.page_size, len(held.path)
        stop = len(tokens) // size * size
        if stop <= start or held.flushed:
            return (start, start)
        found = len(self._longest(held.namespace, tokens[:stop]))
        path = tuple(tokens[:stop])
        for end in range(found + size, stop + size, size):
            self._pages[held.namespace, path[:end]] = _Page(0, self._tick + 1, 0)
        self._touch(held.namespace, path)
        self._pin(held.namespace, held.path, -1)
        self._pin(held.namespace, path, 1)
        num_pages = (stop - start) // size
        self._held[lease] = held._replace(
            path=path, num_own=held.num_own - (stop - start), num_own_pages=held.num_own_pages - num_pages
        )
        return (max(found, start), stop)

    def _close(self, lease: int) -> Result:
        held = self._held.pop(lease)
        if held.flushed:
            epoch = self._epochs.pop(lease)
            for end in range(self.page_size, len(held.path) + 1, self.page_size):
                place = (epoch, (held.namespace, held.path[:end]))
                self._detached[place] -= 1
                if not self._detached[place]:
                    del self._detached[place]
        else:
            self._touch(held.namespace, held.path)
            self._pin(held.namespace, held.path, -1)
        return ()

    def _evict(self, lease: int, num_tokens: int) -> Result:
        evictable = sum(page.pins == 0 for page in self._pages.values())
        num_pages = min(evictable, -(-num_tokens // self.page_size))
        self._drop(num_pages)
        return (num_pages * self.page_size,)

    def _flush(self, lease: int, namespace: int | None) -> Result:
        self._epoch += 1
        gone = [place for place in self._pages if namespace in (None, place[0])]
        held = [place for place in gone if self._pages[place].pins]
        for place in held:
            self._detached[self._epoch, place] = self._pages[place].pins
        for place in gone:
            del self._pages[place]
        for number, each in self._held.items():
            if namespace in (None, each.namespace) and not each.flushed:
                self._held[number] = each._replace(flushed=True)
                self._epochs[number] = self._epoch
        return ((len(gone) - len(held)) * self.page_size, len(held) * self.page_size)

    def _peek(self, lease: int, namespace: int, tokens: Sequence[int]) -> Result:
        return (len(self._longest(namespace, tokens)),)

    # ---- parts

    def _longest(self, namespace: int, tokens: Sequence[int]) -> _Path:
        path = tuple(tokens)
        end = 0
        while end + self.page_size <= len(path) and (namespace, path[: end + self.page_size]) in self._pages:
            end += self.page_size
        return path[:end]

    def _touch(self, namespace: int, path: _Path) -> None:
        self._tick += 1
        for end in range(self.page_size, len(path) + 1, self.page_size):
            self._pages[namespace, path[:end]] = self._pages[namespace, path[:end]]._replace(used=self._tick)

    def _pin(self, namespace: int, path: _Path, change: int) -> None:
        for end in range(self.page_size, len(path) + 1, self.page_size):
            page = self._pages[namespace, path[:end]]
            self._pages[namespace, path[:end]] = page._replace(pins=page.pins + change)

    def _num_free(self) -> int:
        own = sum(held.num_own_pages for held in self._held.values())
        return self.num_pages - len(self._pages) - len(self._detached) - own

    def _drop(self, num_pages: int) -> None:
        for _ in range(num_pages):
            inner = {(namespace, path[: -self.page_size]) for namespace, path in self._pages}
            leaves = [place for place, page in self._pages.items() if not page.pins and place not in inner]
            del self._pages[min(leaves, key=self._rank)]

    def _rank(self, place: _Place) -> int:
        page = self._pages[place]
        return self._sign * (page.used if self._by_use else page.created)
