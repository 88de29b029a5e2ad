"""Logs: silent unless asked for, a logger a package, and never a token in them."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

import anyio
import pytest

from aradix import CacheInitParams, Namespace, RadixCache, SlotAllocator
from aradix.errors import InvariantError, RetractError
from tests.cache.acts import begin, entered, filled, key, settled
from tests.support.caches import opened
from tests.support.places import ROOT

TOKENS = range(123456, 123464)


@pytest.mark.anyio
async def test_what_happens_is_said_without_tokens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aradix")
    async with opened(8, low_watermark=0.2, high_watermark=0.5) as cache:
        await filled(cache, key(TOKENS, namespace=Namespace(salt="secret")))
        await settled()  # the background evicts
        async with anyio.create_task_group() as tasks:
            one = await entered(cache, key(TOKENS), 4)
            two = await entered(cache, key(range(123500, 123504)), 4)
            acts = [await begin(tasks, lease.allocate, 4) for lease in (one, two)]
            await settled()
            assert isinstance(acts[1].error, RetractError)
            two.release()
        one.release()
        await cache.flush()
    said = [record.getMessage() for record in caplog.records]
    for start in ("opened: 8 slots", "flushed: ", "closed, with 0 leases", "everybody waits: the lease of 4 tokens"):
        assert any(message.startswith(start) for message in said), start
    assert any("below the high watermark: evicted" in message for message in said)
    assert any("wait for slots" in message for message in said)
    assert {record.name for record in caplog.records} == {"aradix.cache"}
    assert not re.search("1234[0-9]{2}|1235[0-9]{2}|secret", " ".join(said))


@pytest.mark.anyio
async def test_what_ends_a_cache_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def rank(self, node: object) -> int:
            raise ZeroDivisionError("no rank")

    params = CacheInitParams(allocator=SlotAllocator(8), eviction_policy=Broken(), low_watermark=0, high_watermark=0)
    with pytest.raises(ExceptionGroup):
        async with RadixCache(params) as cache:
            await filled(cache, key(1))
            await settled()
    async with opened(8) as cache:
        cache._pool.num_held += 1
        with pytest.raises(InvariantError):
            cache.check()
        cache._pool.num_held -= 1
        cache._calls._broken = None
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert any("no rank" in message for message in errors)
    assert any("refuses further work" in message for message in errors)


def test_nothing_is_printed_unless_asked_for() -> None:
    code = "import aradix, logging; logging.getLogger('aradix.cache').error('loud')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout + done.stderr == ""


def test_there_is_a_logger_a_package() -> None:
    names = set()
    for path in (ROOT / "aradix").rglob("*.py"):
        for name in re.findall(r"getLogger\(([^)]*)\)", path.read_text("utf-8")):
            names.add((path.relative_to(ROOT).parts[1] if len(path.relative_to(ROOT).parts) > 2 else "", name))
    for folder, name in names:
        assert name == (f'"aradix.{folder}"' if folder else "__name__")
