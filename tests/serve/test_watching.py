"""What operators see: metrics, and the inspector at the root."""

from __future__ import annotations

import json

import pytest
from prometheus_client.registry import CollectorRegistry

from tests.serve.calls import ask
from tests.serve.tiny import served

pytestmark = pytest.mark.anyio

COMPLETE = "/v1/completions"
ASK = {"prompt": "abcdefgh", "max_tokens": 4}


async def test_metrics_count_what_happened() -> None:
    times = iter(range(0, 1000, 3))
    registry = CollectorRegistry()
    async with served(registry=registry, clock=lambda: next(times)) as server:
        for body in (ASK, {**ASK, "stream": True, "n": 2}, {**ASK, "logprobs": 5}, b"{"):
            await ask(server.app, COMPLETE, body)
        answer = await ask(server.app, "/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        lines = set(answer.body.decode().splitlines())
        assert {
            'aradix:http_responses_total{path="/v1/completions",status="200"} 2.0',
            'aradix:http_responses_total{path="/v1/completions",status="400"} 2.0',
            'aradix:request_success_total{finished_reason="length"} 3.0',
            "aradix:num_requests_running 0.0",
            "aradix:num_requests_waiting 0.0",
            "aradix:time_to_first_token_seconds_count 2.0",
            "aradix:time_to_first_token_seconds_sum 6.0",
            "aradix:e2e_request_latency_seconds_sum 12.0",
            "aradix:queries_total 3.0",
            "aradix:prefix_cache_queries_total 24.0",
        } <= lines
        assert registry.get_sample_value("aradix:prefill_tokens_total") == server.engine.stats().prefill_tokens
        assert registry.get_sample_value("aradix:cached_tokens_total") == server.engine.stats().cached_tokens


@pytest.mark.parametrize("show_tokens", [False, True])
async def test_the_inspector_is_at_the_root(show_tokens: bool) -> None:
    async with served(show_tokens=show_tokens) as server:
        await ask(server.app, COMPLETE, ASK)
        page = await ask(server.app, "/")
        assert page.status == 200
        assert b"<title>" in page.body
        assert (await ask(server.app, "/api/about")).found["show_tokens"] is show_tokens
        state = (await ask(server.app, "/api/state")).found
        while not state["walk"]:
            state = (await ask(server.app, "/api/state")).found
        assert state["stats"]["queries"] == 1
        assert state["tree"][0]["t"] == state["stats"]["evictable"] == 8
        assert ("[64, 65, 66" in json.dumps(state)) == show_tokens
        assert (await ask(server.app, "/api/nothing")).status == 404
