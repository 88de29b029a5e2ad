"""What a token's KV takes in well-known models, and what hits are worth with it."""

from __future__ import annotations

from typing import NamedTuple

from aradix.replay.request import ReplayError

__all__ = ["MODELS", "VALUE_BYTES", "ModelShape", "Worth", "model_named"]

VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4}
"""Bytes of one value of the KV, by the name of its type."""


class ModelShape(NamedTuple):
    """What of a model decides how much KV a token has.

    Args:
        layers: that have KV of every token.
        kv_heads: of each layer; with latent attention (MLA) none, for one latent serves keys and values of all heads.
        head_dim: of keys and of values.
        latent_dim: of the latent and the rotary key beside it, where attention is latent.
    """

    layers: int
    kv_heads: int
    head_dim: int
    latent_dim: int = 0

    def bytes_per_token(self, value_type: str = "bf16") -> int:
        """Bytes of KV of one token, in all layers; `value_type` is a key of `VALUE_BYTES`. Does not wait."""
        return self.layers * (2 * self.kv_heads * self.head_dim + self.latent_dim) * VALUE_BYTES[value_type]


# From each model's published config.json: num_hidden_layers, num_key_value_heads, head_dim (or hidden_size over
# num_attention_heads), and kv_lora_rank + qk_rope_head_dim. Only models whose layers all keep every token (so
# not Mistral-7B-v0.1, which has a window of 4,096).
MODELS: dict[str, ModelShape] = {
    "Llama-3.1-8B": ModelShape(32, 8, 128),
    "Llama-3.1-70B": ModelShape(80, 8, 128),
    "Llama-3.1-405B": ModelShape(126, 8, 128),
    "Llama-3.2-1B": ModelShape(16, 8, 64),
    "Llama-3.2-3B": ModelShape(28, 8, 128),
    "Qwen2.5-7B": ModelShape(28, 4, 128),
    "Qwen2.5-72B": ModelShape(80, 8, 128),
    "Qwen3-8B": ModelShape(36, 8, 128),
    "Qwen3-14B": ModelShape(40, 8, 128),
    "Qwen3-32B": ModelShape(64, 8, 128),
    "Qwen3-30B-A3B": ModelShape(48, 4, 128),
    "Qwen3-235B-A22B": ModelShape(94, 4, 128),
    "Mistral-7B-v0.3": ModelShape(32, 8, 128),
    "Mixtral-8x7B": ModelShape(32, 8, 128),
    "DeepSeek-V3": ModelShape(61, 0, 0, 512 + 64),
    "SmolLM2-135M": ModelShape(30, 3, 64),
}


def model_named(name: str) -> tuple[str, ModelShape]:
    """A model of the table, in whatever case its name is written: its name there, and its shape.

    Raises:
        ReplayError: there is none of that name.
    """
    for known, shape in MODELS.items():
        if known.lower() == name.strip().lower():
            return known, shape
    raise ReplayError(f"{name!r} is none of {', '.join(MODELS)}; give --kv-bytes-per-token instead")


class Worth(NamedTuple):
    """What tokens are worth, as far as it is known.

    Args:
        kv_bytes_per_token: of the model's KV.
        model: its name and the type of its values, for the report.
        prefill_tokens_per_s: computed by the engine where nothing is found.
    """

    kv_bytes_per_token: float | None = None
    model: str | None = None
    prefill_tokens_per_s: float | None = None

    def kv_bytes(self, num_tokens: int) -> float | None:
        """Bytes of the KV of so many tokens."""
        return None if self.kv_bytes_per_token is None else num_tokens * self.kv_bytes_per_token

    def seconds_saved(self, hit_tokens: int) -> float | None:
        """Seconds of prefill that tokens found in the cache spare, if every token of a prompt takes as long."""
        return None if self.prefill_tokens_per_s is None else hit_tokens / self.prefill_tokens_per_s
