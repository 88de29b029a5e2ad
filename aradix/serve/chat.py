"""`ChatTemplate`: a chat as the one text that its model was trained on.

Templates are Jinja, come with the models, and are programs of somebody else: they run in Jinja's sandbox. What they may
use is what Hugging Face's `apply_chat_template` gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from aradix.errors import ConfigError
from aradix.serve.api_errors import ApiError

try:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    raise ImportError("chat templates need jinja2: pip install 'aradix[serve]'") from error

__all__ = ["ChatTemplate"]


class _Refused(jinja2.TemplateError):
    """The template itself says that a chat cannot be told."""


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


class ChatTemplate:
    """A chat template. Calls may come from any thread.

    Args:
        source: Jinja.
        named: what it may ask for by name: `bos_token`, `eos_token`, ...

    Raises:
        ConfigError: it is no Jinja.
    """

    def __init__(self, source: str, named: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json  # Jinja's own writes for HTML
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be read: {error}") from error
        self._named = {"bos_token": "", "eos_token": "", **(named or {})}

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a chat, up to where the assistant's answer begins. Does not wait, and may take its time.

        Raises:
            ApiError: 400, the template refuses such a chat, or fails on it.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._named)
        except Exception as error:  # a template may raise whatever an operator of Python's raises
            raise ApiError(
                400, f"the model's chat template does not take these messages: {error}", param="messages"
            ) from error
