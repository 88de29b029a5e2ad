"""`inspector`: a page that shows a live cache, as an ASGI app to mount in one's own server.

Looking costs the cache's loop a little at a time: a survey of the tree goes on in slices of some hundred nodes, one a
turn of the loop, and only while somebody looks. Nothing can be changed through the page.
"""

from __future__ import annotations

import importlib.resources
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

import anyio
import msgspec
import numpy as np

from aradix.cache.radix_cache import RadixCache
from aradix.cache.slot_waiter import SlotWaiter
from aradix.errors import AradixError, InvalidKeyError, UsageError
from aradix.keys import Namespace, RadixKey
from aradix.observe.labels import namespace_label
from aradix.observe.survey import Survey, summary_dict

try:
    from starlette.applications import Starlette
    from starlette.datastructures import QueryParams
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ImportError("the inspector needs starlette: pip install 'aradix[inspect]'") from error

__all__ = ["inspector", "make_page_app"]

_log = logging.getLogger("aradix.observe")

_SLICE_NODES = 150
"""Nodes seen in one turn of the loop: about half a millisecond."""
_SLICES_A_LOOK = 60
"""Turns that one look of a page keeps the survey going."""
_MAX_LISTED = 200
_MAX_SAMPLES = 600
_SAMPLE_SECONDS = 0.2
_PATIENCE_SECONDS = 5.0
_MAX_SEARCH_TOKENS = 1 << 20

_ASKED = {"api/about", "api/state", "api/search"}

_HEADERS = {
    # The page is one file, and this says that it shall stay so.
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}

_Answer = TypeVar("_Answer")


class _Desk:
    """What the page asks for, found out on the cache's loop."""

    def __init__(self, cache: RadixCache, show_tokens: bool) -> None:
        self._cache = cache
        self._show_tokens = show_tokens
        self._clock = cache._params.clock
        self._survey = Survey(cache._core)
        self._slices_left = 0
        self._going = False
        self._samples: deque[tuple[float, ...]] = deque(maxlen=_MAX_SAMPLES)

    async def ask(self, step: Callable[[], _Answer]) -> _Answer:
        """Have a step taken on the cache's loop, which may be another than this one. Waits for it.

        Raises:
            UsageError: the cache is not open, or its loop has ended or does not answer.
        """
        home = self._cache._home
        if home is None:
            raise UsageError("the cache is not open yet")
        answer: Future[_Answer] = Future()

        def take() -> None:
            try:
                answer.set_result(step())
            except Exception as error:
                answer.set_exception(error)

        if not home.call_soon(take):
            raise UsageError("the cache's loop has ended")
        try:
            return await anyio.to_thread.run_sync(answer.result, _PATIENCE_SECONDS, abandon_on_cancel=True)
        except TimeoutError:
            raise UsageError("the cache's loop does not answer: it is busy, or has ended") from None

    def put_down(self, found: dict[str, Any]) -> bytes:
        """What was found, as JSON. Takes its time, away from any loop: what a survey has found changes no more."""
        if found.get("tree") is not None:
            found["tree"] = [summary_dict(root, show_tokens=self._show_tokens) for root in found["tree"]]
        return msgspec.json.encode(found)

    # ---- the survey ----

    def _look(self) -> None:
        """Somebody looks: keep the survey going for a while."""
        self._slices_left = _SLICES_A_LOOK
        if not self._going:
            self._going = True
            self._slice()

    def _slice(self) -> None:
        self._slices_left -= 1
        done = self._survey.step(_SLICE_NODES)
        home = self._cache._home
        if done or self._slices_left <= 0 or self._cache._calls.closed or home is None:
            self._going = False
        else:
            home.call_soon(self._slice)

    # ---- the answers ----

    def about(self) -> dict[str, Any]:
        """What does not change."""
        params = self._cache._params
        policy = params.eviction_policy
        return {
            "core": self._cache._core.name,
            "page_size": params.page_size,
            "num_slots": params.allocator.num_slots,
            "policy": policy if isinstance(policy, str) else type(policy).__name__,
            "evict_unit": params.evict_unit,
            "eagle": params.is_eagle,
            "low": params.low_watermark,
            "high": params.high_watermark,
            "show_tokens": self._show_tokens,
        }

    def state(self, walk: int, since: float) -> dict[str, Any]:
        """Everything that changes: the tree if it was surveyed since walk `walk`, samples since a time."""
        cache = self._cache
        now = self._clock()
        stats = cache.stats()
        self._look()
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_SECONDS:
            self._samples.append(
                (
                    now,
                    stats.queries,
                    stats.query_tokens,
                    stats.hit_tokens,
                    stats.evicted,
                    stats.free,
                    stats.fenced,
                    stats.evictable,
                    stats.protected,
                    stats.leased,
                    stats.num_slot_waiters,
                )
            )
        survey = self._survey
        return {
            "now": now,
            "closed": cache._calls.closed,
            "tick": cache._core.tick,
            "stats": asdict(stats),
            "samples": [sample for sample in self._samples if sample[0] > since],
            "walk": survey.num_walks,
            "progress": survey.progress,
            "tree": survey.done if survey.num_walks != walk else None,
            "others": asdict(survey.others),
            "leases": self._leases(now),
            "waiters": self._waiters(now),
            "gates": self._gates(),
        }

    def _leases(self, now: float) -> list[dict[str, Any]]:
        """The oldest leases, up to a bound."""
        shown: list[dict[str, Any]] = []
        for hold in self._cache._holds.values():
            if len(shown) == _MAX_LISTED:
                break
            shown.append(
                {
                    "id": hold.order,
                    "where": hold.where,
                    "age": now - hold.opened_when,
                    "ns": namespace_label(hold.key.namespace),
                    "matched": hold.num_matched,
                    "committed": hold.published,
                    "tokens": hold.num_tokens,
                    "waiting": hold.waiting,
                    "resume": hold.resume,
                    "node": hold.node_id,
                }
            )
        return shown

    def _kind_of(self, waiter: SlotWaiter) -> str:
        if not waiter.reserve:
            return "growth"
        return "join" if self._cache._leases.joins.is_waiting(waiter.hold) else "admission"

    def _waiters(self, now: float) -> list[dict[str, Any]]:
        """The heads of both queues and of those who wait for what others compute, up to a bound."""
        pressure = self._cache._pressure
        joiners = [joiner for joiner in self._cache._leases.joins.joiners.values() if joiner.event is not None]
        return [
            {
                "id": joiner.hold.order,
                "kind": "join",
                "tokens": joiner.target,
                "waited": now - joiner.began,
                "where": joiner.hold.where,
            }
            for joiner in joiners[:_MAX_LISTED]
        ] + [
            {
                "id": waiter.hold.order,
                "kind": self._kind_of(waiter),
                "tokens": waiter.num_tokens,
                "waited": now - waiter.began,
                "where": waiter.hold.where,
            }
            for queue in (pressure.growth, pressure.admission)
            for waiter in queue[:_MAX_LISTED]
        ]

    def _gates(self) -> list[dict[str, Any]]:
        gates = self._cache._gates
        return [
            {"node": gate.node_id, "depth": gate.depth, "granted": gate.granted, "walkers": gates.num_walkers}
            for gate in gates.standing[:_MAX_LISTED]
        ]

    def search(self, root: str | None, ids: list[int]) -> dict[str, Any]:
        """How much of a prompt is cached in the namespace that has this root, and the nodes on its way.

        Raises:
            InvalidKeyError: there is no such root.
        """
        cache = self._cache
        namespace = Namespace() if root is None else self._namespace_at(root)
        key = cache._view(RadixKey(ids, namespace))
        path = cache._core.look(key)
        shown = []
        for node_id in path:
            glance = cache._core.glance(node_id, children=False)
            if glance is not None:
                shown.append({"id": node_id, "n": glance.num_tokens, "d": glance.depth, "p": glance.lock_ref})
        return {"matched": cache.peek(key), "asked": len(key), "path": shown, "ns": namespace_label(namespace)}

    def _namespace_at(self, root: str) -> Namespace:
        glance = self._cache._core.glance(int(root), children=False) if root.isdecimal() and len(root) < 20 else None
        if glance is None or glance.parent_id:
            raise InvalidKeyError(f"no namespace that holds anything has the root {root[:20]!r}")
        return glance.namespace


def _number(text: str | None, least: float) -> float:
    try:
        return float(text) if text is not None else least
    except ValueError:
        return least


def _ids(text: str) -> list[int]:
    """Token ids as somebody typed them.

    Raises:
        InvalidKeyError: there is something else among them.
    """
    parts = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    if len(parts) > _MAX_SEARCH_TOKENS:
        raise InvalidKeyError(f"{len(parts)} token ids are more than the {_MAX_SEARCH_TOKENS} that are looked up")
    try:
        return np.array(parts, np.int64).tolist() if parts else []
    except (ValueError, OverflowError):
        raise InvalidKeyError("token ids are whole numbers, with commas or spaces between them") from None


def inspector(cache: RadixCache, *, show_tokens: bool = False) -> Starlette:
    """An ASGI app that shows a cache: the page at `/`, what it asks for below `/api`. Does not wait.

    It may run on another loop or thread than the cache. Whoever can reach it sees how the cache is used: mount it where
    only operators come. Nothing is loaded from elsewhere, and nothing can be changed.

    Args:
        cache: the page shows something as soon as it is open.
        show_tokens: whether the first token ids of nodes are shown, from which prompts can be guessed.
    """
    desk = _Desk(cache, show_tokens)

    async def answer(path: str) -> tuple[int, bytes]:
        what, _, query_text = path.partition("?")
        query = QueryParams(query_text)
        walk, since = int(_number(query.get("walk"), -1)), _number(query.get("since"), float("-inf"))
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            "api/about": desk.about,
            "api/state": lambda: desk.state(walk, since),
            "api/search": lambda: desk.search(query.get("root"), _ids(query.get("tokens", ""))),
        }
        try:
            found = await desk.ask(steps[what])
            return 200, await anyio.to_thread.run_sync(desk.put_down, found)
        except InvalidKeyError as error:
            return 400, msgspec.json.encode({"error": str(error)})
        except AradixError as error:
            _log.info("the inspector has nothing to show: %s", error)
            return 503, msgspec.json.encode({"error": str(error)})

    return make_page_app(answer)


def make_page_app(answer: Callable[[str], Awaitable[tuple[int, bytes]]]) -> Starlette:
    """The page and what it asks for: `answer` takes a path and query, and gives a status and what to send, as JSON."""
    page = importlib.resources.files("aradix.observe").joinpath("inspector.html").read_text("utf-8")

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    async def show_answer(request: Request) -> Response:
        path = f"api/{request.path_params['what']}"
        if path not in _ASKED:
            return JSONResponse({"error": f"there is no {path}"}, 404, _HEADERS)
        query = f"?{request.url.query}" if request.url.query else ""
        status, shown = await answer(path + query)
        return Response(shown, status, _HEADERS, media_type="application/json")

    return Starlette(routes=[Route("/", show_page), Route("/api/{what}", show_answer)])
