"""Cancelled at the k-th suspension, for every k: nothing is lost, nobody waits on, and the call can be made again.

`Counted` stands between a coroutine and the loop and tells of the k-th suspension; what makes room comes before the
cancellation, after it, or not at all.
"""

from __future__ import annotations

import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aradix import EvictParams, InsertParams, MatchPrefixParams, RadixCache, SlotAllocator
from tests.cache.acts import Act, begin, entered, filled, key, settled
from tests.support.caches import idle_sum, opened
from tests.support.tiers import TieredScene, opened_tiers

pytestmark = pytest.mark.anyio

MAX_SUSPENSIONS = 3
NUM_SLOTS = 16


class Counted:
    """Awaits a coroutine and calls `at_suspension(k)` each time before it suspends."""

    def __init__(self, inner: Awaitable[Any], at_suspension: Callable[[int], None]) -> None:
        self._inner = inner
        self._at_suspension = at_suspension
        self.count = 0

    @types.coroutine
    def run(self) -> Generator[Any, Any, Any]:
        steps = self._inner.__await__()
        try:
            yielded = next(steps)
            while True:
                self.count += 1
                self._at_suspension(self.count)
                try:
                    sent = yield yielded
                except BaseException as error:
                    yielded = steps.throw(error)
                else:
                    yielded = steps.send(sent)
        except StopIteration as done:
            return done.value


class Scene:
    """A cache under pressure: 4 tokens cached, 12 slots in a lease that can let go, and what the call under test is."""

    def __init__(self, cache: RadixCache, allocator: SlotAllocator) -> None:
        self.cache = cache
        self.allocator = allocator
        self.let_go: Callable[[], None] = lambda: None
        self.mine: list[Any] = []

    def drop_mine(self) -> None:
        for lease in self.mine:
            lease.release()


@asynccontextmanager
async def pressed() -> AsyncIterator[Scene]:
    allocator = SlotAllocator(NUM_SLOTS)
    async with opened(allocator=allocator) as cache:
        await filled(cache, key(range(4)))
        hog = await entered(cache, key(range(50, 62)), 12)
        scene = Scene(cache, allocator)
        scene.let_go = hog.release
        yield scene
        hog.release()


@asynccontextmanager
async def gated() -> AsyncIterator[Scene]:
    allocator = SlotAllocator(NUM_SLOTS)
    async with opened(allocator=allocator) as cache:
        await filled(cache, key(range(4)))
        end = anyio.Event()
        async with anyio.create_task_group() as tasks:

            async def own() -> None:
                async with cache.exclusive(key(range(2))):
                    await end.wait()

            tasks.start_soon(own)
            await settled()
            scene = Scene(cache, allocator)
            scene.let_go = end.set
            yield scene
            end.set()


@asynccontextmanager
async def occupied() -> AsyncIterator[Scene]:
    allocator = SlotAllocator(NUM_SLOTS)
    async with opened(allocator=allocator) as cache:
        await filled(cache, key(range(4)))
        reader = await entered(cache, key(range(4)))
        scene = Scene(cache, allocator)
        scene.let_go = reader.release
        yield scene
        reader.release()


@asynccontextmanager
async def led() -> AsyncIterator[Scene]:
    """Somebody computes what is asked for, until the scene lets go; who takes over finds half of it."""
    allocator = SlotAllocator(NUM_SLOTS)
    async with opened(allocator=allocator) as cache:
        async with anyio.create_task_group() as tasks:  # a task does not wait for what it leads itself
            leading = await begin(tasks, lambda: entered(cache, key(range(8)), 8, join=True))
        leading.value.commit(key(range(4)))
        scene = Scene(cache, allocator)
        scene.let_go = leading.value.release
        yield scene
        leading.value.release()


@asynccontextmanager
async def tired() -> AsyncIterator[Scene]:
    """A cache whose next call lets others go first."""
    allocator = SlotAllocator(NUM_SLOTS)
    async with opened(allocator=allocator) as cache:
        await filled(cache, key(range(4)))
        cache._calls._run_length = 10**6
        yield Scene(cache, allocator)


@asynccontextmanager
async def stored() -> AsyncIterator[tuple[Scene, TieredScene]]:
    """The first 4 tokens are on the host alone."""
    async with opened_tiers(NUM_SLOTS, at_once=False, write_policy="write_back") as tiers:
        await tiers.fill(key(range(4)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tiers.cache.evict, EvictParams(4))
            await settled()
            tiers.copier.finish_all()
        scene = Scene(tiers.cache, tiers.cache._params.allocator)

        def let_go() -> None:
            tiers.copier.at_once = True
            tiers.copier.finish_all()

        scene.let_go = let_go
        yield scene, tiers


@asynccontextmanager
async def loading() -> AsyncIterator[Scene]:
    """A load takes until the scene lets go."""
    async with stored() as (scene, _):
        yield scene


@asynccontextmanager
async def crowded() -> AsyncIterator[Scene]:
    """A load waits for slots until the scene lets go."""
    async with stored() as (scene, tiers):
        tiers.copier.at_once = True
        hog = await entered(scene.cache, key(range(50, 64)), 14)
        scene.let_go = hog.release
        yield scene
        hog.release()


@asynccontextmanager
async def writing_back() -> AsyncIterator[Scene]:
    """Room has to be written back, until the scene lets go."""
    async with stored() as (scene, tiers):
        await tiers.fill(key(range(30, 46)))
        yield scene
        tiers.copier.finish_all()


async def evict(scene: Scene) -> None:
    await scene.cache.evict(EvictParams(8))


async def lease(scene: Scene) -> None:
    async with scene.cache.lease(key(range(8))):
        pass


async def reserve(scene: Scene) -> None:
    async with scene.cache.lease(key(range(8)), reserve=8) as held:
        held.commit(key(range(6)))


async def join(scene: Scene) -> None:
    async with scene.cache.lease(key(range(10)), join=True) as held:
        assert held.num_matched == 4
        await held.allocate(6)


async def join_and_reserve(scene: Scene) -> None:
    async with scene.cache.lease(key(range(10)), join=True, reserve=10) as held:
        assert held.num_matched == 4


async def allocate(scene: Scene) -> None:
    async with scene.cache.lease(key(range(8))) as held:
        await held.allocate(8)


async def allocate_more(scene: Scene) -> None:
    """A lease outlives its cancelled growth."""
    if not scene.mine:
        scene.mine.append(await entered(scene.cache, key(range(8))))
    before = scene.mine[0].num_tokens
    try:
        await scene.mine[0].allocate(5)
    except BaseException:
        assert scene.mine[0].num_tokens == before
        assert len(scene.mine[0].slots) == before
        raise


async def exclusive(scene: Scene) -> None:
    async with scene.cache.exclusive(key(range(3))) as mine:
        assert mine.num_matched == 3


async def match(scene: Scene) -> None:
    await scene.cache.match_prefix(MatchPrefixParams(key(range(8))))


async def insert(scene: Scene) -> None:
    slots = scene.allocator.alloc(6)
    if slots is None:
        return
    try:
        done = await scene.cache.insert(InsertParams(key(range(2), range(70, 74)), slots))
    except BaseException:
        scene.allocator.free(slots)  # all of it is the caller's still
        raise
    scene.allocator.free(done.duplicates)


CASES = [
    (pressed, reserve),
    (pressed, allocate),
    (pressed, allocate_more),
    (gated, lease),
    (gated, reserve),
    (gated, exclusive),
    (gated, match),
    (gated, insert),
    (occupied, exclusive),
    (led, join),
    (led, join_and_reserve),
    (loading, lease),
    (loading, reserve),
    (crowded, lease),
    (crowded, reserve),
    (writing_back, lease),
    (writing_back, reserve),
    (writing_back, allocate),
    (writing_back, evict),
    (tired, lease),
    (tired, reserve),
    (tired, allocate),
    (tired, match),
    (tired, insert),
]
names = [f"{call.__name__}-{scene.__name__}" for scene, call in CASES]


@pytest.mark.parametrize(("make_scene", "call"), CASES, ids=names)
@pytest.mark.parametrize("order", ["cancel, let go", "let go, cancel", "cancel only"])
@pytest.mark.parametrize("suspension", range(1, MAX_SUSPENSIONS + 1))
async def test_a_call_cancelled_anywhere_leaves_no_trace(
    make_scene: Callable[[], Any], call: Callable[[Scene], Awaitable[None]], order: str, suspension: int
) -> None:
    async with make_scene() as scene:
        cache = scene.cache
        act = Act()

        reached = anyio.Event()

        def count(so_far: int) -> None:
            if so_far == suspension:
                reached.set()

        async def meddle() -> None:
            # In a task of its own: no loop bears being called in the middle of a suspension.
            await reached.wait()
            if order == "let go, cancel":
                scene.let_go()
            act.scope.cancel()
            if order == "cancel, let go":
                scene.let_go()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(meddle)
            tasks.start_soon(act.run, Counted(call(scene), count).run)
            await settled()
            if act.waits:
                scene.let_go()  # there are more suspensions to come to
                await settled()
            assert not act.waits, "it still runs, or swallowed its cancellation"
            assert act.error is None
            tasks.cancel_scope.cancel()
        await tidy(scene)
        scene.let_go()
        await settled()
        await call(scene)
        scene.drop_mine()
        await tidy(scene)
        stats = cache.stats()
        assert stats.num_leases == 0
        assert stats.protected == 0
        assert stats.leased == 0
        assert idle_sum(cache) == NUM_SLOTS


@pytest.mark.parametrize(("make_scene", "call"), CASES, ids=names)
@pytest.mark.parametrize("order", ["cancel, let go", "let go, cancel"])
async def test_a_call_cancelled_while_it_waits_leaves_no_trace(
    make_scene: Callable[[], Any], call: Callable[[Scene], Awaitable[None]], order: str
) -> None:
    async with make_scene() as scene, anyio.create_task_group() as tasks:
        act = Act()
        tasks.start_soon(act.run, call, scene)
        await settled()
        if order == "let go, cancel":
            scene.let_go()
        act.scope.cancel()
        if order == "cancel, let go":
            scene.let_go()
        await settled()
        assert not act.waits
        assert act.error is None
        await tidy(scene)
        await call(scene)
        scene.drop_mine()
        assert scene.cache.stats().protected == 0
        assert idle_sum(scene.cache) == NUM_SLOTS


async def tidy(scene: Scene) -> None:
    scene.cache.check()
    assert scene.cache.stats().num_slot_waiters == 0
    assert scene.cache._gates.num_walkers == 0
    assert not scene.cache._leases.joins.joiners


@pytest.mark.parametrize(("make_scene", "call"), CASES, ids=names)
async def test_a_call_begun_in_a_cancelled_scope_leaves_no_trace(
    make_scene: Callable[[], Any], call: Callable[[Scene], Awaitable[None]]
) -> None:
    async with make_scene() as scene:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await call(scene)
        scene.drop_mine()
        await tidy(scene)


WAITING = [case for case in CASES if case[0] is not tired]


@pytest.mark.parametrize(("make_scene", "call"), WAITING, ids=[name for name in names if "tired" not in name])
async def test_a_coroutine_that_is_closed_while_it_waits_leaves_no_trace(
    make_scene: Callable[[], Any], call: Callable[[Scene], Awaitable[None]]
) -> None:
    """As when a task is thrown away: GeneratorExit comes out of the await instead of a cancellation."""
    async with make_scene() as scene:
        inner: Any = call(scene)
        inner.send(None)
        inner.close()
        await tidy(scene)
        scene.let_go()
        await settled()
        await call(scene)
        scene.drop_mine()
        await tidy(scene)
