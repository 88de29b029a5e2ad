"""An engine behind OpenAI's interface: `aradix serve`, and `serve_app` for one's own server. Needs `aradix[serve]`.

    async with RadixCache(runner.cache_params()) as cache, AsyncEngine(cache, runner, tokenizer=tokenizer) as engine:
        app = serve_app(engine, cache, model)  # an ASGI app, to serve or to mount on this loop

Names are imported when they are first asked for, so that the command line works without what they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aradix.serve.app import serve_app, service_of
    from aradix.serve.chat import ChatTemplate
    from aradix.serve.model import ServedModel
    from aradix.serve.tokenizer import ModelTokenizer

__all__ = ["ChatTemplate", "ModelTokenizer", "ServedModel", "serve_app", "service_of"]

_OWNERS = {
    "ChatTemplate": "chat",
    "ModelTokenizer": "tokenizer",
    "ServedModel": "model",
    "serve_app": "app",
    "service_of": "app",
}


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_OWNERS[name]}"), name)
