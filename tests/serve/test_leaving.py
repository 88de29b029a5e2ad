"""Clients that leave, and servers that stop: what was under way ends at once, and nothing is left of it."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aradix.serve import service_of
from tests.serve.calls import Answer, Caller, ask
from tests.serve.tiny import Served, served, tiny_model

pytestmark = pytest.mark.anyio

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "abcdefgh", "max_tokens": 900}
"""So many that its end would not come while a test waits for something else."""


async def until(condition: Any) -> None:
    with anyio.fail_after(60):
        while not condition():
            await anyio.lowlevel.checkpoint()


def metric(text: bytes, name: str) -> float:
    return float(next(line for line in text.decode().splitlines() if line.startswith(f"aradix:{name}")).split()[-1])


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
async def test_who_leaves_is_not_computed_for_any_longer(fields: dict[str, Any]) -> None:
    num_answers = fields.get("n", 1)
    async with served() as server, anyio.create_task_group() as tasks:
        caller = Caller(server.app, "POST", COMPLETE, {**LONG, **fields})
        tasks.start_soon(caller.run)
        await until(lambda: server.runner.num_steps > 5)
        assert server.engine.num_running == num_answers
        caller.gone.set()
        await until(lambda: caller.is_ended)
        assert (server.engine.num_running, server.engine.num_waiting) == (0, 0)
        assert server.engine.stats().aborted == num_answers
        assert server.runner.num_steps < 800
        assert not caller.answer.is_whole
        assert metric((await ask(server.app, "/metrics")).body, "http_disconnects_total") == 1


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"max_tokens": 0}])
async def test_who_has_his_whole_answer_has_not_left(fields: dict[str, Any]) -> None:
    async with served() as server:
        for _ in range(3):
            await ask(server.app, COMPLETE, {"prompt": "abcdefgh", "max_tokens": 3, **fields})
        assert metric((await ask(server.app, "/metrics")).body, "http_disconnects_total") == 0


async def test_who_leaves_while_a_step_runs_is_gone_before_it_ends() -> None:
    async with served() as server, anyio.create_task_group() as tasks:
        caller = Caller(server.app, "POST", COMPLETE, {**LONG, "stream": True})
        tasks.start_soon(caller.run)
        await until(lambda: server.runner.num_steps > 2)
        server.runner.hold()
        await until(lambda: server.runner.is_held)
        caller.gone.set()
        await until(lambda: caller.is_ended)
        assert server.engine.num_running == 0
        server.runner.go_on()


async def test_who_leaves_while_waiting_is_not_begun() -> None:
    async with served(max_batch_size=1) as server, anyio.create_task_group() as tasks:
        server.runner.hold()
        first, second = (Caller(server.app, "POST", COMPLETE, {**LONG, "max_tokens": 20}) for _ in range(2))
        tasks.start_soon(first.run)
        await until(lambda: server.engine.num_running)
        tasks.start_soon(second.run)
        await until(lambda: server.engine.num_waiting)
        second.gone.set()
        await until(lambda: second.is_ended)
        assert server.engine.num_waiting == 0
        server.runner.go_on()
        await until(lambda: first.is_ended)
        assert first.answer.status == 200
        assert server.engine.stats().decoded_tokens <= 20


async def test_who_leaves_in_the_middle_of_his_question_is_not_answered() -> None:
    async with served() as server:
        caller = Caller(server.app, "POST", COMPLETE, b"")
        caller.chunks = []
        caller.gone.set()
        answer = await caller.run()
        assert answer.status == 0
        assert server.engine.stats().finished == 0


async def test_a_send_that_fails_is_a_client_that_left() -> None:
    async with served() as server:

        async def lost(piece: bytes) -> None:
            raise OSError("the connection is lost")

        caller = Caller(server.app, "POST", COMPLETE, {**LONG, "stream": True}, heard=lost)
        await caller.run()
        assert not caller.answer.is_whole
        assert server.engine.stats().aborted == 1


async def test_a_client_that_reads_slowly_holds_nobody_up() -> None:
    async with served() as server, anyio.create_task_group() as tasks:
        reading = anyio.Event()

        async def slowly(piece: bytes) -> None:
            await reading.wait()

        slow = Caller(server.app, "POST", COMPLETE, {**LONG, "max_tokens": 300, "stream": True}, heard=slowly)
        tasks.start_soon(slow.run)
        await until(lambda: server.engine.num_running)
        assert (await ask(server.app, COMPLETE, {**LONG, "max_tokens": 500})).status == 200
        await until(lambda: not server.engine.num_running)  # it is computed, and waits to be read
        reading.set()
        await until(lambda: slow.is_ended)
        text = "".join(choice["text"] for event in slow.answer.events for choice in event["choices"])
        assert text == ("abcdefgh" * 38)[:300]
        assert len(slow.answer.events) < 20  # what had come meanwhile came in one


async def under_way(server: Served, tasks: Any, **fields: Any) -> list[Answer]:
    """A request that is being computed; its answer comes into the list."""
    answers: list[Answer] = []

    async def one() -> None:
        answers.append(await ask(server.app, COMPLETE, {**LONG, **fields}))

    num_steps = server.runner.num_steps
    tasks.start_soon(one)
    await until(lambda: server.runner.num_steps > num_steps + 3)
    return answers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_stops_lets_finish_what_is_under_way_and_takes_no_more(stream: bool) -> None:
    async with served() as server, anyio.create_task_group() as tasks:
        answers = await under_way(server, tasks, stream=stream)
        left: list[int] = []

        async def drain() -> None:
            left.append(await service_of(server.app).drain(600))

        tasks.start_soon(drain)
        await until(lambda: service_of(server.app).is_stopping)
        refused = await ask(server.app, CHAT, {"messages": [{"role": "user", "content": "too late"}]})
        assert (refused.status, refused.error["type"]) == (503, "server_error")
        assert "retry-after" in refused.headers
        assert (await ask(server.app, "/health")).status == 503
        assert not answers
        await until(lambda: left)
        assert left == [0]
        assert answers[0].status == 200
        assert answers[0].events if stream else answers[0].found["usage"]["completion_tokens"] == 900


async def test_a_server_whose_engine_takes_no_more_is_not_well() -> None:
    async with served() as server:
        assert server.engine.is_open
        assert (await ask(server.app, "/health")).status == 200
        await server.engine.drain()
        assert not server.engine.is_open
        assert (await ask(server.app, "/health")).status == 503
        assert (await ask(server.app, COMPLETE, LONG)).error["code"] == "service_unavailable"


async def test_whoever_waits_for_the_last_request_hears_of_its_end() -> None:
    async with served() as server, anyio.create_task_group() as tasks:
        await under_way(server, tasks)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as drains:
                for _ in range(3):
                    drains.start_soon(service_of(server.app).drain, 600)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_finish_in_time_is_given_up_and_told(stream: bool) -> None:
    async with served(num_slots=1 << 14, model=tiny_model(1 << 14)) as server, anyio.create_task_group() as tasks:
        answers = await under_way(server, tasks, stream=stream, max_tokens=16_000)
        assert await service_of(server.app).drain(0) == 1
        (answer,) = answers
        if stream:
            assert answer.status == 200
            error = answer.events[-1]["error"]
        else:
            assert answer.status == 503
            error = answer.error
        assert error["code"] == "service_unavailable"
        assert server.engine.stats().aborted == 1


async def test_a_cancelled_drain_gives_up_at_once() -> None:
    async with served(num_slots=1 << 14, model=tiny_model(1 << 14)) as server, anyio.create_task_group() as tasks:
        answers = await under_way(server, tasks, max_tokens=16_000)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await service_of(server.app).drain(600)
        await until(lambda: answers)
        assert answers[0].status == 503


async def test_what_is_still_being_tokenized_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as server, anyio.create_task_group() as tasks:
        model, may_go_on = service_of(server.app).model, threading.Event()
        tokenize = model.prompt_tokens

        def slowly(prompt: Any) -> list[int]:
            may_go_on.wait(60)
            return tokenize(prompt)

        monkeypatch.setattr(model, "prompt_tokens", slowly)
        caller = Caller(server.app, "POST", COMPLETE, LONG)
        tasks.start_soon(caller.run)
        await until(lambda: service_of(server.app).tokenizing.borrowed_tokens)
        with anyio.CancelScope() as scope:
            scope.cancel()  # so that it waits for no last words
            await service_of(server.app).drain(600)
        may_go_on.set()
        await until(lambda: caller.is_ended)
        assert (caller.answer.status, caller.answer.error["code"]) == (503, "service_unavailable")
        assert server.runner.num_steps < 10


async def test_draining_an_idle_server_takes_no_time() -> None:
    async with served() as server:
        assert await service_of(server.app).drain(600) == 0
        assert await service_of(server.app).drain(0) == 0
