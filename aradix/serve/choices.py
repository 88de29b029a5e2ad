"""`Choices`: all answers to one request, generated side by side, and their text as it grows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anyio.abc import TaskGroup

from aradix.engine.engine import AsyncEngine
from aradix.engine.request import Generation, Pulse
from aradix.engine.sampling import SamplingParams
from aradix.errors import AradixError, UsageError
from aradix.serve.api_errors import ApiError, api_error
from aradix.serve.protocol import AskedRequest, FinishReason, PromptDetails, Usage

__all__ = ["Choices", "Piece", "check_number"]

_log = logging.getLogger("aradix.serve")

_TEMPERATURE = 1.0
"""OpenAI's default."""
_SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class Piece:
    """What came to one answer: some text, and at the end why it ends."""

    index: int
    text: str
    reason: FinishReason | None = None


class _Choice:
    """One answer. Nothing here waits."""

    def __init__(self, index: int, generation: Generation) -> None:
        self.index = index
        self.generation = generation
        self.error: Exception | None = None
        self.is_over = False
        self._num_told = 0
        self._is_told = False

    def news(self) -> Piece | None:
        """What was not told yet, if anything.

        Raises:
            ApiError: it ended before its end.
        """
        if self.error is not None:
            raise _told_error(self.error, was_taken=True)
        text = self.generation.text[self._num_told :]
        reason = self.generation.finish_reason if self.is_over else None
        if self._is_told or not (text or reason):
            return None
        if reason == "abort":
            raise ApiError(503, "the server stops, and gave this answer up", code="service_unavailable")
        self._num_told += len(text)
        self._is_told = reason is not None
        return Piece(self.index, text, reason)


def _told_error(error: Exception, was_taken: bool = False) -> ApiError:
    # What a request broke is said before it is taken; a rule that is broken later on is broken by the server.
    if not isinstance(error, AradixError) or (was_taken and isinstance(error, UsageError)):
        told = api_error(AradixError(str(error)))
    else:
        told = api_error(error)
    if told.status >= 500:
        _log.error("a request failed", exc_info=error)
    return told


class Choices:
    """The answers to one request. They end when they are through, and on `abort`.

    Args:
        engine: open, with a tokenizer.
        prompts: each one's token ids, and how many may follow; `asked.n` answers to each.
        request_id: for the engine's log.

    Raises:
        ApiError: the engine does not take them; none is under way then.
    """

    def __init__(
        self, engine: AsyncEngine, asked: AskedRequest, prompts: Sequence[tuple[list[int], int]], request_id: str
    ) -> None:
        self._num_samples = asked.n or 1
        self._pulse = Pulse()
        self._choices: list[_Choice] = []
        sampling = _sampling(asked)
        try:
            for tokens, num_new in prompts:
                for _ in range(self._num_samples):
                    index = len(self._choices)
                    seed = None if asked.seed is None else (asked.seed + index) % _SEEDS
                    generation = engine.generate(
                        tokens,
                        replace(sampling, max_tokens=num_new, seed=seed),
                        cache_salt=asked.cache_salt,
                        priority=asked.priority or 0,
                        request_id=f"{request_id}-{index}",
                    )
                    self._choices.append(_Choice(index, generation))
        except AradixError as error:
            self.abort()
            raise _told_error(error) from error

    def follow(self, tasks: TaskGroup) -> None:
        """Begin to hear of what is generated, in tasks of that group. Does not wait."""
        for choice in self._choices:
            tasks.start_soon(self._follow, choice)

    async def news(self) -> list[Piece]:
        """What came since this was last asked, a piece for each answer; nothing once all are through. Waits for it.

        Raises:
            ApiError: one of the answers failed, or was aborted.
        """
        while True:
            pieces = [piece for choice in self._choices if (piece := choice.news()) is not None]
            if pieces or all(choice.is_over for choice in self._choices):
                return pieces
            await self._pulse.wait()

    def abort(self) -> None:
        """End what is not through. Does not wait."""
        for choice in self._choices:
            choice.generation.abort()

    @property
    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many answers it has."""
        generations = [choice.generation for choice in self._choices]
        firsts = generations[:: self._num_samples]
        num_prompt = sum(each.num_prompt_tokens for each in firsts)
        num_new = sum(len(each.token_ids) for each in generations)
        # Of several answers one computes the prompt, whichever is first; the others find it, and that is no saving.
        cached = [each.num_cached_tokens for each in generations]
        num_cached = sum(min(cached[i : i + self._num_samples]) for i in range(0, len(cached), self._num_samples))
        return Usage(num_prompt, num_new, num_prompt + num_new, PromptDetails(num_cached))

    async def _follow(self, choice: _Choice) -> None:
        try:
            async for _ in choice.generation:
                self._pulse.send()
        except Exception as error:  # whatever a step of the model raises: the one who asks for news hears of it
            choice.error = error
        choice.is_over = True
        self._pulse.send()


def check_number(engine: AsyncEngine, asked: AskedRequest) -> None:
    """Whether so many answers can ever be under way together; who is told to come back must have a chance then.

    Raises:
        ApiError: 400, they are too many.
    """
    num_prompts, num_samples = asked.num_prompts, asked.n or 1
    num_answers, limit = num_prompts * num_samples, engine.max_requests
    if limit is not None and num_answers > limit:
        raise ApiError(
            400,
            f"{num_answers} answers (n={num_samples} to each of {num_prompts} prompts) are more than the {limit} that "
            "can be computed and wait here at a time; ask for fewer, or in several requests",
            param="n" if num_samples > 1 else "prompt",
        )


def _sampling(asked: AskedRequest) -> SamplingParams:
    return SamplingParams(
        temperature=_TEMPERATURE if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        stop_token_ids=frozenset(asked.stop_token_ids or ()),
        stop=asked.stops,
        ignore_eos=bool(asked.ignore_eos),
    )
