"""Prompts for the real model, and its answers by way of a cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

from aradix import MHAKVPool, RadixCache, RadixKey
from tests.support.smollm2 import SmolLM2

__all__ = ["CLOSE", "NUM_NEW", "OTHER", "PAGE_SIZE", "STORY", "Answer", "ask", "assert_same"]

PAGE_SIZE = 4
NUM_NEW = 3
STORY = "The old man went to the river and said to the boy : The capital of France is"
OTHER = "The old man went to the river and said to the king : The name of the city is"
CLOSE = 1e-3
"""The same sums in another order; logits run to some 20."""


class Answer(NamedTuple):
    num_matched: int
    tokens: list[int]
    logits: torch.Tensor


async def ask(cache: RadixCache, model: SmolLM2, pool: MHAKVPool, prompt: list[int]) -> Answer:
    """Generates greedily, reusing what the cache has, and publishes what was computed."""
    async with cache.lease(RadixKey(prompt), leave_last=1) as lease:
        num_matched = lease.num_matched
        await lease.allocate(len(prompt) + NUM_NEW - 1 - num_matched)
        tokens, logits = model.greedy(prompt, num_matched, lease.slots, pool)
        lease.commit(RadixKey([*prompt, *tokens[:-1]]))
    return Answer(num_matched, tokens, logits)


def assert_same(answer: Answer, cold: tuple[list[int], torch.Tensor]) -> None:
    tokens, logits = cold
    assert answer.tokens == tokens
    torch.testing.assert_close(answer.logits, logits, atol=CLOSE, rtol=0)
