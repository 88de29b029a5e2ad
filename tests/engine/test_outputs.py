"""Fifty prompts: whatever the cache holds, evicts, retracts or brings back, and whoever computes beside, the answer is
that of the prompt alone."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache as kept
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aradix import ChunkCache, EvictParams, HiRadixCache, HostKVPool, RadixCache, RadixKey
from aradix.engine import AsyncEngine, EngineStats, LlamaModel, LlamaRunner, SamplingParams
from tests.engine.tiny_llama import CONFIG, cold, tiny_model
from tests.support.caches import idle_sum
from tests.support.core import TREE_CORE

pytestmark = pytest.mark.anyio

NUM_NEW = 4
NUM_REQUESTS = 52
PAGE_SIZE = 4
ONE_LOOP = pytest.mark.parametrize("anyio_backend", [("asyncio", {})], ids=["asyncio"])
TWO_LOOPS = pytest.mark.parametrize("anyio_backend", [("asyncio", {}), ("trio", {})], ids=["asyncio", "trio"])


@kept
def model() -> LlamaModel:
    return tiny_model()


@kept
def talks() -> list[list[list[int]]]:
    """Thirteen talks: what is said in each turn. They begin with a system prompt in common, and some branch later."""
    chance = random.Random(1)

    def said(least: int, most: int) -> list[int]:
        return [chance.randrange(CONFIG.vocab_size) for _ in range(chance.randrange(least, most))]

    system = said(21, 22)
    turns = [[system + said(1, 9), *(said(1, 7) for _ in range(3))] for _ in range(8)]
    # Five branch off: another second turn, or another end of the first.
    turns += [[turn[0], said(1, 7), said(1, 7), said(1, 7)] for turn in turns[:2]]
    turns += [[turn[0][:-1] + said(2, 9), *turn[1:]] for turn in turns[2:5]]
    return turns


@kept
def right() -> dict[tuple[int, ...], list[int]]:
    """Every prompt that occurs, and its answer."""
    answers: dict[tuple[int, ...], list[int]] = {}
    for talk in talks():
        prompt: list[int] = []
        for said in talk:
            prompt = prompt + said
            if tuple(prompt) not in answers:
                answers[tuple(prompt)] = cold(model(), prompt, NUM_NEW)
            prompt = prompt + answers[tuple(prompt)]
    return answers


@asynccontextmanager
async def serving(
    num_slots: int = 2048, cache_class: type[RadixCache] = RadixCache, num_host_slots: int = 0, **options: Any
) -> AsyncIterator[tuple[RadixCache, AsyncEngine]]:
    """An engine over the tiny model; afterwards every slot is there."""
    runner = LlamaRunner(model(), model().make_pool(num_slots, PAGE_SIZE))
    tiers: dict[str, Any] = {}
    if num_host_slots:
        host = HostKVPool(num_host_slots, PAGE_SIZE, runner.pool)
        tiers = {"host": host, "write_policy": "write_through", "load_back_threshold": 1}
    params = runner.cache_params(low_watermark=0.0, high_watermark=0.0, tree_core=TREE_CORE, **tiers)
    try:
        async with cache_class(params) as cache:
            async with AsyncEngine(cache, runner, **options) as engine:
                yield cache, engine
            with anyio.fail_after(60):
                while num_host_slots and cache.stats().protected:
                    await checkpoint()  # a copy to the host pins what it reads
            stats = cache.stats()
            assert (stats.num_leases, stats.protected, stats.leased) == (0, 0, 0)
            assert idle_sum(cache) == num_slots
            cache.check()
    finally:
        runner.close()
    params.allocator.reclaim()
    assert params.allocator.available_size() == num_slots


async def ask(engine: AsyncEngine, prompt: list[int], stop_at: int | None = None) -> list[int]:
    """The answer, which must be right as far as it is read."""
    answer = engine.generate(prompt, SamplingParams(max_tokens=NUM_NEW))
    seen = []
    async for token in answer:
        seen.append(token)
        if len(seen) == stop_at:
            break
    assert seen == right()[tuple(prompt)][: len(seen)]
    return seen


async def have(engine: AsyncEngine, talk: list[list[int]]) -> None:
    """A whole talk, each turn of which begins with all that was said."""
    prompt: list[int] = []
    for said in talk:
        prompt = prompt + said
        prompt = prompt + await ask(engine, prompt)


async def have_all(engine: AsyncEngine) -> EngineStats:
    async with anyio.create_task_group() as tasks:
        for talk in talks():
            tasks.start_soon(have, engine, talk)
    return engine.stats()


def num_tokens() -> int:
    """Tokens of the prompts of all talks."""
    return sum(sum(map(len, talk[: i + 1])) + i * NUM_NEW for talk in talks() for i in range(len(talk)))


def test_there_are_fifty_prompts_which_share_much() -> None:
    assert len(right()) == 50
    assert sum(map(len, talks())) == NUM_REQUESTS == 52  # two who branch later have their first turn in common
    assert len({prompt[:21] for prompt in right()}) == 1


@ONE_LOOP
@pytest.mark.parametrize("max_batch_size", range(1, 9))
@pytest.mark.parametrize(
    ("cache_class", "join"), [(RadixCache, True), (RadixCache, False), (ChunkCache, False)], ids=["join", "cache", "no"]
)
async def test_batches_of_any_size_say_what_each_says_alone(
    max_batch_size: int, cache_class: type[RadixCache], join: bool
) -> None:
    options: dict[str, Any] = {"max_batch_size": max_batch_size, "chunk_tokens": 16, "join": join}
    async with serving(cache_class=cache_class, **options) as (_, engine):
        stats = await have_all(engine)
    assert stats.finished == NUM_REQUESTS
    assert stats.prefill_tokens + stats.cached_tokens == num_tokens()
    if cache_class is ChunkCache:
        assert stats.cached_tokens == 0
    else:
        assert stats.cached_tokens > num_tokens() / 2


async def test_so_it_is_on_every_loop() -> None:
    async with serving() as (_, engine):
        await have_all(engine)


@pytest.mark.parametrize("anyio_backend", [("trio", {})], ids=["trio"])
async def test_without_a_cache_they_say_the_same_and_compute_it_all() -> None:
    async with serving(cache_class=ChunkCache) as (_, engine):
        stats = await have_all(engine)
    assert (stats.prefill_tokens, stats.cached_tokens) == (num_tokens(), 0)


@TWO_LOOPS
@pytest.mark.parametrize("join", [False, True])
async def test_in_a_pool_for_two_they_are_evicted_and_say_the_same(join: bool) -> None:
    longest = max(map(len, right())) + NUM_NEW
    num_slots = longest // PAGE_SIZE * PAGE_SIZE + 8 * PAGE_SIZE
    async with serving(num_slots=num_slots, max_batch_size=8, join=join) as (cache, engine):
        await have_all(engine)  # how often one of them gives way is up to the threads
        assert cache.stats().evicted > 200


@TWO_LOOPS
@pytest.mark.parametrize("join", [False, True])
async def test_where_two_are_let_in_and_only_one_can_grow_the_other_gives_way_and_says_the_same(join: bool) -> None:
    # Four pages each and one more: whoever takes it needs a sixth, so neither ends while both are there.
    prompts = [[i * 16 + j for j in range(4 * PAGE_SIZE)] for i in range(2)]
    answers: list[list[int]] = [[], []]

    async def one(engine: AsyncEngine, i: int) -> None:
        answers[i] = [token async for token in engine.generate(prompts[i], SamplingParams(max_tokens=2 * PAGE_SIZE))]

    async with serving(num_slots=9 * PAGE_SIZE, join=join) as (_, engine):
        async with anyio.create_task_group() as tasks:
            for i in range(2):
                tasks.start_soon(one, engine, i)
        assert engine.stats().retractions > 0
    assert answers == [cold(model(), prompt, 2 * PAGE_SIZE) for prompt in prompts]


@TWO_LOOPS
@pytest.mark.parametrize("num_host_slots", [128, 2048])
async def test_with_a_host_tier_they_come_back_and_say_the_same(num_host_slots: int) -> None:
    options: dict[str, Any] = {"cache_class": HiRadixCache, "num_host_slots": num_host_slots}
    async with serving(num_slots=160, max_batch_size=3, **options) as (cache, engine):
        await have_all(engine)
        # What a small host still has when somebody comes for it is up to the threads.
        assert cache.stats().load_back_tokens > (0 if num_host_slots > 1000 else -1)


@TWO_LOOPS
async def test_whose_copy_from_the_host_has_no_room_is_made_room_for_by_the_less_urgent() -> None:
    prompts = [[i * 45 + j for j in range(45)] for i in range(2)]
    async with serving(num_slots=160, cache_class=HiRadixCache, num_host_slots=2048) as (cache, engine):
        sampling = SamplingParams(max_tokens=2)
        first = [token async for token in engine.generate(prompts[0], sampling)]
        while cache.stats().protected:
            await checkpoint()
        await cache.evict(EvictParams(160))
        async with cache.lease(RadixKey(range(200, 300))) as outside:
            await outside.allocate(100)
            low = engine.generate(prompts[1][:20], SamplingParams(max_tokens=40))  # all that is left, in the end
            await anext(low)
            urgent = engine.generate(prompts[0], sampling, priority=1)
            assert [token async for token in urgent] == first
            assert urgent.num_cached_tokens == 44
            assert low.finish_reason is None
            assert engine.stats().retractions > 0
        assert len([token async for token in low]) == 39


@TWO_LOOPS
async def test_after_others_vanished_they_say_the_same() -> None:
    async with serving(num_slots=160) as (_, engine):

        async def vanish(prompt: list[int], stop_at: int) -> None:
            await ask(engine, prompt, stop_at)

        chance = random.Random(3)
        async with anyio.create_task_group() as tasks:
            for prompt in right():
                tasks.start_soon(vanish, list(prompt), chance.randrange(1, NUM_NEW))
                if chance.random() < 0.3:
                    engine.generate(prompt)  # nobody takes it
        assert engine.stats().aborted > 30
        num_before = engine.stats().finished
        await have_all(engine)
        assert engine.stats().finished - num_before == NUM_REQUESTS


@ONE_LOOP
async def test_draws_depend_on_nothing_but_the_seed() -> None:
    prompts = [list(prompt) for prompt in right()][:8]

    async def drawn(engine: AsyncEngine, answers: dict[int, list[int]], i: int) -> None:
        sampling = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=i)
        answers[i] = [token async for token in engine.generate(prompts[i], sampling)]

    async def all_drawn(**options: Any) -> tuple[dict[int, list[int]], int]:
        answers: dict[int, list[int]] = {}
        async with serving(**options) as (_, engine):
            async with anyio.create_task_group() as tasks:
                for i in range(8):
                    tasks.start_soon(drawn, engine, answers, i)
            return answers, engine.stats().retractions

    alone, _ = await all_drawn(max_batch_size=1)
    together, _ = await all_drawn()
    crowded, num_retractions = await all_drawn(num_slots=112)
    assert alone == together == crowded
    assert num_retractions > 0
    assert any(alone[i][:NUM_NEW] != right()[tuple(prompts[i])] for i in range(8))  # it did draw
