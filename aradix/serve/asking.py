"""`ask`: one question to a server, as any client would put it, to see that it answers."""

from __future__ import annotations

import http.client
import json
from typing import TextIO
from urllib.parse import urlsplit

from aradix.errors import ConfigError

__all__ = ["ask"]


def ask(url: str, question: str, api_key: str | None, out: TextIO) -> None:
    """Put a question to `/v1/chat/completions`, and write the answer as it comes. Blocks.

    Raises:
        ConfigError: the server does not answer it, with what it says.
    """
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ConfigError(_why(answer.read()))
        for line in answer:
            event = line.strip().removeprefix(b"data: ")
            if not event or event == b"[DONE]":
                continue
            told = json.loads(event)
            if "error" in told:
                raise ConfigError(_why(event))
            for choice in told["choices"]:
                out.write(choice["delta"].get("content", ""))
                out.flush()
        out.write("\n")
    finally:
        connection.close()


def _why(body: bytes) -> str:
    return f"the question was not answered: {json.loads(body)['error']['message']}"
