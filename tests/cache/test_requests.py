"""`cache_unfinished_req` and `cache_finished_req`: rows beside gates, flushes, waiters, streams and mistakes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
import torch

from aradix import EvictParams, MatchPrefixParams, NodeRef, RadixCache, RadixKey
from aradix.adapters.sglang import ReqToTokenPool
from aradix.errors import CacheClosedError, DoubleFreeError, UsageError
from aradix.tree.protocol import NOWHERE
from tests.adapters.scheduler import Request
from tests.cache.acts import begin, entered, filled, key, settled
from tests.cache.bench import LONG_TIME, Bench
from tests.support.caches import idle_sum, opened

pytestmark = pytest.mark.anyio


def table() -> ReqToTokenPool:
    return ReqToTokenPool(8, 64)


async def started(cache: RadixCache, prompt: Sequence[int], extra_key: str | None = None, num_over: int = 0) -> Request:
    """A request that has matched and pinned, and has slots for its prompt, and for some tokens more."""
    allocator, rows = cache._params.allocator, cache._params.req_to_token_pool
    page_size = allocator.page_size
    req = Request(list(prompt), extra_key)
    rows.alloc([req])
    found = await cache.match_prefix(MatchPrefixParams(RadixKey(prompt, extra_key)))
    cache.inc_lock_ref(found.last_device_node)
    num_matched = len(found.device_indices)
    req.last_node, req.cache_protected_len = found.last_device_node, num_matched
    fresh = allocator.alloc(-(-(len(prompt) + num_over - num_matched) // page_size) * page_size)
    assert fresh is not None
    rows.write((req.req_pool_idx, slice(0, num_matched + len(fresh))), torch.cat((found.device_indices, fresh)))
    req.fill_ids, req.kv_committed_len, req.kv_allocated_len = list(prompt), len(prompt), len(prompt) + num_over
    return req


def row(cache: RadixCache, req: Request, stop: int) -> list[int]:
    slots: list[int] = cache._params.req_to_token_pool.req_to_token[req.req_pool_idx, :stop].tolist()
    return slots


@pytest.mark.parametrize("page_size", [1, 4])
async def test_what_a_request_computes_is_found_while_it_runs_and_stays_its_own(page_size: int) -> None:
    async with opened(64, page_size, req_to_token_pool=table()) as cache:
        req = await started(cache, range(10))
        cache.cache_unfinished_req(req)
        whole = 10 // page_size * page_size
        assert req.cache_protected_len == cache.peek(key(range(10))) == cache.protected_size() == whole
        assert req.prefix_indices.tolist() == row(cache, req, 10)
        assert (await cache.evict(EvictParams(64))).num_freed_tokens == 0
        cache.check()
        cache.cache_finished_req(req)
        assert (req.last_node, cache.evictable_size(), cache.protected_size()) == (None, whole, 0)
        assert cache.stats().free == 64 - whole
        assert idle_sum(cache) == 64


async def test_chunks_of_a_prompt_are_no_hits_of_their_own() -> None:
    async with opened(64, req_to_token_pool=table()) as cache:
        req = await started(cache, range(8))
        for stop in (3, 5, 8):
            req.fill_ids = list(range(stop))
            cache.cache_unfinished_req(req, chunked=stop < 8)
            assert req.cache_protected_len == cache.protected_size() == stop
        (space,) = cache.snapshot()["namespaces"]
        (child,) = space["root"]["children"]
        assert (child["num_tokens"], child["hit_count"]) == (8, 0)
        cache.cache_finished_req(req)


async def test_of_two_that_computed_the_same_the_later_is_re_pointed() -> None:
    async with opened(64, 2, req_to_token_pool=table()) as cache:
        first = await started(cache, range(8))
        second = await started(cache, [*range(6), 50, 51])
        own = row(cache, second, 8)
        cache.cache_unfinished_req(first)
        cache.cache_unfinished_req(second)
        assert row(cache, second, 8) == row(cache, first, 6) + own[6:]
        assert cache.stats().free == 64 - 10
        cache.check()
        for req in (second, first):
            cache.cache_finished_req(req)
        assert cache.evictable_size() == 10


@pytest.mark.parametrize("is_insert", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
async def test_what_was_over_allocated_comes_back_at_the_end(page_size: int, is_insert: bool) -> None:
    async with opened(64, page_size, req_to_token_pool=table()) as cache:
        req = await started(cache, range(9), num_over=6)
        cache.cache_unfinished_req(req)
        req.output_ids = [20, 21, 22]
        req.kv_committed_len = 11
        cache.cache_finished_req(req, is_insert)
        kept = 11 if is_insert else 9
        assert cache.evictable_size() == kept // page_size * page_size
        assert cache.stats().outside == 0
        assert idle_sum(cache) == 64


async def test_a_number_of_tokens_can_be_told() -> None:
    async with opened(64, req_to_token_pool=table()) as cache:
        req = await started(cache, range(9))
        cache.cache_finished_req(req, kv_len_to_handle=5)
        assert (cache.peek(key(range(9))), cache.stats().outside) == (5, 0)


async def test_a_thousand_requests_leak_nothing() -> None:
    """Lengths of every rest of a page, each with a slot too many; finished, retracted and aborted."""
    source = random.Random("leak")
    async with opened(64, 4, req_to_token_pool=table()) as cache:
        for number in range(1_000):
            prompt = [source.randint(0, 1) for _ in range(source.randint(1, 13))]
            if cache.stats().free < 16:
                await cache.evict(EvictParams(16))
            req = await started(cache, prompt, source.choice((None, "a")), num_over=1)
            if number % 3:
                cache.cache_unfinished_req(req)
            cache.cache_finished_req(req, is_insert=number % 2 == 0)
            cache._params.req_to_token_pool.free(req)
            assert idle_sum(cache) == 64
            assert cache.protected_size() == 0
        cache.check()
        assert not cache._low_pins._pinned


# ---- gates, flushes, waiters, streams ----


async def own_subtree(cache: RadixCache, place: RadixKey, end: anyio.Event) -> None:
    async with cache.exclusive(place):
        await end.wait()


async def test_below_a_subtree_that_somebody_has_nothing_is_published_until_it_is_free() -> None:
    async with opened(64, req_to_token_pool=table()) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(1, 2, 3))
        req = await started(cache, [1, 2])
        req.origin_input_ids = [1, 2, 3, 4, 5]
        fresh = cache._params.allocator.alloc(3)
        cache._params.req_to_token_pool.write((req.req_pool_idx, slice(2, 5)), fresh)
        req.fill_ids, req.kv_committed_len = [1, 2, 3, 4, 5], 5
        end = anyio.Event()
        await begin(tasks, own_subtree, cache, key(1, 2, 3), end)
        cache.cache_unfinished_req(req)
        assert (req.cache_protected_len, cache.peek(key(1, 2, 3, 4))) == (2, 3)
        assert req.prefix_indices.tolist() == row(cache, req, 5)
        cache.check()
        end.set()
        await settled()
        cache.cache_unfinished_req(req)
        assert (req.cache_protected_len, cache.peek(key(1, 2, 3, 4, 5))) == (5, 5)
        cache.cache_finished_req(req)
        assert idle_sum(cache) == 64


async def test_a_request_that_matched_nothing_publishes_nothing_while_its_namespace_is_somebodys() -> None:
    async with opened(64, req_to_token_pool=table()) as cache, anyio.create_task_group() as tasks:
        req = await started(cache, [1, 2, 3])
        end = anyio.Event()
        await begin(tasks, own_subtree, cache, key(), end)
        cache.cache_unfinished_req(req)
        assert (req.cache_protected_len, req.last_node, cache.total_size()) == (0, NOWHERE, 0)
        cache.check()
        end.set()
        await settled()
        cache.cache_finished_req(req)
        assert cache.evictable_size() == 3


async def test_after_a_flush_what_was_computed_on_it_is_not_published() -> None:
    async with opened(64, req_to_token_pool=table()) as cache:
        await filled(cache, key(1, 2))
        req = await started(cache, [1, 2, 3, 4])
        await cache.flush()
        cache.cache_unfinished_req(req)
        assert (req.cache_protected_len, cache.total_size(), cache.stats().detached) == (2, 0, 2)
        cache.check()
        cache.cache_finished_req(req)
        assert cache.stats().free == 64


async def test_the_end_of_a_request_serves_who_waits() -> None:
    async with opened(8, req_to_token_pool=table()) as cache, anyio.create_task_group() as tasks:
        req = await started(cache, range(6))
        lease = await entered(cache, key(90))
        growth = await begin(tasks, lease.allocate, 5)
        assert growth.waits
        cache.cache_finished_req(req, is_insert=False)
        await settled()
        assert growth.returned
        lease.release()


async def test_what_comes_back_is_fenced_behind_the_engines_streams() -> None:
    bench = Bench()
    async with bench.cache(req_to_token_pool=table()) as cache:
        req = await started(cache, range(4))
        bench.a.launch(row(cache, req, 4), duration=LONG_TIME)
        cache.cache_finished_req(req, is_insert=False)
        assert (cache.stats().fenced, bench.free_now()) == (4, 4)
        bench.finish()
        assert bench.free_now() == 8


# ---- mistakes change nothing ----


async def test_a_request_that_does_not_fit_its_pin_is_refused() -> None:
    async with opened(64, 2, req_to_token_pool=table()) as cache:
        await filled(cache, key(range(4)))
        req = await started(cache, range(8))
        stats, node = cache.stats(), req.last_node
        req.cache_protected_len = 2
        with pytest.raises(UsageError, match="pinned 4 tokens, but says that the tree owns 2"):
            cache.cache_unfinished_req(req)
        req.cache_protected_len, req.last_node = 4, NodeRef(node.node_id, 4)
        cache.dec_lock_ref(node)
        with pytest.raises(UsageError, match="not pinned"):
            cache.cache_unfinished_req(req)
        cache.inc_lock_ref(node)
        assert cache.stats() == stats
        cache.cache_finished_req(req)
        assert idle_sum(cache) == 64


async def test_slots_that_are_not_the_requests_are_refused() -> None:
    async with opened(64, 2, req_to_token_pool=table()) as cache:
        req, other = await started(cache, range(6)), await started(cache, range(50, 56))
        cache.cache_unfinished_req(other)
        kept = row(cache, req, 6)
        stats = cache.stats()
        for wrong in ([0, 1], row(cache, other, 2), kept[:2], [kept[5], kept[4]]):
            cache._params.req_to_token_pool.write((req.req_pool_idx, slice(4, 6)), torch.tensor(wrong))
            for call in (cache.cache_unfinished_req, cache.cache_finished_req):
                with pytest.raises((UsageError, DoubleFreeError)):
                    call(req)
                assert cache.stats() == stats
        cache._params.req_to_token_pool.write((req.req_pool_idx, slice(4, 6)), torch.tensor(kept[4:]))
        for each in (req, other):
            cache.cache_finished_req(each)
        with pytest.raises(UsageError, match="finish a request once"):
            cache.cache_finished_req(req, is_insert=False)
        assert idle_sum(cache) == 64


async def test_without_a_table_or_beyond_its_rows() -> None:
    async with opened(64) as cache:
        req = Request([1, 2], fill_ids=[1, 2], req_pool_idx=0)
        with pytest.raises(UsageError, match="req_to_token_pool"):
            cache.cache_unfinished_req(req)
    async with opened(64, req_to_token_pool=ReqToTokenPool(1, 4)) as cache:
        req = Request(list(range(6)), fill_ids=list(range(6)), req_pool_idx=0)
        with pytest.raises(UsageError, match="4 places, 6"):
            cache.cache_unfinished_req(req)


async def test_with_the_cache_disabled_or_closed() -> None:
    async with opened(64, 4, disable=True, req_to_token_pool=table()) as cache:
        req = await started(cache, range(6))
        cache.cache_unfinished_req(req)
        assert (cache.total_size(), req.prefix_indices.tolist()) == (0, row(cache, req, 6))
        cache.cache_finished_req(req)
        assert cache.stats().free == 64
    for call in (cache.cache_unfinished_req, cache.cache_finished_req):
        with pytest.raises(CacheClosedError):
            call(req)


async def test_a_request_may_say_more_of_itself() -> None:
    class Asked(Request):
        def get_fill_ids(self) -> Any:
            return self.origin_input_ids

        def pop_committed_kv_cache(self) -> int:
            return 2

    async with opened(64, req_to_token_pool=table()) as cache:
        req = await started(cache, range(3))
        asked: Any = Asked(req.origin_input_ids)
        vars(asked).update(vars(req), fill_ids=None, output_ids=(), priority=None)
        cache.cache_unfinished_req(asked)
        assert asked.cache_protected_len == 3
        asked.cache_protected_len, asked.kv_allocated_len = 3, 3
        cache.cache_finished_req(asked)
        assert (cache.evictable_size(), idle_sum(cache)) == (3, 64)
