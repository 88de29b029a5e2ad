"""What is read of a request, what is refused, and how that is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aradix.serve.api_errors import ApiError
from aradix.serve.protocol import MAX_CHOICES, AskedRequest, ChatRequest, CompletionRequest, parsed

HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> CompletionRequest:
    return parsed(json.dumps({"prompt": "hello", **fields}).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return parsed(json.dumps({"messages": HELLO, **fields}).encode(), ChatRequest)


@pytest.mark.parametrize("ask", [completion, chat])
def test_fields_that_are_null_or_that_nobody_knows_change_nothing(ask: Any) -> None:
    plain = ask()
    known = dict.fromkeys(set(plain.__struct_fields__) - {"prompt", "messages"})
    assert ask(**known) == plain
    assert ask(user="me", store=True, metadata={"a": 1}, service_tier="auto", something_new=[1]) == plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"model": 7}, "model"),
        ({"presence_penalty": 3}, "presence_penalty"),
    ],
)
@pytest.mark.parametrize("ask", [completion, chat])
def test_a_wrong_field_is_named(ask: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "`$" not in caught.value.message
    assert param.split("[")[0] in caught.value.message


@pytest.mark.parametrize(
    ("ask", "fields"),
    [
        (completion, {"logprobs": 1}),
        (completion, {"logprobs": 0}),
        (completion, {"echo": True}),
        (completion, {"suffix": "."}),
        (completion, {"best_of": 2}),
        (completion, {"logit_bias": {"5": 1}}),
        (completion, {"presence_penalty": 0.5}),
        (chat, {"frequency_penalty": -1}),
        (chat, {"logprobs": True}),
        (chat, {"top_logprobs": 5}),
        (chat, {"tools": [{"type": "function"}]}),
        (chat, {"functions": [{}]}),
        (chat, {"tool_choice": "required"}),
        (chat, {"response_format": {"type": "json_object"}}),
        (chat, {"modalities": ["text", "audio"]}),
        (chat, {"top_k": 5}),
        (chat, {"min_p": 0.1}),
        (chat, {"min_tokens": 4}),
        (chat, {"continue_final_message": True}),
        (chat, {"chat_template_kwargs": {"enable_thinking": False}}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(ask: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    (name,) = fields
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, name, "unsupported_parameter")


def test_what_is_not_supported_may_be_asked_for_where_it_changes_nothing() -> None:
    completion(logit_bias={}, echo=False, suffix="", best_of=1, presence_penalty=0, frequency_penalty=0.0)
    chat(
        logprobs=False,
        top_logprobs=0,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        top_k=-1,
        min_p=0,
        repetition_penalty=1.0,
        add_generation_prompt=True,
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", [""]),
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_text_or_tokens_or_several_of_one_kind(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [None, [], 5, ["a", 1], [1, "a"], [True], [1.0], [[1], "a"], [[1.5]], [[[1]]], {}])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match="prompt must be") as caught:
        _ = completion(prompt=prompt).prompts
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize(("kind", "param"), [(CompletionRequest, "prompt"), (ChatRequest, "messages")])
def test_what_is_missing_is_named(kind: type[AskedRequest], param: str) -> None:
    with pytest.raises(ApiError, match=f"missing required field `{param}`") as caught:
        parsed(b"{}", kind)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1", b'"\xff"', b'{"prompt": "\\ud800"}', b"\xff\xfe", b"[" * 100_000, b"{}x"]
)
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(body, CompletionRequest)
    assert caught.value.status == 400


def test_messages_are_made_of_text() -> None:
    asked = chat(
        messages=[
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
        ]
    )
    assert asked.texts == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
    ],
)
def test_messages_with_something_else_are_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        _ = chat(messages=[message]).texts
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"content": "a"}], "messages[0]"),
        ([{"role": "x"}], "messages[0].role"),
    ],
)
def test_what_is_no_chat_is_refused(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=messages)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith(param)
