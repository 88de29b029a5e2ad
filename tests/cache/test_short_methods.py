"""Methods with a compiled plain case are used, and look, like the functions in Python that they stand for."""

from __future__ import annotations

import asyncio
import gc
import inspect
import pickle
import threading
import warnings
from collections.abc import Iterable
from typing import Any, Self

import anyio
import pytest
import torch

from aradix import CacheInitParams, Lease, Namespace, RadixCache, RadixKey, SlotAllocator
from aradix.cache.calls import MAX_RUN, Calls
from aradix.cache.leases import Leases
from aradix.cache.watch import Watcher, watch
from aradix.errors import CacheClosedError, LeaseReleasedError, UsageError, WrongLoopError
from aradix.tree import cpp_core_error

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(cpp_core_error() is not None, reason="needs the compiled core"),
]

WAITING = ("__aenter__", "__aexit__", "allocate")
PROMPT = (1, 2, 3, 4)


def key(token_ids: Iterable[int]) -> RadixKey:
    return RadixKey(list(token_ids))


def make_cache(cache_type: type[RadixCache] = RadixCache, low_watermark: float = 0) -> RadixCache:
    allocator = SlotAllocator(64)
    params = CacheInitParams(allocator, low_watermark=low_watermark, high_watermark=low_watermark, tree_core="cpp")
    return cache_type(params)


def note_slow_calls(cache: RadixCache) -> list[str]:
    """From now on, the names of what goes through Python, as it does."""
    called: list[str] = []

    class Noted(Calls):
        __slots__ = ()

        def begin(self) -> None:
            called.append("begin")
            super().begin()

        def begin_open(self) -> None:
            called.append("begin_open")
            super().begin_open()

        def begin_release(self) -> None:
            called.append("begin_release")
            super().begin_release()

    object.__setattr__(cache._calls, "__class__", Noted)
    return called


async def turn(cache: RadixCache, prompt: RadixKey) -> None:
    async with cache.lease(prompt) as lease:
        await lease.allocate(len(prompt) - lease.num_matched)
        lease.commit(prompt)


async def test_a_plain_turn_never_enters_python() -> None:
    cache = make_cache()
    async with cache:
        slow_calls = note_slow_calls(cache)
        for num_tokens in (4, 30, 60):
            await turn(cache, key(range(num_tokens)))
        await turn(cache, key(range(100, 130)))  # and evicts
        assert slow_calls == []
        stats = cache.stats()
        assert (stats.queries, stats.query_tokens, stats.hit_tokens, stats.evicted) == (4, 124, 34, 26)
        cache.check()


async def test_a_lease_opened_with_options_goes_on_without_python() -> None:
    cache = make_cache()
    async with cache:
        lease = cache.lease(key(PROMPT), priority=3)
        slow_calls = note_slow_calls(cache)
        async with lease:
            await lease.allocate(4)
            lease.commit(key(PROMPT))
        assert slow_calls == []
        cache.check()


async def test_what_a_lease_shows_is_shown_without_python() -> None:
    cache = make_cache()
    async with cache:
        slow_calls = note_slow_calls(cache)
        await turn(cache, key(range(6)))
        async with cache.lease(key(PROMPT[:1])) as other, cache.lease(key(range(8))) as lease:
            assert (lease.num_matched, lease.num_tokens, other.num_matched) == (6, 6, 0)
            await lease.allocate(2)
            await other.allocate(3)
            slots = lease.slots
            assert (lease.num_matched, lease.num_tokens) == (6, 8)
            assert lease.slots is slots  # until something changes
            lease.commit(key(range(8)))
            assert lease.slots.tolist() == slots.tolist() == cache._leases.slots_of(lease._hold).tolist()
            assert lease.slots is not slots
            assert slots.dtype == torch.int64
            assert len({*slots.tolist(), *other.slots.tolist()}) == 11
        assert slow_calls == []
        with pytest.raises(LeaseReleasedError):
            _ = lease.slots
        assert lease.num_tokens == 8
        cache.check()


async def test_a_commit_that_fills_no_page_goes_on_without_python() -> None:
    allocator = SlotAllocator(64, 4)
    params = CacheInitParams(allocator, 4, low_watermark=0, high_watermark=0, tree_core="cpp")
    cache = RadixCache(params)
    async with cache:
        slow_calls = note_slow_calls(cache)
        async with cache.lease(key(range(6))) as lease:
            await lease.allocate(7)
            done = [lease.commit(key(range(length))) for length in (3, 6, 7)]
            assert [(one.prefix_len, one.num_adopted, one.repointed) for one in done] == [
                (0, 0, (0, 0)), (0, 4, (0, 0)), (4, 0, (4, 4)),
            ]  # fmt: skip
            assert [one.node.depth for one in done] == [0, 4, 4]
            assert len(lease.key) == 7
            with pytest.raises(UsageError, match="7 are matched or committed already"):
                lease.commit(key(range(6)))
        assert slow_calls == ["begin"]  # of what was refused
        cache.check()


async def test_who_watches_hears_of_every_turn() -> None:
    heard: list[str] = []

    class Hears(Watcher):
        def queried(self, hold: Any) -> None:
            heard.append("queried")

        def released(self, hold: Any) -> None:
            heard.append("released")

    cache, prompt = make_cache(), key(PROMPT)
    async with cache:
        slow_calls = note_slow_calls(cache)
        stop = watch(cache, Hears())
        await turn(cache, prompt)
        stop()
        await turn(cache, prompt)
        assert heard == ["queried", "released"]
        assert "begin" in slow_calls
        cache.check()


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_still_seen_as_a_coroutine_function(name: str) -> None:
    method = getattr(Lease, name)
    assert inspect.iscoroutinefunction(method)
    assert asyncio.iscoroutinefunction(method)
    assert next(iter(inspect.signature(method).parameters)) == "self"
    assert inspect.getdoc(method)


def test_names_and_documentation_are_those_of_the_function() -> None:
    assert Lease.commit.__qualname__ == "Lease.commit"
    assert Lease.commit.__module__ == "aradix.cache.lease"
    assert list(inspect.signature(Lease.commit).parameters) == ["self", "key", "priorities"]
    assert list(inspect.signature(RadixKey).parameters) == ["token_ids", "extra_key"]
    assert "Publish the whole pages" in (Lease.commit.__doc__ or "")


async def test_a_call_does_nothing_before_it_is_awaited() -> None:
    cache = make_cache()
    async with cache, cache.lease(key(PROMPT)) as lease:
        call = lease.allocate(4)
        assert lease.num_tokens == 0
        await call
        assert lease.num_tokens == 4
        with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
            await call
        cache.check()


async def test_a_call_that_is_never_awaited_warns() -> None:
    cache = make_cache()
    async with cache, cache.lease(key(PROMPT)) as lease:
        with pytest.warns(RuntimeWarning, match=r"coroutine 'Lease\.allocate' was never awaited"):
            _ = lease.allocate(4)
            del _
            gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lease.allocate(4).close()
        assert lease.num_tokens == 0
        cache.check()


async def test_an_error_thrown_in_before_the_start_comes_out_and_nothing_is_done() -> None:
    cache = make_cache()
    async with cache, cache.lease(key(PROMPT)) as lease:
        call: Any = lease.allocate(4)
        with pytest.raises(KeyError, match="mine"):
            call.throw(KeyError("mine"))
        with pytest.raises(RuntimeError, match="cannot reuse"):
            call.send(None)
        fresh: Any = lease.allocate(4)
        with pytest.raises(TypeError, match="just-started"):
            fresh.send(1)
        fresh.close()
        assert lease.num_tokens == 0
        cache.check()


async def test_calls_may_be_tasks_of_their_own() -> None:
    cache = make_cache()
    async with cache:
        lease = cache.lease(key(PROMPT))
        grown = []
        for call in ((lease.__aenter__,), (lease.allocate, 4), (lease.__aexit__, None, None, None)):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(*call)
            grown.append((lease.num_tokens, lease._hold.held))
        assert grown == [(0, True), (4, True), (0, False)]
        cache.check()


async def test_a_call_that_has_to_wait_goes_on_when_there_are_slots() -> None:
    cache = make_cache()
    async with cache, anyio.create_task_group() as tasks:
        first, second = cache.lease(key(PROMPT)), cache.lease(key([9]))
        await first.__aenter__()
        await second.__aenter__()
        await first.allocate(60)
        tasks.start_soon(second.allocate, 10)
        await anyio.wait_all_tasks_blocked()
        assert second.num_tokens == 0
        first.release()
        await anyio.wait_all_tasks_blocked()
        assert second.num_tokens == 10
        second.release()
        cache.check()


async def test_misuse_is_told_as_by_the_function() -> None:
    cache = make_cache()
    async with cache:
        lease = cache.lease(key(PROMPT))
        with pytest.raises(LeaseReleasedError, match="not entered yet"):
            await lease.allocate(1)
        async with lease:
            with pytest.raises(UsageError, match="entered already"):
                await lease.__aenter__()
            with pytest.raises(UsageError, match="at least 0, got -1"):
                await lease.allocate(-1)
            with pytest.raises(UsageError, match="got True"):
                await lease.allocate(True)
            with pytest.raises(TypeError, match="num_tokens"):
                await lease.allocate()  # type: ignore[call-arg]
            with pytest.raises(UsageError, match="slots are held for 0"):
                lease.commit(key(PROMPT))
            await lease.allocate(num_tokens=4)
            assert lease.commit(key=key(PROMPT)).num_adopted == 4
        with pytest.raises(LeaseReleasedError, match="released"):
            lease.commit(key(PROMPT))
        cache.check()
    with pytest.raises(CacheClosedError):
        cache.lease(key(PROMPT))


async def test_another_loop_is_refused_in_the_middle_of_a_turn() -> None:
    cache = make_cache()

    async def elsewhere() -> None:
        with pytest.raises(WrongLoopError):
            await lease.allocate(1)
        with pytest.raises(WrongLoopError):
            lease.release()

    async with cache, cache.lease(key(PROMPT)) as lease:
        await anyio.to_thread.run_sync(anyio.run, elsewhere)
        await lease.allocate(4)
        assert lease.num_tokens == 4
        cache.check()


async def test_a_thread_is_refused_in_the_middle_of_a_step_of_the_loop() -> None:
    cache = make_cache()
    async with cache, cache.lease(key(PROMPT)) as lease:
        await lease.allocate(4)
        raised: list[type[BaseException]] = []

        def elsewhere() -> None:
            for call in (lambda: lease.commit(key(PROMPT)), lease.release, lambda: cache.lease(key(PROMPT))):
                try:
                    call()
                except WrongLoopError as error:
                    raised.append(type(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()  # the loop stands still meanwhile
        assert raised == [WrongLoopError] * 3
        assert lease.commit(key(PROMPT)).num_adopted == 4
        cache.check()


def test_a_call_while_the_loop_does_not_run_is_refused() -> None:
    cache = make_cache()
    leases: list[Lease] = []

    async def live(opened: asyncio.Event, stood_still: asyncio.Event) -> None:
        async with cache, cache.lease(key(PROMPT)) as lease:
            await lease.allocate(4)
            leases.append(lease)
            opened.set()
            await stood_still.wait()
            assert lease.commit(key(PROMPT)).num_adopted == 4
            cache.check()

    with asyncio.Runner() as runner:
        loop, opened, stood_still = runner.get_loop(), asyncio.Event(), asyncio.Event()
        task = loop.create_task(live(opened, stood_still))
        loop.run_until_complete(opened.wait())
        with pytest.raises(WrongLoopError):
            leases[0].commit(key(PROMPT))
        with pytest.raises(WrongLoopError):
            leases[0].release()
        stood_still.set()
        loop.run_until_complete(task)


async def test_who_opened_a_lease_is_named_by_file_and_line() -> None:
    cache = make_cache()
    async with cache:
        frame = inspect.currentframe()
        assert frame is not None
        lease, line = cache.lease(key(PROMPT)), frame.f_lineno
        assert lease._hold.where == f"{__file__}:{line}"
        await lease.__aenter__()
        with pytest.warns(ResourceWarning, match=rf"test_short_methods\.py:{line}"):
            del lease
            gc.collect()
        await anyio.lowlevel.checkpoint()
        assert cache.stats().num_leases == 0
        cache.check()


async def test_a_turn_among_many_lets_others_run() -> None:
    cache, prompt = make_cache(), key(PROMPT)
    ran: list[int] = []

    async def other() -> None:
        ran.append(1)

    async with cache, anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        for _ in range(200):
            await turn(cache, prompt)
            if ran:
                break
        assert ran
        cache.check()


async def test_in_a_run_of_turns_python_is_asked_only_to_listen_and_to_yield() -> None:
    cache = make_cache()
    async with cache:
        slow_calls = note_slow_calls(cache)
        for number in range(MAX_RUN):  # of two calls each that count
            await turn(cache, key([number, 0]))
        at_each_end = ["begin", "begin"]  # before it yields, and after
        assert slow_calls == 2 * ["begin", *at_each_end]
        cache.check()


async def test_the_background_evictor_hears_of_a_pool_that_is_low() -> None:
    cache = make_cache(low_watermark=0.5)
    async with cache:
        await turn(cache, key(range(40)))
        await anyio.wait_all_tasks_blocked()
        assert cache.stats().free >= 32
        cache.check()


@pytest.mark.parametrize(("name", "arguments"), [("send", (None,)), ("throw", (KeyError("mine"),)), ("close", ())])
async def test_a_call_that_runs_is_not_to_be_run_from_inside(name: str, arguments: tuple[Any, ...]) -> None:
    params = CacheInitParams(SlotAllocator(64), tree_core="cpp", enable_kv_cache_events=True)
    errors: list[ValueError] = []

    def meddle() -> None:
        try:
            getattr(call, name)(*arguments)
        except ValueError as error:
            errors.append(error)

    async with RadixCache(params) as cache:
        await turn(cache, key(range(60)))
        async with cache.lease(key(range(100, 130))) as lease:
            cache.take_events()
            call = lease.allocate(30)
            cache._core.on_event = meddle
            await call  # which evicts, and tells of that
            cache._core.on_event = None
            assert [str(error) for error in errors] == ["coroutine already executing"]
            assert lease.num_tokens == 30
        cache.check()


async def test_subclasses_are_asked_by_their_own_methods() -> None:
    told: list[str] = []

    class Told(Lease):
        __slots__ = ()

        async def __aenter__(self) -> Self:
            told.append("enter")
            return await super().__aenter__()

        def release(self) -> None:
            told.append("release")
            super().release()

    class Slower(Leases):
        def release(self, hold: Any) -> None:
            told.append("leases")
            super().release(hold)

    class Cache(RadixCache):
        def lease(self, key: RadixKey, **options: Any) -> Lease:
            lease = super().lease(key, **options)
            object.__setattr__(lease, "__class__", Told)
            return lease

    cache = make_cache(Cache)
    object.__setattr__(cache._leases, "__class__", Slower)
    async with cache:
        async with cache.lease(key(PROMPT)) as lease:
            await lease.allocate(4)
        assert told == ["enter", "release", "leases"]
        cache.check()


def test_keys_are_the_same_whichever_way_they_are_made() -> None:
    space = Namespace(lora="a")
    for made in (RadixKey([1, 2, 3], space), RadixKey(token_ids=[1, 2, 3], extra_key=space)):
        copy = pickle.loads(pickle.dumps(made))
        assert made == copy == RadixKey((1, 2, 3), space)
        assert hash(made) == hash(copy)
        assert (made.start, made.stop, made.item_bytes, made.num_items) == (0, 12, 4, 3)
        assert made.namespace is space
    assert len(RadixKey([])) == 0
    assert RadixKey([1]).namespace == Namespace()

    class Named(RadixKey):
        __slots__ = ("name",)

        def __init__(self, token_ids: Any) -> None:
            super().__init__(token_ids)
            self.name = "mine"

    assert (Named([1, 2]).name, Named([1, 2]) == RadixKey([1, 2])) == ("mine", True)
