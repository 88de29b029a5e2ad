"""The shell around a backend: what hangs, fails or is cleared, and who is slowed by it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import anyio
import pytest

from aradix.errors import ConfigError, TierError
from aradix.keys import Namespace
from aradix.memory.storage.breaker import Breaker
from aradix.memory.storage.clear_gate import ClearGate
from aradix.memory.storage.protocol import PageSpace
from aradix.memory.storage.store import BackedStore

SPACE = PageSpace("model", "format")
OTHER = SPACE._replace(namespace=Namespace(lora="x"))
HASHES = [bytes([i]) * 32 for i in range(4)]
PAGES = [bytes([i]) * 10 for i in range(4)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class MemoryBackend:
    """A dict, which may fail, hang at a gate, or be full."""

    def __init__(self) -> None:
        self.frames: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.fails = False
        self.full = False
        self.gates: dict[str, threading.Event] = {}
        self.entered = threading.Semaphore(0)
        self.closed = 0

    def _enter(self, operation: str) -> None:
        self.calls.append(operation)
        self.entered.release()
        if operation in self.gates:
            self.gates[operation].wait()
        if self.fails:
            raise TierError("the cable is cut")

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._enter("exists")
        return [name in self.frames for name in names]

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        self._enter("get")
        return [self.frames.get(name) for name in names]

    def put(self, names: Sequence[str], frames: Sequence[bytes]) -> list[bool]:
        self._enter("put")
        if not self.full:
            self.frames.update(zip(names, frames, strict=True))
        return [not self.full] * len(names)

    def delete(self, names: Sequence[str], *, force: bool = False) -> list[bool]:
        self._enter("delete")
        return [self.frames.pop(name, b"") != b"kept" for name in names]

    def clear(self, prefix: str) -> None:
        self._enter("clear")
        for name in [name for name in self.frames if name.startswith(prefix)]:
            del self.frames[name]

    def close(self) -> None:
        self.closed += 1


class Site:
    def __init__(self, timeout_s: float = 60) -> None:
        self.backend = MemoryBackend()
        self.clock = Clock()
        self.store = BackedStore("test store", self.backend, timeout_s=timeout_s, clock=self.clock)

    def hang(self, operation: str) -> None:
        self.backend.gates[operation] = threading.Event()

    def let_go(self) -> None:
        for gate in self.backend.gates.values():
            gate.set()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.let_go()


@pytest.fixture
def hasty() -> Iterator[Site]:
    """Gives up on what hangs at once."""
    site = Site(timeout_s=0.01)
    yield site
    site.let_go()


@pytest.mark.anyio
async def test_a_store_that_fails_is_left_alone_said_once_and_found_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await site.store.put(SPACE, HASHES, PAGES)
    site.backend.fails = True
    for _ in range(3):
        assert await site.store.get(SPACE, HASHES) == [None] * 4
    assert not site.store.stats().is_reachable
    asked = len(site.backend.calls)
    for _ in range(10):
        assert await site.store.get(SPACE, HASHES) == [None] * 4
        assert await site.store.exists(SPACE, HASHES) == [False] * 4
        assert await site.store.put(SPACE, HASHES, PAGES) == [False] * 4
        assert await site.store.delete(SPACE, HASHES) == [False] * 4
    assert len(site.backend.calls) == asked
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    stats = site.store.stats()
    assert (stats.failed_calls, stats.skipped_calls, stats.misses) == (3, 40, 4 * 13)
    faults = site.store.take_faults()
    assert [(fault.operation, str(fault.error)) for fault in faults] == [("get", "the cable is cut")] * 3
    assert site.store.take_faults() == []
    # One try a second, then rarer; the others are not held up by it.
    site.clock.now += 1
    await site.store.get(SPACE, HASHES)
    await site.store.get(SPACE, HASHES)
    assert len(site.backend.calls) == asked + 1
    site.backend.fails = False
    site.clock.now += 2
    assert await site.store.get(SPACE, HASHES) == PAGES
    assert site.store.stats().is_reachable
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


@pytest.mark.anyio
async def test_a_store_that_hangs_is_given_up_in_time_and_then_left_alone(hasty: Site) -> None:
    hasty.hang("get")
    for _ in range(3):
        assert await hasty.store.get(SPACE, HASHES) == [None] * 4
    asked = len(hasty.backend.calls)
    assert await hasty.store.get(SPACE, HASHES) == [None] * 4
    assert len(hasty.backend.calls) == asked
    assert not hasty.store.stats().is_reachable
    assert "no answer to get in 0.01 s" in str(hasty.store.take_faults()[0].error)


@pytest.mark.anyio
async def test_the_threads_of_a_store_that_hangs_are_few_and_callers_do_not_wait_for_them(hasty: Site) -> None:
    hasty.hang("get")
    hasty.hang("put")
    async with anyio.create_task_group() as tasks:
        for _ in range(30):
            tasks.start_soon(hasty.store.get, SPACE, HASHES)
            tasks.start_soon(hasty.store.put, SPACE, HASHES, PAGES)
        hasty.clock.now += 1000
    for _ in range(10):
        hasty.clock.now += 1000
        assert await hasty.store.get(SPACE, HASHES) == [None] * 4
    assert 1 <= len(hasty.backend.calls) <= 4
    assert any("all 4 threads" in str(fault.error) for fault in hasty.store.take_faults())
    hasty.let_go()
    while any(job.runs for job in hasty.store._given_up):
        await anyio.lowlevel.checkpoint()
    hasty.store._timeout_s = 60
    hasty.clock.now += 1000
    assert await hasty.store.put(SPACE, HASHES, PAGES) == [True] * 4
    assert await hasty.store.get(SPACE, HASHES) == PAGES


@pytest.mark.anyio
async def test_a_bug_of_a_backend_is_not_taken_for_a_store_that_fails(site: Site) -> None:
    site.backend.frames = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        await site.store.get(SPACE, HASHES)


@pytest.mark.anyio
async def test_a_full_store_is_said_once_and_still_read(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    await site.store.put(SPACE, HASHES[:1], PAGES[:1])
    site.backend.full = True
    for _ in range(3):
        assert await site.store.put(SPACE, HASHES[1:3], PAGES[1:3]) == [False] * 2
    assert caplog.text.count("no room") == 1
    assert site.store.stats().refused == 6
    assert site.store.stats().is_reachable
    assert site.store.take_faults()[0].hashes == tuple(HASHES[1:3])
    assert await site.store.get(SPACE, HASHES[:1]) == PAGES[:1]


@pytest.mark.anyio
async def test_a_clear_that_does_not_reach_the_store_is_made_up_for_before_anything_is_found(site: Site) -> None:
    await site.store.put(SPACE, HASHES, PAGES)
    await site.store.put(OTHER, HASHES, PAGES)
    site.backend.fails = True
    assert not await site.store.clear(SPACE)
    site.backend.fails = False
    assert await site.store.get(SPACE, HASHES) == [None] * 4
    assert await site.store.get(OTHER, HASHES) == PAGES
    assert await site.store.put(SPACE, HASHES, PAGES) == [True] * 4
    assert await site.store.get(SPACE, HASHES) == PAGES


@pytest.mark.anyio
async def test_a_clear_that_a_store_did_not_hear_of_is_a_fault_even_where_it_is_left_alone(site: Site) -> None:
    await site.store.put(SPACE, HASHES, PAGES)
    site.backend.fails = True
    while site.store.stats().is_reachable:
        await site.store.get(SPACE, HASHES)
    site.store.take_faults()
    assert not await site.store.clear(SPACE)
    assert "clear" not in site.backend.calls
    (fault,) = site.store.take_faults()
    assert (fault.operation, fault.hashes) == ("clear", ())


@pytest.mark.anyio
async def test_a_clear_of_everything_that_did_not_arrive_holds_for_each_namespace(site: Site) -> None:
    await site.store.put(OTHER, HASHES, PAGES)
    site.backend.fails = True
    assert not await site.store.clear(SPACE._replace(namespace=None))
    site.backend.fails = False
    assert await site.store.exists(OTHER, HASHES) == [False] * 4
    assert site.backend.frames == {}


@pytest.mark.anyio
async def test_a_put_on_its_way_does_not_outlive_a_clear(site: Site) -> None:
    site.hang("put")
    cleared: list[bool] = []

    async def clear() -> None:
        cleared.append(await site.store.clear(SPACE))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(site.store.put, SPACE, HASHES, PAGES)
        await anyio.to_thread.run_sync(site.backend.entered.acquire)
        tasks.start_soon(clear)
        await anyio.wait_all_tasks_blocked()
        assert "clear" not in site.backend.calls
        site.let_go()
    assert cleared == [True]
    assert site.backend.frames == {}
    assert await site.store.get(SPACE, HASHES) == [None] * 4


@pytest.mark.anyio
async def test_a_put_that_was_given_up_does_not_outlive_a_clear(hasty: Site) -> None:
    hasty.hang("put")
    assert await hasty.store.put(SPACE, HASHES, PAGES) == [False] * 4
    assert not await hasty.store.clear(SPACE)  # it is still being written
    hasty.let_go()
    hasty.store._timeout_s = 60
    assert await hasty.store.get(SPACE, HASHES) == [None] * 4
    assert hasty.backend.frames == {}


def test_a_put_that_comes_to_its_turn_after_a_clear_writes_nothing(site: Site) -> None:
    ticket = site.store._gate.ticket(SPACE.prefix())
    site.store._gate.close(SPACE.prefix())
    names = [SPACE.prefix() + page_hash.hex() for page_hash in HASHES]
    assert (
        site.store._gate.run(SPACE.prefix(), lambda: site.store._put(ticket, HASHES, names, PAGES), ticket)
        == [False] * 4
    )
    assert site.backend.frames == {}


@pytest.mark.anyio
async def test_a_closed_store_finds_nothing_and_asks_nobody(site: Site) -> None:
    await site.store.put(SPACE, HASHES, PAGES)
    asked = len(site.backend.calls)
    await site.store.aclose()
    await site.store.aclose()
    assert site.backend.closed == 1
    assert await site.store.get(SPACE, HASHES) == [None] * 4
    assert await site.store.put(SPACE, HASHES, PAGES) == [False] * 4
    assert not await site.store.clear(SPACE)
    assert len(site.backend.calls) == asked


def test_one_store_serves_one_loop_after_another(site: Site) -> None:
    assert anyio.run(site.store.put, SPACE, HASHES, PAGES) == [True] * 4
    assert anyio.run(site.store.get, SPACE, HASHES, backend="trio") == PAGES


@pytest.mark.parametrize(
    "changed", [{"timeout_s": 0}, {"timeout_s": -1}, {"num_threads": 0}, {"num_threads": True}, {"num_threads": 1.5}]
)
def test_what_cannot_work_is_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changed))):
        BackedStore("test store", MemoryBackend(), **changed)  # type: ignore[arg-type]


def test_a_put_taken_before_a_clear_is_stale_and_one_of_another_prefix_is_not() -> None:
    gate = ClearGate(lambda prefix: None)
    mine, below, other = gate.ticket("a/b/"), gate.ticket("a/c/"), gate.ticket("b/b/")
    gate.close("a/")
    assert (mine.is_stale, below.is_stale, other.is_stale) == (True, True, False)
    assert not gate.ticket("a/b/").is_stale


def test_what_is_due_is_cleared_once_and_only_where_it_matters() -> None:
    cleared: list[str] = []
    gate = ClearGate(cleared.append)
    gate.close("a/b/")
    gate.close("a/c/")
    gate.run("b/b/", lambda: None)
    assert cleared == []
    gate.run("a/b/", lambda: None)
    gate.run("a/b/", lambda: None)
    assert cleared == ["a/b/"]
    gate.run("a/", lambda: None)
    assert cleared == ["a/b/", "a/c/"]


def test_a_breaker_opens_after_failures_in_a_row_and_tries_ever_more_rarely() -> None:
    clock = Clock()
    breaker = Breaker(3, 1.0, 4.0, clock)

    def fail(expected: bool) -> None:
        assert breaker.allows()
        assert breaker.failed() == expected

    fail(False)
    fail(False)
    assert not breaker.succeeded()  # it was never open
    for expected in (False, False, True):
        fail(expected)
    assert breaker.is_open
    for pause in (1, 2, 4, 4):
        assert not breaker.allows()
        clock.now += pause - 0.01
        assert not breaker.allows()
        clock.now += 0.01
        fail(False)
        assert not breaker.allows()
    clock.now += 4
    assert breaker.allows()
    assert not breaker.allows()  # one try at a time
    assert breaker.succeeded()
    assert breaker.allows()
    assert not breaker.is_open


def test_a_try_whose_end_is_never_told_is_followed_by_another() -> None:
    clock = Clock()
    breaker = Breaker(1, 1.0, 4.0, clock)
    breaker.failed()
    clock.now += 1
    assert breaker.allows()
    clock.now += 1
    assert breaker.allows()
