"""A tiny Llama of random weights, in float64: what is computed beside it changes no digit that counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aradix.engine import LlamaConfig, LlamaModel
from aradix.engine.llama import LAYER_PARTS

__all__ = ["CONFIG", "cold", "tiny_model"]

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=256,
    rms_epsilon=1e-5,
    rope_theta=10000.0,
)
MLP_SIZE = 48


def tiny_model(config: LlamaConfig = CONFIG, tied: bool = False, **options: Any) -> LlamaModel:
    """The same weights each time, in Hugging Face's names."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3

    size, heads, kv_heads = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    shapes = {
        "self_attn.q_proj": (heads, size),
        "self_attn.k_proj": (kv_heads, size),
        "self_attn.v_proj": (kv_heads, size),
        "self_attn.o_proj": (size, heads),
        "mlp.gate_proj": (MLP_SIZE, size),
        "mlp.up_proj": (MLP_SIZE, size),
        "mlp.down_proj": (size, MLP_SIZE),
    }
    weights = {"model.embed_tokens.weight": drawn(config.vocab_size, size), "model.norm.weight": 1 + drawn(size)}
    if not tied:
        weights["lm_head.weight"] = drawn(config.vocab_size, size)
    for layer in range(config.num_layers):
        for part in LAYER_PARTS:
            weight = drawn(*shapes[part]) if part in shapes else 1 + drawn(size)
            weights[f"model.layers.{layer}.{part}.weight"] = weight
    return LlamaModel(config, weights, **options)


def cold(model: LlamaModel, prompt: Sequence[int], num_new: int) -> list[int]:
    """What it says greedily, computed alone, with everything anew for each token."""
    tokens = list(prompt)
    for _ in range(num_new):
        slots = torch.arange(1, len(tokens) + 1)
        logits = model.logits(model.hidden([(tokens, slots)], model.make_pool(len(tokens), 1)))[-1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]
