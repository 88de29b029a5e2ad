"""Event sinks: each sees every event of later steps once, in order, a list a turn; what one raises ends the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aradix import CacheInitParams, ChunkCache, EvictParams, RadixCache, SlotAllocator
from aradix.errors import CacheClosedError, UsageError
from aradix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from tests.cache.acts import filled, key, settled
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


class Kept:
    """A sink that keeps the lists it was handed."""

    def __init__(self) -> None:
        self.lists: list[list[KVCacheEvent]] = []

    def __call__(self, events: Sequence[KVCacheEvent]) -> None:
        self.lists.append(list(events))

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for events in self.lists for event in events]


async def test_the_events_of_a_turn_come_in_one_list_in_order() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        kept = Kept()
        cache.add_event_sink(kept)
        await filled(cache, key(range(8)), key(range(4), 50))
        assert kept.lists == []  # not in the middle of a step, nor of a turn
        await settled()
        first, second = kept.lists[0]
        assert isinstance(first, BlockStored)
        assert isinstance(second, BlockStored)
        assert second.parent_block_hash == first.block_hashes[3]
        await cache.evict(EvictParams(1))
        await settled()
        await cache.flush()
        await settled()
        assert [len(events) for events in kept.lists] == [2, 1, 1]
        assert kept.kinds == ["BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"]


class Later:
    """Stands in for the loop's timer: what was asked for, until the test makes it happen."""

    def __init__(self, cache: RadixCache) -> None:
        assert cache._home is not None
        cache._home.call_later = self
        self.asked: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, seconds: float, step: Callable[[], None]) -> None:
        self.asked.append((seconds, step))

    def happen(self) -> float:
        ((seconds, step),) = self.asked
        self.asked.clear()
        step()
        return seconds


async def test_a_sink_that_can_wait_gets_the_events_of_many_turns_at_once() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        later, kept = Later(cache), Kept()
        cache.add_event_sink(kept, delay=0.5)
        for number in range(3):
            await filled(cache, key(number))
            await settled()
        assert kept.lists == []
        assert later.happen() == 0.5
        assert [len(events) for events in kept.lists] == [3]
        await settled()
        assert later.asked == []
        await filled(cache, key(3))
        assert later.happen() == 0.5
        assert [len(events) for events in kept.lists] == [3, 1]
        await filled(cache, key(4))
    assert [len(events) for events in kept.lists] == [3, 1, 2]  # the rest as the cache closed
    later.happen()
    assert len(kept.lists) == 3


async def test_the_sink_with_the_shortest_delay_decides_for_all() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        later = Later(cache)
        slow, slower, prompt = Kept(), Kept(), Kept()
        remove_slow = cache.add_event_sink(slow, delay=0.5)
        cache.add_event_sink(slower, delay=2)
        await filled(cache, key(1))
        assert later.happen() == 0.5
        remove_prompt = cache.add_event_sink(prompt)
        await filled(cache, key(2))
        await settled()
        assert later.asked == []
        remove_prompt()
        remove_slow()
        await filled(cache, key(3))
        await settled()
        assert later.happen() == 2
        assert [len(kept.lists) for kept in (slow, slower, prompt)] == [2, 3, 1]
        assert slower.lists[:2] == slow.lists


@pytest.mark.parametrize("delay", [-1, True, "soon", float("inf"), float("nan")])
async def test_a_delay_that_is_no_time_is_refused(delay: Any) -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        with pytest.raises(UsageError, match="delay is a number of seconds from 0 on"):
            cache.add_event_sink(Kept(), delay=delay)
        assert len(cache._event_sinks) == 0


async def test_a_turn_without_events_delivers_nothing() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        kept = Kept()
        cache.add_event_sink(kept)
        async with cache.lease(key(range(4))) as lease:
            lease.allocate_nowait(4)
        await settled()
        assert kept.lists == []


async def test_closing_delivers_what_is_left() -> None:
    kept = Kept()
    async with opened(64, enable_kv_cache_events=True) as cache:
        cache.add_event_sink(kept)
        await filled(cache, key(range(4)))
    assert kept.kinds == ["BlockStored", "AllBlocksCleared"]
    assert len(kept.lists) == 1
    await settled()
    assert len(kept.lists) == 1


async def test_a_sink_sees_the_steps_after_it_was_added_and_none_after_it_was_removed() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        early, late = Kept(), Kept()
        await filled(cache, key(1))
        remove_early = cache.add_event_sink(early)
        await filled(cache, key(2))
        remove_late = cache.add_event_sink(late)
        await filled(cache, key(3))
        await settled()
        remove_early()
        remove_early()
        await filled(cache, key(4))
        await settled()

        def ids(kept: Kept) -> list[int]:
            return [event.token_ids[0] for events in kept.lists for event in events if isinstance(event, BlockStored)]

        assert ids(early) == [2, 3]
        assert ids(late) == [3, 4]
        remove_late()
        await filled(cache, key(5))
        await settled()
        assert ids(late) == [3, 4]
        assert len(cache.take_events()) == 1


async def test_a_sink_may_use_the_cache_and_add_another() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        inner, last = Kept(), Kept()
        seen: list[int] = []

        def sink(events: Sequence[KVCacheEvent]) -> None:
            seen.append(len(events))
            if len(seen) == 1:
                lease = cache.lease(key(7, 8))
                stored = cache.snapshot()["namespaces"][0]["root"]["children"]
                assert [node["tokens"] for node in stored] == [[1, 2]]
                cache.check()
                del lease
                cache._leases.evict_slots(1)
                cache.add_event_sink(inner)

        cache.add_event_sink(sink)
        cache.add_event_sink(last)
        await filled(cache, key(1, 2))
        await settled()
        assert seen == [1, 1]
        assert inner.lists == []  # the eviction came before it
        assert last.kinds == ["BlockStored", "BlockRemoved"]
        await cache.evict(EvictParams(1))
        await settled()
        assert inner.kinds == ["BlockRemoved"]


@pytest.mark.parametrize("at_close", [False, True])
async def test_what_a_sink_raises_ends_the_cache_and_the_others_hear_on(at_close: bool) -> None:
    kept = Kept()

    def broken(events: Sequence[KVCacheEvent]) -> None:
        raise ZeroDivisionError(len(events))

    with pytest.raises(ExceptionGroup) as caught:
        async with opened(64, enable_kv_cache_events=True) as cache:
            cache.add_event_sink(broken)
            cache.add_event_sink(kept)
            await filled(cache, key(1, 2))
            if not at_close:
                await settled()
    assert [repr(error) for error in caught.value.exceptions] == [f"ZeroDivisionError({2 if at_close else 1})"]
    assert kept.kinds == ["BlockStored", "AllBlocksCleared"]
    cache.check()


async def test_by_hand_and_by_sink_exclude_each_other() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        await filled(cache, key(1))
        assert len(cache.take_events()) == 1
        remove = cache.add_event_sink(Kept())
        with pytest.raises(UsageError, match="1 event sinks take the events"):
            cache.take_events()
        remove()
        assert cache.take_events() == []


async def test_a_sink_needs_an_open_cache_that_records_events() -> None:
    async with opened(64) as cache:
        with pytest.raises(UsageError, match="enable_kv_cache_events=True"):
            cache.add_event_sink(Kept())
    with pytest.raises(CacheClosedError):
        cache.add_event_sink(Kept())
    unopened = RadixCache(CacheInitParams(allocator=SlotAllocator(4), enable_kv_cache_events=True))
    with pytest.raises(UsageError, match="open the cache"):
        unopened.add_event_sink(Kept())
    async with opened(64, cache_class=ChunkCache, enable_kv_cache_events=True) as cache:
        kept = Kept()
        cache.add_event_sink(kept)
        with pytest.raises(UsageError, match="called with a list of events"):
            cache.add_event_sink(3)  # type: ignore[arg-type]
        await filled(cache, key(range(4)))
        await settled()
        assert kept.lists == []


async def test_events_of_a_whole_life_add_up_to_what_is_cached() -> None:
    listed: set[bytes] = set()

    def mirror(events: Sequence[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                listed.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                listed.difference_update(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                listed.clear()

    async with opened(32, 4, enable_kv_cache_events=True) as cache:
        cache.add_event_sink(mirror)
        for number in range(12):
            each = key(range(8), range(100 * number, 100 * number + 8))
            await filled(cache, each)
            await settled()
            assert len(listed) * 4 == cache.total_size()
            assert set(each.hash_chain(4)) <= listed
    assert listed == set()
