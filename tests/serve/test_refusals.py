"""What is not answered: how it is said, and that the server goes on."""

from __future__ import annotations

import base64
import re
from typing import Any

import anyio
import pytest

from aradix.errors import ConfigError, InvariantError, RequestTooLargeError, UsageError, WrongLoopError
from aradix.serve import serve_app, service_of
from tests.serve.calls import Caller, ask
from tests.serve.tiny import TinyRunner, served, tiny_model

pytestmark = pytest.mark.anyio

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = {"prompt": "abcdefgh", "max_tokens": 4}


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents], **fields}


async def test_a_wrong_request_is_answered_as_openai_does() -> None:
    async with served(model=tiny_model(50)) as server:
        for path, body, status, param, code, said in (
            (COMPLETE, {**ASK, "model": "gpt-5"}, 404, "model", "model_not_found", "'gpt-5'"),
            (COMPLETE, b"{", 400, None, None, "not JSON"),
            (COMPLETE, {**ASK, "logprobs": 3}, 400, "logprobs", "unsupported_parameter", "logprobs is not supported"),
            (COMPLETE, {"prompt": ""}, 400, "prompt", None, "no tokens"),
            (COMPLETE, {"prompt": [[1], []]}, 400, "prompt", None, "no tokens"),
            (COMPLETE, {"prompt": [1, TinyRunner.vocab_size]}, 400, "prompt", None, "from 0 to 260"),
            (COMPLETE, {"prompt": [-1]}, 400, "prompt", None, "from 0 to 260"),
            (COMPLETE, {"prompt": ["a"] * 50, "n": 3}, 400, "prompt", None, "150 answers"),
            (COMPLETE, {**ASK, "max_tokens": 43}, 400, "prompt", "context_length_exceeded", "make 51.*at most 42"),
            (COMPLETE, {"prompt": "a" * 50}, 400, "prompt", "context_length_exceeded", "alone has 50"),
            (COMPLETE, {"prompt": "a" * 10_000}, 400, "prompt", "context_length_exceeded", "more than"),
            (CHAT, chat("a" * 50), 400, "messages", "context_length_exceeded", "50 tokens: .* alone has 51"),
            (CHAT, chat("unspeakable"), 400, "messages", None, "I would rather not"),
            (CHAT, chat("a", tools=[{}]), 400, "tools", "unsupported_parameter", "not supported"),
        ):
            answer = await ask(server.app, path, body)
            error = answer.error
            assert (answer.status, error["param"], error["code"]) == (status, param, code), error
            assert error["type"] == "invalid_request_error"
            assert re.search(said, error["message"]), error
        assert (await ask(server.app, COMPLETE, ASK)).status == 200
        assert server.engine.stats().finished == 1


async def test_the_most_that_fits_is_answered() -> None:
    async with served(num_slots=48, page_size=4, model=tiny_model(49)) as server:
        whole = (await ask(server.app, COMPLETE, {"prompt": "abcdefgh", "max_tokens": 41})).found
        assert whole["usage"]["total_tokens"] == 49


async def test_a_model_without_a_template_does_not_chat() -> None:
    async with served(model=tiny_model(chats=False)) as server:
        answer = await ask(server.app, CHAT, chat("hello"))
        assert answer.status == 400
        assert "/v1/completions" in answer.error["message"]


async def test_other_paths_methods_and_bodies() -> None:
    async with served(max_body_bytes=100) as server:
        for method, path, body, headers, status in (
            ("GET", COMPLETE, None, {}, 405),
            ("GET", CHAT, None, {}, 405),
            ("POST", "/v1/models", {}, {}, 405),
            ("POST", "/v1/embeddings", {}, {}, 404),
            ("GET", "/v1/", None, {}, 404),
            ("POST", COMPLETE, {"prompt": "a" * 100}, {}, 413),
            ("POST", COMPLETE, b"{}", {"content-length": "101"}, 413),
            ("POST", COMPLETE, b"{}", {"content-type": "text/plain"}, 415),
            ("POST", COMPLETE, b"{}", {"content-type": ""}, 415),
        ):
            answer = await Caller(server.app, method, path, body, headers).run()
            assert answer.status == status, (method, path)
            assert answer.error["type"] == "invalid_request_error"
        # In pieces, and without saying how many.
        caller = Caller(server.app, "POST", COMPLETE, b"")
        caller.chunks = [b" " * 60] * 100
        assert (await caller.run()).status == 413
        assert len(caller.chunks) == 98
        answer = await ask(server.app, COMPLETE, ASK, content_type="application/json; charset=utf-8")
        assert answer.status == 200


async def test_a_step_that_fails_is_the_servers_fault_and_told_in_streams_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as server:
        server.runner.failure = OSError("the weights are gone: /secret/path")
        for stream in (False, True):
            answer = await ask(server.app, COMPLETE, {**ASK, "stream": stream})
            assert (answer.status, answer.error["type"]) == (500, "server_error")
            assert "secret" not in answer.error["message"]
        assert "/secret/path" in caplog.text

        async def fail(piece: bytes) -> None:
            server.runner.failure = OSError("later")

        server.runner.failure = None
        body = {**ASK, "stream": True, "max_tokens": 50}
        answer = await Caller(server.app, "POST", COMPLETE, body, heard=fail).run()
        assert (answer.status, answer.is_whole) == (200, True)
        assert answer.events[0]["choices"]
        assert answer.events[-1]["error"]["type"] == "server_error"
        server.runner.failure = None
        assert (await ask(server.app, COMPLETE, ASK)).status == 200


async def test_a_bug_in_the_server_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as server:

        def broken(*args: Any, **named: Any) -> Any:
            raise KeyError("private")

        monkeypatch.setattr(server.engine, "generate", broken)
        answer = await ask(server.app, COMPLETE, ASK)
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert "private" not in answer.error["message"]
        assert "private" in caplog.text


@pytest.mark.parametrize("error", [UsageError("private"), WrongLoopError("private"), InvariantError("private")])
async def test_a_request_that_was_taken_and_failed_is_no_fault_of_the_clients(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served() as server:

        def broken(*args: Any, **named: Any) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(server.cache, "lease", broken)
            answer = await ask(server.app, COMPLETE, ASK)
            assert (answer.status, answer.error["code"]) == (500, "internal_error")
            assert "private" not in answer.error["message"]
        with monkeypatch.context() as patch:
            patch.setattr(server.engine, "generate", broken)
            answer = await ask(server.app, COMPLETE, ASK)
            assert answer.status == (400 if type(error) is UsageError else 500)


async def test_what_the_pool_can_never_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(num_slots=20, page_size=4) as server:
        answer = await ask(server.app, COMPLETE, {"prompt": "abcdefgh", "max_tokens": 50})
        assert answer.status == 400
        with pytest.raises(RequestTooLargeError) as caught:
            server.engine.generate(range(100))
        assert str(len(range(100))) in str(caught.value)


async def test_overload_is_told_with_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(max_batch_size=1, max_waiting=1) as server, anyio.create_task_group() as tasks:
        server.runner.hold()
        answers = []

        async def one() -> None:
            answers.append(await ask(server.app, COMPLETE, ASK))

        tasks.start_soon(one)
        while not server.engine.num_running:
            await anyio.lowlevel.checkpoint()
        # Of several answers none is begun that could not be ended.
        assert (await ask(server.app, COMPLETE, {**ASK, "n": 2})).status == 429
        assert (server.engine.num_running, server.engine.num_waiting) == (1, 0)
        tasks.start_soon(one)
        while not server.engine.num_waiting:
            await anyio.lowlevel.checkpoint()
        for stream in (False, True):
            refused = await ask(server.app, COMPLETE, {**ASK, "stream": stream})
            assert refused.status == 429
            assert (refused.error["type"], refused.error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert int(refused.headers["retry-after"]) >= 1
        with monkeypatch.context() as patch:
            patch.setattr(service_of(server.app).model, "prompt_tokens", None)  # nothing is tokenized in vain
            assert (await ask(server.app, COMPLETE, ASK)).status == 429
        assert (server.engine.num_running, server.engine.num_waiting) == (1, 1)
        server.runner.go_on()
        while len(answers) < 2:
            await anyio.lowlevel.checkpoint()
        assert [answer.status for answer in answers] == [200, 200]


@pytest.mark.parametrize("max_waiting", [0, 2, None])
async def test_more_answers_than_there_can_ever_be_room_for_are_refused_for_good(max_waiting: int | None) -> None:
    async with served(max_batch_size=2, max_waiting=max_waiting) as server:
        chats = (CHAT, chat("abcdefgh", max_tokens=4))
        most = 2 + (max_waiting or 0)
        for path, body, param in ((COMPLETE, ASK, "n"), (*chats, "n"), (COMPLETE, ASK, "prompt")):

            def several(number: int, body: Any = body, param: str = param) -> dict[str, Any]:
                return {**body, param: number if param == "n" else ["abcdefgh"] * number}

            fitting = await ask(server.app, path, several(most))
            assert (fitting.status, len(fitting.found["choices"])) == (200, most)
            for stream in (False, True):
                answer = await ask(server.app, path, {**several(most + 1), "stream": stream})
                if max_waiting is None:
                    assert answer.status == 200
                    continue
                assert (answer.status, answer.error["param"]) == (400, param)
                assert re.search(rf"{most + 1} answers .* more than the {most} that", answer.error["message"])
                assert "retry-after" not in answer.headers
        both = await ask(server.app, COMPLETE, {**ASK, "prompt": ["abcdefgh"] * most, "n": 2})
        assert both.status == (200 if max_waiting is None else 400)
        # Nor is it told to come back where all is taken.
        server.runner.hold()
        async with anyio.create_task_group() as tasks:
            for _ in range(most):
                tasks.start_soon(ask, server.app, COMPLETE, ASK)
            while server.engine.num_running + server.engine.num_waiting < most:
                await anyio.lowlevel.checkpoint()
            if max_waiting is not None:
                assert (await ask(server.app, COMPLETE, ASK)).status == 429
                assert (await ask(server.app, COMPLETE, {**ASK, "n": most + 1})).status == 400
            server.runner.go_on()
        assert server.engine.stats().aborted == 0


async def test_who_has_no_key_is_not_let_in() -> None:
    basic = "Basic " + base64.b64encode(b"anybody:second").decode()
    wrong = "Basic " + base64.b64encode(b"second:first!").decode()
    async with served(api_keys=["first", "s\u00e9cond", "second"]) as server:
        for path in ("/v1/models", "/metrics", "/", "/api/state", "/nowhere", "/health/"):
            for header in ("", "first", "Bearer", "Bearer ", "Bearer First", "Bearer first2", "Basic x!", wrong):
                answer = await ask(server.app, path, authorization=header)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), (path, header)
                assert answer.headers["www-authenticate"].startswith("Basic")
            for header in ("Bearer first", "bearer second", basic):
                status = (await ask(server.app, path, authorization=header)).status
                assert status == (404 if path in ("/nowhere", "/health/") else 200), (path, header)
        assert (await ask(server.app, COMPLETE, ASK)).status == 401
        assert (await ask(server.app, COMPLETE, ASK, authorization="Bearer s\u00e9cond")).status == 200
        assert (await ask(server.app, "/health")).found == {"status": "ok"}
        assert server.engine.stats().finished == 1


async def test_without_keys_anybody_may_ask() -> None:
    async with served() as server:
        assert (await ask(server.app, COMPLETE, ASK, authorization="Bearer whatever")).status == 200


async def test_options_that_cannot_work_are_refused() -> None:
    async with served() as server:
        options: Any
        for options in ({"api_keys": "key"}, {"api_keys": [""]}, {"api_keys": [1]}, {"max_body_bytes": 0}):
            with pytest.raises(ConfigError, match=next(iter(options))):
                serve_app(server.engine, server.cache, tiny_model(), **options)
