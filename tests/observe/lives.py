"""Random lives of a cache, with a host tier or without, for a reader to mirror."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup
from hypothesis import strategies as st

from aradix import EvictParams, Lease, Namespace, RadixCache, RadixKey
from tests.cache.acts import Act, begin, entered, settled
from tests.support.tiers import TieredScene

__all__ = ["ACTS", "TIERED_ACTS", "Life", "TieredLife"]

NAMESPACES = (
    Namespace(),
    Namespace(lora="adapter"),
    Namespace(salt="one"),
    Namespace(salt="two", lora="adapter"),
    Namespace(salt=1),
    Namespace(version=3, tenant="somebody"),
)

# Prompts that part ways within a page, and within a block, are what it is about.
tokens = st.builds(lambda same, rest: [0] * same + rest, st.integers(0, 14), st.lists(st.integers(0, 1), max_size=6))
namespaces = st.sampled_from((*[Namespace()] * len(NAMESPACES), *NAMESPACES))
fills = st.tuples(st.just("fill"), namespaces, tokens)
ACTS = st.one_of(
    fills,
    fills,
    fills,
    st.tuples(st.just("hold"), namespaces, tokens),
    st.tuples(st.just("grow"), st.integers(0, 3), tokens),
    st.tuples(st.just("release"), st.integers(0, 3)),
    st.tuples(st.just("evict"), st.integers(1, 12)),
    st.tuples(st.just("flush"), st.one_of(st.none(), namespaces)),
    st.tuples(st.just("alone"), namespaces, tokens),
    st.tuples(st.just("turn")),
    st.tuples(st.just("look")),
)
# What has left the device is wanted again, and much of it leaves.
ends = st.tuples(st.just("end_copy"), st.one_of(st.none(), st.none(), st.integers(0, 3)))
again = st.tuples(st.just("fill"), st.just(Namespace()), st.just([0] * 12))
leaves = st.tuples(st.just("evict"), st.just(40))
TIERED_ACTS = st.one_of(ACTS, ACTS, ACTS, ends, again, leaves)


class Life:
    """One cache under random acts, and the leases that are open in it."""

    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.held: list[Lease] = []

    async def act(self, name: str, *args: Any) -> None:
        await getattr(self, f"_{name}")(*args)

    async def _fill(self, namespace: Namespace, ids: Sequence[int]) -> None:
        await self._hold(namespace, ids)
        await self._release(-1)

    async def _hold(self, namespace: Namespace, ids: Sequence[int]) -> None:
        lease = self.cache.lease(RadixKey(ids, namespace))
        await lease.__aenter__()
        self.held.append(lease)
        await self._grow(-1, ())

    async def _grow(self, index: int, ids: Sequence[int]) -> None:
        if not self.held:
            return
        lease = self.held[index % len(self.held)]
        key = RadixKey([*lease.key, *ids], lease.key.namespace)
        view = key.maybe_to_bigram_view(self.cache._params.is_eagle)
        lease.allocate_nowait(max(0, len(view) - lease.num_tokens))
        lease.commit(key)

    async def _release(self, index: int) -> None:
        if self.held:
            self.held.pop(index % len(self.held)).release()

    async def _evict(self, num_tokens: int) -> None:
        await self.cache.evict(EvictParams(num_tokens))

    async def _flush(self, namespace: Namespace | None) -> None:
        await self.cache.flush(namespace)

    async def _alone(self, namespace: Namespace, ids: Sequence[int]) -> None:
        with anyio.move_on_after(0):
            async with self.cache.exclusive(RadixKey(ids, namespace)) as subtree:
                subtree.evict()

    async def _turn(self) -> None:
        await settled()

    async def _look(self) -> None:
        raise AssertionError("the caller looks")


class TieredLife(Life):
    """One cache with a host tier. A lease may wait for a copy to end, so each is opened in a task of its own.

    Args:
        scene: the cache, and the copies that are under way in it.
        tasks: where leases wait.
    """

    def __init__(self, scene: TieredScene, tasks: TaskGroup) -> None:
        super().__init__(scene.cache)
        self._scene = scene
        self._tasks = tasks
        self._coming: list[Act] = []

    async def _evict(self, num_tokens: int) -> None:
        # It may wait for what goes to the host first.
        await begin(self._tasks, self.cache.evict, EvictParams(num_tokens))

    async def _hold(self, namespace: Namespace, ids: Sequence[int]) -> None:
        self._coming.append(await begin(self._tasks, entered, self.cache, RadixKey(ids, namespace)))
        await self._arrive()

    async def _arrive(self) -> None:
        """Go on with the leases that wait no longer."""
        waiting = []
        for act in self._coming:
            if act.waits:
                waiting.append(act)
                continue
            assert act.error is None
            self.held.append(act.value)
            await self._grow(-1, ())
        self._coming = waiting

    async def _end_copy(self, num_pages: int | None) -> None:
        """End the oldest copy under way, or let it fail after so many pages."""
        if self._scene.copier.running:
            copy = self._scene.copier.next()
            if num_pages is None:
                copy.finish()
            else:
                copy.fail(min(num_pages, len(copy.job.source_pages) - 1))
            await settled()
        await self._arrive()

    async def end(self) -> None:
        """Let all copies end, and all leases go."""
        while self._coming or self._scene.copier.running:
            await self._end_copy(None)
        while self.held:
            await self._release(-1)
