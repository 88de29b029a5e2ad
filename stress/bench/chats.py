"""The load of the whole-turn figure: chats that grow, in a pool that holds half of them.

200 chats on 8 system prompts of 512 tokens; each of 1,600 turns adds 64 tokens of a question and 192 of an answer to
one of them, in a shuffled order, eight turns a chat. It is the load SGLang's caches are known by: under LRU, whole
leaves at a time, .782 of all prompt tokens are found and 614,656 tokens evicted. The shuffle's seed is one that gives
just that; whoever plays the load is then checked against both numbers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["EVICTED_TOKENS", "HIT_TOKENS", "NUM_SLOTS", "PROMPT_TOKENS", "Turn", "chat_turns"]

Tokens = npt.NDArray[np.int32]

_NUM_CHATS = 200
_NUM_SYSTEM_PROMPTS = 8
_SYSTEM_TOKENS = 512
_QUESTION_TOKENS = 64
_ANSWER_TOKENS = 192
_TURNS_A_CHAT = 8
_VOCABULARY = 50_000
_SEED = 0
_ORDER_SEED = 167

_TURN_TOKENS = _QUESTION_TOKENS + _ANSWER_TOKENS
NUM_SLOTS = (_NUM_SYSTEM_PROMPTS * _SYSTEM_TOKENS + _NUM_CHATS * _TURNS_A_CHAT * _TURN_TOKENS) // 2
PROMPT_TOKENS = 2_355_200
HIT_TOKENS = 1_840_896
EVICTED_TOKENS = 614_656


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a chat: all its tokens, of which the first `num_prompt` are there when it begins."""

    tokens: Tokens
    num_prompt: int


def chat_turns() -> list[Turn]:
    """All turns, in order; the same every time."""
    rng = np.random.default_rng(_SEED)
    prompts = [rng.integers(0, _VOCABULARY, _SYSTEM_TOKENS, np.int32) for _ in range(_NUM_SYSTEM_PROMPTS)]
    contexts = [prompts[chat % _NUM_SYSTEM_PROMPTS] for chat in range(_NUM_CHATS)]
    order = [chat for chat in range(_NUM_CHATS) for _ in range(_TURNS_A_CHAT)]
    random.Random(_ORDER_SEED).shuffle(order)
    turns = []
    for chat in order:
        whole = np.concatenate((contexts[chat], rng.integers(0, _VOCABULARY, _TURN_TOKENS, np.int32)))
        turns.append(Turn(whole, len(contexts[chat]) + _QUESTION_TOKENS))
        contexts[chat] = whole
    return turns
