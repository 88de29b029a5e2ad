"""`aradix inspect`, and the page of `aradix replay --inspect`: their arguments, and what they do with them.

What they need is imported when they run, so that the command line works without it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from aradix.errors import ConfigError

if TYPE_CHECKING:
    from aradix.cache.radix_cache import RadixCache

__all__ = ["add_arguments", "add_replay_arguments", "run", "shown"]

_HOST = "127.0.0.1"
_PORT = 8188
_PACE = 100.0
_HINT = "the inspector needs starlette and uvicorn: pip install 'aradix[inspect]'"


def _address(text: str) -> tuple[str, int]:
    """`PORT` or `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    try:
        number = int(port)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError(f"expected PORT or HOST:PORT, such as {_PORT}, got {text!r}")
    return host.strip("[]") or _HOST, number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `aradix inspect`."""
    parser.add_argument(
        "--attach",
        required=True,
        metavar="URL",
        help="where an engine has mounted its inspector, such as http://worker:8000/inspector",
    )
    parser.add_argument(
        "--bind",
        type=_address,
        default=(_HOST, _PORT),
        metavar="[HOST:]PORT",
        help=f"where to serve the page (default: {_HOST}:{_PORT}, which only this machine reaches)",
    )


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `aradix replay` what the page needs."""
    parser.add_argument(
        "--inspect",
        type=_address,
        nargs="?",
        const=(_HOST, _PORT),
        metavar="[HOST:]PORT",
        help=f"show the replay live on a page (default: {_HOST}:{_PORT}, which only this machine reaches)",
    )
    parser.add_argument(
        "--stay",
        action=argparse.BooleanOptionalAction,
        help="keep the page after the replay until Ctrl-C (default: on a terminal)",
    )


def run(options: argparse.Namespace) -> int:
    """Serve the page of another process's inspector until Ctrl-C; gives the exit status. Blocks.

    Raises:
        ConfigError: there is no inspector at that URL, or nothing can be served there.
    """
    serve = _server()
    app = serve.attached(options.attach)

    async def show() -> None:
        async with serve.serving(app, *options.bind) as url:
            print(f"{options.attach} is shown at {url} until Ctrl-C", file=sys.stderr, flush=True)
            await _interrupted()

    anyio.run(show)
    return 0


def shown(options: argparse.Namespace) -> Callable[[RadixCache], AbstractAsyncContextManager[None]] | None:
    """What shows a replay's cache on a page, if that is asked for; sets the pace of the replay then.

    Raises:
        ConfigError: several runs cannot be shown on one page.
    """
    if options.inspect is None:
        return None
    if len(options.policy or ("lru",)) * len(options.capacity) > 1:
        raise ConfigError("--inspect shows one run: give one policy and one capacity")
    serve = _server()
    options.pace = options.pace or _PACE
    stays = sys.stdin.isatty() if options.stay is None else options.stay

    @asynccontextmanager
    async def show(cache: RadixCache) -> AsyncIterator[None]:
        from aradix.observe.inspection import inspector

        async with serve.serving(inspector(cache, show_tokens=True), *options.inspect) as url:
            print(f"the replay is shown at {url}", file=sys.stderr, flush=True)
            yield
            if stays:
                print("the replay is over; the page stays until Ctrl-C", file=sys.stderr, flush=True)
                await _interrupted()

    return show


async def _interrupted() -> None:
    """Wait for Ctrl-C, or for being asked to end."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            return


def _server() -> Any:
    try:
        from aradix.observe import serve
    except ImportError as error:
        raise ConfigError(f"{_HINT} ({error})") from error
    return serve
