"""`Service`: the requests that a server is answering, and how they come to their end when it stops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from aradix.engine.engine import AsyncEngine
from aradix.engine.request import Overloaded, Pulse
from aradix.serve.api_errors import ApiError, api_error
from aradix.serve.choices import Choices
from aradix.serve.metrics import ServeMetrics
from aradix.serve.model import ServedModel

__all__ = ["Service"]

_LAST_WORDS_SECONDS = 2.0


class Service:
    """What all requests share.

    Args:
        engine: open, with a tokenizer.
        model: what it runs.
        metrics: what is counted.
        max_body_bytes: of a request.
    """

    def __init__(self, engine: AsyncEngine, model: ServedModel, metrics: ServeMetrics, max_body_bytes: int) -> None:
        self.engine = engine
        self.model = model
        self.metrics = metrics
        self.max_body_bytes = max_body_bytes
        # Tokenizing takes a core, and the loop, the engine and the other threads want some too.
        self.tokenizing = anyio.CapacityLimiter(2)
        self.is_stopping = False
        self._is_over = False
        self._num_requests = 0
        self._running: set[Choices] = set()
        self._idle = Pulse()

    @property
    def num_requests(self) -> int:
        """Requests that are not answered yet, or not to the end."""
        return self._num_requests

    def check_open(self) -> None:
        """Whether new requests are taken.

        Raises:
            ApiError: 503, the server stops.
        """
        if self.is_stopping:
            raise ApiError(
                503, "the server stops, and takes no more requests", code="service_unavailable", headers=CLOSING
            )

    def check_load(self) -> None:
        """Whether the engine would let a request in now.

        Raises:
            ApiError: 429, too many wait already.
        """
        try:
            self.engine.check_load()
        except Overloaded as error:
            raise api_error(error) from error

    @contextmanager
    def attending(self) -> Iterator[None]:
        """While a request is being answered."""
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.send()

    @contextmanager
    def running(self, choices: Choices) -> Iterator[None]:
        """While these are being generated; however it ends, they are no more then."""
        self._running.add(choices)
        if self._is_over:  # they were still being tokenized when all others were given up
            choices.abort()
        try:
            yield
        finally:
            self._running.discard(choices)
            choices.abort()

    async def drain(self, seconds: float) -> int:
        """Refuse new requests, let those under way finish, and give up what is left after so many seconds.

        Waits for them, and a little longer for those given up to be told. Cancelled, it gives them up at once.

        Returns:
            How many requests were given up.
        """
        self.is_stopping = True
        num_left = 0
        try:
            with anyio.move_on_after(seconds):
                await self._until_idle()
        finally:
            num_left = self._num_requests
            self._is_over = True
            for choices in list(self._running):
                choices.abort()
        with anyio.move_on_after(_LAST_WORDS_SECONDS):
            await self._until_idle()
        return num_left

    async def _until_idle(self) -> None:
        while self._num_requests:
            await self._idle.wait()


CLOSING = {"retry-after": "10", "connection": "close"}
"""What goes with a refusal: by then another server may stand here."""
