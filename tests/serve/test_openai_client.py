"""OpenAI's own client talks to the server, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from aradix.serve.server import listening
from tests.serve.tiny import END, NAME, Served, served, tiny_model

pytestmark = [
    pytest.mark.anyio,
    # uvicorn is asyncio's.
    pytest.mark.parametrize(
        "anyio_backend",
        [
            pytest.param(("asyncio", {}), id="asyncio"),
            pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        ],
    ),
]

HELLO: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Say it again."},
    {"role": "user", "content": "é🎉ab"},
]


@asynccontextmanager
async def connected(api_key: str = "secret", **options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served]]:
    """A client of a server that asks for a key."""
    async with served(api_keys=["secret"], **options) as server:
        async with listening(server.app, "127.0.0.1", 0) as url:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0) as client:
                yield client, server


async def test_a_chat_whole_and_streamed() -> None:
    async with connected() as (client, _):
        whole = await client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=12)
        assert whole.choices[0].message.content == "é🎉abé\ufffd"
        assert whole.usage is not None
        text, usage = "", None
        stream = await client.chat.completions.create(
            model=NAME, messages=HELLO, max_tokens=16, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            assert "\ufffd" not in str(chunk)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
        assert text == "é🎉ab" * 2
        assert usage is not None
        assert usage.completion_tokens == 16
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens // 4 * 4


async def test_a_completion_whole_and_streamed() -> None:
    async with connected() as (client, _):
        whole = await client.completions.create(model=NAME, prompt=["abcdefgh", f"1234567{END}"], n=2, max_tokens=9)
        assert [choice.text for choice in whole.choices] == ["abcdefgha", "abcdefgha", "1234567", "1234567"]
        assert [choice.finish_reason for choice in whole.choices] == ["length", "length", "stop", "stop"]
        text = ""
        stream = await client.completions.create(model=NAME, prompt="abcdefgh", max_tokens=20, stop="ha", stream=True)
        async for piece in stream:
            text += piece.choices[0].text
        assert text == "abcdefg"


async def test_what_is_not_openais_goes_along_as_an_extra_body() -> None:
    async with connected() as (client, _):
        for salt, cached in (("mine", 0), ("mine", 8), ("yours", 0)):
            answer = await client.completions.create(
                model=NAME, prompt="0123abcdefgh", max_tokens=1, extra_body={"cache_salt": salt, "priority": 3}
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == cached


async def test_models() -> None:
    async with connected() as (client, _):
        assert [model.id async for model in client.models.list()] == [NAME, "small"]
        assert (await client.models.retrieve("small")).owned_by == "aradix"


async def test_errors_are_those_that_it_knows() -> None:
    async with connected(model=tiny_model(20), max_batch_size=1, max_waiting=0) as (client, server):
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5'") as missing:
            await client.completions.create(model="gpt-5", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="20 tokens: 8 of the prompt and 13 to generate") as long:
            await client.completions.create(model=NAME, prompt="abcdefgh", max_tokens=13)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
        with pytest.raises(openai.AuthenticationError) as unknown:
            await client.with_options(api_key="wrong").models.list()
        assert unknown.value.code == "invalid_api_key"
        with pytest.raises(openai.BadRequestError, match=r"3 answers .* more than the 1 that"):
            await client.completions.create(model=NAME, prompt=["a", "b", "c"])
        server.runner.hold()
        other = server.engine.generate([1])
        with pytest.raises(openai.RateLimitError) as busy:
            await client.completions.create(model=NAME, prompt="a")
        assert int(busy.value.response.headers["retry-after"]) >= 1
        other.abort()
        server.runner.go_on()
        server.runner.failure = OSError("broken")
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model=NAME, prompt="a")
        assert busy.value.request_id


async def test_an_error_in_a_stream_ends_it() -> None:
    async with connected() as (client, server):
        stream = await client.completions.create(model=NAME, prompt="abcdefgh", max_tokens=900, stream=True)
        with pytest.raises(openai.APIError, match="its log says why"):
            async for _ in stream:
                server.runner.failure = OSError("broken")


async def test_a_stream_that_is_closed_is_cancelled() -> None:
    async with connected(model=tiny_model(4000)) as (client, server):
        stream = await client.completions.create(model=NAME, prompt="abcdefgh", max_tokens=3900, stream=True)
        async for _ in stream:
            server.runner.hold()
            break
        assert server.engine.num_running == 1
        await stream.close()
        while server.engine.num_running:  # it does not wait for the step that runs
            await anyio.lowlevel.checkpoint()
        server.runner.go_on()
        assert server.engine.stats().aborted == 1


async def test_a_client_that_is_cancelled_is_no_longer_computed_for() -> None:
    async with connected() as (client, server):
        server.runner.hold()
        async with anyio.create_task_group() as tasks:

            async def leave() -> None:
                while not server.engine.num_running:
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()

            tasks.start_soon(leave)
            await client.completions.create(model=NAME, prompt="abcdefgh", max_tokens=900)
        while server.engine.num_running:
            await anyio.lowlevel.checkpoint()
        server.runner.go_on()
        assert server.engine.stats().aborted == 1
