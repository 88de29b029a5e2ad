"""`Reply`: one HTTP answer on its way out, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Send

from aradix.serve.api_errors import ApiError

__all__ = ["ClientGone", "Reply"]

_JSON = {"content-type": "application/json"}
_EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # else nginx would keep the events until there are many
}


class ClientGone(Exception):
    """The client left; some servers say so only to those who send."""


class Reply:
    """One answer. Its calls wait while the client is slow to read.

    Args:
        send: of ASGI.
        request_id: goes with it.
    """

    def __init__(self, send: Send, request_id: str) -> None:
        self.status: int | None = None
        self.is_through = False
        """Whether all of it was sent; a server tells of a disconnect then, whether or not the client is there."""
        self.request_id = request_id
        self._send = send

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """All of it, as JSON."""
        await self._start(status, {**_JSON, "content-length": str(len(body)), **(headers or {})})
        await self._body(body, more=False)

    async def event(self, event: Any) -> None:
        """The next event of a stream; the first one begins it."""
        if self.status is None:
            await self._start(200, _EVENTS)
        await self._body(b"data: %b\n\n" % msgspec.json.encode(event), more=True)

    async def end(self) -> None:
        """The end of a stream."""
        await self._body(b"data: [DONE]\n\n", more=False)

    async def error(self, error: ApiError) -> None:
        """All of an answer, or the end of a stream that has begun."""
        if self.status is None:
            await self.whole(error.status, error.encoded(), error.headers)
        else:
            await self.event(error.told())
            await self.end()

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        shown = {**headers, "x-request-id": self.request_id}
        await self._out(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode()) for name, value in shown.items()],
            }
        )

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._out({"type": "http.response.body", "body": body, "more_body": more})
        self.is_through = not more

    async def _out(self, message: dict[str, Any]) -> None:
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error
