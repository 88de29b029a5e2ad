"""Flushing: what was flushed is never matched again, and comes back when nobody holds it any more."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aradix import FlushResult, InsertParams, MatchPrefixParams, Namespace, RadixCache, RadixKey, SlotAllocator
from aradix.errors import UsageError
from tests.cache.acts import begin, entered, filled, key, settled
from tests.support.caches import idle_sum, opened

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("page_size", [1, 4])
async def test_a_flush_gives_back_everything_nobody_holds(page_size: int) -> None:
    async with opened(64, page_size) as cache:
        await filled(cache, key(range(8)), key(range(4), range(20, 28)), key(range(8), namespace="x"))
        assert await cache.flush() == FlushResult(24, 0)
        stats = cache.stats()
        assert stats.free == 64
        assert stats.num_nodes == 0
        assert stats.num_namespaces == 0
        assert cache.peek(key(range(8))) == 0
        assert await cache.flush() == FlushResult(0, 0)


async def test_one_namespace_is_flushed_alone_and_the_default_one_has_a_name() -> None:
    async with opened(64) as cache:
        x = Namespace(lora="x")
        await filled(cache, key(range(8)), key(range(8), namespace=x), key(range(8), namespace="plain"))
        assert await cache.flush(Namespace()) == FlushResult(8, 0)
        assert [cache.peek(key(range(8), namespace=name)) for name in (None, x, "plain")] == [0, 8, 8]
        assert await cache.flush("plain") == FlushResult(8, 0)
        assert await cache.flush(x) == FlushResult(8, 0)
        assert await cache.flush("never seen") == FlushResult(0, 0)


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("length", [4, 32])
async def test_held_slots_come_back_once_when_the_lease_ends(page_size: int, length: int) -> None:
    async with opened(4 * length, page_size) as cache:
        prompt = key(range(length))
        await filled(cache, prompt)
        lease = await entered(cache, prompt, length)
        slots = lease.slots.tolist()
        assert await cache.flush() == FlushResult(0, length)
        assert lease.slots.tolist() == slots
        await filled(cache, prompt)
        longer = key(range(2 * length))
        done = lease.commit(longer)
        assert done.num_adopted == 0
        assert done.duplicates.tolist() == []
        assert lease.slots.tolist() == slots
        assert cache.peek(longer) == length
        assert cache.stats().protected == 0  # the new node is nobody's
        assert idle_sum(cache) == 4 * length
        lease.release()
        assert cache.stats().free == 3 * length
        assert cache.stats().evictable == length
        lease.release()
        assert idle_sum(cache) == 4 * length


async def test_a_lease_that_matched_nothing_belongs_to_its_epoch_too() -> None:
    async with opened(16) as cache:
        lease = await entered(cache, key(range(8)), 8)
        assert await cache.flush() == FlushResult(0, 0)
        assert lease.commit(key(range(8))).num_adopted == 0
        assert cache.peek(key(range(8))) == 0
        lease.release()
        assert cache.stats().free == 16


async def test_what_was_committed_before_the_flush_counts_as_held() -> None:
    async with opened(16) as cache:
        lease = await entered(cache, key(range(8)), 8)
        lease.commit(key(range(6)))
        assert await cache.flush() == FlushResult(0, 6)
        lease.commit(key(range(8)))
        lease.truncate(7)
        lease.release()
        assert cache.stats().free == 16


async def test_two_leases_on_what_was_flushed_end_in_any_order() -> None:
    for first in (0, 1):
        async with opened(32) as cache:
            await filled(cache, key(range(12)))
            leases = [await entered(cache, key(range(12))), await entered(cache, key(range(6), range(50, 56)))]
            assert await cache.flush() == FlushResult(0, 12)
            fork = leases[0].fork()
            leases[first].release()
            cache.check()
            leases[1 - first].release()
            cache.check()
            assert cache.stats().free == 20
            fork.release()
            assert cache.stats().free == 32


@pytest.mark.parametrize("length", [8, 32])
async def test_an_adapter_reloaded_under_its_name_is_a_new_version(length: int) -> None:
    async with opened(4 * length) as cache:
        old, new = Namespace(lora="a", version=1), Namespace(lora="a", version=2)
        await filled(cache, key(range(length), namespace=old))
        lease = await entered(cache, key(range(length + 8), namespace=old), 8)
        assert cache.peek(key(range(length), namespace=new)) == 0
        async with cache.lease(key(range(length), namespace=new)) as other:
            assert other.num_matched == 0
        lease.commit(key(range(length + 8), namespace=old))
        assert cache.peek(key(range(length + 8), namespace=new)) == 0
        lease.release()
        assert await cache.flush(old) == FlushResult(length + 8, 0)


async def test_those_who_wait_to_be_entered_do_not_keep_what_was_flushed() -> None:
    async with opened(16) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)))
        hog = await entered(cache, key(range(50, 62)), 12)
        waiting = await begin(tasks, cache.lease(key(range(8)), reserve=8).__aenter__)
        assert waiting.waits
        await cache.flush()
        hog.release()
        await settled()
        lease = waiting.value
        assert lease.num_matched == 0  # it was entered after the flush
        assert lease.commit(key(range(8))).num_adopted == 8
        lease.release()
        assert cache.peek(key(range(8))) == 8


async def test_a_flush_serves_those_who_wait_for_slots() -> None:
    async with opened(16) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)))
        match = await cache.match_prefix(MatchPrefixParams(key(range(4))))
        cache.inc_lock_ref(match.last_device_node)
        lease = await entered(cache, key(range(50, 66)), 10)
        waiting = await begin(tasks, lease.allocate, 6)
        assert waiting.waits
        assert await cache.flush() == FlushResult(0, 4)
        assert waiting.waits
        cache.dec_lock_ref(match.last_device_node)
        await settled()
        assert waiting.returned
        lease.release()


async def test_a_place_that_was_flushed_cannot_be_pinned_any_more() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(4)))
        match = await cache.match_prefix(MatchPrefixParams(key(range(4))))
        await cache.flush()
        with pytest.raises(UsageError, match="stale"):
            cache.inc_lock_ref(match.last_device_node)
        await filled(cache, key(range(4)))
        with pytest.raises(UsageError, match="stale"):
            cache.inc_lock_ref(match.last_device_node)


async def own(cache: RadixCache, place: RadixKey, end: anyio.Event) -> int:
    async with cache.exclusive(place) as mine:
        await end.wait()
        return mine.evict()


@pytest.mark.parametrize("depth", [0, 3, 8])
@pytest.mark.parametrize("granted", [True, False])
async def test_a_flush_does_not_wait_for_a_gate(depth: int, granted: bool) -> None:
    allocator = SlotAllocator(32)
    async with opened(allocator=allocator) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(8)))
        end = anyio.Event()
        reader = None if granted else await entered(cache, key(range(8)))
        owner = await begin(tasks, own, cache, key(range(depth)), end)
        walker = await begin(tasks, cache.lease(key(range(8))).__aenter__)
        assert walker.waits
        done = await cache.flush()
        assert done.num_freed_tokens + done.num_held_tokens == 8
        await settled()
        assert walker.returned  # what it meets now is a new tree
        assert walker.value.num_matched == 0
        cache.check()
        slots = allocator.alloc(8)
        await cache.insert(InsertParams(key(range(8)), slots))
        end.set()
        if reader is not None:
            reader.release()
        await settled()
        assert owner.returned
        cache.check()
        assert cache.peek(key(range(8))) == 8
        walker.value.release()
        assert cache.stats().free == 24


async def test_all_namespaces_in_which_some_fields_have_a_value_are_flushed_together() -> None:
    async with opened(64) as cache:
        spaces = [
            Namespace(lora="x", salt="1", version=1),
            Namespace(lora="x", salt="2", version=2),
            Namespace(lora="y", salt="1", version=1),
            Namespace(lora="x"),
            Namespace(salt="x"),
            Namespace(),
        ]
        prompts = [key(range(4), namespace=space) for space in spaces]
        await filled(cache, *prompts)
        lease = await entered(cache, prompts[1])
        assert await cache.flush(lora="x", version="1") == FlushResult(0, 0)  # a str is no int
        assert await cache.flush(lora="x", version=1) == FlushResult(4, 0)
        assert await cache.flush(lora="x") == FlushResult(4, 4)
        assert [cache.peek(each) for each in prompts] == [0, 0, 4, 0, 4, 4]
        lease.release()
        assert await cache.flush(lora=None, salt=None) == FlushResult(4, 0)
        assert [cache.peek(each) for each in prompts] == [0, 0, 4, 0, 4, 0]
        assert await cache.flush(version=1) == FlushResult(4, 0)
        assert cache.stats().num_namespaces == 1


async def test_a_flush_of_fields_holds_for_those_who_wait_to_be_entered() -> None:
    async with opened(16) as cache, anyio.create_task_group() as tasks:
        x, y = Namespace(lora="x", salt="1"), Namespace(lora="y", salt="1")
        await filled(cache, key(range(4), namespace=x), key(range(4), namespace=y))
        hog = await entered(cache, key(range(50, 58)), 8)
        waiting = [
            await begin(tasks, cache.lease(key(range(12), namespace=space), reserve=12).__aenter__) for space in (x, y)
        ]
        await cache.flush(lora="x")
        hog.release()
        await settled()
        lease = waiting[0].value
        assert lease.num_matched == 0
        lease.release()
        await settled()
        assert waiting[1].value.num_matched == 4
        waiting[1].value.release()


async def test_a_flush_of_what_no_namespace_has_is_refused() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(4)))
        wrong: list[dict[str, Any]] = [{"model": "x"}, {"namespace": Namespace(), "lora": "x"}, {"version": 1.5}]
        for fields in wrong:
            with pytest.raises(UsageError):
                await cache.flush(**fields)
        assert cache.peek(key(range(4))) == 4
