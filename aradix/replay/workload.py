"""The built-in workload: chats, agents and few-shot prompts, mixed on one time line, drawn from a seed.

Chats share one of a few system prompts and grow by a question and a reply a turn, while their users think (the shape of
the chat load in SGLang's benchmarks). Agents share long tool prompts and grow by a call and a tool's answer, fast and
often. Few-shot prompts share their shots and are otherwise on their own. With an arrivals file the requests have its
lengths, to the token, and its order; which conversation each one continues is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from aradix.replay.arrivals import read_arrivals
from aradix.replay.interleave import Session, interleave
from aradix.replay.lines import TraceFile
from aradix.replay.request import Request, Tokens

__all__ = ["BuiltInWorkload"]

_VOCABULARY = 200_000
_SESSION_GAP_S = 0.5
_MAX_LIVE_CONVERSATIONS = 64
_CONTINUES = 0.75
_LONG_PAUSE = 0.25
_LONG_PAUSE_FACTOR = 8


class _Dialogue(NamedTuple):
    """How a kind of conversation goes on: means in tokens, turns and seconds."""

    share: float
    num_prefixes: int
    prefix_tokens: int
    turns: float
    question_tokens: float
    output_tokens: float
    pause_s: float


_CHAT = _Dialogue(0.54, 8, 512, 8, 128, 224, 40)
_AGENT = _Dialogue(0.06, 3, 3072, 20, 420, 90, 8)
_FEW_SHOT = _Dialogue(0.40, 12, 1536, 1, 120, 40, 0)
_KINDS = (_CHAT, _AGENT, _FEW_SHOT)


def _tokens(rng: np.random.Generator, num_tokens: int) -> Tokens:
    return rng.integers(0, _VOCABULARY, num_tokens, dtype=np.int32)


def _length(rng: np.random.Generator, mean: float) -> int:
    """A length around a mean, never below 1, with a long tail (log-normal, sigma 0.6)."""
    return max(1, round(float(rng.lognormal(np.log(mean) - 0.18, 0.6))))


class _Conversation:
    """A context that grows: what was said so far, and who it belongs to."""

    def __init__(self, session: int | None, prefix: Tokens) -> None:
        self.session = session
        self.context = prefix
        self.num_sent = 0

    def __len__(self) -> int:
        return len(self.context)

    def turn(self, question: Tokens, output: Tokens) -> Request:
        """The request that asks this next; its output joins the context."""
        whole = np.concatenate((self.context, question, output))
        num_prompt = len(self.context) + len(question)
        request = Request(
            session=self.session,
            extra_key=None,
            ids=whole[:num_prompt],
            block_size=1,
            input_tokens=num_prompt,
            output=whole[num_prompt:],
            fresh_tokens=num_prompt - self.num_sent,
        )
        self.context, self.num_sent = whole, num_prompt
        return request


class BuiltInWorkload:
    """Requests drawn from a seed: the same seed gives the same ones. Endless, unless arrivals bound it.

    Args:
        seed: at least 0.
        arrivals: a file of arrivals and lengths to keep to.
    """

    block_size = 1
    has_outputs = True

    def __init__(self, seed: int = 0, arrivals: TraceFile | None = None) -> None:
        self._seed = seed
        self._arrivals = arrivals
        self.name = "built-in" if arrivals is None else f"built-in, {arrivals.path.name}"

    def requests(self) -> Iterator[Request]:
        """See `Trace.requests`."""
        rng = np.random.default_rng([self._seed, 0])
        prefixes = [[_tokens(rng, kind.prefix_tokens) for _ in range(kind.num_prefixes)] for kind in _KINDS]
        if self._arrivals is not None:
            return self._to_measure(rng, prefixes, self._arrivals)
        return interleave(self._sessions(rng, prefixes))

    def _sessions(self, rng: np.random.Generator, prefixes: list[list[Tokens]]) -> Iterator[Session]:
        begin, number = 0.0, 0
        shares = [kind.share for kind in _KINDS]
        while True:
            which = int(rng.choice(len(_KINDS), p=shares))
            prefix = prefixes[which][int(rng.integers(len(prefixes[which])))]
            number += 1
            own = np.random.default_rng([self._seed, number])
            yield begin, self._turns(own, _KINDS[which], _Conversation(number, prefix), begin)
            begin += float(rng.exponential(_SESSION_GAP_S))

    @staticmethod
    def _turns(
        rng: np.random.Generator, kind: _Dialogue, conversation: _Conversation, begin: float
    ) -> Iterator[tuple[float, Request]]:
        at = begin
        for _ in range(int(rng.geometric(1 / kind.turns))):
            question = _tokens(rng, _length(rng, kind.question_tokens))
            yield at, conversation.turn(question, _tokens(rng, _length(rng, kind.output_tokens)))
            # Now and then a user or a tool is away for long, and an LRU must decide whether to wait for them.
            longer = _LONG_PAUSE_FACTOR if rng.random() < _LONG_PAUSE else 1
            at += float(rng.exponential(kind.pause_s * longer))

    @staticmethod
    def _to_measure(rng: np.random.Generator, prefixes: list[list[Tokens]], arrivals: TraceFile) -> Iterator[Request]:
        """Requests of the lengths in a file: each goes on with a shorter live conversation, or begins one."""
        shared = [prefix for of_kind in prefixes for prefix in of_kind]
        live: list[_Conversation] = []
        num_begun = 0
        for arrival in read_arrivals(arrivals):
            fitting = [conversation for conversation in live if len(conversation) < arrival.input_tokens]
            if fitting and rng.random() < _CONTINUES:
                conversation = fitting[int(rng.integers(len(fitting)))]
            else:
                num_begun += 1
                prefix = shared[int(rng.integers(len(shared)))]
                conversation = _Conversation(num_begun, prefix[: arrival.input_tokens - 1])
                live.append(conversation)
                if len(live) > _MAX_LIVE_CONVERSATIONS:
                    del live[0]
            question = _tokens(rng, arrival.input_tokens - len(conversation))
            yield conversation.turn(question, _tokens(rng, arrival.output_tokens))
