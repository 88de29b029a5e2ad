"""A lease: what it matches, what it may publish, what it gives back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aradix import EvictParams, InsertResult, Lease, Namespace, NodeRef, RadixKey
from aradix.errors import InvalidKeyError, UsageError
from tests.cache.acts import entered, filled, key
from tests.support.caches import idle_sum, opened

pytestmark = pytest.mark.anyio


async def test_one_request_from_beginning_to_end() -> None:
    async with opened(64, 4) as cache:
        prompt = key(range(10))
        async with cache.lease(prompt) as first:
            assert first.num_matched == 0
            await first.allocate(10)
            first.commit(prompt)
            published = first.slots[:8].tolist()
            for token in range(10, 15):
                await first.allocate(1)
                first.commit(key(range(token + 1)))
            assert len(first.slots) == 15
            assert first.slots[:8].tolist() == published
            decoded = first.slots.tolist()
        async with cache.lease(key(range(14))) as second:
            assert second.num_matched == 12
            assert second.slots.tolist() == decoded[:12]
            assert second.node == second.node
        assert cache.stats().evictable == 12
        assert cache.stats().free == 52


async def test_slots_are_cpu_int64_in_token_order_and_pages_are_contiguous() -> None:
    async with opened(64, 4) as cache:
        await filled(cache, key(range(8)))
        async with cache.lease(key(range(11))) as lease:
            await lease.allocate(3)
            slots = lease.slots
            assert slots.dtype == torch.int64
            assert slots.device.type == "cpu"
            assert slots.shape == (11,)
            for start in range(0, 11, 4):
                page = slots[start : start + 4].tolist()
                assert page[0] % 4 == 0
                assert page == list(range(page[0], page[0] + len(page)))
            assert min(slots.tolist()) >= 4  # page 0 is padding
            assert lease.slots_on("cpu").tolist() == slots.tolist()
            table = lease.page_table()
            assert table.dtype == torch.int32
            assert table.tolist() == [slots[i].item() // 4 for i in (0, 4, 8)]
            out = torch.full((5,), -1, dtype=torch.int32)
            assert lease.page_table(out).tolist() == table.tolist()
            assert out[3:].tolist() == [-1, -1]
            for bad in (torch.empty(2, dtype=torch.int32), torch.empty(3, 3, dtype=torch.int32)):
                with pytest.raises(UsageError, match="3 pages"):
                    lease.page_table(bad)


@pytest.mark.parametrize("page_size", [1, 4, 16])
async def test_only_whole_pages_match_and_only_whole_pages_are_published(page_size: int) -> None:
    async with opened(16 * page_size, page_size) as cache:
        length = 2 * page_size + page_size // 2
        async with cache.lease(key(range(length))) as lease:
            await lease.allocate(length)
            done = lease.commit(key(range(length)))
            assert done.num_adopted == length // page_size * page_size
            assert len(lease.slots) == length
        stats = cache.stats()
        assert stats.evictable == length // page_size * page_size
        assert stats.free == 16 * page_size - stats.evictable
        assert cache.peek(key(range(length - 1))) == (length - 1) // page_size * page_size


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("num_pages", [1, 2, 8])
async def test_leave_last_leaves_something_to_compute(page_size: int, num_pages: int) -> None:
    length = page_size * num_pages
    async with opened(4 * length, page_size) as cache:
        prompt = key(range(length))
        await filled(cache, prompt)
        for leave, matched in ((0, length), (1, length - page_size), (length, 0), (length + 5, 0)):
            async with cache.lease(prompt, leave_last=leave) as lease:
                assert lease.num_matched == matched
        async with cache.lease(key(range(length), 999), leave_last=1) as lease:
            assert lease.num_matched == length


async def test_namespaces_never_meet() -> None:
    names: list[Any] = [
        None,
        "x",
        Namespace(lora="x"),
        Namespace(salt="x"),
        Namespace(lora="ab", salt="c"),
        Namespace(lora="a", salt="bc"),
        Namespace(version=1),
        Namespace(version="1"),
        Namespace(lora="x", version=1),
        Namespace(tenant="x"),
    ]
    async with opened(256) as cache:
        for i, name in enumerate(names):
            for other in names[i:]:
                assert cache.peek(key(range(8), namespace=other)) == 0
            await filled(cache, key(range(8), namespace=name))
            for other in names:
                seen = names.index(other) <= i
                assert cache.peek(key(range(8), namespace=other)) == (8 if seen else 0)
        assert cache.stats().evictable == 8 * len(names)
        assert cache.peek(key(range(8), namespace=Namespace(extra="x"))) == 8  # what a plain str is


async def test_siblings_may_share_all_but_the_end_of_their_first_page() -> None:
    async with opened(64, 4) as cache:
        await filled(cache, key(1, 2, 3, 4, 5, 6, 7, 8), key(1, 2, 9, 9, 5, 6, 7, 8))
        assert cache.peek(key(1, 2, 3, 7, 5, 6)) == 0
        assert cache.peek(key(1, 2, 9, 9, 5, 6, 7, 8)) == 8
        async with cache.lease(key(1, 2, 3)) as lease:
            await lease.allocate(3)
            done = lease.commit(key(1, 2, 3))
            assert done.num_adopted == 0
            assert len(lease.slots) == 3
        assert cache.stats().evictable == 16


async def test_pairs_of_tokens_make_the_pages_under_eagle() -> None:
    async with opened(64, 4, is_eagle=True) as cache:
        for num_tokens, num_slots in ((4, 0), (5, 4), (8, 4), (9, 8)):
            ids = range(100 * num_tokens, 101 * num_tokens)
            async with cache.lease(key(ids)) as lease:
                await lease.allocate(num_tokens - 1)
                assert lease.commit(key(ids)).num_adopted == num_slots
            assert cache.peek(key(ids)) == num_slots
            async with cache.lease(key(ids)) as again:
                assert again.num_matched == num_slots
            async with cache.lease(key(ids, 7)) as longer:
                assert longer.num_matched == num_slots
            # The last pair of a page reaches into the next one: another token there is another page.
            ends_in_the_last_pair = 4 if num_slots == num_tokens - 1 else 0
            assert cache.peek(key(ids[: num_tokens - 1], 7)) == num_slots - ends_in_the_last_pair


# ---- committing ----


async def test_of_two_that_compute_the_same_the_later_is_repointed_and_gives_its_own_back() -> None:
    for page_size in (1, 2):
        async with opened(64, page_size) as cache:
            one = await entered(cache, key(range(8)), 8)
            two = await entered(cache, key(range(6), range(50, 54)), 10)
            own = two.slots.tolist()
            one.commit(key(range(8)))
            done = two.commit(key(range(6), range(50, 54)))
            assert done.prefix_len == 6
            assert done.repointed == (0, 6)
            assert done.num_adopted == 4
            assert done.duplicates.tolist() == own[:6]
            assert two.slots.tolist() == one.slots[:6].tolist() + own[6:]
            assert cache.stats().free == 64 - 12
            assert cache.stats().leased == 0
            one.release()
            two.release()
            assert cache.stats().evictable == 12


async def test_a_commit_of_what_is_there_already_changes_nothing() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(8)))
        async with cache.lease(key(range(8))) as lease:
            slots = lease.slots.tolist()
            done = lease.commit(key(range(8)))
            assert (done.num_adopted, done.repointed, done.duplicates.tolist()) == (0, (8, 8), [])
            assert lease.slots.tolist() == slots


async def test_a_shorter_commit_publishes_a_part_and_the_rest_stays_the_leases() -> None:
    async with opened(16) as cache:
        lease = await entered(cache, key(range(12)), 12)
        assert lease.commit(key(range(5))).num_adopted == 5
        assert lease.key == key(range(12))
        assert cache.stats().leased == 7
        assert lease.commit(key(range(9))).num_adopted == 4
        lease.release()
        assert cache.stats().free == 16 - 9


async def test_what_may_not_be_committed_changes_nothing() -> None:
    async with opened(32, 2) as cache:
        await filled(cache, key(range(4)))
        lease = await entered(cache, key(range(8)), 4)
        lease.commit(key(range(7)))
        before, slots = cache.stats(), lease.slots.tolist()
        bad: list[tuple[Any, type[Exception], str]] = [
            (key(range(8), namespace="x"), UsageError, "namespace|is in"),
            (key(range(6), 99, 98), UsageError, "prefixes"),
            (key(9), UsageError, "prefixes"),
            (key(range(6)), UsageError, "7 are matched or committed"),
            (key(range(3)), UsageError, "matched or committed"),
            (key(range(9)), UsageError, "allocate"),
            ([1, 2, 3], InvalidKeyError, "RadixKey"),
            (None, InvalidKeyError, "RadixKey"),
        ]
        for wrong, error, message in bad:
            with pytest.raises(error, match=message):
                lease.commit(wrong)
            assert cache.stats() == before
            assert lease.slots.tolist() == slots
            cache.check()
        lease.commit(key(range(8)))
        lease.release()


async def test_matched_tokens_cannot_be_committed_away() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(6)))
        async with cache.lease(key(range(6))) as lease:
            with pytest.raises(UsageError, match="6 are matched"):
                lease.commit(key(range(5)))


async def test_the_key_is_a_copy_of_what_the_caller_gave() -> None:
    ids = list(range(8))
    array = np.arange(8, dtype=np.int32)
    tensor = torch.arange(8)
    keys = [RadixKey(given) for given in (ids, array, tensor)]
    ids[0] = array[0] = 77
    tensor[0] = 77
    async with opened(16) as cache:
        await filled(cache, keys[0])
        assert [cache.peek(each) for each in keys] == [8, 8, 8]


async def test_without_store_nothing_is_published_and_everything_comes_back() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(4)))
        async with cache.lease(key(range(8)), store=False) as lease:
            assert lease.num_matched == 4
            await lease.allocate(4)
            assert lease.commit(key(range(8))).num_adopted == 0
            assert len(lease.slots) == 8
        assert cache.peek(key(range(8))) == 4
        assert cache.stats().free == 12


async def test_reserve_counts_what_is_matched() -> None:
    async with opened(16, 4) as cache:
        await filled(cache, key(range(8)))
        for reserve, held in ((0, 8), (8, 8), (9, 9), (16, 16)):
            async with cache.lease(key(range(16)), reserve=reserve) as lease:
                assert lease.num_matched == 8
                assert len(lease.slots) == held
        assert cache.stats().free == 8


async def test_bad_numbers_are_refused_and_nothing_is_lost() -> None:
    async with opened(16) as cache:
        lease = await entered(cache, key(range(8)), 4)
        before = cache.stats()
        for bad in (-1, 1.5, True, "3", None, [1]):
            with pytest.raises(UsageError):
                await lease.allocate(bad)  # type: ignore[arg-type]
            with pytest.raises(UsageError):
                lease.allocate_nowait(bad)  # type: ignore[arg-type]
            with pytest.raises(UsageError):
                lease.truncate(bad)  # type: ignore[arg-type]
            with pytest.raises(UsageError):
                cache.lease(key(1), leave_last=bad)  # type: ignore[arg-type]
            if bad is not None:
                with pytest.raises(UsageError):
                    cache.lease(key(1), reserve=bad)  # type: ignore[arg-type]
        for bad_priority in (1.5, True, "3", None):
            with pytest.raises(UsageError):
                cache.lease(key(1), priority=bad_priority)  # type: ignore[arg-type]
        for bad_key in ([1], None, "abc", b"abc"):
            with pytest.raises(InvalidKeyError):
                cache.lease(bad_key)  # type: ignore[arg-type]
        assert cache.stats() == before
        await lease.allocate(np.int64(1))  # type: ignore[arg-type]
        await lease.allocate(0)
        assert len(lease.slots) == 5
        lease.release()


async def test_an_empty_key_and_a_key_shorter_than_a_page_are_fine() -> None:
    async with opened(16, 4) as cache:
        for length in (0, 3):
            async with cache.lease(key(range(length))) as lease:
                assert lease.num_matched == 0
                assert lease.slots.tolist() == []
                await lease.allocate(length)
                lease.commit(key(range(length)))
                await lease.allocate(4)
        assert cache.stats().free == 16
        assert cache.stats().num_namespaces == 0


# ---- truncating and forking ----


@pytest.mark.parametrize("page_size", [1, 4])
async def test_truncate_gives_back_whole_pages_beyond_what_is_kept(page_size: int) -> None:
    async with opened(64, page_size) as cache:
        await filled(cache, key(range(8)))
        lease = await entered(cache, key(range(20)), 12)
        slots = lease.slots.tolist()
        for keep in (20, 17, 16, 13, 8):
            lease.truncate(keep)
            assert lease.slots.tolist() == slots[:keep]
            assert cache.stats().free == 56 - -(-(keep - 8) // page_size) * page_size
            cache.check()
        for bad in (7, 9, 0):
            with pytest.raises(UsageError, match="8 are matched or published"):
                lease.truncate(bad)
        lease.allocate_nowait(5)
        assert len(lease.slots) == 13
        lease.release()


async def test_rejected_drafts_make_room_for_others_to_be_committed() -> None:
    async with opened(64, 4) as cache:
        lease = await entered(cache, key(range(6)), 6)
        lease.commit(key(range(6)))
        for round_ in range(5):
            await lease.allocate(4)
            lease.truncate(7 + round_)
            lease.commit(key(range(6), range(100, 101 + round_)))
        lease.release()
        assert cache.peek(key(range(6), range(100, 105))) == 8


async def test_a_fork_shares_what_is_published_and_goes_its_own_way() -> None:
    async with opened(64, 2) as cache:
        lease = await entered(cache, key(range(9)), 9)
        lease.commit(key(range(9)))
        fork = lease.fork()
        assert fork.num_matched == 8
        assert fork.slots.tolist() == lease.slots[:8].tolist()
        await fork.allocate(3)
        await lease.allocate(2)
        assert not set(fork.slots[8:].tolist()) & set(lease.slots[8:].tolist())
        fork.commit(key(range(9), 51, 52))
        lease.commit(key(range(9), 61))
        cache.check()
        lease.release()
        cache.check()
        assert len(fork.slots) == 11
        async with fork as same:
            assert same is fork
            grandchild = fork.fork()
        assert cache.stats().protected == 10
        grandchild.release()
        assert cache.stats().protected == 0
        assert idle_sum(cache) == 64
        assert cache.stats().queries == 1


async def test_a_fork_of_a_lease_on_nothing_holds_nothing() -> None:
    async with opened(16) as cache:
        lease = await entered(cache, key(range(4)), 2)
        fork = lease.fork()
        assert fork.slots.tolist() == []
        lease.release()
        fork.allocate_nowait(4)
        assert fork.commit(key(range(4))).num_adopted == 4
        fork.release()
        assert cache.peek(key(range(4))) == 4


async def test_a_lease_keeps_showing_its_slots_while_the_tree_changes_around_it() -> None:
    async with opened(64) as cache:
        lease = await entered(cache, key(range(12)), 12)
        lease.commit(key(range(12)))
        slots = lease.slots.tolist()
        others: list[Lease] = []
        for cut in (6, 3, 9, 1, 11):
            others.append(await entered(cache, key(range(cut), 900 + cut), 1))
            others[-1].commit(key(range(cut), 900 + cut))
            assert lease.slots.tolist() == slots
            cache.check()
        for other in others:
            other.release()
            assert lease.slots.tolist() == slots
        await cache.evict(EvictParams(64))
        assert lease.slots.tolist() == slots
        lease.release()
        assert isinstance(lease.key, RadixKey)
        assert lease.num_matched == 0


async def test_release_is_idempotent_and_a_second_one_takes_from_nobody() -> None:
    async with opened(8) as cache:
        await filled(cache, key(1, 2, 3, 4))
        one = await entered(cache, key(1, 2, 3, 4))
        two = await entered(cache, key(1, 2, 9))
        assert cache.stats().protected == 4
        one.release()
        one.release()
        assert cache.stats().protected == 2
        await one.__aexit__(None, None, None)
        assert cache.stats().protected == 2
        two.release()
        assert cache.stats().evictable == 4


async def test_an_exception_in_the_block_releases_and_goes_on() -> None:
    async with opened(8) as cache:
        with pytest.raises(ZeroDivisionError):
            async with cache.lease(key(range(4))) as lease:
                await lease.allocate(4)
                raise ZeroDivisionError
        assert cache.stats().free == 8


async def test_lengths_in_and_over_a_page_with_one_slot_too_many_lose_nothing() -> None:
    async with opened(64, 4) as cache:
        for i in range(2000):
            length = i % 13 + 1
            prompt = key(range(i % 5), range(10 * i, 10 * i + length))[:length]
            lease = await entered(cache, prompt)
            lease.allocate_nowait(length - lease.num_matched + 1)
            if i % 3 == 0:
                lease.commit(prompt)
            elif i % 3 == 1:
                lease.truncate(max(length, lease.num_matched))
            lease.release()
            lease.release()
            assert idle_sum(cache) == 64
        assert cache.stats().leased == 0


def test_the_result_of_a_commit_says_nothing_by_default() -> None:
    result = InsertResult(0, NodeRef(0, 0), torch.empty(0, dtype=torch.int64))
    assert result.num_adopted == 0
    assert result.repointed == (0, 0)
