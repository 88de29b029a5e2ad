"""A thousand clients over a real socket, a third of which leave at random moments, leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from aradix.serve import service_of
from aradix.serve.server import listening
from tests.serve.tiny import END, Served, served

pytestmark = pytest.mark.anyio

NUM_REQUESTS = 1000
CONCURRENCY = 40


def request_of(draw: random.Random, leaves: bool) -> tuple[bytes, dict[str, Any]]:
    """A request as it goes over the wire, and its body. One whose client leaves would go on for long."""
    kind = draw.choice(["completions", "chat/completions"])
    system = f"system prompt {draw.randrange(5)}: be kind to whoever asks "
    question = f"{system}{draw.randrange(100)} abcdefg{END}"
    body: dict[str, Any] = {"stream": draw.random() < 0.7}
    if kind == "completions":
        body |= {"prompt": question, "n": draw.choice([1, 1, 1, 2])}
    else:
        body["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    if leaves:
        body |= {"ignore_eos": True}
    body |= {"max_tokens": 600 if leaves else 20, "priority": draw.randrange(3)}
    if draw.random() < 0.2:
        body["cache_salt"] = f"salt {draw.randrange(3)}"
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/{kind} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw, body


async def leave(connection: anyio.abc.SocketStream, raw: bytes, draw: random.Random) -> None:
    """Leave in the middle of asking, before the answer, or after some of it."""
    if draw.random() < 0.2:
        await connection.send(raw[: draw.randrange(len(raw))])
        return
    await connection.send(raw)
    if b'"stream": true' in raw and draw.random() < 0.7:
        for _ in range(draw.randrange(1, 12)):
            await connection.receive()
    else:
        for _ in range(draw.randrange(200)):
            await anyio.lowlevel.checkpoint()


async def stay(connection: anyio.abc.SocketStream, raw: bytes, body: dict[str, Any]) -> None:
    """Read all of the answer, and find it right."""
    await connection.send(raw)
    received = b""
    while True:
        try:
            received += await connection.receive()
        except anyio.EndOfStream:
            break
    assert received.startswith(b"HTTP/1.1 200 ")
    events = [line for line in received.split(b"\r\n") if line.startswith((b"data: {", b"{"))]
    texts: dict[int, str] = {}
    for event in events:
        for choice in json.loads(event.strip().removeprefix(b"data: "))["choices"]:
            said = choice.get("delta", choice.get("message", choice))
            texts[choice["index"]] = texts.get(choice["index"], "") + said.get("content", said.get("text", ""))
    assert texts == dict.fromkeys(range(body.get("n", 1)), "abcdefg")


async def clients(server: Served, port: int) -> int:
    """Have them all come; gives how many left."""
    draw = random.Random(9)
    plans = [(draw.random() < 1 / 3, draw.getrandbits(32)) for _ in range(NUM_REQUESTS)]
    limiter = anyio.CapacityLimiter(CONCURRENCY)

    async def one(leaves: bool, seed: int) -> None:
        draw = random.Random(seed)
        raw, body = request_of(draw, leaves)
        async with limiter, await anyio.connect_tcp("127.0.0.1", port) as connection:
            await (leave(connection, raw, draw) if leaves else stay(connection, raw, body))

    async with anyio.create_task_group() as tasks:
        for leaves, seed in plans:
            tasks.start_soon(one, leaves, seed)
    return sum(leaves for leaves, _ in plans)


async def left_over(before: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """The tasks that were not there before, when those had time to end that have nothing to wait for but a socket."""
    with anyio.move_on_after(10):
        while asyncio.all_tasks() - before:
            await anyio.lowlevel.checkpoint()
    return asyncio.all_tasks() - before


# uvicorn is asyncio's.
@pytest.mark.parametrize("anyio_backend", [pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")])
async def test_a_thousand_requests_of_which_a_third_disconnect_leave_nothing_behind() -> None:
    before = asyncio.all_tasks()
    async with served(num_slots=2048, page_size=4, max_batch_size=16) as server:  # less than all of them want at once
        async with listening(server.app, "127.0.0.1", 0) as url:
            tasks_before = asyncio.all_tasks()
            num_left = await clients(server, int(url.rpartition(":")[2]))
            assert 280 < num_left < 390
            assert await service_of(server.app).drain(60) == 0
            # While all is open: who closes an engine or a server ends what was forgotten there.
            assert await left_over(tasks_before) == set()
            stats = server.engine.stats()
            assert (stats.running, stats.waiting, stats.failed) == (0, 0, 0)
            assert stats.finished >= NUM_REQUESTS - num_left
            assert stats.aborted > num_left / 2
            assert stats.cached_tokens > stats.prefill_tokens
            server.cache.check()
            assert server.cache.stats().num_leases == 0
            assert server.cache.stats().leased == 0
    # And what `served` asserts: the idle sum is whole.
    assert asyncio.all_tasks() - before == set()
