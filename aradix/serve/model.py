"""`ServedModel`: what a server has to know of its model: its names, its text, and how much of it fits."""

from __future__ import annotations

from collections.abc import Sequence

from aradix.serve.api_errors import ApiError
from aradix.serve.chat import ChatTemplate
from aradix.serve.tokenizer import ModelTokenizer

__all__ = ["ServedModel"]


class ServedModel:
    """A model by its names.

    Args:
        names: what requests may call it; the first is what answers call it.
        tokenizer: its own.
        chat_template: `None` where it does not chat.
        context_length: the most tokens of a prompt and its answer together.
        vocab_size: token ids are below it.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: ModelTokenizer,
        chat_template: ChatTemplate | None,
        *,
        context_length: int,
        vocab_size: int,
    ) -> None:
        self.names = tuple(names)
        self.context_length = context_length
        self._tokenizer = tokenizer
        self._template = chat_template
        self._vocab_size = vocab_size

    def check_name(self, name: str | None) -> None:
        """A request that names no model means this one.

        Raises:
            ApiError: 404, it means another one.
        """
        if name is not None and name not in self.names:
            served = " or ".join(map(repr, self.names))
            raise ApiError(
                404, f"there is no model {name!r} here, only {served}", param="model", code="model_not_found"
            )

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The token ids of a chat. Does not wait, and may take its time.

        Raises:
            ApiError: 400, the chat cannot be told, or is too long.
        """
        if self._template is None:
            raise ApiError(
                400,
                f"{self.names[0]} has no chat template; use /v1/completions",
                param="messages",
                code="unsupported_parameter",
            )
        return self._encoded(self._template.render(messages), "messages", begin=False)

    def prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a text that is to be continued. Does not wait, and may take its time.

        Raises:
            ApiError: 400, it is empty or too long, or has token ids that are none.
        """
        if isinstance(prompt, str):
            tokens = self._encoded(prompt, "prompt", begin=True)
        else:
            tokens = list(prompt)
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
                raise ApiError(
                    400,
                    f"token ids go from 0 to {self._vocab_size - 1}, got some from {min(tokens)} to {max(tokens)}",
                    param="prompt",
                )
        if not tokens:
            raise ApiError(400, "the prompt has no tokens; give at least one", param="prompt")
        return tokens

    def num_new(self, num_prompt: int, max_tokens: int | None, otherwise: int | None, param: str) -> int:
        """How many tokens may be generated after a prompt. Does not wait.

        Args:
            num_prompt: tokens of the prompt.
            max_tokens: what was asked for.
            otherwise: what nobody asked for; `None` is all that fits.
            param: where the prompt came from.

        Raises:
            ApiError: 400, so many do not fit.
        """
        left = self.context_length - num_prompt
        if left < 1:
            raise self._too_long(f"the prompt alone has {num_prompt}; shorten it", param)
        if max_tokens is None:
            return left if otherwise is None else min(left, otherwise)
        if max_tokens > left:
            raise self._too_long(
                f"{num_prompt} of the prompt and {max_tokens} to generate make {num_prompt + max_tokens}; shorten the "
                f"prompt, or ask for at most {left}",
                param,
            )
        return max_tokens

    def _encoded(self, text: str, param: str, *, begin: bool) -> list[int]:
        least = self._tokenizer.least_tokens(text)
        if least >= self.context_length:  # who sends megabytes is not worth a minute of tokenizing
            raise self._too_long(f"the prompt alone has more than {least}; shorten it", param)
        try:
            return self._tokenizer.encode(text, begin=begin)
        except UnicodeEncodeError as error:
            raise ApiError(400, f"there is something in the text that is no character: {error}", param=param) from None

    def _too_long(self, what: str, param: str) -> ApiError:
        return ApiError(
            400,
            f"the context of {self.names[0]} is {self.context_length} tokens: {what}",
            param=param,
            code="context_length_exceeded",
        )
