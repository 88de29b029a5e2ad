"""The README's Python, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import anyio
import pytest
from prometheus_client import generate_latest

import aradix
from aradix import RadixCache, RadixKey, SlotAllocator
from aradix.errors import RetractError
from tests.support.caches import opened
from tests.support.places import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


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
    exec(BLOCKS[1], names)
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


@pytest.mark.anyio
async def test_the_operators_example_keeps_what_is_pinned() -> None:
    names: dict[str, Any] = {name: getattr(aradix, name) for name in aradix.__all__}
    exec(BLOCKS[2], names)
    assert await names["serve"](SlotAllocator(100), [*range(20)], [*range(30, 40)], [*range(50, 60)]) == (20, 20, 50)


@pytest.mark.anyio
async def test_others_look_on_as_the_readme_says() -> None:
    scope: dict[str, Any] = {}
    exec(BLOCKS[3].replace("*:5557", "*:*").replace("*:5558", "*:*"), scope)
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
