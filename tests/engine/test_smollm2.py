"""A real model behind the engine, in batches and over reused prefixes, says what it says alone."""

from __future__ import annotations

import anyio
import pytest
import torch

from aradix import RadixCache
from aradix.engine import AsyncEngine, LlamaRunner, SamplingParams
from tests.support.smollm2 import SmolLM2, needs_smollm2

pytestmark = needs_smollm2

NUM_NEW = 4
SYSTEM = "The old man went to the river and said to the "
PROMPTS = [
    "The capital of France is",
    "The capital of Germany is",
    SYSTEM + "boy : The capital of France is",
    SYSTEM + "king : The name of the city is",
]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_in_a_batch_and_from_the_cache_it_says_the_same(smollm2: SmolLM2) -> None:
    runner = LlamaRunner(smollm2.model, smollm2.pool(64, 4))
    prompts = [smollm2.encode(prompt) for prompt in PROMPTS]

    async def ask(engine: AsyncEngine, prompt: list[int]) -> None:
        answer = engine.generate(prompt, SamplingParams(max_tokens=NUM_NEW))
        assert [token async for token in answer] == smollm2.cold(prompt, NUM_NEW)[0]

    async with RadixCache(runner.cache_params(low_watermark=0, high_watermark=0)) as cache:
        async with AsyncEngine(cache, runner, chunk_tokens=8) as engine:
            for _ in range(2):
                async with anyio.create_task_group() as tasks:
                    for prompt in prompts:
                        tasks.start_soon(ask, engine, prompt)
            first = engine.generate(prompts[0], SamplingParams(max_tokens=1))
            assert [smollm2.decode([token]) async for token in first] == [" Paris"]
            assert engine.stats().cached_tokens > 20
        cache.check()
    runner.close()


def test_weights_of_half_the_size_know_the_capital_too(smollm2: SmolLM2) -> None:
    """Another type of weights and KV: not the same logits, but the same sense."""
    half = type(smollm2.model)(
        smollm2.model.config, {name: weight.to(torch.bfloat16) for name, weight in smollm2.model.weights.items()}
    )
    slots = torch.arange(1, 6)
    pool = half.make_pool(8, 1)
    assert pool.dtype is torch.bfloat16
    logits = half.logits(half.hidden([(smollm2.encode(PROMPTS[0]), slots)], pool))
    assert smollm2.decode([int(logits[-1].argmax())]) == " Paris"
