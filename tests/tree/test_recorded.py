"""What is recorded is told as the Python core tells it, whoever looks at it, whenever, on whatever thread."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest

from aradix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from aradix.keys import Namespace, RadixKey
from aradix.tree import make_core
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import TreeCore
from tests.tree.lockstep import CORES

pytestmark = pytest.mark.skipif("cpp" not in CORES, reason="the core is not compiled")

NAMESPACES = (Namespace(), Namespace(salt="a"))


def made(name: Literal["python", "cpp"], **settings: Any) -> TreeCore:
    return make_core(name, policy=settings.pop("policy", "lru"), record_events=True, **settings)


class Twins:
    """Both cores, taken through the same random steps; each step gives what either recorded in it."""

    def __init__(self, seed: int, page_size: int, bigrams: bool, evict_unit: Literal["page", "node"]) -> None:
        self._source = random.Random(seed)
        self._bigrams = bigrams
        settings = {"page_size": page_size, "item_bytes": 8 if bigrams else 4, "evict_unit": evict_unit}
        self.cores = [made("python", **settings), made("cpp", **settings)]
        self._pins: list[tuple[list[int], Namespace, list[int]]] = []

    def both(self, step: Callable[[TreeCore], Any]) -> list[Any]:
        return [step(core) for core in self.cores]

    def _ids(self) -> list[int]:
        source = self._source
        return [0] * source.randrange(40) + [source.randrange(2) for _ in range(source.randrange(30))]

    def _key(self, ids: list[int], namespace: Namespace) -> RadixKey:
        return RadixKey(ids, namespace).maybe_to_bigram_view(self._bigrams)

    def step(self) -> None:
        source, ids = self._source, self._ids()
        namespace = source.choice(NAMESPACES)
        key = self._key(ids, namespace)
        match source.randrange(10):
            case 0 | 1 | 2 | 3:
                self.both(lambda core: core.insert(key, np.arange(len(key))))
            case 4:
                matches = self.both(lambda core: core.match(key, pin=True))
                nodes = [match.node_id for match in matches]
                self._pins.append((ids[: matches[0].num_matched + self._bigrams], namespace, nodes))
            case 5 | 6 if self._pins:
                self._grow()
            case 7 if self._pins:
                self._unpin(source.randrange(len(self._pins)))
            case 8:
                count = source.choice((1, 3, 20, 200))
                self.both(lambda core: core.evict(count))
            case 9 if not source.randrange(12):
                flushed = source.choice((None, *NAMESPACES))
                self.both(lambda core: core.detach(flushed))

    def _grow(self) -> None:
        """Decode a little on a pin, as a lease does."""
        ids, namespace, nodes = self._pins.pop()
        more = [*ids, *(self._source.randrange(2) for _ in range(9))]
        longer = self._key(more, namespace)
        grown = [
            core.extend(node_id, longer, np.arange(len(longer)))
            for core, node_id in zip(self.cores, nodes, strict=True)
        ]
        ends = {done.end for done in grown if done is not None}
        if ends:  # else it was flushed
            (end,) = ends
            ids, nodes = more[: end + self._bigrams], [done.node_id for done in grown if done is not None]
        self._pins.append((ids, namespace, nodes))

    def _unpin(self, index: int) -> None:
        _, _, nodes = self._pins.pop(index)
        for core, node_id in zip(self.cores, nodes, strict=True):
            core.unpin(node_id)

    def end(self) -> None:
        while self._pins:
            self._unpin(-1)
        for core in self.cores:
            assert audit_tree(core, {}).problems == []


def batches(twins: Twins, num_steps: int) -> Iterator[tuple[list[KVCacheEvent], Sequence[KVCacheEvent]]]:
    """What the Python core told, and what the compiled one recorded, step after step."""
    for _ in range(num_steps):
        twins.step()
        told, recorded = twins.both(lambda core: core.take_recorded())
        assert len(told) == len(recorded)
        if told:
            yield told, recorded


WORLDS = pytest.mark.parametrize(
    ("seed", "page_size", "bigrams", "evict_unit"),
    [(1, 1, False, "page"), (2, 4, False, "page"), (3, 1, True, "node"), (4, 2, True, "page"), (5, 1, False, "node")],
)


@WORLDS
def test_whenever_it_is_looked_at(seed: int, page_size: int, bigrams: bool, evict_unit: Any) -> None:
    source = random.Random(seed)
    twins = Twins(seed, page_size, bigrams, evict_unit)
    kept: list[tuple[list[KVCacheEvent], Sequence[KVCacheEvent]]] = []
    for pair in batches(twins, 1_500):
        kept.append(pair)
        if source.randrange(60) == 0:  # all of them, in any order; some are dropped and never looked at
            source.shuffle(kept)
            for told, recorded in kept[len(kept) // 4 :]:
                assert list(recorded) == told
            kept.clear()
    twins.end()


@WORLDS
def test_on_whatever_thread(seed: int, page_size: int, bigrams: bool, evict_unit: Any) -> None:
    twins = Twins(seed + 10, page_size, bigrams, evict_unit)
    looks: list[tuple[list[KVCacheEvent], Future[list[KVCacheEvent]]]] = []
    with ThreadPoolExecutor(4) as threads:
        for told, recorded in batches(twins, 1_500):
            looks += [(told, threads.submit(list, recorded)) for _ in range(2)]
    for told, look in looks:
        assert look.result() == told
    twins.end()


def test_a_long_context_that_several_threads_hash_at_once() -> None:
    core = made("cpp")
    key = RadixKey(np.random.default_rng(1).integers(0, 2**31, 60_000))
    pin = core.match(RadixKey([]), pin=True).node_id
    recorded = []
    for end in range(3_000, 60_001, 3_000):
        done = core.extend(pin, key[:end], np.arange(3_000))
        assert done is not None
        pin = done.node_id
        recorded.append(core.take_recorded())
    core.match(key[:100])  # a split while they are hashed
    with ThreadPoolExecutor(8) as threads:
        looked: list[list[KVCacheEvent]] = list(threads.map(list, [*recorded[::-1], *recorded]))
    told = [event for events in looked[20:] for event in events]
    assert [block for event in told for block in event.block_hashes] == key.hash_chain(1)  # type: ignore[union-attr]
    core.unpin(pin)
    core.evict(60_000)
    (removed,) = core.take_recorded()
    assert removed.block_hashes == key.hash_chain(1)  # type: ignore[union-attr]


def test_it_is_a_sequence_that_is_made_once() -> None:
    core = made("cpp", page_size=2)
    core.insert(RadixKey(range(6)), np.arange(6))
    core.insert(RadixKey([0, 1, 8, 9]), np.arange(4))
    core.detach()
    recorded = core.take_recorded()
    assert core.take_recorded() == () == tuple(core.take_events())
    assert isinstance(recorded, Sequence)
    assert len(recorded) == 3
    first, second, third = recorded
    assert isinstance(first, BlockStored)
    assert recorded[0] is first
    assert recorded[-1] is third
    assert list(recorded[1:]) == [second, third]
    assert [*reversed(recorded)] == [third, second, first]
    assert second in recorded
    assert BlockRemoved(b"") not in recorded
    assert recorded.index(third) == 2
    assert recorded.index(third, 1) == 2
    assert recorded.count(AllBlocksCleared()) == 1
    assert repr(recorded) == repr([first, second, third])
    with pytest.raises(IndexError):
        recorded[3]
    with pytest.raises(ValueError, match="not in list"):
        recorded.index(BlockRemoved(b""))


def test_it_outlives_its_tree() -> None:
    core = made("cpp")
    core.insert(RadixKey(range(100)), np.arange(100))
    recorded = core.take_recorded()
    del core
    (stored,) = recorded
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == RadixKey(range(100)).hash_chain(1)
