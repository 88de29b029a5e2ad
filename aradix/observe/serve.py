"""A web server for the inspector, in a thread of its own: on loopback unless told otherwise."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from aradix.errors import ConfigError
from aradix.observe.inspection import make_page_app
from aradix.observe.loopback import guarded

try:
    import uvicorn
    from starlette.applications import Starlette
except ImportError as error:
    raise ImportError("the inspector's server needs uvicorn: pip install 'aradix[inspect]'") from error

__all__ = ["DEFAULT_HOST", "DEFAULT_PORT", "attached", "serving"]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8188
_PATIENCE_SECONDS = 5.0


@asynccontextmanager
async def serving(app: Any, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT) -> AsyncIterator[str]:
    """Serve an ASGI app until the block is left; gives its URL. Port 0 takes a free one. Waits while it stops.

    Raises:
        ConfigError: nothing can be served there.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"the inspector cannot be served at {host}:{port}: {error}") from error
    server = uvicorn.Server(
        uvicorn.Config(
            guarded(app, listening.getsockname()[0], [host]),
            log_config=None,
            lifespan="off",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=server.run, args=([listening],), name="aradix inspector", daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        with anyio.CancelScope(shield=True):
            # Whoever is being answered may need this loop for it.
            await anyio.to_thread.run_sync(thread.join, _PATIENCE_SECONDS)
        listening.close()


def attached(url: str) -> Starlette:
    """An app with the page of an inspector that is mounted somewhere else. Blocks until that has answered once.

    Args:
        url: where its page is.

    Raises:
        ConfigError: there is no inspector at that URL.
    """
    base = url.rstrip("/") + "/"
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no http URL; give the one of an inspector's page, such as http://host:8188/")

    def fetch(path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(base + path, timeout=_PATIENCE_SECONDS) as answer:
                return 200, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, _sorry(f"{base} answered {error.code}: {_told(error.read(), error.reason)}")
        except (OSError, ValueError) as error:
            return 503, _sorry(f"{base} does not answer: {error}")

    status, about = fetch("api/about")
    if status != 200 or b'"num_slots"' not in about:
        raise ConfigError(f"no inspector to attach to: {_told(about, f'{url} is something else')}")

    async def forward(path: str) -> tuple[int, bytes]:
        return await anyio.to_thread.run_sync(fetch, path, abandon_on_cancel=True)

    return make_page_app(forward)


def _sorry(why: str) -> bytes:
    return json.dumps({"error": why}).encode()


def _told(answer: bytes, otherwise: str) -> str:
    """What an inspector said went wrong."""
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, LookupError, TypeError):
        return otherwise
