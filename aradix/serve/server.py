"""`listening`: an ASGI app on a socket, served by uvicorn on the loop that the engine is on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from aradix.errors import ConfigError
from aradix.observe.loopback import guarded

try:
    import uvicorn
except ImportError as error:
    raise ImportError("the server needs uvicorn: pip install 'aradix[serve]'") from error

__all__ = ["listening"]

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 65
"""More than clients and proxies keep an idle connection, so that they are the ones to end it."""
_STOP_SECONDS = 1


class _Server(uvicorn.Server):
    """Says when it has started, and leaves signals to whoever runs it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = anyio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()


@asynccontextmanager
async def listening(app: Any, host: str, port: int, names: Sequence[str] = ()) -> AsyncIterator[str]:
    """Serve an app until the block is left; gives its URL. On asyncio. Waits until it has started, and until it stops.

    Args:
        app: what is served, `guarded` on loopback; requests under way get a second to end.
        host, port: where; port 0 takes a free one.
        names: by which clients may call it on loopback, beside those of the machine: what a proxy passes on.

    Raises:
        ConfigError: nothing can be served there.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"nothing can be served at {host}:{port}: {error}") from error
    server = _Server(
        uvicorn.Config(
            guarded(app, bound.getsockname()[0], [host, *names]),
            log_config=None,
            lifespan="off",
            access_log=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
    )
    with bound:
        shown = f"[{host}]" if ":" in host else host
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [bound])
            await server.has_started.wait()
            try:
                yield f"http://{shown}:{bound.getsockname()[1]}"
            except Exception as error:  # it goes on as it is, not in a group
                failure = error
            finally:
                server.should_exit = True
        if failure is not None:
            raise failure
