"""Copies between the pools on threads of this machine: the bytes, the order, what fails, who hears of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from aradix import HostKVPool, MHAKVPool, MLAKVPool, SlotAllocator
from aradix.errors import ConfigError, TransferError, UsageError
from aradix.memory.copiers import HostCopier, runs
from aradix.memory.fences import FutureFence
from aradix.memory.kv_pool import BookKVPool, KVPool, Layout
from aradix.memory.lines import host_copier
from aradix.memory.streams import HostStream
from aradix.memory.transfer import Transfer

LAYOUTS: tuple[Layout, ...] = ("layer_first", "page_first")
P = 4


class Site:
    """Two pools filled with random values, and the transfer between them."""

    def __init__(self, pool: KVPool, copier: HostCopier | None = None) -> None:
        self.pool = pool
        self.host = HostKVPool(pool.num_slots, pool.page_size, pool)
        self.wakes = 0
        self.transfer = Transfer(pool, self.host, copier=copier, on_done=self._wake)
        generator = torch.Generator().manual_seed(0)
        for pages in (pool.pages, self.host.pages):
            assert pages is not None
            pages.copy_(torch.randn(pages.shape, generator=generator))

    def _wake(self) -> None:
        self.wakes += 1

    @property
    def device_pages(self) -> torch.Tensor:
        assert self.pool.pages is not None
        return self.pool.pages

    @property
    def host_pages(self) -> torch.Tensor:
        assert self.host.pages is not None
        return self.host.pages

    def slots(self, *pages: int) -> torch.Tensor:
        size = self.pool.page_size
        return (torch.tensor(pages)[:, None] * size + torch.arange(size)).flatten()


def mha(layout: Layout = "layer_first", num_pages: int = 8, **changed: Any) -> MHAKVPool:
    return MHAKVPool(
        **{
            "num_slots": num_pages * P,
            "page_size": P,
            "num_layers": 3,
            "num_heads": 2,
            "head_dim": 8,
            "dtype": torch.float32,
            "layout": layout,
            **changed,
        }
    )


SHAPES: dict[str, KVPool] = {
    "layer_first": mha(),
    "page_first": mha("page_first"),
    "odd bytes": mha(dtype=torch.float16, num_heads=1, head_dim=3),
    "single bytes": mha(dtype=torch.int8, num_heads=1, head_dim=3, num_layers=1),
    "page of one": mha(num_slots=8, page_size=1),
    "latent": MLAKVPool(8 * P, P, 3, 6, 2, torch.float32, "cpu", "layer_first"),
    "latent by page": MLAKVPool(8 * P, P, 3, 6, 2, torch.float32, "cpu", "page_first"),
    "large pages": mha(num_heads=8, head_dim=700),
    "large pages by page": mha("page_first", num_heads=8, head_dim=700),
    "large and odd": mha(dtype=torch.float16, num_layers=8, num_heads=7, head_dim=151),
}
COPIERS: list[type[HostCopier]] = list(dict.fromkeys((HostCopier, type(host_copier()))))
"""The one in Python, and the compiled one where it is there."""


@pytest.fixture
def gate() -> Iterator[Future[None]]:
    gate: Future[None] = Future()
    yield gate
    if not gate.done():
        gate.set_result(None)


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("by_layer", [False, True], ids=["at once", "by layer"])
@pytest.mark.parametrize("shape", SHAPES)
def test_pages_arrive_whole_and_nothing_else_changes(shape: str, by_layer: bool, copier: type[HostCopier]) -> None:
    site = Site(SHAPES[shape], copier())
    device, host = site.device_pages.clone(), site.host_pages.clone()
    copy = site.transfer.store(site.slots(2, 3, 7, 1), site.slots(5, 6, 1, 8))
    copy.synchronize()
    host[[5, 6, 1, 8]] = device[[2, 3, 7, 1]]
    assert torch.equal(site.host_pages, host)
    copy = site.transfer.load(site.slots(8, 2, 3), site.slots(4, 5, 6), by_layer=by_layer)
    copy.synchronize()
    device[[4, 5, 6]] = host[[8, 2, 3]]
    assert torch.equal(site.device_pages, device)
    assert copy.num_tokens == copy.num_tokens_done == 3 * site.pool.page_size
    assert copy.error is None
    site.transfer.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_layer_stored_comes_back_through_the_host(layout: Layout) -> None:
    site = Site(mha(layout))
    pool: Any = site.pool
    k, v = torch.randn(P, 2, 8), torch.randn(P, 2, 8)
    pool.set_kv(2, site.slots(3), k, v)
    site.transfer.store(site.slots(3), site.slots(1)).synchronize()
    site.transfer.load(site.slots(1), site.slots(6)).synchronize()
    keys, values = pool.get_kv(2)
    assert torch.equal(keys[site.slots(6)], k)
    assert torch.equal(values[site.slots(6)], v)
    site.transfer.close()


def test_runs_are_as_long_as_both_sides_ascend() -> None:
    assert list(runs([1, 2, 3, 5, 6], [4, 5, 7, 8, 9])) == [(1, 4, 2), (3, 7, 1), (5, 8, 2)]
    assert list(runs([], [])) == []
    assert list(runs([3], [9])) == [(3, 9, 1)]


def test_a_store_waits_for_the_stream_that_writes(gate: Future[None]) -> None:
    site = Site(mha())
    writer = HostStream("writer")
    writer.launch(gate.result)
    writer.launch(lambda: site.device_pages[1].fill_(7.0))
    copy = site.transfer.store(site.slots(1), site.slots(2), after=(writer,))
    writer.launch(lambda: site.device_pages[1].fill_(8.0))  # comes later: the copy must not wait for it
    assert not copy.done()
    assert not site.host_pages[2].eq(7.0).any()
    gate.set_result(None)
    copy.synchronize()
    # The writer goes on beside the copy, which is why pages are pinned meanwhile; here only the first write matters.
    assert site.host_pages[2].ge(7.0).all()
    site.transfer.close()
    writer.close()


def test_a_copy_waits_for_an_event_and_holds_up_nobody_else(gate: Future[None]) -> None:
    site = Site(mha())
    writer = HostStream("writer")
    writer.launch(gate.result)
    event = writer.record_event()
    store = site.transfer.store(site.slots(1), site.slots(2), after=(event,))
    load = site.transfer.load(site.slots(5), site.slots(6))
    load.synchronize()
    assert load.done()
    assert not store.done()
    gate.set_result(None)
    store.synchronize()
    assert store.done()
    site.transfer.close()
    writer.close()


class GatedCopier(HostCopier):
    """Stops before the copy of a run, until told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[Future[None]] = []
        self.reached = threading.Semaphore(0)

    def copy_run(self, source: Any, target: Any) -> None:
        self.reached.release()
        if self.gates:
            self.gates.pop(0).result()
        super().copy_run(source, target)


def test_a_reader_of_one_layer_does_not_wait_for_the_next(gate: Future[None]) -> None:
    copier = GatedCopier()
    first: Future[None] = Future()
    first.set_result(None)
    copier.gates = [first, gate]
    site = Site(mha(), copier)
    copy = site.transfer.load(site.slots(1, 2), site.slots(3, 4), by_layer=True)
    reader = HostStream("reader")
    seen: list[torch.Tensor] = []
    copy.wait_on(reader, 0)
    reader.launch(lambda: seen.append(site.pool.layer_pages(0)[3].clone()))
    reader.synchronize()
    assert copy.layer_done(0)
    assert not copy.layer_done(1)
    assert not copy.done()
    assert torch.equal(seen[0], site.host.layer_pages(0)[1])
    copy.wait_on(reader, 2)
    reader.launch(lambda: seen.append(site.pool.layer_pages(2)[4].clone()))
    gate.set_result(None)
    reader.synchronize()
    assert copy.layer_done(2)
    assert torch.equal(seen[1], site.host.layer_pages(2)[2])
    site.transfer.close()
    reader.close()


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_reader_is_ordered_behind_the_whole_copy(gate: Future[None], by_layer: bool) -> None:
    copier = GatedCopier()
    copier.gates = [gate]
    site = Site(mha(), copier)
    copy = site.transfer.load(site.slots(1, 5), site.slots(3, 4), by_layer=by_layer)
    reader = HostStream("reader")
    copy.wait_on(reader)
    seen: list[torch.Tensor] = []
    reader.launch(lambda: seen.append(site.device_pages[3:5].clone()))
    assert seen == []
    gate.set_result(None)
    reader.synchronize()
    assert torch.equal(seen[0], site.host_pages[[1, 5]])
    copy.wait_on(reader)  # done already: nothing to wait for
    site.transfer.close()
    reader.close()


class FaultyCopier(HostCopier):
    """Fails at the run whose number it is given, counted from 0."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def copy_run(self, source: Any, target: Any) -> None:
        self.at -= 1
        if self.at == -1:
            raise OSError("bad memory")
        super().copy_run(source, target)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_batch_that_fails_says_how_many_tokens_are_there(at: int) -> None:
    site = Site(mha(), FaultyCopier(at))
    before = site.host_pages.clone()
    copy = site.transfer.store(site.slots(1, 3, 5), site.slots(2, 4, 6))
    copy.synchronize()
    assert copy.done()
    assert copy.num_tokens_done == at * P
    assert isinstance(copy.error, TransferError)
    assert isinstance(copy.error.__cause__, OSError)
    assert str(copy.error) == f"store of 3 pages failed after {at}: bad memory"
    before[[2, 4, 6][:at]] = site.device_pages[[1, 3, 5][:at]]
    assert torch.equal(site.host_pages, before)
    again = site.transfer.store(site.slots(1, 3, 5), site.slots(2, 4, 6))
    again.synchronize()
    assert again.error is None
    site.transfer.close()


@pytest.mark.parametrize(("at", "num_pages"), [(0, 0), (2, 0), (4, 0), (5, 1)])
def test_of_a_load_by_layer_a_page_is_there_once_its_last_layer_is(at: int, num_pages: int) -> None:
    site = Site(mha(), FaultyCopier(at))
    copy = site.transfer.load(site.slots(1, 3), site.slots(2, 4), by_layer=True)
    copy.synchronize()
    assert copy.error is not None
    assert copy.num_tokens_done == num_pages * P
    site.transfer.close()


def test_completions_are_told_once_a_batch_and_come_in_order(gate: Future[None]) -> None:
    copier = GatedCopier()
    copier.gates = [gate]
    site = Site(mha(), copier)
    copies = [site.transfer.store(site.slots(page), site.slots(page)) for page in (1, 2, 3)]
    assert site.transfer.take_done() == []
    assert site.transfer.num_running() == 3
    told: list[object] = []
    copies[1].add_done_callback(told.append)
    gate.set_result(None)
    copies[2].synchronize()
    site.transfer.store_stream.synchronize()
    assert site.wakes == 1
    assert site.transfer.take_done() == copies
    assert site.transfer.take_done() == []
    assert site.transfer.num_running() == 0
    assert told == [copies[1]]
    copies[1].add_done_callback(told.append)
    assert told == [copies[1], copies[1]]
    last = site.transfer.load(site.slots(1), site.slots(1))
    last.synchronize()
    site.transfer.load_stream.synchronize()
    assert site.wakes == 2
    site.transfer.close()


def test_a_batch_whose_callback_raises_is_told_all_the_same(
    caplog: pytest.LogCaptureFixture, gate: Future[None]
) -> None:
    copier = GatedCopier()
    copier.gates = [gate]
    site = Site(mha(), copier)
    copy = site.transfer.store(site.slots(1), site.slots(1))
    copy.add_done_callback(lambda _: 1 // 0)
    gate.set_result(None)
    site.transfer.close()
    assert "ZeroDivisionError" in caplog.text
    assert site.transfer.take_done() == [copy]


def test_slots_retire_behind_a_copy(gate: Future[None]) -> None:
    copier = GatedCopier()
    copier.gates = [gate]
    site = Site(mha(), copier)
    allocator = SlotAllocator(8 * P, P)
    slots = allocator.alloc(8 * P)
    assert slots is not None
    copy = site.transfer.store(slots, slots)
    assert isinstance(copy.fence(), FutureFence)
    allocator.free(slots, fence=copy.fence())
    assert allocator.alloc(P) is None
    assert allocator.fenced_size() == 8 * P
    gate.set_result(None)
    site.transfer.close()
    assert allocator.alloc(8 * P) is not None
    allocator.check()


def test_what_is_no_batch_is_refused_and_nothing_is_started() -> None:
    site = Site(mha())
    before = site.host_pages.clone()
    for device_slots, host_slots in (
        (site.slots(1, 2), site.slots(1)),
        (site.slots(1)[:2], site.slots(1)[:2]),
        (site.slots(9), site.slots(1)),
        (site.slots(1), site.slots(0)),
        (site.slots(1)[:0], site.slots(1)[:0]),
    ):
        with pytest.raises(UsageError):
            site.transfer.store(device_slots, host_slots)
    assert site.transfer.num_running() == 0
    copy = site.transfer.load(site.slots(1), site.slots(2))
    with pytest.raises(UsageError, match="by_layer=True"):
        copy.synchronize(0)
    site.transfer.close()
    site.transfer.close()
    with pytest.raises(UsageError, match="closed"):
        site.transfer.store(site.slots(1), site.slots(1))
    assert torch.equal(site.host_pages, before)


def test_pools_of_different_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        Transfer(mha(), HostKVPool(8 * P, P, mha("page_first")))


def test_between_pools_of_books_a_copy_is_done_at_once_and_needs_no_thread() -> None:
    pool = BookKVPool(64, 4, num_layers=2)
    host = HostKVPool(128, 4, pool)
    wakes: list[int] = []
    transfer = Transfer(pool, host, on_done=lambda: wakes.append(1))
    num_threads = threading.active_count()
    slots = torch.arange(4, 12)
    for copy in (transfer.store(slots, slots), transfer.load(slots, slots, by_layer=True)):
        assert copy.done()
        assert copy.num_tokens_done == 8
        assert copy.error is None
    assert len(transfer.take_done()) == 2
    assert wakes == [1]
    assert threading.active_count() == num_threads
    transfer.close()
