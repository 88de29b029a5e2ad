"""An engine over a `HashRunner`, and what must hold when its requests are done."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aradix import RadixCache
from aradix.engine import AsyncEngine, Generation, SamplingParams
from stress.schedules import Scripted, run
from tests.engine.hash_runner import HashRunner
from tests.support.caches import idle_sum

__all__ = ["new", "on_both_loops", "read", "working"]


async def read(answer: Generation) -> list[int]:
    """The tokens of a request, to its end."""
    return [token async for token in answer]


def new(num_tokens: int, **options: Any) -> SamplingParams:
    """So many tokens, greedy unless told otherwise."""
    return SamplingParams(max_tokens=num_tokens, **options)


@asynccontextmanager
async def working(
    runner: HashRunner,
    num_slots: int = 64,
    page_size: int = 1,
    cache_class: type[RadixCache] = RadixCache,
    **options: Any,
) -> AsyncIterator[tuple[RadixCache, AsyncEngine]]:
    """An engine that has nothing left at the end, whatever its requests went through."""
    params = runner.cache_params(num_slots, page_size)
    async with cache_class(params) as cache:
        async with AsyncEngine(cache, runner, **options) as engine:
            await checkpoint()
            num_tasks = len(anyio.get_running_tasks())
            yield cache, engine
            await engine.drain()
            await anyio.sleep(10)  # virtual: the step of whoever was the last to vanish
            assert len(anyio.get_running_tasks()) == num_tasks
            assert (engine.num_running, engine.num_waiting) == (0, 0)
            cache.check()
        stats = cache.stats()
        assert (stats.num_leases, stats.num_slot_waiters, stats.protected, stats.leased) == (0, 0, 0, 0)
        assert idle_sum(cache) == num_slots
    cache.check()
    params.allocator.check()
    params.allocator.reclaim()
    assert params.allocator.available_size() == num_slots


def on_both_loops(scenario: Callable[[], Awaitable[None]]) -> Any:
    """Makes a test of a coroutine function: on asyncio and trio, in the order of a plain loop, on the virtual clock."""

    @pytest.mark.parametrize("backend", ["asyncio", "trio"])
    def test(backend: Any) -> None:
        run(scenario, backend=backend, chooser=Scripted(()))

    test.__name__ = scenario.__name__
    return test
