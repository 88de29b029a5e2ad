"""The two ways to ask for text, and how each is answered: as a completion, or as a chat."""

from __future__ import annotations

from typing import Protocol, TypeVar

from aradix.serve.api_errors import ApiError
from aradix.serve.model import ServedModel
from aradix.serve.protocol import (
    MAX_CHOICES,
    AskedRequest,
    ChatChoice,
    ChatRequest,
    ChatText,
    Choice,
    CompletionRequest,
    FinishReason,
)

__all__ = ["ChatDialect", "CompletionDialect", "Dialect"]

_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat goes on until the model is done."""

_Asked = TypeVar("_Asked", bound=AskedRequest)


class Dialect(Protocol[_Asked]):
    """What differs between the two. No call waits."""

    kind: type[_Asked]
    path: str
    id_prefix: str
    whole: str
    piece: str

    def prompts(self, asked: _Asked, model: ServedModel) -> list[tuple[list[int], int]]:
        """Each prompt's token ids, and how many may follow. May take its time.

        Raises:
            ApiError: 400, something does not fit.
        """
        ...

    def answer(self, index: int, text: str, reason: FinishReason) -> Choice | ChatChoice:
        """One whole answer."""
        ...

    def opening(self, index: int) -> Choice | ChatChoice | None:
        """What comes before the first piece of an answer, if anything."""
        ...

    def part(self, index: int, text: str, reason: FinishReason | None) -> Choice | ChatChoice:
        """A piece of an answer; the last one has a reason."""
        ...


class CompletionDialect:
    """`/v1/completions`."""

    kind = CompletionRequest
    path = "/v1/completions"
    id_prefix = "cmpl-"
    whole = piece = "text_completion"

    def prompts(self, asked: CompletionRequest, model: ServedModel) -> list[tuple[list[int], int]]:
        """Several prompts are several answers."""
        num_answers = len(asked.prompts) * (asked.n or 1)
        if num_answers > MAX_CHOICES:
            raise ApiError(400, f"{num_answers} answers are more than the {MAX_CHOICES} of a request", param="prompt")
        prompts = [model.prompt_tokens(prompt) for prompt in asked.prompts]
        return [
            (tokens, model.num_new(len(tokens), asked.max_tokens, _COMPLETION_TOKENS, "prompt")) for tokens in prompts
        ]

    def answer(self, index: int, text: str, reason: FinishReason) -> Choice:
        """One whole answer."""
        return Choice(index, text, reason)

    def opening(self, index: int) -> None:
        """Nothing."""

    def part(self, index: int, text: str, reason: FinishReason | None) -> Choice:
        """A piece of an answer."""
        return Choice(index, text, reason)


class ChatDialect:
    """`/v1/chat/completions`."""

    kind = ChatRequest
    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    whole, piece = "chat.completion", "chat.completion.chunk"

    def prompts(self, asked: ChatRequest, model: ServedModel) -> list[tuple[list[int], int]]:
        """One prompt: the chat so far."""
        tokens = model.chat_tokens(asked.texts)
        max_tokens = asked.max_completion_tokens or asked.max_tokens
        return [(tokens, model.num_new(len(tokens), max_tokens, None, "messages"))]

    def answer(self, index: int, text: str, reason: FinishReason) -> ChatChoice:
        """One whole answer."""
        return ChatChoice(index, message=ChatText(text, "assistant"), finish_reason=reason)

    def opening(self, index: int) -> ChatChoice:
        """Who speaks."""
        return ChatChoice(index, delta=ChatText("", "assistant"))

    def part(self, index: int, text: str, reason: FinishReason | None) -> ChatChoice:
        """A piece of an answer."""
        return ChatChoice(index, delta=ChatText(text) if text else ChatText(), finish_reason=reason)
