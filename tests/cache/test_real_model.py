"""A real model over the cache: what is reused gives the tokens and logits of what is computed anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aradix import CacheInitParams, HostKVPool, MHAKVPool, RadixCache, RadixKey, SlotAllocator
from aradix.memory.kv_pool import Layout
from aradix.memory.storage.file_store import FileStore
from aradix.memory.storage.protocol import PageSpace
from aradix.memory.transfer import Transfer
from tests.support.answers import CLOSE, NUM_NEW, OTHER, PAGE_SIZE, STORY, Answer, ask, assert_same
from tests.support.smollm2 import SmolLM2, needs_smollm2

pytestmark = needs_smollm2


def test_the_model_is_the_model(smollm2: SmolLM2) -> None:
    prompt = smollm2.encode("The capital of France is")
    tokens, _ = smollm2.cold(prompt, NUM_NEW)
    assert smollm2.decode(tokens[:1]) == " Paris"


@pytest.mark.anyio
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("anyio_backend", [("asyncio", {}), ("trio", {})], ids=["asyncio", "trio"])
async def test_reused_prefixes_give_what_computing_gives(smollm2: SmolLM2, layout: Layout) -> None:
    story, other = smollm2.encode(STORY), smollm2.encode(OTHER)
    num_slots = 32
    pool = smollm2.pool(num_slots, PAGE_SIZE, layout)
    params = CacheInitParams(SlotAllocator(num_slots, PAGE_SIZE), PAGE_SIZE, low_watermark=0, high_watermark=0)
    async with RadixCache(params) as cache:
        first = await ask(cache, smollm2, pool, story)
        assert first.num_matched == 0
        assert_same(first, smollm2.cold(story, NUM_NEW))
        again = await ask(cache, smollm2, pool, story)
        assert again.num_matched == len(story) // PAGE_SIZE * PAGE_SIZE - (PAGE_SIZE if len(story) % 4 == 0 else 0)
        assert_same(again, smollm2.cold(story, NUM_NEW))
        split = await ask(cache, smollm2, pool, other)
        assert split.num_matched == 8
        assert_same(split, smollm2.cold(other, NUM_NEW))
        # The pool is too small for all: the story's end goes, its slots serve others, and then it comes again.
        await ask(cache, smollm2, pool, story[::-1])
        assert cache.stats().evicted > 0
        later = await ask(cache, smollm2, pool, story)
        assert_same(later, smollm2.cold(story, NUM_NEW))
        cache.check()


def _stored(model: SmolLM2, prompt: list[int], layout: Layout) -> tuple[MHAKVPool, torch.Tensor]:
    """A pool with the KV of all of a prompt but its last token, at slots from the second page on."""
    pool = model.pool(64, PAGE_SIZE, layout)
    slots = torch.arange(2 * PAGE_SIZE, 2 * PAGE_SIZE + len(prompt) + NUM_NEW - 1)
    model.forward(prompt[:-1], slots[: len(prompt) - 1], pool)
    return pool, slots


def test_wrong_slots_are_seen_in_the_logits(smollm2: SmolLM2) -> None:
    prompt = smollm2.encode(STORY)
    num_cached = len(prompt) - 1
    pool, slots = _stored(smollm2, prompt, "layer_first")
    _, right = smollm2.cold(prompt, NUM_NEW)
    wrong = slots.clone()
    wrong[4:8] = slots[8:12]  # one page in the place of another
    shifted = slots.clone()
    shifted[:num_cached] -= 1  # (the right slots in another order would do: keys carry their positions)
    empty = slots.clone()
    empty[4:8] = torch.arange(4)  # the padding page
    for bad in (wrong, shifted, empty):
        logits = smollm2.forward(prompt[num_cached:], bad[: len(prompt)], pool)[-1]
        assert (logits - right[0]).abs().max() > 100 * CLOSE


@pytest.mark.anyio
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("anyio_backend", [("asyncio", {})], ids=["asyncio"])
async def test_kv_that_went_to_the_host_and_to_files_is_the_same_kv(
    smollm2: SmolLM2, layout: Layout, tmp_path: Path
) -> None:
    prompt = smollm2.encode(STORY)
    num_cached = (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
    pool, slots = _stored(smollm2, prompt, layout)
    host = HostKVPool(64, PAGE_SIZE, pool)
    transfer = Transfer(pool, host)
    host_slots = host.alloc(num_cached)
    assert host_slots is not None
    transfer.store(slots[:num_cached], host_slots).synchronize()
    pool.buffer.zero_()

    # Through storage, into another host pool, and onto other slots of the device.
    store, space = FileStore(tmp_path, timeout_s=60), PageSpace("smollm2-135m", host.format_id)
    hashes = RadixKey(prompt[:num_cached]).hash_chain(PAGE_SIZE)
    pages = [host.get_page(page) for page in host.page_ids(host_slots)]
    assert all(await store.put(space, hashes, pages))
    tomorrow = HostKVPool(64, PAGE_SIZE, pool)
    for page, data in enumerate(await store.get(space, hashes), start=5):
        assert data is not None
        tomorrow.set_page(page, data)
    back = Transfer(pool, tomorrow)
    elsewhere = torch.arange(32, 32 + len(slots))
    copy = back.load(torch.arange(5 * PAGE_SIZE, 5 * PAGE_SIZE + num_cached), elsewhere[:num_cached], by_layer=True)
    copy.synchronize()
    assert copy.error is None
    tokens, logits = smollm2.greedy(prompt, num_cached, elsewhere, pool)
    assert_same(Answer(num_cached, tokens, logits), smollm2.cold(prompt, NUM_NEW))
    transfer.close()
    back.close()
