"""`Answering`: one way to ask for text, as an ASGI endpoint that stops at once when its client leaves."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import anyio.to_thread
from anyio.abc import TaskGroup
from msgspec import UNSET
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from aradix.serve.api_errors import ApiError
from aradix.serve.beside import beside
from aradix.serve.choices import Choices, Piece, check_number
from aradix.serve.dialects import Dialect
from aradix.serve.protocol import AskedRequest, Response, parsed
from aradix.serve.reply import ClientGone, Reply
from aradix.serve.service import Service

__all__ = ["Answering"]

_log = logging.getLogger("aradix.serve")

_Asked = TypeVar("_Asked", bound=AskedRequest)


class Answering(Generic[_Asked]):
    """`POST` of one dialect.

    Args:
        service: what all requests share.
        dialect: how it is asked and answered.
    """

    def __init__(self, service: Service, dialect: Dialect[_Asked]) -> None:
        self._service = service
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Waits until it is answered, or its client is gone."""
        metrics = self._service.metrics
        reply = Reply(send, self._dialect.id_prefix + secrets.token_hex(16))
        with self._service.attending():
            try:
                await self._answer_or_say_why(scope, receive, reply, metrics.clock())
            except ClientGone:
                metrics.disconnected()
            if reply.status is not None:
                metrics.answered(self._dialect.path, reply.status)

    async def _answer_or_say_why(self, scope: Scope, receive: Receive, reply: Reply, arrived: float) -> None:
        try:
            self._service.check_open()
            body = await _body(scope, receive, self._service.max_body_bytes)
            async with _with_client(receive, reply) as tasks:
                await self._answer(body, reply, tasks, arrived)
        except ApiError as error:
            await reply.error(error)
        except ClientGone:
            raise
        except Exception:
            _log.exception("a request failed")
            await reply.error(ApiError(500, "the server failed; its log says why", code="internal_error"))

    async def _answer(self, body: bytes, reply: Reply, tasks: TaskGroup, arrived: float) -> None:
        service, metrics = self._service, self._service.metrics
        asked = parsed(body, self._dialect.kind)
        service.model.check_name(asked.model)
        check_number(service.engine, asked)
        service.check_load()  # who is sent away anyway shall not keep others waiting for the tokenizer
        prompts = await anyio.to_thread.run_sync(
            self._dialect.prompts, asked, service.model, limiter=service.tokenizing
        )
        choices = Choices(service.engine, asked, prompts, reply.request_id)
        with service.running(choices):
            choices.follow(tasks)
            pieces = await choices.news()
            metrics.began(arrived)
            if asked.stream:
                await self._stream(asked, choices, pieces, reply)
            else:
                await self._give(choices, pieces, reply)
            metrics.finished(arrived)

    async def _give(self, choices: Choices, pieces: list[Piece], reply: Reply) -> None:
        """The whole answer."""
        texts: dict[int, str] = {}
        answers = {}
        while pieces:
            for piece in pieces:
                texts[piece.index] = texts.get(piece.index, "") + piece.text
                if piece.reason:
                    self._service.metrics.ended(piece.reason)
                    answers[piece.index] = self._dialect.answer(piece.index, texts[piece.index], piece.reason)
            pieces = await choices.news()
        response = self._response(reply, self._dialect.whole)
        response.choices = [answers[index] for index in sorted(answers)]
        response.usage = choices.usage
        await reply.whole(200, response.encoded())

    async def _stream(self, asked: _Asked, choices: Choices, pieces: list[Piece], reply: Reply) -> None:
        """Piece by piece."""
        event = self._response(reply, self._dialect.piece)
        event.usage = None if asked.wants_usage else UNSET
        opened: set[int] = set()
        while pieces:
            for piece in pieces:
                if piece.index not in opened:
                    opened.add(piece.index)
                    if opening := self._dialect.opening(piece.index):
                        event.choices = [opening]
                        await reply.event(event)
                event.choices = [self._dialect.part(piece.index, piece.text, piece.reason)]
                await reply.event(event)
                if piece.reason:
                    self._service.metrics.ended(piece.reason)
            pieces = await choices.news()
        if asked.wants_usage:
            event.choices, event.usage = [], choices.usage
            await reply.event(event)
        await reply.end()

    def _response(self, reply: Reply, kind: str) -> Response:
        return Response(reply.request_id, kind, int(time.time()), self._service.model.names[0], [])


@asynccontextmanager
async def _with_client(receive: Receive, reply: Reply) -> AsyncIterator[TaskGroup]:
    """Tasks that end with the block, and the block with the client's connection.

    Raises:
        ClientGone: the client left before its answer was through; whatever was going on was cancelled.
    """
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = not reply.is_through
        tasks.cancel_scope.cancel()

    async with beside() as tasks:
        tasks.start_soon(watch)
        yield tasks
    if is_gone:
        raise ClientGone


async def _body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The body of a request. Waits until it is there.

    Raises:
        ApiError: 413, it is too long; 415, it is no JSON.
        ClientGone: the client left before its end.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        # Also because a browser asks before it sends JSON on behalf of a page from elsewhere.
        raise ApiError(415, f"the body must be JSON (content-type: application/json), got {kind or 'nothing'!r}")
    body = bytearray()
    declared = headers.get("content-length", "")
    more = not (declared.isdecimal() and int(declared[:20]) > max_bytes)
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        more = message.get("more_body", False) and len(body) <= max_bytes
        if not more and len(body) <= max_bytes:
            return bytes(body)
    raise ApiError(413, f"the body has more than the {max_bytes} bytes that are taken", headers={"connection": "close"})
