"""Requests that come, wait, are computed, give way and vanish in any order: right tokens, and nothing left behind."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest

from aradix import ChunkCache, RadixCache
from aradix.engine import AsyncEngine, EngineStats, SamplingParams
from stress.schedules import run
from tests.engine.hash_runner import HashRunner, expected
from tests.engine.workplace import working

MAX_NEW = 8


class Visitors:
    """Consumers of one engine, of whom some lose patience, each in another way."""

    def __init__(self, engine: AsyncEngine, seed: int, num_slots: int) -> None:
        self.engine = engine
        self.chance = random.Random(seed)
        self.longest = num_slots - MAX_NEW
        self.num_vanished = 0
        # Few beginnings, so that prefixes are shared; long ones, so that they are worth it.
        self.beginnings = [[self.chance.randrange(1000) for _ in range(self.longest // 2)] for _ in range(3)]

    def prompt(self) -> list[int]:
        chance = self.chance
        beginning = chance.choice(self.beginnings)[: chance.randrange(self.longest // 2 + 1)]
        return beginning + [chance.randrange(1000) for _ in range(chance.randrange(1, self.longest // 2))]

    async def visit(self) -> None:
        chance = self.chance
        await anyio.sleep(chance.random() * 30)
        prompt, num_new = self.prompt(), chance.randrange(1, MAX_NEW + 1)
        right = expected(prompt, num_new)
        answer = self.engine.generate(prompt, SamplingParams(max_tokens=num_new), priority=chance.randrange(3))
        patience = chance.choice((None, None, "cancelled", "closed", "dropped", "aborted"))
        seen: list[int] = []
        if patience is None:
            seen = [token async for token in answer]
            assert (seen, answer.finish_reason) == (right, "length")
            return
        self.num_vanished += 1
        with anyio.move_on_after(chance.random() * 20 if patience == "cancelled" else None):
            limit = chance.randrange(num_new + 1)
            async for token in answer:
                seen.append(token)
                if patience != "cancelled" and len(seen) >= limit:
                    break
        if patience == "closed":
            await answer.aclose()
        elif patience == "aborted":
            answer.abort()
        assert seen == right[: len(seen)]
        del answer

    async def all(self, num_visitors: int) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(num_visitors):
                tasks.start_soon(self.visit)


async def visited(seed: int, page_size: int, num_slots: int, cache_class: type[RadixCache]) -> EngineStats:
    durations = random.Random(seed)
    runner = HashRunner(lambda: durations.choice((0.001, 0.1, 1.0)))
    options: dict[str, Any] = {
        "max_batch_size": durations.choice((1, 2, 5, 8)),
        "chunk_tokens": durations.choice((3, 8, 512)),
    }
    options["join"] = bool(seed % 3)
    async with working(runner, num_slots, page_size, cache_class, **options) as (_, engine):
        visitors = Visitors(engine, seed, num_slots)
        await visitors.all(24)
    stats = engine.stats()
    assert stats.finished + stats.aborted == 24
    assert stats.failed == 0
    assert stats.aborted <= visitors.num_vanished
    return stats


@pytest.mark.parametrize("seed", range(20))
def test_whoever_stays_is_answered_and_nothing_is_left_of_who_vanishes(seed: int) -> None:
    backend: Any = ("asyncio", "trio")[seed // 4 % 2]  # with every size of page and pool
    page_size = (1, 4)[seed % 2]
    cache_class = ChunkCache if seed % 5 == 4 else RadixCache
    num_slots = (40, 64)[seed // 2 % 2]
    run(visited, seed, page_size, num_slots, cache_class, backend=backend, seed=seed, max_steps=50_000)


def test_among_these_are_retractions_aborts_and_hits() -> None:
    seen = [run(visited, seed, 1, 40, RadixCache, backend="asyncio", seed=seed).result() for seed in range(6)]
    assert min(sum(stats.retractions for stats in seen), sum(stats.aborted for stats in seen)) > 5
    assert sum(stats.cached_tokens for stats in seen) > 100


async def left(seed: int) -> None:
    chance = random.Random(seed)
    num_slots = chance.choice((40, 64))
    runner = HashRunner(lambda: chance.choice((0.001, 0.1, 1.0)))
    params = runner.cache_params(num_slots, chance.choice((1, 4)))
    options: dict[str, Any] = {"max_batch_size": chance.choice((1, 2, 8)), "chunk_tokens": chance.choice((1, 3, 8))}
    async with RadixCache(params) as cache:
        with anyio.CancelScope() as around:
            async with AsyncEngine(cache, runner, join=bool(seed % 3), **options) as engine:
                visitors = Visitors(engine, seed, num_slots)
                answers = [
                    engine.generate(
                        visitors.prompt(),
                        SamplingParams(max_tokens=chance.randrange(1, MAX_NEW)),
                        priority=chance.randrange(4),
                    )
                    for _ in range(16)
                ]
                await anyio.sleep(chance.choice((0.0, chance.random() * 20)))
                if seed % 2:
                    around.cancel()
        assert all(answer.finish_reason for answer in answers)
        stats = cache.stats()
        assert (stats.num_leases, stats.num_slot_waiters, stats.num_joiners, stats.leased) == (0, 0, 0, 0)
        cache.check()


@pytest.mark.parametrize("seed", range(12))
def test_an_engine_that_is_left_at_any_time_leaves_nothing_behind(seed: int) -> None:
    backend: Any = ("asyncio", "trio")[seed // 2 % 2]
    run(left, seed, backend=backend, seed=seed, max_steps=50_000)
