"""`check()` finds each invariant that is broken on purpose, and says which."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from aradix import CacheInitParams, MatchPrefixParams, RadixCache, SlotAllocator
from aradix.cache.locks import StandingGate
from aradix.errors import InvariantError
from aradix.tree.protocol import Gate
from tests.cache.acts import begin, entered, filled, key, settled

pytestmark = pytest.mark.anyio


class Scene:
    """A cache with two branches, a lease on one of them, and its tree laid open."""

    def __init__(self, cache: RadixCache, lease: Any) -> None:
        self.cache = cache
        core: Any = cache._core
        self.core = core
        self.pool: Any = cache._pool
        self.hold: Any = lease._hold
        (self.root,) = core._roots.values()
        (self.top,) = self.root.children.values()
        self.pinned, self.leaf = self.top.children.values()


def change_slots(scene: Scene, change: Any) -> None:
    slots = scene.hold.own.copy()
    num_own = scene.hold.num_own
    change(slots)
    scene.hold.cut(0)
    scene.hold.add(slots, num_own)


def lose_a_slot(scene: Scene) -> None:
    scene.hold.take_front(1)


def use_a_slot_twice(scene: Scene) -> None:
    change_slots(scene, lambda slots: slots.__setitem__(0, scene.leaf.slots[0]))


def swap_a_slot_for_a_free_one(scene: Scene) -> None:
    free = scene.cache._params.allocator.pages_in("free")
    change_slots(scene, lambda slots: slots.__setitem__(0, int(free[0])))


def count_a_slot_too_many(scene: Scene) -> None:
    scene.pool.num_held += 1


def forget_a_lease(scene: Scene) -> None:
    scene.cache._leases.holds.clear()


def pin_once_too_often(scene: Scene) -> None:
    scene.leaf.lock_ref += 1


def pin_a_child_alone(scene: Scene) -> None:
    scene.pinned.lock_ref += 1


def unpin_a_parent(scene: Scene) -> None:
    scene.top.lock_ref -= 1


def forget_an_evictable_leaf(scene: Scene) -> None:
    scene.core._evictable.discard(scene.leaf)


def index_a_pinned_leaf(scene: Scene) -> None:
    scene.core._evictable.put(scene.pinned, 0)


def miscount(name: str) -> Any:
    def act(scene: Scene) -> None:
        setattr(scene.core, name, getattr(scene.core, name) + 1)

    return act


def key_a_child_wrongly(scene: Scene) -> None:
    first = next(iter(scene.top.children))
    scene.leaf.tokens[: len(first)] = first


def leave_a_phantom_child(scene: Scene) -> None:
    scene.leaf.tokens.clear()
    del scene.leaf.slots[:]
    scene.core.evictable_tokens -= 4


def mix_namespaces(scene: Scene) -> None:
    scene.leaf.namespace = scene.leaf.namespace._replace(salt="x")


def move_the_end_of_a_node(scene: Scene) -> None:
    scene.leaf.depth += 4


def hold_what_is_free(scene: Scene) -> None:
    scene.cache._params.allocator.free_held(scene.hold.own[:1].copy())


def split_without_need(scene: Scene) -> None:
    scene.core._split(scene.leaf, len(scene.leaf.tokens) // 2)


def keep_an_empty_namespace(scene: Scene) -> None:
    scene.core._new_root(scene.root.namespace._replace(salt="empty"))


def gate_without_a_pin(scene: Scene) -> None:
    scene.leaf.gate = Gate.GRANTED


def keep_bytes_of_tokens_that_are_gone(scene: Scene) -> None:
    scene.leaf.tokens += np.int32(7).tobytes()


def keep_a_lease_that_has_ended(scene: Scene) -> None:
    scene.hold.released = True


BREAKS = {
    lose_a_slot: "I1",
    use_a_slot_twice: "I1",
    count_a_slot_too_many: "I1",
    forget_a_lease: "I1",
    swap_a_slot_for_a_free_one: "I5",
    hold_what_is_free: "I5",
    pin_once_too_often: "I2",
    pin_a_child_alone: "I2",
    unpin_a_parent: "I2",
    gate_without_a_pin: "I2",
    keep_a_lease_that_has_ended: "I2",
    forget_an_evictable_leaf: "I3",
    index_a_pinned_leaf: "I3",
    key_a_child_wrongly: "I4",
    leave_a_phantom_child: "I4",
    mix_namespaces: "I4",
    move_the_end_of_a_node: "I4",
    split_without_need: "I8",
    keep_an_empty_namespace: "I8",
    keep_bytes_of_tokens_that_are_gone: "I8",
}
COUNTS = ("evictable_tokens", "protected_tokens", "detached_tokens", "num_nodes")


async def assert_found(break_it: Any, invariant: str) -> None:
    allocator = SlotAllocator(64)
    # The core whose nodes lie open.
    cache = RadixCache(CacheInitParams(allocator, low_watermark=0, high_watermark=0, tree_core="python"))
    await cache.__aenter__()
    await filled(cache, key(range(8)), key(range(4), range(50, 54)))
    lease = await entered(cache, key(range(8), 99, 98), 2)
    cache.check()
    scene = Scene(cache, lease)
    break_it(scene)
    with pytest.raises(InvariantError, match=rf"\b{invariant}: "):
        cache.check()
    with pytest.raises(InvariantError, match=r"refuses further work"):
        cache.lease(key(1))
    lease._hold.released, lease._hold.held = True, False  # its slots are past saving: nothing is to warn of them
    background: Any = cache._task_group
    background.cancel_scope.cancel()
    await background.__aexit__(None, None, None)


@pytest.mark.parametrize(("break_it", "invariant"), BREAKS.items(), ids=[each.__name__ for each in BREAKS])
async def test_each_invariant_broken_on_purpose_is_found(break_it: Any, invariant: str) -> None:
    await assert_found(break_it, invariant)


@pytest.mark.parametrize("name", COUNTS)
async def test_a_counter_that_is_off_by_one_is_found(name: str) -> None:
    await assert_found(miscount(name), "I3")


async def test_a_node_whose_parent_does_not_know_it_is_found() -> None:
    def orphan(scene: Scene) -> None:
        # walk() shows it below a parent of which nothing else is seen.
        views = list(scene.core.walk())
        scene.core.walk = lambda *, detached=False: iter(
            [] if detached else [view for view in views if view.node_id != scene.top.node_id]
        )

    await assert_found(orphan, "I6")


async def test_a_task_that_holds_two_subtrees_is_found() -> None:
    def take_two(scene: Scene) -> None:
        scene.cache._gates.standing.extend(_gate(scene, 1) for _ in range(2))

    await assert_found(take_two, "I7")


def _gate(scene: Scene, task_id: int) -> Any:
    return StandingGate(scene.leaf.node_id, 8, task_id)


async def test_a_waiter_that_was_decided_but_still_queues_is_found() -> None:
    async with RadixCache(CacheInitParams(allocator=SlotAllocator(8))) as cache:
        async with anyio.create_task_group() as tasks:
            hog = await entered(cache, key(range(8)), 8)
            lease = await entered(cache, key(range(20, 24)))
            waiting = await begin(tasks, lease.allocate, 1)
            (waiter,) = cache._pressure.growth
            waiter.granted = True
            with pytest.raises(InvariantError, match="I7: "):
                cache.check()
            waiter.granted = False
            waiting.scope.cancel()
            await settled()
            hog.release()
            lease.release()


async def test_a_low_level_pin_that_was_lost_is_found() -> None:
    async with RadixCache(CacheInitParams(allocator=SlotAllocator(8))) as cache:
        await filled(cache, key(range(4)))
        match = await cache.match_prefix(MatchPrefixParams(key(range(4))))
        cache.inc_lock_ref(match.last_device_node)
        cache.check()
        cache._low_pins._pinned.clear()
        with pytest.raises(InvariantError, match="I2: "):
            cache.check()


async def test_a_sound_cache_is_found_sound_again_and_again() -> None:
    async with RadixCache(CacheInitParams(allocator=SlotAllocator(16, 2), page_size=2)) as cache:
        for i in range(20):
            await filled(cache, key(range(i % 7), range(100, 104)))
            cache.check()
