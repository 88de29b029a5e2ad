"""What is served on loopback is for this machine, and for requests that call it by a name of this machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

try:
    from starlette.middleware.trustedhost import TrustedHostMiddleware
except ImportError as error:
    raise ImportError("what is served needs starlette: pip install 'aradix[inspect]', or 'aradix[serve]'") from error

__all__ = ["guarded", "is_loopback"]

_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is served at `host`. Does not wait: of names it knows `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def guarded(app: Any, address: str, names: Sequence[str]) -> Any:
    """An app that is to be served at `address`. On loopback others than requests to a name of this machine get a 400.

    Else a page from elsewhere could have its own name point here, and read what is answered.

    Args:
        app: an ASGI app.
        address: that its socket is bound to, as the socket says it: many names lead to loopback.
        names: by which it may be called on loopback, beside those of the machine: the one it was told, and what a proxy
            passes on.
    """
    return TrustedHostMiddleware(app, [*_NAMES, address, *names]) if is_loopback(address) else app
