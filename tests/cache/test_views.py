"""What a cache shows of itself: counters, snapshot, text, events; and looking changes nothing."""

from __future__ import annotations

import dataclasses
import json

import anyio
import pytest

from aradix import CacheStats, EvictParams, MatchPrefixParams, Namespace
from aradix.errors import OutOfSlotsError, RetractError
from aradix.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.cache.acts import begin, entered, filled, key, settled
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


async def test_every_slot_is_in_one_place_in_the_stats() -> None:
    async with opened(64, 4) as cache:
        allocator = cache._params.allocator
        await filled(cache, key(range(8)), key(range(100, 104)))
        outside = allocator.alloc(4)
        lease = await entered(cache, key(range(8)), 5)
        stats = cache.stats()
        places = (stats.free, stats.fenced, stats.evictable, stats.protected, stats.leased, stats.outside)
        assert places == (64 - 8 - 4 - 4 - 8, 0, 4, 8, 8, 4)
        assert sum(places) == stats.num_slots == 64
        assert (stats.num_leases, stats.num_slot_waiters, stats.num_nodes, stats.num_namespaces) == (1, 0, 2, 1)
        assert (stats.evictable, stats.protected) == (cache.evictable_size(), cache.protected_size())
        assert cache.total_size() == 12
        with pytest.raises(dataclasses.FrozenInstanceError):
            stats.free = 3  # type: ignore[misc]
        assert isinstance(stats, CacheStats)
        lease.release()
        assert outside is not None
        allocator.free(outside)


async def test_a_request_counts_once_however_often_it_looks() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(4)))
        start = cache.stats()
        for _ in range(5):
            async with cache.lease(key(range(8))):
                pass
            await cache.match_prefix(MatchPrefixParams(key(range(8))))
            cache.peek(key(range(8)))
        assert cache.stats().queries == start.queries
        async with cache.lease(key(range(8))) as lease:
            await lease.allocate(2)
            await lease.allocate(2)
            lease.commit(key(range(8)))
        after = cache.stats()
        assert after.queries - start.queries == 1
        assert after.query_tokens - start.query_tokens == 8
        assert after.hit_tokens - start.hit_tokens == 4
        async with cache.lease(key(range(8)), resume=True) as lease:
            await lease.allocate(1)
        assert cache.stats().queries == after.queries
        assert cache.stats().hit_tokens == after.hit_tokens
        assert cache.stats().resumes == 1


async def test_a_commit_alone_is_a_query_and_so_is_a_granted_reserve() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(4)))
        start = cache.stats().queries
        async with cache.lease(key(range(4))) as lease:
            lease.commit(key(range(4)))
        assert cache.stats().queries == start + 1
        async with cache.lease(key(range(4)), reserve=4):
            assert cache.stats().queries == start + 2


async def test_those_who_were_never_admitted_are_no_queries() -> None:
    async with opened(8) as cache, anyio.create_task_group() as tasks:
        hog = await entered(cache, key(range(8)), 8)
        start = cache.stats().queries
        waiting = await begin(tasks, cache.lease(key(range(8)), reserve=8).__aenter__)
        assert cache.stats().num_slot_waiters == 1
        waiting.scope.cancel()
        await settled()
        idle = await entered(cache, key(range(20, 24)))
        with pytest.raises(OutOfSlotsError):
            idle.allocate_nowait(1)
        growth = await begin(tasks, idle.allocate, 1)
        growth.scope.cancel()
        await settled()
        assert cache.stats().queries == start
        assert cache.stats().num_slot_waiters == 0
        idle.release()
        hog.release()


async def test_waits_and_retracts_are_counted() -> None:
    async with opened(8) as cache, anyio.create_task_group() as tasks:
        one = await entered(cache, key(range(4)), 4)
        two = await entered(cache, key(range(10, 14)), 4)
        waiting = await begin(tasks, one.allocate, 1)
        with pytest.raises(RetractError):
            await two.allocate(1)
        stats = cache.stats()
        assert stats.slot_waits == 2
        assert stats.retracts == 1
        assert stats.num_slot_waiters == 1
        two.release()
        await settled()
        assert waiting.returned
        one.release()


async def test_looking_changes_nothing() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(8)), key(range(20, 24)))
        before = (cache.stats(), cache.snapshot())
        for length in range(9):
            assert cache.peek(key(range(length), 99)) == length
        assert cache.peek(key(range(8), namespace="nobody")) == 0
        assert (cache.stats(), cache.snapshot()) == before
        await cache.evict(EvictParams(4))
        assert cache.peek(key(range(8))) == 4  # it was not made recent


async def test_a_snapshot_is_plain_data() -> None:
    async with opened(64) as cache:
        await filled(cache, key(range(8)), priority=2)
        await filled(cache, key(range(4), 50, 51))
        await filled(cache, key(range(2), namespace=Namespace(lora="x", version=2)))
        lease = await entered(cache, key(range(4)))
        shot = cache.snapshot()
        assert json.loads(json.dumps(shot)) == shot
        assert [each["namespace"] for each in shot["namespaces"]] == [
            Namespace()._asdict(),
            Namespace(lora="x", version=2)._asdict(),
        ]
        root = shot["namespaces"][0]["root"]
        assert root["num_tokens"] == 0
        (top,) = root["children"]
        assert set(top) == {
            "id",
            "num_tokens",
            "tokens",
            "lock_ref",
            "residency",
            "priority",
            "hit_count",
            "children",
        }
        assert top["tokens"] == [0, 1, 2, 3]
        assert (top["num_tokens"], top["lock_ref"], top["residency"], top["priority"]) == (4, 1, "device", 2)
        assert sorted(child["tokens"] for child in top["children"]) == [[4, 5, 6, 7], [50, 51]]
        assert all(child["lock_ref"] == 0 for child in top["children"])
        without = cache.snapshot(tokens=False)["namespaces"][0]["root"]["children"][0]
        assert "tokens" not in without
        lease.release()


async def test_the_text_names_every_node(capsys: pytest.CaptureFixture[str]) -> None:
    async with opened(64) as cache:
        await filled(cache, key(range(20)), key(range(4), 50))
        cache.pretty_print()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + cache.stats().num_nodes
        assert "50" in "".join(lines)


@pytest.mark.parametrize("page_size", [1, 4])
async def test_events_tell_what_a_router_may_count_on(page_size: int) -> None:
    async with opened(64, page_size, enable_kv_cache_events=True) as cache:
        listed: set[bytes] = set()

        def replay() -> None:
            for event in cache.take_events():
                if isinstance(event, BlockStored):
                    assert event.block_size == page_size
                    assert event.parent_block_hash is None or event.parent_block_hash in listed
                    assert not listed & set(event.block_hashes)
                    listed.update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    assert set(event.block_hashes) <= listed
                    listed.difference_update(event.block_hashes)
                else:
                    assert isinstance(event, AllBlocksCleared)
                    listed.clear()

        prompt, branch = key(range(16)), key(range(8), range(50, 58))
        await filled(cache, prompt, branch)
        replay()
        assert listed == set(prompt.hash_chain(page_size)) | set(branch.hash_chain(page_size))
        assert cache.take_events() == []
        await cache.evict(EvictParams(8))
        replay()
        assert len(listed) == 16 // page_size
        for each in (prompt, branch):
            assert set(each.hash_chain(page_size)[: cache.peek(each) // page_size]) <= listed
        await filled(cache, prompt)
        replay()
        await cache.flush()
        replay()
        assert not listed


async def test_the_same_tokens_under_two_salts_are_two_blocks() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        one, two = (key(range(8), namespace=Namespace(salt=salt)) for salt in "ab")
        await filled(cache, one, two)
        stored = [event for event in cache.take_events() if isinstance(event, BlockStored)]
        hashes = [set(event.block_hashes) for event in stored]
        assert len(hashes) == 2
        assert not hashes[0] & hashes[1]
        await cache.evict(EvictParams(8))
        (removed,) = cache.take_events()
        assert isinstance(removed, BlockRemoved)
        assert set(removed.block_hashes) == hashes[0]
        assert cache.peek(two) == 8
        await cache.flush(Namespace(salt="b"))
        (removed,) = cache.take_events()
        assert isinstance(removed, BlockRemoved)
        assert set(removed.block_hashes) == hashes[1]


async def test_without_asking_there_are_no_events() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(8)))
        await cache.flush()
        assert cache.take_events() == []
