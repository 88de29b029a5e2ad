"""The calls for schedulers that keep their own tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aradix import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    NodeRef,
    RadixCache,
    RadixKey,
    SlotAllocator,
)
from aradix.errors import DoubleFreeError, InvalidKeyError, OutOfSlotsError, UsageError
from tests.cache.acts import entered, filled, key
from tests.support.caches import idle_sum, opened

pytestmark = pytest.mark.anyio


async def inserted(cache: RadixCache, opened_with: RadixKey) -> torch.Tensor:
    allocator = cache._params.allocator
    page_size = cache._params.page_size
    slots: torch.Tensor = allocator.alloc(-(-len(opened_with) // page_size) * page_size)
    result = await cache.insert(InsertParams(opened_with, slots))
    allocator.free(result.duplicates)
    return slots


@pytest.mark.parametrize("page_size", [1, 4])
async def test_what_was_inserted_is_matched(page_size: int) -> None:
    async with opened(64, page_size) as cache:
        slots = await inserted(cache, key(range(8)))
        match = await cache.match_prefix(MatchPrefixParams(key(range(8), 99)))
        assert match.device_indices.tolist() == slots.tolist()
        assert match.device_indices.dtype == torch.int64
        assert match.last_host_node == match.best_match_node == match.last_device_node
        assert match.host_hit_length == 0
        assert cache.stats().queries == 0
        nothing = await cache.match_prefix(MatchPrefixParams(key(77)))
        assert nothing.device_indices.tolist() == []


async def test_a_match_is_a_copy() -> None:
    async with opened(16) as cache:
        slots = await inserted(cache, key(range(4)))
        match = await cache.match_prefix(MatchPrefixParams(key(range(4))))
        expected = slots.tolist()
        slots.fill_(0)
        match.device_indices.fill_(0)
        again = await cache.match_prefix(MatchPrefixParams(key(range(4))))
        assert again.device_indices.tolist() == expected


async def test_duplicates_are_the_callers_and_never_the_trees_own() -> None:
    allocator = SlotAllocator(64, 4)
    async with opened(allocator=allocator) as cache:
        first = await inserted(cache, key(range(8)))
        second = allocator.alloc(12)
        assert second is not None
        done = await cache.insert(InsertParams(key(range(11)), second))
        assert done.prefix_len == 8
        assert done.num_adopted == 0
        assert done.duplicates.tolist() == second.tolist()
        allocator.free(done.duplicates)
        # The usual way: what was matched, then what was computed.
        fresh = allocator.alloc(4)
        assert fresh is not None
        third = await cache.insert(InsertParams(key(range(12)), torch.cat((first, fresh))))
        assert third.num_adopted == 4
        assert third.duplicates.tolist() == []
        match = await cache.match_prefix(MatchPrefixParams(key(range(12))))
        assert match.device_indices.tolist() == first.tolist() + fresh.tolist()
        assert third.node == match.last_device_node
        with pytest.raises(UsageError):
            allocator.free(fresh)  # the cache's now
        assert idle_sum(cache) == 64


async def test_pins_protect_and_are_counted() -> None:
    async with opened(16) as cache:
        await inserted(cache, key(range(8)))
        match = await cache.match_prefix(MatchPrefixParams(key(range(5))))
        assert cache.inc_lock_ref(match.last_device_node) == 5
        assert cache.inc_lock_ref(match.last_device_node) == 0
        cache.check()
        assert (await cache.evict(EvictParams(16))).num_freed_tokens == 3
        assert cache.dec_lock_ref(match.last_device_node) == 0
        assert cache.protected_size() == 5
        assert cache.dec_lock_ref(match.last_device_node) == 5
        with pytest.raises(UsageError, match="without"):
            cache.dec_lock_ref(match.last_device_node)
        assert cache.evictable_size() == 5
        assert cache.total_size() == 5


async def test_pins_survive_splits_and_merges_around_them() -> None:
    async with opened(64) as cache:
        await inserted(cache, key(range(12)))
        places = []
        for depth in (12, 6, 9, 3, 6):
            match = await cache.match_prefix(MatchPrefixParams(key(range(depth))))
            cache.inc_lock_ref(match.last_device_node)
            places.append(match.last_device_node)
            cache.check()
        await inserted(cache, key(range(7), 50))
        for place in (places[2], places[0], places[4], places[1], places[3]):
            cache.dec_lock_ref(place)
            cache.check()
        assert cache.protected_size() == 0


async def test_the_end_of_nothing_can_be_pinned_and_holds_nothing() -> None:
    async with opened(16) as cache:
        match = await cache.match_prefix(MatchPrefixParams(key(range(4))))
        assert cache.inc_lock_ref(match.last_device_node) == 0
        assert cache.dec_lock_ref(match.last_device_node) == 0
        assert cache.stats().protected == 0


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("trimmed", [1, 2])
async def test_a_place_that_was_evicted_or_trimmed_cannot_be_pinned(page_size: int, trimmed: int) -> None:
    async with opened(4 * page_size, page_size) as cache:
        await inserted(cache, key(range(2 * page_size)))
        match = await cache.match_prefix(MatchPrefixParams(key(range(2 * page_size))))
        await cache.evict(EvictParams(trimmed * page_size))
        with pytest.raises(UsageError, match="stale"):
            cache.inc_lock_ref(match.last_device_node)
        assert cache.protected_size() == 0


async def test_a_lease_pins_in_the_step_that_matches() -> None:
    async with opened(8) as cache:
        await filled(cache, key(range(4)))
        reader = await entered(cache, key(range(4)))
        other = await entered(cache, key(range(10, 18)))
        with pytest.raises(OutOfSlotsError):
            other.allocate_nowait(8)
        assert len(reader.slots) == 4
        reader.release()
        other.allocate_nowait(8)
        other.release()


async def test_nonsense_for_a_place_is_refused() -> None:
    async with opened(8) as cache:
        await inserted(cache, key(range(4)))
        bad: list[Any] = [NodeRef(999, 4), NodeRef(-1, 0), None, "node", 7, (1, 2, 3)]
        for place in bad:
            with pytest.raises(UsageError):
                cache.inc_lock_ref(place)
            with pytest.raises(UsageError):
                cache.dec_lock_ref(place)
        assert cache.stats().protected == 0


async def test_bad_values_change_nothing() -> None:
    allocator = SlotAllocator(32, 2)
    async with opened(allocator=allocator) as cache:
        await inserted(cache, key(range(4)))
        good = allocator.alloc(8)
        assert good is not None
        mine = good.tolist()
        held = (await cache.match_prefix(MatchPrefixParams(key(range(4))))).device_indices.tolist()
        before = cache.stats()
        prompt = key(range(50, 58))
        bad: list[Any] = [
            mine[:7],
            [*mine[:7], 1.5],
            [mine],
            "abc",
            None,
            torch.tensor(mine, dtype=torch.float32),
            [*mine[:6], *held[:2]],  # the tree's own at another place
            [*mine[:6], 30, 31],  # never handed out
            [*mine[:6], mine[0], mine[1]],  # twice
            [mine[1], mine[0], *mine[2:]],  # not in the order of the page
            [mine[0], mine[2], mine[1], *mine[3:]],
            [*mine[:7], 10**9],
            [*mine[:7], -1],
            [0, 1, *mine[:6]],  # padding
        ]
        for value in bad:
            with pytest.raises(UsageError):
                await cache.insert(InsertParams(prompt, value))
            assert cache.stats() == before, value
            cache.check()
        with pytest.raises(InvalidKeyError):
            await cache.insert(InsertParams([1, 2], mine))  # type: ignore[arg-type]
        with pytest.raises(InvalidKeyError):
            await cache.match_prefix(MatchPrefixParams([1, 2]))  # type: ignore[arg-type]
        for number in (-1, 1.5, True, None):
            with pytest.raises(UsageError):
                await cache.evict(EvictParams(number))  # type: ignore[arg-type]
        assert cache.stats() == before
        allocator.free(good)


@pytest.mark.parametrize("kind", ["list", "numpy", "int32", "tensor", "strided"])
async def test_slots_come_in_any_shape_of_ints(kind: str) -> None:
    allocator = SlotAllocator(16)
    async with opened(allocator=allocator) as cache:
        slots = allocator.alloc(4)
        assert slots is not None
        expected = slots.tolist()
        value: Any = {
            "list": slots.tolist(),
            "numpy": slots.numpy(),
            "int32": slots.numpy().astype(np.int32),
            "tensor": slots,
            "strided": torch.stack((slots, slots), dim=1)[:, 0],
        }[kind]
        assert (await cache.insert(InsertParams(key(range(4)), value))).num_adopted == 4
        slots.fill_(0)
        assert (await cache.match_prefix(MatchPrefixParams(key(range(4))))).device_indices.tolist() == expected


async def test_more_slots_than_tokens_come_back_as_duplicates() -> None:
    allocator = SlotAllocator(16, 4)
    async with opened(allocator=allocator) as cache:
        slots = allocator.alloc(12)
        assert slots is not None
        done = await cache.insert(InsertParams(key(range(6)), slots))
        assert done.num_adopted == 4
        assert done.duplicates.tolist() == slots[4:].tolist()
        allocator.free(done.duplicates)
        with pytest.raises(DoubleFreeError):
            allocator.free(done.duplicates)


async def test_evict_says_what_really_came_back() -> None:
    async with opened(64, 4) as cache:
        await filled(cache, key(range(8)), key(range(100, 112)))
        assert (await cache.evict(EvictParams(1))).num_freed_tokens == 4
        assert (await cache.evict(EvictParams(5))).num_freed_tokens == 8
        assert (await cache.evict(EvictParams(0))).num_freed_tokens == 0
        assert (await cache.evict(EvictParams(10**9))).num_freed_tokens == 8
        assert cache.stats().evicted == 20
        assert cache.stats().free == 64
