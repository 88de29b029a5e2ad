"""The engine with its model on a CUDA device says what the model says on the host, with and without a host tier."""

from __future__ import annotations

import anyio
import pytest
import torch

from aradix import HiRadixCache, HostKVPool, RadixCache
from aradix.engine import AsyncEngine, LlamaModel, LlamaRunner, SamplingParams
from tests.engine.tiny_llama import CONFIG, cold, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.anyio,
]

PAGE_SIZE = 4
SYSTEM = [(17 * place) % 91 + 3 for place in range(24)]
PROMPTS = [[*SYSTEM, *range(i, i + 7)] for i in range(12)]


@pytest.mark.parametrize("num_host_slots", [0, 1024])
async def test_on_a_device_it_says_what_it_says_on_the_host(num_host_slots: int) -> None:
    host_model = tiny_model()
    model = LlamaModel(CONFIG, {name: weight.cuda() for name, weight in host_model.weights.items()})
    runner = LlamaRunner(model, model.make_pool(120, PAGE_SIZE))
    host = HostKVPool(num_host_slots, PAGE_SIZE, runner.pool) if num_host_slots else None
    params = runner.cache_params(
        low_watermark=0, high_watermark=0, host=host, write_policy="write_through", load_back_threshold=1
    )

    async def ask(engine: AsyncEngine, prompt: list[int]) -> None:
        answer = engine.generate(prompt, SamplingParams(max_tokens=8))
        assert [token async for token in answer] == cold(host_model, prompt, 8)

    async with (HiRadixCache if num_host_slots else RadixCache)(params) as cache:
        async with AsyncEngine(cache, runner) as engine:
            for _ in range(2):
                async with anyio.create_task_group() as tasks:
                    for i, prompt in enumerate(PROMPTS):
                        tasks.start_soon(ask, engine, prompt)
                        if i % 3 == 0:
                            engine.generate(prompt[::-1])  # nobody takes it
            assert engine.stats().aborted == 8
        cache.check()
        assert cache.stats().evicted > 0
        assert not num_host_slots or cache.stats().load_back_tokens > 0
    runner.close()
