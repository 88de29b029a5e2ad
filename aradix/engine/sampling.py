"""How the next token is chosen: greedily, or drawn from what the model thinks likely.

A draw depends on the seed and the token's place alone, never on what was drawn before or beside it. So a request that
gave its slots back and was computed again says the same, and so does one that shares its batch with others.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch

from aradix.errors import ConfigError

__all__ = ["Sampler", "SamplingParams"]

_MAX_SEED = 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks of its tokens; all of it is checked at construction.

    Args:
        max_tokens: the most to generate; where they run out, the finish reason is `"length"`.
        temperature: divides the logits before a draw; 0 is greedy.
        top_p: a draw is among the likeliest tokens that have so much of the probability together.
        seed: from 0 to 2**64 - 1; the same one gives the same draws. `None` takes a new one for each request.
        stop_token_ids: each ends the generation and is not part of it.
        stop: texts, each of which ends the generation; it and what follows it are not part of the text. They need an
            engine with a tokenizer.
        ignore_eos: go on where the model says that it is done; `stop_token_ids` still count.

    Raises:
        ConfigError: a value that cannot work, with the value and what would.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be an int of at least 1, got {self.max_tokens!r}")
        if not (_is_number(self.temperature) and 0 <= self.temperature <= sys.float_info.max):
            raise ConfigError(
                f"temperature must be a number from 0 to {sys.float_info.max:.4g}, got {self.temperature!r}"
            )
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < _MAX_SEED):
            raise ConfigError(f"seed must be an int from 0 to 2**64 - 1, or None, got {self.seed!r}")
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))
        if any(type(token) is not int or token < 0 for token in self.stop_token_ids):
            raise ConfigError(
                f"stop_token_ids must be ints of at least 0, got {sorted(map(repr, self.stop_token_ids))}"
            )
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"stop must be a tuple of texts, none of them empty, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Sampler:
    """Chooses the tokens of one request. No call waits.

    Args:
        params: of the request.
        seed: where `params` has none.
    """

    __slots__ = ("_params", "_seed")

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self._params = params
        self._seed = seed if params.seed is None else params.seed

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the likeliest token, whatever the seed."""
        return self._params.temperature == 0

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """The token at a place of the sequence, counted from the prompt's first.

        Args:
            logits: `[vocabulary]`, of any floating type, on any device; a draw copies them to the host.
        """
        if self.is_greedy:
            return int(logits.argmax())
        wide = logits.double().cpu()
        # From the largest down, which leaves the probabilities as they are: else a low temperature makes infinities of
        # the logits, whose difference is no number.
        scaled = (wide - wide.max()) / self._params.temperature
        # A stable sort, so that equal logits stand in the same order on every machine.
        probabilities, order = torch.softmax(scaled, -1).sort(descending=True, stable=True)
        reached = probabilities.cumsum(-1)
        # The token with which `top_p` is reached is the last one that counts.
        num_likely = int(torch.searchsorted(reached, torch.tensor(self._params.top_p, dtype=reached.dtype))) + 1
        num_likely = min(num_likely, len(reached))
        drawn = self._uniform(position) * float(reached[num_likely - 1])
        index = int(torch.searchsorted(reached, torch.tensor(drawn, dtype=reached.dtype), right=True))
        return int(order[min(index, num_likely - 1)])

    def _uniform(self, position: int) -> float:
        """From 0 to below 1. The generator remembers nothing: its key is the seed, its counter the place."""
        return float(np.random.Generator(np.random.Philox(key=self._seed, counter=position)).random())
