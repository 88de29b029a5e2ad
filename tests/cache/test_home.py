"""A cache belongs to the loop and thread that opened it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest

from aradix import CacheInitParams, EvictParams, InsertParams, MatchPrefixParams, RadixCache, SlotAllocator
from aradix.errors import WrongLoopError
from tests.cache.acts import entered, filled, key
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


def error_of(call: Callable[[], Any]) -> BaseException | None:
    """What a call raises on a thread of its own."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else None


async def test_a_call_from_another_thread_is_refused_and_changes_nothing() -> None:
    async with opened(16) as cache:
        await filled(cache, key(range(4)))
        lease = await entered(cache, key(range(8)), 2)
        match = await cache.match_prefix(MatchPrefixParams(key(range(4))))
        place = match.last_device_node
        before = cache.stats()
        calls: list[Callable[[], Any]] = [
            lambda: cache.lease(key(1)),
            lambda: cache.exclusive(key(1)),
            lambda: cache.peek(key(1)),
            cache.stats,
            cache.check,
            cache.snapshot,
            cache.pretty_print,
            cache.evictable_size,
            cache.protected_size,
            cache.total_size,
            cache.take_events,
            lambda: cache.inc_lock_ref(place),
            lambda: cache.dec_lock_ref(place),
            lambda: lease.slots,
            lambda: lease.node,
            lambda: lease.allocate_nowait(1),
            lambda: lease.commit(key(range(6))),
            lambda: lease.truncate(4),
            lease.fork,
            lambda: lease.used_on(object()),
            lease.release,
            lambda: lease.allocate(1).send(None),
            lambda: cache.evict(EvictParams(1)).send(None),
            lambda: cache.flush().send(None),
            lambda: cache.match_prefix(MatchPrefixParams(key(1))).send(None),
            lambda: cache.insert(InsertParams(key(1), [1])).send(None),
        ]
        for call in calls:
            assert isinstance(error_of(call), WrongLoopError)
        assert cache.stats() == before
        assert len(lease.slots) == 6  # it is still held
        lease.release()


async def test_a_call_from_another_loop_is_refused(anyio_backend: tuple[str, dict[str, Any]]) -> None:
    async with opened(16) as cache:
        lease = await entered(cache, key(range(4)), 2)

        async def elsewhere() -> None:
            for call in (cache.stats, lambda: cache.lease(key(1)), lease.release):
                with pytest.raises(WrongLoopError):
                    call()
            with pytest.raises(WrongLoopError):
                await cache.evict(EvictParams(1))

        for backend in ("asyncio", "trio"):
            assert error_of(partial(anyio.run, elsewhere, backend=backend)) is None
        assert anyio_backend
        lease.release()


def test_a_call_after_the_loop_has_ended_is_refused_but_not_forgotten() -> None:
    allocator = SlotAllocator(8)
    kept: list[Any] = []

    async def main() -> None:
        cache = RadixCache(CacheInitParams(allocator=allocator))
        async with cache:
            kept.extend((cache, await entered(cache, key(range(4)), 4)))

    for backend in ("asyncio", "trio"):
        anyio.run(main, backend=backend)
        cache, lease = kept
        lease.release()  # closed, and on the home thread: whatever a lease has left can be given back
        assert cache.stats().num_slots == 8
        assert allocator.available_size() == 8
        kept.clear()


test_a_call_after_the_loop_has_ended_is_refused_but_not_forgotten.pytestmark = []  # type: ignore[attr-defined]
