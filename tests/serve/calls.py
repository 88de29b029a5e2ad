"""Calls of an ASGI app, without a socket and on any loop."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

__all__ = ["Answer", "Caller", "ask"]

JSON = {"content-type": "application/json"}


class Answer:
    """What came back."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_whole = False

    @property
    def found(self) -> Any:
        """The body, as JSON."""
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """What was wrong."""
        assert list(self.found) == ["error"]
        assert sorted(self.found["error"]) == ["code", "message", "param", "type"]
        error: dict[str, Any] = self.found["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream, which has ended as streams do."""
        assert self.headers["content-type"].startswith("text/event-stream")
        *events, last, rest = self.body.decode().split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


class Caller:
    """One call, whose client may leave.

    Args:
        body: anything that JSON can say, or the bytes themselves.
        heard: called with each piece of the answer's body.
    """

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        heard: Callable[[bytes], Awaitable[None]] | None = None,
    ) -> None:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.answer = Answer()
        self.gone = anyio.Event()
        self.chunks = [raw]
        self.is_ended = False
        self._app = app
        self._heard = heard
        path, _, query = path.partition("?")
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [
                (name.lower().encode(), value.encode())
                for name, value in {"host": "localhost", **({} if body is None else JSON), **(headers or {})}.items()
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }

    async def run(self) -> Answer:
        """Waits until the app has returned."""
        await self._app(self._scope, self._receive, self._send)
        self.is_ended = True
        return self.answer

    async def _receive(self) -> dict[str, Any]:
        if self.chunks:
            return {"type": "http.request", "body": self.chunks.pop(0), "more_body": bool(self.chunks)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        assert not self.answer.is_whole
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            self.answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert self.answer.status
            self.answer.body += message.get("body", b"")
            self.answer.is_whole = not message.get("more_body", False)
            if self.answer.is_whole:
                self.gone.set()  # as servers say it, though the client may well be there
            if self._heard is not None:
                await self._heard(message.get("body", b""))


async def ask(app: Any, path: str, body: Any = None, method: str | None = None, **headers: str) -> Answer:
    """Call, and wait for the whole answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await Caller(app, method or ("GET" if body is None else "POST"), path, body, named).run()
    assert answer.is_whole
    return answer
