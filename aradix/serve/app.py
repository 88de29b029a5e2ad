"""`serve_app`: an engine behind OpenAI's interface, as an ASGI app."""

from __future__ import annotations

import hmac
import time
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Sequence

import msgspec

from aradix.cache.radix_cache import RadixCache
from aradix.engine.engine import AsyncEngine
from aradix.errors import ConfigError
from aradix.serve.answering import Answering
from aradix.serve.api_errors import ApiError
from aradix.serve.dialects import ChatDialect, CompletionDialect
from aradix.serve.metrics import ServeMetrics
from aradix.serve.model import ServedModel
from aradix.serve.protocol import Model, Models
from aradix.serve.service import Service

try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Mount, Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:
    raise ImportError("the server needs starlette and prometheus-client: pip install 'aradix[serve]'") from error

from aradix.observe.inspection import inspector
from aradix.observe.metrics import CacheMetrics

__all__ = ["serve_app", "service_of"]

MAX_BODY_BYTES = 8 * 2**20
_OPEN_TO_ALL = {"/health"}


def serve_app(
    engine: AsyncEngine,
    cache: RadixCache,
    model: ServedModel,
    *,
    api_keys: Sequence[str] = (),
    registry: CollectorRegistry | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    show_tokens: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Starlette:
    """`/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/health`, `/metrics` and the inspector at `/`: ASGI.

    Make it where the engine is open, on its loop, and serve it there: it has no lifespan of its own. Before the engine
    is closed `await service_of(app).drain(seconds)` lets what is under way finish. Does not wait.

    Args:
        engine: open, with a tokenizer.
        cache: the engine's.
        model: what it runs.
        api_keys: one of them must come with every request but those to `/health`, as a bearer token, or as the password
            of HTTP's basic authentication, which is how a browser gets to the inspector. Empty: anybody may ask.
        registry: where metrics go, those of the cache among them; one of its own by default.
        max_body_bytes: of a request.
        show_tokens: whether the inspector shows the first token ids of nodes, from which prompts can be guessed.
        clock: seconds, for the metrics.

    Raises:
        ConfigError: a value that cannot work.
    """
    if isinstance(api_keys, str) or not all(isinstance(key, str) and key for key in api_keys):
        raise ConfigError("api_keys must be a list of strings, none of them empty")
    if type(max_body_bytes) is not int or max_body_bytes < 1:
        raise ConfigError(f"max_body_bytes must be an int of at least 1, got {max_body_bytes!r}")
    registry = CollectorRegistry() if registry is None else registry
    CacheMetrics(cache, registry).__enter__()  # for as long as the cache lives
    service = Service(engine, model, ServeMetrics(engine, registry, clock), max_body_bytes)
    since = int(time.time())
    models = Models([Model(name, since, model.context_length) for name in model.names])

    async def list_models(request: Request) -> Response:
        return _json(models)

    async def show_model(request: Request) -> Response:
        name = request.path_params["name"]
        model.check_name(name)
        return _json(next(each for each in models.data if each.id == name))

    async def health(request: Request) -> Response:
        if service.is_stopping or not engine.is_open:
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    v1 = [
        Route("/models", list_models),
        Route("/models/{name:path}", show_model),
        Route("/completions", Answering(service, CompletionDialect()), methods=["POST"]),
        Route("/chat/completions", Answering(service, ChatDialect()), methods=["POST"]),
    ]
    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Mount("/v1", routes=v1),
        Mount("/", inspector(cache, show_tokens=show_tokens)),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(_KeyAsked, [key.encode() for key in api_keys])] if api_keys else [],
        exception_handlers={ApiError: _say, HTTPException: _say_http},
    )
    app.state.service = service
    return app


def service_of(app: Starlette) -> Service:
    """What an app of `serve_app` is doing: to drain it."""
    service: Service = app.state.service
    return service


def _path(scope: Scope) -> str:
    """Where in this app a request goes, wherever that is mounted."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _json(told: Models | Model) -> Response:
    return Response(msgspec.json.encode(told), media_type="application/json")


def _say(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.encoded(), error.status, error.headers, "application/json")


def _say_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return _say(request, ApiError(error.status_code, what, headers=error.headers))


class _KeyAsked:
    """Lets in who has a key.

    The page of the inspector and the metrics are behind it as well: they tell how the cache is used, and whether a
    given prompt is in it.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[bytes]) -> None:
        self._app = app
        self._keys = tuple(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) in _OPEN_TO_ALL or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        # A browser asks for a password then, and an OpenAI client reads the rest.
        headers = {"www-authenticate": 'Basic realm="aradix", charset="UTF-8"'}
        told = ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers)
        await _say(Request(scope), told)(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1")  # as it came
        if scheme.lower() == "basic":
            try:
                key = b64decode(key, validate=True).partition(b":")[2]
            except Base64Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        # All of them, so that time tells nothing.
        return sum(hmac.compare_digest(key, known) for known in self._keys) > 0
