"""Chat templates: the text that the reference makes, and templates that mean no good."""

from __future__ import annotations

from typing import Any

import pytest

from aradix.errors import ConfigError
from aradix.serve import ChatTemplate
from aradix.serve.api_errors import ApiError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["user", "assistant", "system"] %}
        {%- continue %}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content | trim + eos_token }}
{%- endfor %}
    {% if messages | length > 2 %}
{{ {"é": messages | length} | tojson }}
    {% endif %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is <rain>?"}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": " 日本 🎉 {{ 1 + 1 }} {% raise %}"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "Water.\n"},
        {"role": "user", "content": "Why?"},
    ],
]


@pytest.mark.parametrize("source", [CHATML, LLAMA])
def test_the_text_is_that_of_the_reference(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    named = {"bos_token": "<s>", "eos_token": "</s>"}
    for chat in CHATS:
        (expected,), _ = render_jinja_template([chat], chat_template=source, add_generation_prompt=True, **named)
        assert ChatTemplate(source, named).render(chat) == expected


def test_what_users_write_is_no_template() -> None:
    assert "{{ 1 + 1 }} {% raise %}" in ChatTemplate(CHATML).render(CHATS[1])


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ messages.append(1) }}",
        "{% include 'secret' %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_refusal(source: str) -> None:
    with pytest.raises(ApiError, match="chat template does not take these messages") as caught:
        ChatTemplate(source).render(CHATS[0])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_the_date_may_be_asked_for() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') | int > 2020 }}").render(CHATS[0]) == "True"


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% unheard_of %}"])
def test_what_is_no_template_is_said_at_once(source: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatTemplate(source)
