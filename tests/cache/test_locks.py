"""Gates: a subtree for oneself, who waits at one, and that nothing deadlocks there."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aradix import EvictParams, Lease, Namespace, RadixCache, RadixKey
from tests.cache.acts import Act, begin, entered, filled, key, settled
from tests.support.caches import opened

pytestmark = pytest.mark.anyio

LONG = key(range(12))
PLACES = {
    "root": key(),
    "middle": key(range(4)),
    "leaf": key(range(12)),
    "partial edge": key(range(6)),
    "beyond what is cached": key(range(12), 99),
}


async def tree(cache: RadixCache) -> None:
    """4 tokens, then 8 more in one branch and 4 in another."""
    await filled(cache, LONG, key(range(4), range(50, 54)))


async def hold_exclusive(cache: RadixCache, place: RadixKey, end: anyio.Event, order: list[str], name: str) -> None:
    async with cache.exclusive(place):
        order.append(name)
        await end.wait()


async def open_lease(cache: RadixCache, opened_with: RadixKey) -> Lease:
    return await cache.lease(opened_with).__aenter__()


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
async def test_a_free_subtree_is_granted_at_once(place: RadixKey) -> None:
    async with opened(64) as cache:
        await tree(cache)
        before = cache.total_size()
        async with cache.exclusive(place) as mine:
            assert mine.num_matched == min(len(place), 12)
            assert len(mine.slots) == mine.num_matched
            cache.check()
        cache.check()
        assert cache.total_size() == before
        assert cache.stats().protected == 0
        assert cache.peek(LONG) == 12


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
async def test_a_granted_gate_waits_for_the_leases_below_and_keeps_new_ones_out(place: RadixKey) -> None:
    async with opened(64) as cache, anyio.create_task_group() as tasks:
        await tree(cache)
        reader = await entered(cache, LONG)
        end, order = anyio.Event(), list[str]()
        owner = await begin(tasks, hold_exclusive, cache, place, end, order, "owner")
        assert owner.waits
        assert order == []
        late = await begin(tasks, open_lease, cache, LONG)
        assert late.waits
        cache.check()
        reader.release()
        await settled()
        assert order == ["owner"]
        assert late.waits
        cache.check()
        end.set()
        await settled()
        assert late.returned
        assert late.value.num_matched == 12
        late.value.release()


async def test_a_lease_above_the_gate_or_beside_it_is_not_concerned() -> None:
    async with opened(64) as cache:
        await tree(cache)
        above = await entered(cache, key(range(2)))
        beside = await entered(cache, key(range(4), range(50, 54)))
        other_namespace = await entered(cache, key(range(12), namespace="other"), 4)
        async with cache.exclusive(key(range(6))):
            (await entered(cache, key(range(4), range(50, 54)))).release()
            async with cache.lease(key(range(3))) as lease:
                assert lease.num_matched == 3
            other_namespace.commit(key(range(4), namespace="other"))
            cache.check()
        for lease in (above, beside, other_namespace):
            lease.release()


@pytest.mark.parametrize("place", list(PLACES.values())[:4], ids=list(PLACES)[:4])
async def test_nothing_below_a_granted_gate_is_evicted(place: RadixKey) -> None:
    async with opened(64) as cache:
        await tree(cache)
        async with cache.exclusive(place) as mine:
            result = await cache.evict(EvictParams(64))
            assert cache.peek(LONG) >= mine.num_matched
            below = 12 if len(place) > 4 else 16
            assert result.num_freed_tokens == 16 - below
            assert cache.stats().protected == below
            cache.check()
        assert cache.stats().evictable == below


@pytest.mark.parametrize("place", list(PLACES.values())[:4], ids=list(PLACES)[:4])
async def test_the_owner_frees_everything_below_and_the_path_stays(place: RadixKey) -> None:
    async with opened(64) as cache:
        await tree(cache)
        async with cache.exclusive(place) as mine:
            depth = mine.num_matched
            freed = mine.evict()
            assert freed == {0: 16, 4: 12, 6: 6, 12: 0}[depth]
            assert mine.evict() == 0
            cache.check()
        assert cache.peek(LONG) == depth
        assert cache.stats().free == 64 - (16 - freed)


async def test_walkers_wait_first_come_first_served() -> None:
    async with opened(64) as cache, anyio.create_task_group() as tasks:
        await tree(cache)
        ends = [anyio.Event() for _ in range(6)]
        order: list[str] = []
        for i, end in enumerate(ends):
            await begin(tasks, hold_exclusive, cache, LONG, end, order, str(i))
        for i, end in enumerate(ends):
            assert order == [str(j) for j in range(i + 1)]
            end.set()
            await settled()


async def test_readers_that_waited_longer_go_before_the_next_owner() -> None:
    async with opened(64) as cache, anyio.create_task_group() as tasks:
        await tree(cache)
        ends = [anyio.Event(), anyio.Event()]
        order: list[str] = []
        await begin(tasks, hold_exclusive, cache, LONG, ends[0], order, "first")
        reader = await begin(tasks, open_lease, cache, LONG)
        await begin(tasks, hold_exclusive, cache, LONG, ends[1], order, "second")
        ends[0].set()
        await settled()
        assert reader.returned
        assert order == ["first"]
        reader.value.release()
        await settled()
        assert order == ["first", "second"]
        ends[1].set()


async def test_an_owner_who_comes_back_at_once_goes_behind_those_who_wait() -> None:
    async with opened(64) as cache, anyio.create_task_group() as tasks:
        await tree(cache)
        rounds = 0
        stop = False

        async def again_and_again() -> None:
            nonlocal rounds
            while not stop and rounds < 1000:
                async with cache.exclusive(LONG):
                    rounds += 1
                    await checkpoint()

        tasks.start_soon(again_and_again)
        await checkpoint()
        reader = await begin(tasks, open_lease, cache, LONG)
        for _ in range(20):
            if reader.returned:
                break
            await settled()
        stop = True
        await settled()
        assert reader.returned
        reader.value.release()
        assert rounds < 500


async def test_a_cancelled_exclusive_opens_its_gate_again() -> None:
    async with opened(64) as cache, anyio.create_task_group() as tasks:
        await tree(cache)
        reader = await entered(cache, LONG)
        end, order = anyio.Event(), list[str]()
        owner = await begin(tasks, hold_exclusive, cache, key(range(4)), end, order, "owner")
        late = await begin(tasks, open_lease, cache, LONG)
        assert late.waits
        owner.scope.cancel()
        await settled()
        assert late.returned
        assert order == []
        cache.check()
        late.value.release()
        reader.release()
        assert cache.stats().protected == 0


async def test_cancelled_in_the_tick_of_its_grant_it_opens_the_gate_again() -> None:
    async with opened(64) as cache, anyio.create_task_group() as tasks:
        await tree(cache)
        reader = await entered(cache, LONG)
        end, order = anyio.Event(), list[str]()
        owner = await begin(tasks, hold_exclusive, cache, LONG, end, order, "owner")
        late = await begin(tasks, open_lease, cache, LONG)
        reader.release()
        owner.scope.cancel()
        await settled()
        assert late.returned
        cache.check()
        late.value.release()
        assert cache.stats().protected == 0


@pytest.mark.parametrize("outer", [0, 4])
@pytest.mark.parametrize("inner", [6, 12])
@pytest.mark.parametrize("inner_first", [True, False])
async def test_nested_gates_take_turns(outer: int, inner: int, inner_first: bool) -> None:
    async with opened(64) as cache, anyio.create_task_group() as tasks:
        await tree(cache)
        places = [("inner", key(range(inner))), ("outer", key(range(outer)))]
        if not inner_first:
            places.reverse()
        ends = {name: anyio.Event() for name, _ in places}
        order: list[str] = []
        acts = [await begin(tasks, hold_exclusive, cache, place, ends[name], order, name) for name, place in places]
        assert order == [places[0][0]]
        cache.check()
        ends[places[0][0]].set()
        await settled()
        assert order == [name for name, _ in places]
        ends[places[1][0]].set()
        await settled()
        assert all(act.returned for act in acts)


async def test_many_gates_across_one_path_all_get_their_turn() -> None:
    async with opened(64) as cache, anyio.create_task_group() as tasks:
        await tree(cache)
        reader = await entered(cache, LONG)
        order: list[str] = []
        acts: list[Act] = []
        for i, depth in enumerate((6, 0, 12, 4, 6, 0, 8, 2)):
            end = anyio.Event()
            end.set()
            acts.append(await begin(tasks, hold_exclusive, cache, key(range(depth)), end, order, str(i)))
        assert not any(act.returned for act in acts)
        reader.release()
        await settled()
        await settled()
        assert all(act.returned for act in acts)
        assert len(order) == 8


async def test_siblings_are_granted_side_by_side() -> None:
    async with opened(64) as cache, anyio.create_task_group() as tasks:
        await tree(cache)
        end, order = anyio.Event(), list[str]()
        await begin(tasks, hold_exclusive, cache, LONG, end, order, "left")
        await begin(tasks, hold_exclusive, cache, key(range(4), range(50, 54)), end, order, "right")
        await begin(tasks, hold_exclusive, cache, key(namespace=Namespace(lora="x")), end, order, "elsewhere")
        assert order == ["left", "right", "elsewhere"]
        end.set()
