"""Bigram keys (EAGLE) on every path: N tokens are N-1 pairs, and all is as if each pair were a token of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from aradix import EvictParams, InsertParams, Lease, MatchPrefixParams, RadixCache, RadixKey, SlotAllocator
from aradix.errors import UsageError
from aradix.events import BlockRemoved, BlockStored
from tests.cache.acts import entered, filled, key
from tests.support.caches import idle_sum, opened
from tests.tree.lockstep import CORES

pytestmark = pytest.mark.anyio


@pytest.fixture(params=CORES)
def tree_core(request: pytest.FixtureRequest) -> Any:
    return request.param


# ---- four tokens are no page of four, five are one ----


async def lease_and_commit(cache: RadixCache, ids: Sequence[int]) -> None:
    async with cache.lease(key(ids), reserve=len(ids)) as lease:
        lease.commit(key(ids))


async def commit_in_chunks(cache: RadixCache, ids: Sequence[int]) -> None:
    async with cache.lease(key(ids), reserve=len(ids)) as lease:
        for stop in range(1, len(ids) + 1):
            lease.commit(key(ids[:stop]))


async def commit_while_decoding(cache: RadixCache, ids: Sequence[int]) -> None:
    async with cache.lease(key(ids[:1])) as lease:
        for stop in range(1, len(ids) + 1):
            await lease.allocate(stop - lease.num_tokens)
            lease.commit(key(ids[:stop]))


async def commit_from_a_fork(cache: RadixCache, ids: Sequence[int]) -> None:
    async with cache.lease(key(ids[:2]), reserve=2) as lease:
        lease.commit(key(ids[:2]))
        async with lease.fork() as twin:
            await twin.allocate(len(ids) - twin.num_tokens)
            twin.commit(key(ids))


async def after_rejected_drafts(cache: RadixCache, ids: Sequence[int]) -> None:
    async with cache.lease(key(ids[:1])) as lease:
        await lease.allocate(len(ids) + 6)
        lease.truncate(len(ids))
        lease.commit(key(ids))


async def insert_by_hand(cache: RadixCache, ids: Sequence[int]) -> None:
    allocator = cache._params.allocator
    slots = allocator.alloc(-(-len(ids) // 4) * 4)
    done = await cache.insert(InsertParams(key(ids), slots))
    allocator.free(done.duplicates)
    assert len(done.duplicates) + done.num_adopted == len(slots)


WAYS = [
    lease_and_commit,
    commit_in_chunks,
    commit_while_decoding,
    commit_from_a_fork,
    after_rejected_drafts,
    insert_by_hand,
]


@pytest.mark.parametrize("publish", WAYS)
async def test_however_it_is_published_whole_pages_of_pairs_are_found(publish: Any, tree_core: Any) -> None:
    for num_tokens, num_cached in ((1, 0), (4, 0), (5, 4), (8, 4), (9, 8)):
        async with opened(64, 4, is_eagle=True, tree_core=tree_core, enable_kv_cache_events=True) as cache:
            ids = range(10, 10 + num_tokens)
            await publish(cache, ids)
            cache.check()
            assert cache.stats().evictable == cache.peek(key(ids)) == num_cached
            match = await cache.match_prefix(MatchPrefixParams(key(ids, 99)))
            assert (len(match.device_indices), match.last_device_node.depth) == (num_cached, num_cached)
            # The last pair of a page ends in the token after it: another one there is another page.
            assert cache.peek(key(ids[:num_cached], 99)) == max(0, num_cached - 4)
            stored = [event for event in cache.take_events() if isinstance(event, BlockStored)]
            digests = key(ids).maybe_to_bigram_view(True).hash_chain(4)
            assert [digest for event in stored for digest in event.block_hashes] == digests
            if num_cached:
                assert stored[0].token_ids[:5] == list(ids[:5])
            assert idle_sum(cache) == 64
            assert (await cache.evict(EvictParams(64))).num_freed_tokens == num_cached
            removed = [event for event in cache.take_events() if isinstance(event, BlockRemoved)]
            assert sorted(digest for event in removed for digest in event.block_hashes) == sorted(digests)


async def test_siblings_that_share_all_tokens_of_a_page_but_the_next(tree_core: Any) -> None:
    """The page of four pairs holds five tokens, and the split falls where the pages differ."""
    async with opened(64, 4, is_eagle=True, tree_core=tree_core) as cache:
        await filled(cache, key(range(1, 10)), key(range(1, 5), range(50, 55)))
        assert cache.peek(key(range(1, 10))) == cache.peek(key(range(1, 5), range(50, 55))) == 8
        assert cache.peek(key(range(1, 5), 7)) == 0
        await filled(cache, key(range(1, 6), range(70, 75)))
        assert cache.peek(key(range(1, 6), 99)) == 4
        (space,) = cache.snapshot()["namespaces"]
        heads = {tuple(map(tuple, child["tokens"])) for child in space["root"]["children"]}
        assert tuple(pairwise(range(1, 6))) in heads
        assert all(len(child["tokens"]) % 4 == 0 for child in space["root"]["children"])


async def test_the_last_token_can_be_left_to_compute(tree_core: Any) -> None:
    async with opened(64, 4, is_eagle=True, tree_core=tree_core) as cache:
        await filled(cache, key(range(1, 10)))
        for num_tokens, left, matched in ((9, 0, 8), (9, 1, 8), (9, 2, 4), (10, 1, 8), (5, 1, 4), (5, 2, 0)):
            async with cache.lease(key(range(1, num_tokens + 1)), leave_last=left) as lease:
                assert lease.num_matched == matched


async def test_a_commit_says_in_pairs_what_is_wrong(tree_core: Any) -> None:
    async with opened(64, 4, is_eagle=True, tree_core=tree_core) as cache:
        await filled(cache, key(range(1, 10)))
        lease = await entered(cache, key(range(1, 10)))
        with pytest.raises(UsageError, match="7 bigrams, but 8"):
            lease.commit(key(range(1, 9)))
        with pytest.raises(UsageError, match="9 bigrams, but slots are held for 8"):
            lease.commit(key(range(1, 11)))
        with pytest.raises(UsageError, match="8 bigrams and the lease's of 8"):
            lease.commit(key(range(1, 9), 5))
        lease.release()


async def test_what_is_printed_names_each_token_once(tree_core: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async with opened(64, 1, is_eagle=True, tree_core=tree_core) as cache:
        await filled(cache, key(1, 2, 3, 4))
        cache.pretty_print()
        assert "3 tokens to 3: [1 2 3 4]" in capsys.readouterr().out


async def test_a_subtree_of_pairs_can_be_had_alone(tree_core: Any) -> None:
    async with opened(64, 4, is_eagle=True, tree_core=tree_core) as cache:
        await filled(cache, key(range(1, 10)))
        async with cache.exclusive(key(range(1, 6))) as alone:
            assert alone.evict() == 4
        assert cache.peek(key(range(1, 10))) == 4


# ---- as if each pair were a token ----


def pairs(ids: Sequence[int]) -> RadixKey:
    return RadixKey([10 * first + second for first, second in pairwise(ids)])


class Twice:
    """The same done to a cache of bigrams, and to one whose tokens are the pairs."""

    def __init__(self, bigrams: RadixCache, plain: RadixCache, seed: object) -> None:
        self.caches = (bigrams, plain)
        self.leases: list[tuple[list[int], Lease, Lease]] = []
        self.random = random.Random(str(seed))

    def keys(self, ids: Sequence[int]) -> tuple[RadixKey, RadixKey]:
        return RadixKey(ids), pairs(ids)

    async def open(self) -> None:
        ids = [self.random.randint(0, 1) for _ in range(self.random.randint(2, 26))]
        first, second = [await entered(cache, each) for cache, each in zip(self.caches, self.keys(ids), strict=True)]
        assert first.num_matched == second.num_matched
        self.leases.append((ids, first, second))
        self.grow(-1)

    def grow(self, which: int | None = None) -> None:
        ids, *leases = self.random.choice(self.leases) if which is None else self.leases[which]
        missing = len(ids) - 1 - leases[0].num_tokens
        room = self.caches[0].stats()
        if 0 < missing <= room.free + room.evictable - 4:
            for lease in leases:
                lease.allocate_nowait(missing)

    def commit(self) -> None:
        ids, first, second = self.random.choice(self.leases)
        least = max(first.num_matched, first.node.depth)
        stop = self.random.randint(least, max(least, first.num_tokens)) + 1
        if stop > min(len(ids), first.num_tokens + 1):
            return
        done: list[Any] = []
        for lease, each in zip((first, second), self.keys(ids[:stop]), strict=True):
            try:
                result = lease.commit(each)
            except UsageError:  # more was committed, and not published, since it was flushed
                done.append(None)
            else:
                done.append((result.prefix_len, result.num_adopted, result.repointed))
        assert done[0] == done[1]

    def cut(self) -> None:
        _, *leases = self.random.choice(self.leases)
        # The pair at the end of what is kept goes with the token after it, so this is beyond what was committed.
        least = leases[0]._hold.committed + 1
        if least > leases[0].num_tokens:
            return
        keep = self.random.randint(least, leases[0].num_tokens)
        for lease in leases:
            lease.truncate(keep)

    def fork(self) -> None:
        ids, first, second = self.random.choice(self.leases)
        self.leases.append((ids, first.fork(), second.fork()))

    def end(self) -> None:
        _, *leases = self.leases.pop(self.random.randrange(len(self.leases)))
        for lease in leases:
            lease.release()

    async def evict(self) -> None:
        count = self.random.randint(1, 12)
        freed = [await cache.evict(EvictParams(count)) for cache in self.caches]
        assert freed[0] == freed[1]

    async def flush(self) -> None:
        done = [await cache.flush() for cache in self.caches]
        assert done[0] == done[1]

    async def step(self) -> None:
        chance = self.random.random()
        if not self.leases or (chance < 0.3 and len(self.leases) < 5):
            return await self.open()
        if chance > 0.995:
            return await self.flush()
        if chance > 0.85:
            return await self.evict()
        steps = [self.grow, self.commit, self.commit, self.cut, self.fork, self.end, self.end]
        self.random.choice(steps)()
        return None

    def compare(self) -> None:
        seen = []
        for cache in self.caches:
            stats = cache.stats()
            seen.append((stats.free, stats.evictable, stats.protected, stats.leased, stats.detached, stats.num_nodes))
        assert seen[0] == seen[1]
        for _, first, second in self.leases:
            assert (first.num_tokens, first.node.depth) == (second.num_tokens, second.node.depth)
            # Pools of one size, used alike, give the same slots.
            assert torch.equal(first.slots, second.slots)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(3))
async def test_all_is_as_if_each_pair_were_a_token(seed: int, page_size: int, tree_core: Any) -> None:
    async with opened(allocator=SlotAllocator(96, page_size), is_eagle=True, tree_core=tree_core) as bigrams:
        async with opened(allocator=SlotAllocator(96, page_size), tree_core=tree_core) as plain:
            twice = Twice(bigrams, plain, seed)
            for _ in range(500):
                await twice.step()
                twice.compare()
            bigrams.check()
            while twice.leases:
                twice.end()
            twice.compare()
            assert bigrams.stats().evicted > 50
