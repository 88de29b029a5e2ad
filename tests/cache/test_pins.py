"""Pins: a prefix is kept while nobody uses it, for its time and within its budget, and holds up nobody for ever."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aradix import EvictParams, MatchPrefixParams, Namespace, RadixCache, SlotAllocator
from aradix.errors import CacheClosedError, InvalidKeyError, OutOfSlotsError, UsageError
from stress.device import VirtualDevice
from tests.cache.acts import begin, entered, filled, key, settled
from tests.support.caches import idle_sum, opened
from tests.tree.lockstep import CORES

pytestmark = pytest.mark.anyio


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def freed_by(cache: RadixCache, num_tokens: int) -> int:
    return (await cache.evict(EvictParams(num_tokens))).num_freed_tokens


# ---- what it keeps ----


@pytest.mark.parametrize("page_size", [1, 4])
async def test_a_pinned_prefix_stays_while_idle_until_its_time_is_over(core: str, page_size: int) -> None:
    clock = Clock()
    async with opened(32, page_size, clock=clock, tree_core=core) as cache:
        await filled(cache, key(range(8)), key(range(20, 28)))
        pin = cache.pin(key(range(8)), ttl=5)
        assert (pin.num_tokens, pin.num_matched, pin.expires, pin.ended) == (8, 8, 105.0, None)
        assert (cache.stats().pinned, cache.stats().num_pins, cache.stats().protected) == (8, 1, 8)
        assert await freed_by(cache, 100) == 8
        assert cache.peek(key(range(8))) == 8
        cache.check()
        clock.now = 104.999
        assert await freed_by(cache, 100) == 0
        clock.now = 105.0
        assert (pin.num_tokens, pin.ended) == (0, "expired")
        assert cache.peek(key(range(8))) == 8  # its end evicts nothing
        assert await freed_by(cache, 4) == 4
        assert (cache.stats().pinned, cache.stats().num_pins) == (0, 0)
        pin.release()
        assert pin.ended == "expired"


async def test_released_it_protects_no_longer_and_a_second_release_changes_nothing(core: str) -> None:
    async with opened(16, tree_core=core) as cache:
        await filled(cache, key(range(8)))
        with cache.pin(key(range(8))) as pin:
            assert pin.expires is None
            assert await freed_by(cache, 8) == 0
        assert pin.ended == "released"
        pin.release()
        assert await freed_by(cache, 8) == 8


async def test_the_part_that_is_cached_is_pinned_and_nothing_that_comes_later() -> None:
    async with opened(32) as cache:
        assert cache.pin(key(range(8))).num_tokens == 0
        assert cache.stats().num_namespaces == 0
        await filled(cache, key(range(6)))
        pin = cache.pin(key(range(10)))
        assert (pin.num_matched, pin.num_tokens) == (6, 6)
        await filled(cache, key(range(10)), key(range(3), range(50, 55)))
        assert await freed_by(cache, 32) == 9
        assert cache.peek(key(range(10))) == 6
        pin.release()


async def test_overlapping_pins_each_hold_their_own() -> None:
    clock = Clock()
    async with opened(16, clock=clock) as cache:
        await filled(cache, key(range(8)))
        long, short = cache.pin(key(range(8)), ttl=1), cache.pin(key(range(3)), ttl=9)
        assert cache.stats().pinned == 11
        clock.now += 1
        assert await freed_by(cache, 16) == 5
        assert (long.ended, short.num_tokens, cache.peek(key(range(8)))) == ("expired", 3, 3)
        short.release()


async def test_expired_it_is_as_old_as_its_last_use() -> None:
    clock = Clock()
    async with opened(32, clock=clock) as cache:
        await filled(cache, key(range(4)))
        cache.pin(key(range(4)), ttl=5)
        await filled(cache, key(range(10, 14)))
        clock.now += 5
        assert await freed_by(cache, 4) == 4
        assert (cache.peek(key(range(4))), cache.peek(key(range(10, 14)))) == (0, 4)


# ---- time ends idle protection only ----


async def test_what_a_lease_reads_outlives_the_pin_on_it(core: str) -> None:
    clock = Clock()
    async with opened(16, clock=clock, tree_core=core) as cache:
        await filled(cache, key(range(8)))
        cache.pin(key(range(8)), ttl=1)
        reader = await entered(cache, key(range(8)))
        slots = reader.slots.tolist()
        clock.now += 10
        hog = await entered(cache, key(range(50, 58)), 8)
        async with anyio.create_task_group() as tasks:
            waiting = await begin(tasks, hog.allocate, 4)
            assert waiting.waits
            assert await freed_by(cache, 16) == 0
            assert reader.slots.tolist() == slots
            reader.release()
            await settled()
            assert waiting.returned
        assert cache.peek(key(range(8))) == 4
        hog.release()


async def test_a_copy_that_runs_keeps_the_slots_after_the_pin_and_the_eviction(core: str) -> None:
    clock = Clock()
    device = VirtualDevice(1)
    stream = device.stream("copy")
    allocator = SlotAllocator(8, event_factory=device.event)
    async with opened(allocator=allocator, streams=(stream,), clock=clock, tree_core=core) as cache:
        await filled(cache, key(range(8)))
        device.run_until_idle()
        allocator.reclaim()
        cache.pin(key(range(8)), ttl=1)
        stream.launch(reads=range(1, 9), duration=50)
        clock.now += 1
        assert await freed_by(cache, 8) == 8
        assert (cache.stats().fenced, cache.stats().free) == (8, 0)
        assert allocator.alloc(8, host_visible=True) is None
        device.run_until_idle()
        allocator.reclaim()
        assert cache.stats().free == 8


# ---- budgets ----


async def test_a_budget_ends_the_pin_at_the_last_page_that_fits(core: str) -> None:
    async with opened(32, 4, tree_core=core) as cache:
        await filled(cache, key(range(16)))
        pin = cache.pin(key(range(16)), budget=11)
        assert (pin.num_tokens, pin.num_matched) == (8, 16)
        assert await freed_by(cache, 32) == 8
        assert cache.peek(key(range(16))) == 8
        assert cache.pin(key(range(16)), budget=0).num_tokens == 0
        assert cache.pin(key(range(16)), budget=3).num_tokens == 0
        pin.release()


async def test_all_pins_together_stay_within_the_budget_of_the_cache() -> None:
    clock = Clock()
    async with opened(40, pin_budget=0.5, clock=clock) as cache:
        await filled(cache, key(range(12)), key(range(20, 32)))
        first = cache.pin(key(range(12)), ttl=3)
        second = cache.pin(key(range(20, 32)))
        assert (first.num_tokens, second.num_tokens, second.num_matched) == (12, 8, 12)
        assert cache.pin(key(range(12))).num_tokens == 0
        clock.now += 3
        third = cache.pin(key(range(12)))
        assert third.num_tokens == 12
        assert cache.stats().pinned == 20
        second.release()
        third.release()


# ---- it holds up nobody for ever ----


async def test_an_expired_pin_is_found_by_whoever_needs_the_room(core: str) -> None:
    clock = Clock()
    async with opened(8, clock=clock, tree_core=core) as cache:
        await filled(cache, key(range(8)))
        cache.pin(key(range(8)), ttl=60)
        lease = await entered(cache, key(range(20, 28)))
        with pytest.raises(Exception, match="no room"):
            lease.allocate_nowait(8)
        clock.now += 60
        lease.allocate_nowait(8)
        lease.release()


async def test_who_waits_is_served_when_the_time_is_over_and_is_not_told_to_give_way() -> None:
    clock = Clock()
    async with opened(16, clock=clock) as cache:
        await filled(cache, key(range(8)))
        pin = cache.pin(key(range(8)), ttl=0.001)
        first = await entered(cache, key(range(20, 32)), 4)
        second = await entered(cache, key(range(40, 52)), 4)
        async with anyio.create_task_group() as tasks:
            waiting = [await begin(tasks, first.allocate, 4), await begin(tasks, second.allocate, 4)]
            assert all(each.waits for each in waiting)
            clock.now += 1
        assert all(each.returned for each in waiting)
        assert pin.ended == "expired"
        assert cache.stats().retracts == 0
        first.release()
        second.release()


async def test_whoever_finds_an_expired_pin_serves_those_who_waited_for_it(core: str) -> None:
    clock = Clock()
    async with opened(16, clock=clock, tree_core=core) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(8)))
        cache.pin(key(range(8)), ttl=3600)
        first = await entered(cache, key(range(20, 32)), 4)
        second = await entered(cache, key(range(40, 52)), 4)
        waiting = await begin(tasks, first.allocate, 8)
        assert waiting.waits
        clock.now += 3600
        with pytest.raises(OutOfSlotsError):
            second.allocate_nowait(4)
        await settled()
        assert waiting.returned
        first.release()
        second.release()


async def test_the_task_that_ends_pins_asks_the_clock_of_the_cache() -> None:
    clock = Clock()
    async with opened(8, clock=clock) as cache:
        await filled(cache, key(range(8)))
        late, soon = cache.pin(key(range(4)), ttl=3600), cache.pin(key(range(8)), ttl=0.001)
        async with anyio.create_task_group() as tasks:
            waiting = await begin(tasks, entered, cache, key(range(20, 24)))
            waiting.value.release()
            lease = cache.lease(key(range(20, 24)), reserve=4)
            entering = await begin(tasks, lease.__aenter__)
            await anyio.sleep(0.01)
            assert entering.waits  # the loop's time went on, the clock did not
            clock.now += 1
        assert lease.num_tokens == 4
        assert (soon.ended, late.ended) == ("expired", None)
        lease.release()
        late.release()


@pytest.mark.parametrize("keep", [True, False])
async def test_where_only_pins_without_a_time_are_in_the_way_the_youngest_are_taken_back(keep: bool) -> None:
    async with opened(12, waiters_keep_pins=keep) as cache:
        await filled(cache, key(range(4)), key(range(10, 14)), key(range(20, 24)))
        pins = [cache.pin(key(range(n, n + 4))) for n in (0, 10, 20)]
        async with cache.lease(key(range(30, 38)), reserve=8) as lease:
            assert len(lease.slots) == 8
        assert [pin.ended for pin in pins] == [None, "taken back", "taken back"]
        assert cache.peek(key(range(4))) == 4
        whole = await entered(cache, key(range(40, 52)))
        await whole.allocate(12)  # it is not too large
        assert pins[0].ended == "taken back"
        whole.release()
        assert idle_sum(cache) == 12


async def test_a_pin_is_taken_back_before_anybody_gives_way_and_not_while_somebody_may_end() -> None:
    async with opened(12) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(4)))
        pin = cache.pin(key(range(4)))
        running, asking = await entered(cache, key(range(20, 24)), 4), await entered(cache, key(range(30, 40)), 4)
        waiting = await begin(tasks, asking.allocate, 4)
        assert waiting.waits
        assert pin.ended is None  # `running` may end
        also = await begin(tasks, running.allocate, 1)
        assert pin.ended == "taken back"
        assert waiting.returned
        assert also.waits
        asking.release()
        await settled()
        assert also.returned
        assert cache.stats().retracts == 0
        running.release()


# ---- flush, gates, the end ----


async def test_a_flush_ends_the_pins_of_what_it_flushes(core: str) -> None:
    async with opened(32, tree_core=core) as cache:
        x = Namespace(lora="x")
        await filled(cache, key(range(8)), key(range(8), namespace=x))
        ours, theirs = cache.pin(key(range(8)), ttl=60), cache.pin(key(range(8), namespace=x))
        done = await cache.flush(x)
        assert (done.num_freed_tokens, done.num_held_tokens) == (8, 0)
        assert (ours.ended, theirs.ended) == (None, "flushed")
        assert (await cache.flush()).num_freed_tokens == 8
        assert ours.ended == "flushed"
        assert cache.stats().free == 32


@pytest.mark.parametrize("depth", [0, 4, 8])
async def test_an_idle_pin_holds_up_no_exclusive_access(core: str, depth: int) -> None:
    async with opened(32, tree_core=core) as cache:
        await filled(cache, key(range(8)))
        pin, at_gate = cache.pin(key(range(8)), ttl=60), cache.pin(key(range(depth)))
        with anyio.fail_after(0):
            mine = cache.exclusive(key(range(depth)))
            await mine.__aenter__()
        cache.check()
        with pytest.raises(UsageError, match="exclusively"):
            cache.pin(key(range(8)))
        if depth < 8:
            assert mine.evict() == 8 - depth
            assert pin.ended == "evicted"
        assert at_gate.ended == ("released" if depth == 0 else None)  # of 0 tokens it never held anything
        cache.check()
        await mine.__aexit__(None, None, None)
        pin.release()
        assert cache.peek(key(range(8))) == depth
        at_gate.release()
        assert cache.stats().evictable == depth


async def test_a_pin_taken_while_somebody_waits_for_a_subtree_does_not_hold_it_up() -> None:
    async with opened(32) as cache, anyio.create_task_group() as tasks:
        await filled(cache, key(range(8)))
        reader = await entered(cache, key(range(8)))
        wanting = await begin(tasks, cache.exclusive(key(range(4))).__aenter__)
        assert wanting.waits
        pin = cache.pin(key(range(8)))
        reader.release()
        await settled()
        assert wanting.returned
        cache.check()
        await wanting.value.__aexit__(None, None, None)
        pin.release()


async def test_closed_the_cache_has_no_pins() -> None:
    async with opened(8) as cache:
        await filled(cache, key(range(8)))
        pin, other = cache.pin(key(range(8)), ttl=60), cache.pin(key(range(4)))
    assert (pin.ended, other.ended) == ("closed", "closed")
    pin.release()
    with pytest.raises(CacheClosedError):
        cache.pin(key(range(8)))
    assert cache.stats().free == 8


# ---- what is shown and refused ----


async def test_pins_are_shown_in_the_snapshot() -> None:
    clock = Clock()
    async with opened(8, clock=clock) as cache:
        await filled(cache, key(range(4), namespace="x"))
        assert "pins" not in cache.snapshot()
        pin = cache.pin(key(range(4), namespace="x"), ttl=2)
        (shown,) = cache.snapshot()["pins"]
        assert shown["namespace"]["extra"] == "x"
        assert (shown["num_tokens"], shown["expires"]) == (4, 102.0)
        (namespace,) = cache.snapshot()["namespaces"]
        assert namespace["root"]["children"][0]["id"] == shown["node"]
        assert "until 102.000" in repr(pin)
        pin.release()
        assert "released" in repr(pin)


async def test_ten_thousand_pins_leave_nothing_behind() -> None:
    clock = Clock()
    async with opened(64, clock=clock) as cache:
        await filled(cache, *(key(range(n, n + 4)) for n in range(0, 40, 10)))
        for number in range(10_000):
            pin = cache.pin(key(range(number % 4 * 10, number % 4 * 10 + 4)), ttl=1 + number % 7)
            if number % 3:
                pin.release()
            clock.now += 0.01
        pins: Any = cache._leases.pins
        assert len(pins._due) < 1000
        clock.now += 10
        assert await freed_by(cache, 64) == 16
        assert (len(pins), pins._due) == (0, [])
        assert cache.stats().num_namespaces == 0


@pytest.mark.parametrize("bad", [0, -1, True, "5", float("nan"), float("inf")])
async def test_a_time_that_is_none_is_refused(bad: Any) -> None:
    async with opened(8) as cache:
        with pytest.raises(UsageError, match="ttl"):
            cache.pin(key(range(4)), ttl=bad)


async def test_what_cannot_be_pinned_is_refused() -> None:
    async with opened(8) as cache:
        wrong: Any = [1, 2]
        with pytest.raises(InvalidKeyError):
            cache.pin(wrong)
        for bad in (-1, True, 1.5):
            number: Any = bad
            with pytest.raises(UsageError, match="budget"):
                cache.pin(key(range(4)), budget=number)


async def test_a_low_level_pin_and_an_idle_one_count_apart() -> None:
    clock = Clock()
    async with opened(8, clock=clock) as cache:
        await filled(cache, key(range(8)))
        match = await cache.match_prefix(MatchPrefixParams(key(range(8))))
        cache.inc_lock_ref(match.last_device_node)
        cache.pin(key(range(8)), ttl=1)
        clock.now += 1
        assert await freed_by(cache, 8) == 0
        cache.dec_lock_ref(match.last_device_node)
        assert await freed_by(cache, 8) == 8
