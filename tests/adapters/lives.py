"""Random lives of a prefix cache, and what drives a cache in SGLang's shape through one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch

__all__ = ["Life", "Shaped", "Step", "Subject"]


@dataclass
class Step:
    """One operation: `match`, `insert`, `lock` (a match, locked at once), `unlock` (the `which`th lock) or `evict`."""

    kind: str
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    extra_key: str | None = None
    priority: int = 0
    which: int = 0
    count: int = 0


class Life:
    """Operations drawn from a seed: a few families of prompts that share beginnings, in two namespaces.

    Args:
        seed: of everything.
        page_size: tokens a page; slots are whole pages that are never used twice.
        num_cached: about how many tokens stay cached.
    """

    def __init__(self, seed: object, page_size: int, num_cached: int = 400) -> None:
        self._random = random.Random(f"{seed} {page_size}")
        self._page_size = page_size
        self._num_cached = num_cached
        self._next_page = 1
        self._num_locks = 0
        self._prompts: list[list[int]] = [[family] * 3 for family in range(4)]

    def _tokens(self) -> list[int]:
        """A prompt known already, cut and continued, so that it leaves the known ones inside an edge."""
        known = self._random.choice(self._prompts)
        kept = known[: self._random.randint(1, len(known))]
        more = [self._random.randint(0, 2) for _ in range(self._random.choice((0, 0, 3, 9, 30)))]
        tokens = (kept + more)[:90]
        if self._random.random() < 0.3:
            self._prompts = [*self._prompts[-20:], tokens]
        return tokens

    def _slots(self, count: int) -> list[int]:
        num_pages = -(-count // self._page_size)
        first, self._next_page = self._next_page * self._page_size, self._next_page + num_pages
        return list(range(first, first + count))

    def step(self, num_evictable: int) -> Step:
        """The next one, for a cache with so many evictable tokens."""
        chance = self._random.random()
        extra_key = self._random.choice((None, None, None, "lora"))
        if num_evictable > self._num_cached or chance < 0.05:
            return Step("evict", count=self._random.choice((1, 7, 40, 200)))
        if self._num_locks and chance < 0.25:
            self._num_locks -= 1
            return Step("unlock", which=self._random.randint(0, self._num_locks))
        tokens = self._tokens()
        if chance < 0.35:
            self._num_locks += 1
            return Step("lock", tokens, extra_key=extra_key)
        if chance < 0.55:
            return Step("match", tokens, extra_key=extra_key)
        return Step("insert", tokens, self._slots(len(tokens)), extra_key, self._random.choice((0, 0, 0, 1, 2)))


class Subject(Protocol):
    """A cache that a life is lived by. `do` gives all that can be seen of a step, `seen` what can be seen after it."""

    def do(self, step: Step) -> Any: ...
    def seen(self) -> tuple[int, ...]: ...


class _Freed:
    """An allocator that keeps a list of what came back."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.slots: list[int] = []

    def free(self, slots: torch.Tensor) -> None:
        self.slots += slots.tolist()

    def free_segment(self, slots: torch.Tensor, start_pos: int = 0) -> None:
        self.free(slots)


class Shaped:
    """A cache in SGLang's shape, theirs or ours.

    Args:
        names: the module or modules that have `RadixCache`, `RadixKey` and the params.
        params: for `CacheInitParams`.
    """

    def __init__(self, names: ModuleType | Any, **params: Any) -> None:
        self._names = names
        self._freed = _Freed()
        self.cache = names.RadixCache(
            names.CacheInitParams(
                disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self._freed, **params
            )
        )
        self._locks: list[Any] = []

    def _key(self, step: Step) -> Any:
        return self._names.RadixKey(list(step.tokens), step.extra_key)

    def _match(self, step: Step) -> tuple[list[int], Any]:
        found = self.cache.match_prefix(self._names.MatchPrefixParams(key=self._key(step)))
        node = found.last_device_node
        # The release tells a length, and the slots of a node; 2026-05 told the slots.
        slots = getattr(found, "device_indices", None)
        return (self.cache.path_device_indices(node) if slots is None else slots).tolist(), node

    def do(self, step: Step) -> Any:
        names = self._names
        if step.kind == "insert":
            value = torch.tensor(step.slots, dtype=torch.int64)
            params = names.InsertParams(key=self._key(step), value=value, priority=step.priority)
            return self.cache.insert(params).prefix_len
        if step.kind == "evict":
            before = len(self._freed.slots)
            evicted = self.cache.evict(names.EvictParams(num_tokens=step.count)).num_tokens_evicted
            return evicted, self._freed.slots[before:]
        if step.kind == "unlock":
            return self.cache.dec_lock_ref(self._locks.pop(step.which)).delta
        slots, node = self._match(step)
        if step.kind == "lock":
            self._locks.append(node)
            return slots, self.cache.inc_lock_ref(node).delta
        return slots

    def seen(self) -> tuple[int, ...]:
        cache = self.cache
        return cache.evictable_size(), cache.protected_size(), cache.total_size()
