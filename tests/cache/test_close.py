"""Opening and closing: what waits is told, what is held stays usable, and errors arrive as what they are."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aradix import CacheInitParams, EvictParams, InsertParams, MatchPrefixParams, RadixCache, SlotAllocator
from aradix.errors import CacheClosedError, InvariantError, LeaseReleasedError, UsageError
from tests.cache.acts import begin, entered, filled, key, settled
from tests.support.caches import idle_sum, opened

pytestmark = pytest.mark.anyio


def closed_cache(num_slots: int = 8) -> RadixCache:
    return RadixCache(CacheInitParams(allocator=SlotAllocator(num_slots), low_watermark=0, high_watermark=0))


async def test_nothing_works_before_the_cache_is_opened() -> None:
    cache = closed_cache()
    for call in (
        lambda: cache.lease(key(1)),
        lambda: cache.peek(key(1)),
        lambda: cache.exclusive(key(1)),
        cache.stats,
        cache.check,
        cache.snapshot,
        cache.evictable_size,
        cache.take_events,
        cache.pretty_print,
    ):
        with pytest.raises(UsageError, match="open the cache"):
            call()
    for wait in (cache.match_prefix(MatchPrefixParams(key(1))), cache.evict(EvictParams(1)), cache.flush()):
        with pytest.raises(UsageError, match="open the cache"):
            await wait


async def test_a_cache_is_opened_once() -> None:
    cache = closed_cache()
    async with cache:
        with pytest.raises(UsageError, match="opened already"):
            await cache.__aenter__()
    with pytest.raises(UsageError, match="opened already"):
        await cache.__aenter__()


async def test_what_takes_or_gives_slots_is_refused_after_closing() -> None:
    allocator = SlotAllocator(8)
    async with opened(allocator=allocator) as cache:
        await filled(cache, key(range(4)))
        lease = cache.lease(key(range(4)))
    outside = allocator.alloc(2)
    with pytest.raises(CacheClosedError):
        cache.lease(key(1))
    with pytest.raises(CacheClosedError):
        await lease.__aenter__()
    with pytest.raises(CacheClosedError):
        cache.exclusive(key(1))
    for wait in (
        cache.match_prefix(MatchPrefixParams(key(1))),
        cache.insert(InsertParams(key(1, 2), outside)),
        cache.evict(EvictParams(1)),
        cache.flush(),
    ):
        with pytest.raises(CacheClosedError):
            await wait
    assert cache.stats().num_slots == 8
    assert cache.peek(key(range(4))) == 0
    assert outside is not None
    allocator.free(outside)
    assert allocator.available_size() == 8


async def test_closing_gives_back_what_was_cached() -> None:
    allocator = SlotAllocator(16, 4)
    async with opened(allocator=allocator) as cache:
        await filled(cache, key(range(8)), key(range(4), range(50, 54)))
    assert allocator.available_size() == 16


async def test_a_lease_held_over_the_end_stays_usable_until_released() -> None:
    allocator = SlotAllocator(16)
    async with opened(allocator=allocator) as cache:
        await filled(cache, key(range(4)))
        lease = await entered(cache, key(range(8)), 4)
    slots = lease.slots.tolist()
    assert len(slots) == 8
    done = lease.commit(key(range(8)))
    assert done.num_adopted == 0
    assert lease.slots.tolist() == slots
    with pytest.raises(CacheClosedError):
        await lease.allocate(1)
    with pytest.raises(CacheClosedError):
        lease.allocate_nowait(1)
    with pytest.raises(CacheClosedError):
        lease.fork()
    lease.truncate(6)
    cache.check()
    assert idle_sum(cache) == 16
    lease.release()
    lease.release()
    assert allocator.available_size() == 16
    cache.check()
    with pytest.raises(LeaseReleasedError):
        _ = lease.slots


async def test_everybody_who_waits_is_told_of_the_end() -> None:
    cache = closed_cache(8)
    async with anyio.create_task_group() as tasks:
        await cache.__aenter__()
        await filled(cache, key(range(2)))
        hog = await entered(cache, key(range(10, 18)), 6)
        grower = await entered(cache, key(range(2)))
        growth = await begin(tasks, grower.allocate, 4)
        admission = await begin(tasks, cache.lease(key(range(8)), reserve=8).__aenter__)
        owner = await begin(tasks, cache.exclusive(key(range(2))).__aenter__)
        walker = await begin(tasks, cache.lease(key(range(20, 24))).__aenter__)
        assert walker.returned
        match = await begin(tasks, cache.exclusive(key(range(2))).__aenter__)
        for act in (growth, admission, owner, match):
            assert act.waits
        cache._close()
        await settled()
        for act in (growth, admission, match, owner):
            assert isinstance(act.error, CacheClosedError), act.error
        for lease in (hog, grower, walker.value):
            lease.release()
        assert cache._params.allocator.available_size() == 8
        await cache.__aexit__(None, None, None)


async def test_closing_under_a_gate_and_leaving_it_later_is_fine() -> None:
    allocator = SlotAllocator(8)
    cache = RadixCache(CacheInitParams(allocator=allocator))
    async with cache:
        await filled(cache, key(range(4)))
        mine = cache.exclusive(key(range(2)))
        await mine.__aenter__()
    await mine.__aexit__(None, None, None)
    assert allocator.available_size() == 8
    cache.check()


# ---- errors ----


class UsersError(Exception):
    pass


async def test_the_users_own_exception_is_not_wrapped() -> None:
    with pytest.raises(UsersError):
        async with opened(8) as cache:
            await filled(cache, key(range(4)))
            raise UsersError


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_is_not_wrapped_either(kind: type[BaseException]) -> None:
    caught: BaseException | None = None
    try:
        async with opened(8):
            raise kind
    except BaseException as error:
        caught = error
    assert type(caught) is kind


async def test_a_group_of_the_users_is_handed_on_as_it_is() -> None:
    group = ExceptionGroup("mine", [UsersError()])
    with pytest.raises(ExceptionGroup) as caught:
        async with opened(8):
            raise group
    assert caught.value is group


async def test_the_users_exception_survives_a_cancellation_around_it() -> None:
    with anyio.CancelScope() as scope:
        with pytest.raises(UsersError):
            async with opened(8):
                scope.cancel()
                raise UsersError
    async with opened(8) as cache:
        cache.check()


async def test_a_cancellation_from_outside_goes_through_and_gives_all_back() -> None:
    allocator = SlotAllocator(8)
    with anyio.CancelScope() as scope:
        async with opened(allocator=allocator) as cache:
            async with cache.lease(key(range(8))) as lease:
                await lease.allocate(8)
                scope.cancel()
                await checkpoint()
    assert scope.cancelled_caught
    assert allocator.available_size() == 8


class Weird(RuntimeError):
    pass


class BrokenPolicy:
    """Ranks by recency until told to break."""

    broken = False

    def rank(self, node: object) -> int:
        if self.broken:
            raise Weird("no rank today")
        return node.last_access  # type: ignore[attr-defined, no-any-return]


async def test_a_policy_that_raises_ends_the_cache_and_reaches_the_user() -> None:
    allocator = SlotAllocator(8)
    policy = BrokenPolicy()
    with pytest.RaisesGroup(Weird):
        async with opened(allocator=allocator, eviction_policy=policy) as cache:
            await filled(cache, key(range(4)))
            policy.broken = True
            await filled(cache, key(range(10, 14)))
            for _ in range(100):
                await cache.evict(EvictParams(1))
                await checkpoint()
            pytest.fail("the cache goes on as if nothing had happened")
    assert allocator.available_size() == 8


async def test_a_failure_in_the_background_comes_with_the_users_error_if_it_was_first() -> None:
    with pytest.RaisesGroup(Weird):
        async with opened(8) as cache:
            cache._calls.fail(Weird())
            await settled()
            raise UsersError


async def test_a_failed_audit_stops_all_further_work_but_not_the_way_out() -> None:
    allocator = SlotAllocator(8)
    cache = RadixCache(CacheInitParams(allocator=allocator, tree_core="python"))
    async with cache:
        lease = await entered(cache, key(range(4)), 4)
        cache._core.evictable_tokens += 1  # type: ignore[misc]
        with pytest.raises(InvariantError, match="evictable_tokens"):
            cache.check()
        cache._core.evictable_tokens -= 1  # type: ignore[misc]
        for call in (lambda: cache.lease(key(1)), cache.stats, cache.check, lambda: lease.commit(key(range(4)))):
            with pytest.raises(InvariantError, match="refuses further work"):
                call()
        with pytest.raises(InvariantError):
            await lease.allocate(1)
        with pytest.raises(InvariantError):
            await cache.evict(EvictParams(1))
        lease.release()
    assert allocator.available_size() == 8


@pytest.mark.parametrize("call", ["lease", "reserve", "match_prefix", "insert", "exclusive"])
@pytest.mark.parametrize("full", [True, False])
async def test_a_gate_that_opens_in_the_moment_of_closing_lets_nobody_into_a_closed_cache(
    call: str, full: bool
) -> None:
    allocator = SlotAllocator(16)
    cache = RadixCache(CacheInitParams(allocator=allocator, low_watermark=0, high_watermark=0))
    async with anyio.create_task_group() as tasks:
        async with cache:
            await filled(cache, key(range(4)))
            outside = allocator.alloc(6)
            assert outside is not None
            hog = await entered(cache, key(range(50, 56)), 6 if full else 0)
            mine = cache.exclusive(key(range(2)))
            await mine.__aenter__()
            calls = {
                "lease": cache.lease(key(range(4))).__aenter__,
                "reserve": cache.lease(key(range(12)), reserve=12).__aenter__,
                "match_prefix": lambda: cache.match_prefix(MatchPrefixParams(key(range(4)))),
                "insert": lambda: cache.insert(InsertParams(key(range(2), range(90, 94)), outside)),
                "exclusive": cache.exclusive(key(range(4))).__aenter__,
            }
            act = await begin(tasks, calls[call])
            assert act.waits
            await mine.__aexit__(None, None, None)  # lets it pass, but the cache is closed before it wakes
        await settled()
        assert not act.waits, "it waits for ever in a cache that is closed"
        tasks.cancel_scope.cancel()
    if act.error is not None:
        assert isinstance(act.error, CacheClosedError)
    elif call in ("lease", "reserve"):
        act.value.release()
    elif call == "exclusive":
        await act.value.__aexit__(None, None, None)
    if not (call == "insert" and act.returned):
        allocator.free(outside)
    hog.release()
    cache.check()
    assert allocator.available_size() == 16
