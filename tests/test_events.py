"""Events: records that travel, and a stream of them from which a reader rebuilds the cache."""

from __future__ import annotations

import gc
import weakref
from typing import Literal

import msgspec
import numpy as np
import pytest

from aradix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from aradix.keys import Namespace, RadixKey
from aradix.tree import make_core
from tests.tree.lockstep import CORES

TOKENS = np.arange(1, 5, dtype=np.int32).tobytes()
STORED = BlockStored(b"a" * 32 + b"b" * 32, b"p" * 32, TOKENS, 2, Namespace(lora="x", version=3))


@pytest.mark.parametrize("event", [STORED, BlockRemoved(b"a" * 32), AllBlocksCleared()])
def test_an_event_survives_the_wire(event: KVCacheEvent) -> None:
    for codec in (msgspec.msgpack, msgspec.json):
        again = codec.decode(codec.encode([event]), type=list[KVCacheEvent])
        assert again == [event]
        assert type(again[0]) is type(event)


def test_an_event_is_frozen() -> None:
    with pytest.raises(AttributeError):
        STORED.block_size = 3  # type: ignore[misc]
    assert isinstance(msgspec.msgpack.decode(msgspec.msgpack.encode(STORED), type=BlockStored).namespace, Namespace)


@pytest.mark.parametrize("name", CORES)
def test_the_same_tokens_under_two_salts_are_different_blocks(name: Literal["python", "cpp"]) -> None:
    core = make_core(name, policy="lru", page_size=4, record_events=True)
    ids = list(range(8))
    core.insert(RadixKey(ids, Namespace(salt="one")), np.arange(8))
    core.insert(RadixKey(ids, Namespace(salt="two")), np.arange(8, 16))
    one, two = core.take_events()
    assert isinstance(one, BlockStored)
    assert isinstance(two, BlockStored)
    assert one.token_ids == two.token_ids == ids
    assert set(one.block_hashes).isdisjoint(two.block_hashes)
    assert core.evict(8)[0].slots.tolist() == list(range(8))
    assert core.take_events() == [BlockRemoved(one.digests)]
    assert core.take_events() == []


@pytest.mark.parametrize("name", CORES)
def test_a_flush_of_everything_is_one_event_and_of_a_namespace_its_blocks(name: Literal["python", "cpp"]) -> None:
    core = make_core(name, policy="lru", record_events=True)
    for salt in ("one", "two"):
        core.insert(RadixKey([1, 2], Namespace(salt=salt)), np.arange(2))
    stored = core.take_events()
    core.detach(Namespace(salt="one"))
    assert isinstance(stored[0], BlockStored)
    assert core.take_events() == [BlockRemoved(stored[0].digests)]
    core.detach()
    assert core.take_events() == [AllBlocksCleared()]


@pytest.mark.parametrize("name", CORES)
def test_a_split_a_merge_and_a_held_flush_say_nothing(name: Literal["python", "cpp"]) -> None:
    core = make_core(name, policy="lru", record_events=True)
    core.insert(RadixKey([1, 2, 3]), np.arange(3))
    held = core.match(RadixKey([1, 2, 3]), pin=True)
    core.take_events()
    core.match(RadixKey([1, 9]))
    core.match(RadixKey([1, 2, 3]))
    assert core.take_events() == []
    core.detach()
    core.take_events()
    core.unpin(held.node_id)
    assert core.take_events() == []


@pytest.mark.parametrize("name", CORES)
def test_without_events_there_are_none(name: Literal["python", "cpp"]) -> None:
    core = make_core(name, policy="lru")
    core.insert(RadixKey([1, 2]), np.arange(2))
    core.evict(2)
    core.detach()
    assert core.take_events() == []


@pytest.mark.parametrize("name", CORES)
def test_the_first_event_since_they_were_taken_is_announced(name: Literal["python", "cpp"]) -> None:
    core = make_core(name, policy="lru", record_events=True)
    told: list[int] = []
    core.on_event = lambda: told.append(core.num_nodes)
    core.match(RadixKey([1, 2]), pin=True)
    assert told == []
    core.insert(RadixKey([1, 2]), np.arange(2))
    core.insert(RadixKey([1, 3]), np.arange(2, 4))
    core.evict(1)
    assert len(told) == 1
    assert len(core.take_events()) == 3
    core.evict(1)
    assert len(told) == 2
    core.take_events()
    core.detach()
    assert len(told) == 3
    core.on_event = None
    core.take_events()
    core.insert(RadixKey([5]), np.arange(1))
    assert core.on_event is None
    assert len(told) == 3


@pytest.mark.parametrize("name", CORES)
def test_a_core_and_who_listens_to_it_are_collected_together(name: Literal["python", "cpp"]) -> None:
    class Listener:
        def __init__(self) -> None:
            self.core = make_core(name, policy="lru", record_events=True)
            self.core.on_event = self.hear

        def hear(self) -> None:
            raise AssertionError("nothing was recorded")

    gone = weakref.ref(Listener())
    gc.collect()
    assert gone() is None
