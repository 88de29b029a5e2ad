"""What is asked on the wire and what is answered: the fields of OpenAI's API that there are, and no others.

Fields that nobody knows are ignored, as OpenAI's own servers and clients expect of each other. Fields that are known,
would change the answer and are not supported are refused by name, unless they ask for what happens anyway.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from aradix.serve.api_errors import ApiError

__all__ = [
    "MAX_CHOICES",
    "AskedRequest",
    "ChatChoice",
    "ChatRequest",
    "ChatText",
    "Choice",
    "CompletionRequest",
    "FinishReason",
    "Model",
    "Models",
    "PromptDetails",
    "Response",
    "Usage",
    "parsed",
]

MAX_STOPS = 4
MAX_CHOICES = 128

FinishReason = Literal["stop", "length"]

_Count = Annotated[int, Meta(ge=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(Struct):
    """What a stream ends with."""

    include_usage: bool | None = None


class AskedRequest(Struct, kw_only=True):
    """What both kinds of request have. A field that is null counts as left out.

    `cache_salt`, `priority`, `ignore_eos` and `stop_token_ids` are not OpenAI's, but those that vLLM and SGLang take
    too.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    # What is not supported: see _NO_CHANGE.
    logprobs: Any = None
    logit_bias: Any = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Any = None
    top_k: Any = None
    min_p: Any = None
    min_tokens: Any = None
    response_format: Any = None
    structured_outputs: Any = None

    @property
    def num_prompts(self) -> int:
        """Each has `n` answers."""
        return 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream shall end with what it cost."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(AskedRequest, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Any
    echo: Any = None
    suffix: Any = None
    best_of: Any = None

    @property
    def num_prompts(self) -> int:
        """Each has `n` answers."""
        return len(self.prompts)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts: texts, or token ids.

        Raises:
            ApiError: neither of them, or none at all.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if all(type(token) is int for token in prompt):
                return [prompt]
            if all(isinstance(text, str) for text in prompt):
                return prompt
            if all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in prompt):
                return prompt
        raise ApiError(
            400,
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
            param="prompt",
        )


class ContentPart(Struct):
    """A part of a message."""

    type: str
    text: str | None = None


class Message(Struct):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None


class ChatRequest(AskedRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: Any = None

    @property
    def texts(self) -> list[dict[str, str]]:
        """The messages as a chat template takes them: each with a role and a text.

        Raises:
            ApiError: there is something else than text in them.
        """
        return [_text_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


def _text_message(message: Message, where: str) -> dict[str, str]:
    if message.tool_calls:
        raise ApiError(400, "tool calls are not supported", param=f"{where}.tool_calls", code="unsupported_value")
    content = message.content
    if isinstance(content, list):
        for i, part in enumerate(content):
            if part.type != "text" or part.text is None:
                raise ApiError(
                    400,
                    f"only parts of type 'text' with a text are supported, got type {part.type!r}",
                    param=f"{where}.content[{i}]",
                    code="unsupported_value",
                )
        content = "\n".join(part.text or "" for part in content)
    if content is None:
        raise ApiError(400, "a message needs a content", param=f"{where}.content")
    # Templates know OpenAI's newer name for the system's role as little as models do.
    told = {"role": "system" if message.role == "developer" else message.role, "content": content}
    return told if message.name is None else {**told, "name": message.name}


_NO_CHANGE: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
}
"""What is not supported, by the values that change nothing."""


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _check_supported(asked: AskedRequest) -> None:
    for name in asked.__struct_fields__:
        value = getattr(asked, name)
        if name in _NO_CHANGE and not any(_same(value, harmless) for harmless in _NO_CHANGE[name]):
            shown = ", ".join(str(msgspec.json.encode(each), "utf-8") for each in _NO_CHANGE[name][1:])
            hint = f"leave it out{f' or give {shown}' if shown else ''}"
            raise ApiError(400, f"{name} is not supported; {hint}", param=name, code="unsupported_parameter")


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop has {len(stops)} strings, of at most {MAX_STOPS}", param="stop")
    if not all(stops):
        raise ApiError(400, "a stop string must not be empty", param="stop")


_Asked = TypeVar("_Asked", bound=AskedRequest)
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?$", re.DOTALL)


def parsed(body: bytes, kind: type[_Asked]) -> _Asked:
    """Read a request. Does not wait.

    Raises:
        ApiError: 400, with the field that is wrong.
    """
    try:
        asked = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = _WHERE.match(str(error))
        what, where = (found["what"], found["where"]) if found else (str(error), None)
        missing = re.search(r"missing required field `(\w+)`", what)
        message = f"{where}: {what[:1].lower()}{what[1:]}" if where else what
        raise ApiError(400, message, param=where or (missing[1] if missing else None)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body of the request is not JSON that can be read: {error}") from None
    _check_supported(asked)
    _check_stops(asked.stops)
    return asked


class PromptDetails(Struct):
    """Where the tokens of a prompt came from."""

    cached_tokens: int


class Usage(Struct):
    """What an answer cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Choice(Struct):
    """One answer of `/v1/completions`, or a piece of it."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: None = None


class ChatText(Struct):
    """A message, or what a piece adds to one."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer of `/v1/chat/completions`: with `message`, or a piece of it with `delta`."""

    index: int
    message: ChatText | UnsetType = UNSET
    delta: ChatText | UnsetType = UNSET
    finish_reason: FinishReason | None = None
    logprobs: None = None


class Response(Struct):
    """An answer, or one event of a stream. `usage` is left out where nobody asked for it, and null before the end."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice | ChatChoice]
    usage: Usage | UnsetType | None = UNSET

    def encoded(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)


class Model(Struct):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "aradix"


class Models(Struct):
    """`GET /v1/models`."""

    data: list[Model]
    object: str = "list"
