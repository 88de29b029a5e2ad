"""Hugging Face generation over a lease with a real model: SmolLM2, its prompts encoded without a tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aradix import RadixCache, RadixKey, SlotAllocator
from aradix.adapters.transformers import LeaseCache
from aradix.memory.kv_pool import MHAKVPool
from tests.adapters.generation import Computed
from tests.support.caches import opened
from tests.support.smollm2 import SmolLM2, needs_smollm2

pytestmark = needs_smollm2

NUM_NEW = 3
STORY = "The old man went to the river and said to the boy : The capital of France is"
OTHER = "The old man went to the river and said to the king : The name of the city is"


@pytest.fixture(scope="module")
def model(smollm2: SmolLM2) -> Any:
    """The same weights, shared, in transformers' Llama."""
    weights, shape = smollm2.model.weights, smollm2.model.config
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=len(weights["model.layers.0.mlp.up_proj.weight"]),
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    with torch.device("meta"):
        made: Any = LlamaForCausalLM(config)
    missing, unknown = made.load_state_dict(weights, strict=False, assign=True)
    assert (missing, unknown) == (["lm_head.weight"], [])
    made.tie_weights()
    made.model.rotary_emb = type(made.model.rotary_emb)(config)
    return made.eval()


async def ask(cache: RadixCache, pool: MHAKVPool, model: Any, prompt: list[int]) -> tuple[list[int], int, int]:
    """What it says after a prompt, how much was matched, and how many positions were computed."""
    async with cache.lease(RadixKey(prompt), reserve=len(prompt) + NUM_NEW, leave_last=1) as lease:
        kv = LeaseCache(lease, pool)
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), **kv.argument(model)}
        with Computed(model) as computed:
            output = model.generate(ids, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0, **options)
        kv.commit(output[0])
        return output[0].tolist()[len(prompt) :], lease.num_matched, computed.count


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {})], ids=["asyncio"])
async def test_it_says_with_reuse_what_it_says_without(smollm2: SmolLM2, model: Any) -> None:
    story, other = smollm2.encode(STORY), smollm2.encode(OTHER)
    allocator = SlotAllocator(64, 4)
    pool = smollm2.pool(64, 4)
    async with opened(allocator=allocator) as cache:
        shared = next(place for place, pair in enumerate(zip(story, other, strict=True)) if pair[0] != pair[1])
        for prompt, known in ((story, 0), (story, len(story) - 1), (other, shared)):
            tokens, matched, computed = await ask(cache, pool, model, prompt)
            assert matched == known // 4 * 4
            assert computed == len(prompt) - matched + NUM_NEW - 1
            assert tokens == smollm2.cold(prompt, NUM_NEW)[0]
        assert smollm2.decode((await ask(cache, pool, model, story))[0][:1]) == " Paris"
