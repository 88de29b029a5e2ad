"""A tiny language model of Hugging Face's, and what tests of generation ask of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["NUM_NEW", "PROMPT", "Computed", "said", "tiny_llama"]

PROMPT = [(17 * place) % 61 + 3 for place in range(30)]
NUM_NEW = 10


def tiny_llama() -> Any:
    """A tiny Llama of random weights, in float64, so that no two tokens are as good as tied."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=2,
    )
    made: Any = LlamaForCausalLM(config)
    return made.to(torch.float64).eval()


class Computed:
    """How many positions a model was asked to compute."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        self._handle = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        self.count += kwargs["input_ids"].shape[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()


def said(model: Any, prompt: Sequence[int], **options: Any) -> list[int]:
    """The prompt and what a model says after it, greedily."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    tokens: list[int] = model.generate(ids, **options)[0].tolist()
    return tokens
