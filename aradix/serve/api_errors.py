"""What the server answers when it cannot answer: errors in the shape that OpenAI's clients read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from aradix.engine.request import EngineClosedError, Overloaded
from aradix.errors import AradixError, CacheClosedError, CapacityError, UsageError, WrongLoopError

__all__ = ["ApiError", "api_error"]


class ApiError(AradixError):
    """An error that has an HTTP status.

    Args:
        status: of the answer.
        message: what is wrong, with the numbers and a hint.
        param: the field of the request that it is about.
        code: what a program may look for, such as `context_length_exceeded`.
        kind: OpenAI's `type` of the error; by default that of the status.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})

    def told(self) -> dict[str, Any]:
        """The body of the answer, or of the event that ends a stream. Does not wait."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        """The same, as JSON. Does not wait."""
        return msgspec.json.encode(self.told())


def api_error(error: AradixError) -> ApiError:
    """What to answer to an error of the engine or the cache; it is the server's own fault unless it says otherwise."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        seconds = max(1, math.ceil(error.retry_after))
        headers = {"retry-after": str(seconds)}
        return ApiError(429, str(error), code="rate_limit_exceeded", kind="rate_limit_error", headers=headers)
    if isinstance(error, CacheClosedError | EngineClosedError):
        return ApiError(503, str(error), code="service_unavailable")
    if isinstance(error, UsageError | CapacityError) and not isinstance(error, WrongLoopError):
        return ApiError(400, str(error))
    return ApiError(500, "the server failed to answer this request; its log says why", code="internal_error")
