"""The cache in SGLang's shape and the async one live through the same operations with equal results."""

from __future__ import annotations

from typing import Any

import pytest

from aradix import EvictParams, InsertParams, MatchPrefixParams, RadixCache, RadixKey, SlotAllocator
from aradix.adapters import sglang
from aradix.params import NodeRef
from tests.adapters.lives import Life, Shaped, Step
from tests.support.caches import opened

pytestmark = pytest.mark.anyio

NUM_STEPS = 400
NUM_SLOTS = 4_000


class Async:
    """The async cache, driven by the low-level calls. The life's slots and the allocator's are told apart."""

    def __init__(self, cache: RadixCache, allocator: SlotAllocator) -> None:
        self.cache = cache
        self._allocator = allocator
        self._names: dict[int, int] = {}
        self._locks: list[NodeRef] = []

    def _held(self) -> set[int]:
        return set(self._allocator.pages_in("held").tolist())

    async def _match(self, step: Step) -> tuple[list[int], NodeRef]:
        found = await self.cache.match_prefix(MatchPrefixParams(RadixKey(step.tokens, step.extra_key)))
        return [self._names[slot] for slot in found.device_indices.tolist()], found.last_device_node

    async def do(self, step: Step) -> Any:
        if step.kind == "insert":
            page_size = self._allocator.page_size
            fresh = self._allocator.alloc(-(-len(step.slots) // page_size) * page_size)
            assert fresh is not None
            self._names.update(zip(fresh.tolist(), step.slots, strict=False))
            key = RadixKey(step.tokens, step.extra_key)
            done = await self.cache.insert(InsertParams(key, fresh, step.priority))
            self._allocator.free(done.duplicates)
            return done.prefix_len
        if step.kind == "evict":
            before = self._held()
            evicted = (await self.cache.evict(EvictParams(step.count))).num_freed_tokens
            pages, page_size = before - self._held(), self._allocator.page_size
            slots = [page * page_size + place for page in pages for place in range(page_size)]
            return evicted, sorted(self._names[slot] for slot in slots)
        if step.kind == "unlock":
            return self.cache.dec_lock_ref(self._locks.pop(step.which))
        slots, node = await self._match(step)
        if step.kind == "lock":
            self._locks.append(node)
            return slots, -self.cache.inc_lock_ref(node)
        return slots

    def release(self) -> None:
        while self._locks:
            self.cache.dec_lock_ref(self._locks.pop())


@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", ["lru", "lfu", "mru", "fifo", "filo", "priority"])
@pytest.mark.parametrize("tree_core", ["auto", "python"])
async def test_they_agree_operation_by_operation(tree_core: Any, policy: str, page_size: int, is_eagle: bool) -> None:
    settings: dict[str, Any] = {"is_eagle": is_eagle, "eviction_policy": policy, "tree_core": tree_core}
    allocator = SlotAllocator(NUM_SLOTS, page_size)
    async with opened(allocator=allocator, **settings) as cache:
        shaped, other = Shaped(sglang, page_size=page_size, **settings), Async(cache, allocator)
        life = Life(policy, page_size)
        num_evicted = 0
        for number in range(NUM_STEPS):
            step = life.step(cache.evictable_size())
            told = shaped.do(step)
            if step.kind == "evict":
                told = told[0], sorted(told[1])
                num_evicted += told[0]
                assert told[0] <= -(-step.count // page_size) * page_size
            assert await other.do(step) == told, (number, step)
            assert shaped.seen() == (cache.evictable_size(), cache.protected_size(), cache.total_size())
        shaped.cache.check()
        other.release()
        assert num_evicted > NUM_STEPS
