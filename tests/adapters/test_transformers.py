"""Hugging Face generation over a lease: with reuse it says what it says without, and computes less."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import pytest
import torch
from anyio.to_thread import run_sync

from aradix import Namespace, RadixCache, RadixKey, SlotAllocator
from aradix.adapters.transformers import LeaseCache
from aradix.errors import LeaseReleasedError, OutOfSlotsError, UsageError, WrongLoopError
from aradix.memory.kv_pool import MHAKVPool
from tests.adapters.generation import NUM_NEW, PROMPT, Computed, said
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


def pool_for(allocator: SlotAllocator) -> MHAKVPool:
    return MHAKVPool(allocator.num_slots, allocator.page_size, 2, 2, 8, torch.float64)


async def said_over(
    cache: RadixCache, pool: MHAKVPool, model: Any, prompt: Sequence[int], extra_key: Any = None, **options: Any
) -> tuple[list[int], int, int]:
    """What it says over a lease, how much was matched, and how many positions were computed."""
    key = RadixKey(prompt, extra_key)
    async with cache.lease(key, reserve=len(prompt) + NUM_NEW, leave_last=1) as lease:
        kv = LeaseCache(lease, pool)
        with Computed(model) as computed:
            tokens = said(model, prompt, **kv.argument(model), **options)
        kv.commit(tokens)
        return tokens, lease.num_matched, computed.count


@pytest.mark.parametrize("page_size", [1, 4])
async def test_with_reuse_it_says_the_same_and_computes_less(tiny_llama: Any, page_size: int) -> None:
    allocator = SlotAllocator(256, page_size)
    pool = pool_for(allocator)
    async with opened(allocator=allocator) as cache:
        alone = said(tiny_llama, PROMPT)
        tokens, matched, computed = await said_over(cache, pool, tiny_llama, PROMPT)
        assert (tokens, matched, computed) == (alone, 0, len(PROMPT) + NUM_NEW - 1)
        assert cache.peek(RadixKey(alone)) == (len(alone) - 1) // page_size * page_size
        for prompt in (PROMPT, PROMPT[:21], [*PROMPT[:17], 5, 6, 7], [*alone, 9, 9]):
            known = min(cache.peek(RadixKey(prompt)), (len(prompt) - 1) // page_size * page_size)
            tokens, matched, computed = await said_over(cache, pool, tiny_llama, prompt)
            assert tokens == said(tiny_llama, prompt)
            assert matched == known > 0
            assert computed == len(prompt) - matched + NUM_NEW - 1
        assert cache.stats().protected == cache.stats().leased == 0


async def test_namespaces_compute_for_themselves(tiny_llama: Any) -> None:
    allocator = SlotAllocator(256, 4)
    pool = pool_for(allocator)
    async with opened(allocator=allocator) as cache:
        for space in (None, "a", Namespace(lora="a")):
            tokens, matched, _ = await said_over(cache, pool, tiny_llama, PROMPT, space)
            assert (tokens, matched) == (said(tiny_llama, PROMPT), 0)
            assert cache.peek(RadixKey(PROMPT, space)) == 28


async def test_slots_that_are_used_again_hold_the_new_kv(tiny_llama: Any) -> None:
    """A pool for one request and a half: each evicts what the last one left."""
    allocator = SlotAllocator(64, 4)
    pool = pool_for(allocator)
    async with opened(allocator=allocator) as cache:
        for turn in range(6):
            prompt = PROMPT[:12] + [turn + 3] * 12
            tokens, matched, _ = await said_over(cache, pool, tiny_llama, prompt)
            assert tokens == said(tiny_llama, prompt)
            assert (matched >= 12) is (turn > 0)
        assert cache.stats().evicted > 0


async def test_it_may_run_in_a_worker_thread_with_what_is_reserved(tiny_llama: Any) -> None:
    allocator = SlotAllocator(256, 4)
    pool = pool_for(allocator)
    async with opened(allocator=allocator) as cache:
        results: dict[int, list[int]] = {}

        async def ask(last: int) -> None:
            prompt = [*PROMPT, last]
            async with cache.lease(RadixKey(prompt), reserve=len(prompt) + NUM_NEW, leave_last=1) as lease:
                kv = LeaseCache(lease, pool)
                results[last] = await run_sync(partial(said, tiny_llama, prompt, **kv.argument(tiny_llama)))
                kv.commit(results[last])

        async with anyio.create_task_group() as tasks:
            for last in range(3, 6):
                tasks.start_soon(ask, last)
        for last, tokens in results.items():
            assert tokens == said(tiny_llama, [*PROMPT, last])
        async with cache.lease(RadixKey(PROMPT), leave_last=1) as lease:
            kv = LeaseCache(lease, pool)
            with pytest.raises(WrongLoopError):  # it would have to grow there
                await run_sync(partial(said, tiny_llama, PROMPT, **kv.argument(tiny_llama)))


async def test_without_a_reservation_it_grows_as_it_goes(tiny_llama: Any) -> None:
    allocator = SlotAllocator(40, 4)
    pool = pool_for(allocator)
    async with opened(allocator=allocator) as cache:
        async with cache.lease(RadixKey(PROMPT), leave_last=1) as lease:
            kv = LeaseCache(lease, pool)
            assert said(tiny_llama, PROMPT, **kv.argument(tiny_llama)) == said(tiny_llama, PROMPT)
            assert lease.num_tokens == kv.get_seq_length() == len(PROMPT) + NUM_NEW - 1
        async with cache.lease(RadixKey(PROMPT), leave_last=1) as lease, cache.lease(RadixKey([9])) as other:
            await other.allocate(8)
            kv = LeaseCache(lease, pool)
            with pytest.raises(OutOfSlotsError):
                said(tiny_llama, PROMPT, **kv.argument(tiny_llama))


async def test_drafts_that_are_rejected_are_cropped(tiny_llama: Any) -> None:
    """Prompt look-up proposes tokens out of the prompt; most of them are wrong."""
    prompt = [5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6]
    allocator = SlotAllocator(256, 4)
    pool = pool_for(allocator)
    async with opened(allocator=allocator) as cache:
        for _ in range(2):
            async with cache.lease(
                RadixKey(prompt), reserve=len(prompt) + NUM_NEW + 16, leave_last=len(prompt)
            ) as lease:
                kv = LeaseCache(lease, pool)
                tokens = said(tiny_llama, prompt, prompt_lookup_num_tokens=3, **kv.argument(tiny_llama))
                assert (tokens, lease.num_matched) == (said(tiny_llama, prompt), 0)
                assert kv.commit(tokens).prefix_len in (0, 20)
        tokens, matched, _ = await said_over(cache, pool, tiny_llama, prompt)
        assert (tokens, matched) == (said(tiny_llama, prompt), 8)


async def test_what_is_everybodys_cannot_be_taken_back(tiny_llama: Any) -> None:
    allocator = SlotAllocator(256, 4)
    pool = pool_for(allocator)
    async with opened(allocator=allocator) as cache:
        await said_over(cache, pool, tiny_llama, PROMPT)
        async with cache.lease(RadixKey(PROMPT), reserve=len(PROMPT) + NUM_NEW, leave_last=1) as lease:
            kv = LeaseCache(lease, pool)
            with pytest.raises(UsageError, match="28 are matched or committed"):
                kv.crop(-1)
            tokens = said(tiny_llama, PROMPT, **kv.argument(tiny_llama))
            with pytest.raises(UsageError, match="39 tokens were computed, but 38"):
                kv.commit(tokens[:38])
            kv.commit(tokens)
            kv.crop(-3)
            with pytest.raises(UsageError, match="36 are matched or committed"):
                kv.crop(-1)
            for refused in (kv.reset, partial(kv.batch_repeat_interleave, 2)):
                with pytest.raises(UsageError, match="lease"):
                    refused()
        with pytest.raises(LeaseReleasedError):
            LeaseCache(lease, pool)


async def test_batches_and_beams_are_refused(tiny_llama: Any) -> None:
    allocator = SlotAllocator(256, 4)
    pool = pool_for(allocator)
    async with opened(allocator=allocator) as cache:
        async with cache.lease(RadixKey(PROMPT), reserve=64) as lease:
            kv = LeaseCache(lease, pool)
            with pytest.raises(UsageError, match="batch of 2"):
                tiny_llama.generate(torch.tensor([PROMPT, PROMPT]), max_new_tokens=2, **kv.argument(tiny_llama))
            with pytest.raises(UsageError, match="one sequence"):
                said(tiny_llama, PROMPT, num_beams=2, **kv.argument(tiny_llama))
