"""A reader that knows the wire alone holds what the cache holds, after whatever was done to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aradix import EvictParams, Lease, Namespace, RadixCache, RadixKey
from aradix.observe import KVEventPublisher
from tests.cache.acts import settled
from tests.observe.reader import Reader, held_by, joined
from tests.support.caches import opened

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
acts = st.one_of(
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


class _Life:
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


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@given(
    page_size=st.sampled_from([1, 2, 3, 4]),
    block_size=st.sampled_from([1, 2, 3, 4, 6]),
    wire=st.sampled_from(["map", "array"]),
    is_eagle=st.booleans(),
    evict_unit=st.sampled_from(["page", "node"]),
    with_replay=st.booleans(),
    before=st.lists(acts, max_size=6),
    script=st.lists(acts, min_size=12, max_size=50),
)
@settings(max_examples=80)
def test_a_reader_holds_what_the_cache_holds(
    backend: str,
    page_size: int,
    block_size: int,
    wire: Literal["map", "array"],
    is_eagle: bool,
    evict_unit: str,
    with_replay: bool,
    before: list[tuple[Any, ...]],
    script: list[tuple[Any, ...]],
) -> None:
    async def live() -> None:
        num_slots = 4096 // page_size * page_size
        async with opened(
            num_slots, page_size, enable_kv_cache_events=True, is_eagle=is_eagle, evict_unit=evict_unit
        ) as cache:
            life = _Life(cache)
            for name, *args in before:
                if name != "look":
                    await life.act(name, *args)
            replay = "tcp://127.0.0.1:*" if with_replay else None
            async with KVEventPublisher(
                cache, "tcp://0.0.0.0:*", replay, block_size=block_size, wire=wire
            ) as publisher:
                with Reader(publisher) as reader:
                    await joined(cache, reader)
                    for name, *args in [*script, ("look",)]:
                        if name == "look":
                            await settled()
                            await reader.follow()
                            assert reader.mirror.held == held_by(cache, block_size)
                            cache.check()
                        else:
                            await life.act(name, *args)
            for lease in life.held:
                lease.release()

    anyio.run(live, backend=backend)
