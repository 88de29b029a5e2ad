"""A reader that knows the wire alone holds what the cache holds, on every tier, after whatever was done to it."""

from __future__ import annotations

from typing import Any, Literal

import anyio
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aradix import Namespace
from aradix.observe import KVEventPublisher
from tests.cache.acts import settled
from tests.observe.lives import ACTS, TIERED_ACTS, Life, TieredLife
from tests.observe.reader import Reader, held_by, joined
from tests.support.caches import opened
from tests.support.tiers import opened_tiers

SPACE = Namespace(salt="one")
THERE_AND_BACK: list[tuple[Any, ...]] = [
    ("fill", SPACE, [0] * 8),
    ("look",),
    ("evict", 8),
    ("look",),
    ("end_copy", None),  # on the host alone
    ("look",),
    ("hold", SPACE, [0] * 10),
    ("look",),
    ("end_copy", None),  # and back on the device
    ("look",),
    ("release", 0),
    ("fill", SPACE, [1] * 12),
    ("evict", 40),
    ("end_copy", None),  # more than the host has room for
    ("end_copy", None),
    ("look",),
    ("hold", SPACE, [1] * 12),
    ("flush", SPACE),  # while some of it is copied
    ("look",),
    ("end_copy", 1),
]


async def play(life: Life, script: list[tuple[Any, ...]], reader: Reader, block_size: int) -> None:
    """Take a cache through a script; at each look, and at its end, the reader holds what the cache holds."""
    for name, *args in [*script, ("look",)]:
        if name != "look":
            await life.act(name, *args)
            continue
        await settled()
        await reader.follow()
        assert reader.mirror.held == held_by(life.cache, block_size)
        life.cache.check()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@given(
    page_size=st.sampled_from([1, 2, 3, 4]),
    block_size=st.sampled_from([1, 2, 3, 4, 6]),
    wire=st.sampled_from(["map", "array"]),
    is_eagle=st.booleans(),
    evict_unit=st.sampled_from(["page", "node"]),
    with_replay=st.booleans(),
    delay=st.sampled_from([0.0, 0.001]),
    before=st.lists(ACTS, max_size=6),
    script=st.lists(ACTS, min_size=12, max_size=50),
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
    delay: float,
    before: list[tuple[Any, ...]],
    script: list[tuple[Any, ...]],
) -> None:
    async def live() -> None:
        num_slots = 4096 // page_size * page_size
        async with opened(
            num_slots, page_size, enable_kv_cache_events=True, is_eagle=is_eagle, evict_unit=evict_unit
        ) as cache:
            life = Life(cache)
            for name, *args in before:
                if name != "look":
                    await life.act(name, *args)
            replay = "tcp://127.0.0.1:*" if with_replay else None
            async with KVEventPublisher(
                cache, "tcp://0.0.0.0:*", replay, block_size=block_size, wire=wire, delay=delay
            ) as publisher:
                with Reader(publisher) as reader:
                    await joined(cache, reader)
                    await play(life, script, reader, block_size)
            for lease in life.held:
                lease.release()

    anyio.run(live, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@given(
    page_size=st.sampled_from([1, 2, 3]),
    block_size=st.sampled_from([1, 2, 3, 4]),
    num_host_pages=st.sampled_from([6, 16, 60]),
    write_policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
    at_once=st.booleans(),
    is_eagle=st.booleans(),
    evict_unit=st.sampled_from(["page", "node"]),
    delay=st.sampled_from([0.0, 0.001]),
    script=st.lists(TIERED_ACTS, min_size=20, max_size=60),
)
@example(
    page_size=2,
    block_size=2,
    num_host_pages=6,
    write_policy="write_back",
    at_once=False,
    is_eagle=False,
    evict_unit="page",
    delay=0.001,
    script=THERE_AND_BACK,
)
@settings(max_examples=50)
def test_a_reader_holds_what_the_cache_holds_on_each_tier(
    backend: str,
    page_size: int,
    block_size: int,
    num_host_pages: int,
    write_policy: str,
    at_once: bool,
    is_eagle: bool,
    evict_unit: str,
    delay: float,
    script: list[tuple[Any, ...]],
) -> None:
    async def live() -> None:
        num_slots = 4096 // page_size * page_size
        async with opened_tiers(
            num_slots,
            num_host_pages * page_size,
            page_size,
            at_once=at_once,
            write_policy=write_policy,
            enable_kv_cache_events=True,
            is_eagle=is_eagle,
            evict_unit=evict_unit,
        ) as scene:
            async with (
                KVEventPublisher(
                    scene.cache, "tcp://0.0.0.0:*", "tcp://127.0.0.1:*", block_size=block_size, delay=delay
                ) as publisher,
                anyio.create_task_group() as tasks,
            ):
                life = TieredLife(scene, tasks)
                with Reader(publisher) as reader:
                    await joined(scene.cache, reader)
                    await play(life, script, reader, block_size)
                    await life.end()
                    await play(life, [], reader, block_size)

    anyio.run(live, backend=backend)
