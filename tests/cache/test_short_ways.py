"""What is compiled of a lease's calls, steps of the tree or whole methods, comes to the same as the way in Python."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aradix import CacheInitParams, RadixCache, RadixKey, SlotAllocator
from aradix.errors import AradixError
from aradix.tree import cpp_core_error
from tests.tree.test_tenure import loyal

pytestmark = pytest.mark.skipif(cpp_core_error() is not None, reason="needs the compiled core")

NUM_PAGES = 12


class Way:
    """A cache, its leases by name, and what each act answered."""

    def __init__(
        self,
        page_size: int,
        evict_unit: Any,
        short_steps: bool,
        short_methods: bool,
        *,
        num_pages: int = NUM_PAGES,
        policy: str = "lru",
    ) -> None:
        self._short_methods = short_methods
        allocator = SlotAllocator(num_pages * page_size, page_size)
        params = CacheInitParams(
            allocator,
            page_size,
            eviction_policy=policy,
            low_watermark=0,
            high_watermark=0,
            evict_unit=evict_unit,
            tree_core="cpp",
        )
        self.cache = RadixCache(params)
        assert self.cache._leases.takes_short_ways
        assert self.cache._short_calls is not None
        self.cache._leases.takes_short_ways = self.cache._pressure._takes_short_ways = short_steps
        if not short_methods:
            self.cache._short_calls = None
        self.leases: list[Any] = []

    async def act(self, name: str, *args: Any) -> Any:
        try:
            return await getattr(self, name)(*args)
        except AradixError as error:
            # Where it was opened is this file on both ways, and the line as well.
            return type(error).__name__, str(error)

    async def open(self, tokens: list[int], space: str | None, store: bool, resume: bool) -> Any:
        if store and not resume:
            lease = self.cache.lease(RadixKey(tokens, space))
        else:
            lease = self.cache.lease(RadixKey(tokens, space), store=store, resume=resume)
        await lease.__aenter__()
        self.leases.append(lease)
        return lease.num_matched, lease.node

    async def grow(self, which: int, num_tokens: int) -> None:
        self.leases[which % len(self.leases)].allocate_nowait(num_tokens)

    async def grow_waiting(self, which: int, num_tokens: int) -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()  # whoever would have to wait gives up at once
            await self.leases[which % len(self.leases)].allocate(num_tokens)

    async def commit(self, which: int, tokens: list[int], space: str | None) -> Any:
        lease = self.leases[which % len(self.leases)]
        done = lease.commit(RadixKey([*lease.key.token_ids().tolist(), *tokens], space))
        return *done[:2], done.duplicates.tolist(), *done[3:]

    async def commit_known(self, which: int, num_tokens: int) -> Any:
        lease = self.leases[which % len(self.leases)]
        done = lease.commit(lease.key[:num_tokens])
        return *done[:2], done.duplicates.tolist(), *done[3:]

    async def truncate(self, which: int, num_tokens: int) -> None:
        self.leases[which % len(self.leases)].truncate(num_tokens)

    async def close(self, which: int) -> None:
        self.leases.pop(which % len(self.leases)).release()

    async def leave(self, which: int) -> None:
        await self.leases.pop(which % len(self.leases)).__aexit__(None, None, None)

    async def flush(self, space: str | None) -> Any:
        return await self.cache.flush(space)

    async def fork(self, which: int) -> None:
        self.leases.append(self.leases[which % len(self.leases)].fork())

    def state(self) -> Any:
        cache = self.cache
        slots = [(lease.slots.tolist(), lease.num_matched, lease.num_tokens) for lease in self.leases]
        table = cache._params.allocator._table
        return cache.stats(), cache.snapshot(), slots, np.array(table.stack[: table.num_free]).tolist()


TOKENS = st.lists(st.integers(0, 1), max_size=14)
SPACES = st.sampled_from([None, "other"])
WHICH = st.integers(0, 3)
ACTS = st.one_of(
    st.tuples(st.just("open"), TOKENS, SPACES, st.booleans(), st.booleans()),
    st.tuples(st.just("grow"), WHICH, st.integers(0, 14)),
    st.tuples(st.just("commit"), WHICH, TOKENS, SPACES),
    st.tuples(st.just("commit_known"), WHICH, st.integers(0, 14)),
    st.tuples(st.just("truncate"), WHICH, st.integers(0, 14)),
    st.tuples(st.just("grow_waiting"), WHICH, st.integers(-1, 14)),
    st.tuples(st.just("close"), WHICH),
    st.tuples(st.just("leave"), WHICH),
    st.tuples(st.just("fork"), WHICH),
    st.tuples(st.just("flush"), SPACES),
)
NEEDS_A_LEASE = {"grow", "grow_waiting", "leave", "commit", "commit_known", "truncate", "close", "fork"}


@pytest.mark.parametrize("evict_unit", ["page", "node"])
@pytest.mark.parametrize("page_size", [1, 4])
@settings(deadline=None, max_examples=120)
@given(acts=st.lists(ACTS, min_size=4, max_size=40))
def test_all_ways_come_to_the_same(page_size: int, evict_unit: str, acts: list[tuple[Any, ...]]) -> None:
    async def main() -> None:
        ways = [
            Way(page_size, evict_unit, short_steps=False, short_methods=False),
            Way(page_size, evict_unit, short_steps=True, short_methods=False),
            Way(page_size, evict_unit, short_steps=True, short_methods=True),
        ]
        async with ways[0].cache, ways[1].cache, ways[2].cache:
            for name, *args in acts:
                if name in NEEDS_A_LEASE and not ways[0].leases:
                    continue
                answer, *others = [await way.act(name, *args) for way in ways]
                assert others == [answer] * len(others)
                state, *others = [way.state() for way in ways]
                assert others == [state] * len(others)
                for way in ways:
                    way.cache.check()
            for way in ways:
                while way.leases:
                    way.leases.pop().release()
                way.cache.check()
            state, *others = [way.state() for way in ways]
            assert others == [state] * len(others)

    anyio.run(main)


def test_the_policy_that_learns_hears_of_the_same_uses_on_all_ways() -> None:
    async def main() -> None:
        ways = [
            Way(4, "page", short_steps, short_methods, num_pages=100, policy="tenure")
            for short_steps, short_methods in ((False, False), (True, False), (True, True))
        ]
        stays = set()
        async with ways[0].cache, ways[1].cache, ways[2].cache:
            for number, prompt in enumerate(loyal(0, 900)):
                for way in ways:
                    num_matched, _ = await way.act("open", prompt, None, True, False)
                    await way.act("grow", 0, len(prompt) - num_matched)
                    await way.act("commit_known", 0, len(prompt))
                    await way.act("leave", 0)
                stay, *others = [way.cache._core.stay for way in ways]
                assert others == [stay] * len(others)
                stays.add(stay)
                if number % 100 == 99:
                    shown = [(way.state(), [view.state for view in way.cache._core.walk()]) for way in ways]
                    assert shown[1:] == shown[:1] * 2
            for way in ways:
                way.cache.check()
        assert len(stays) > 1

    anyio.run(main)
