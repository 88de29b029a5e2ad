"""Copies on a virtual device: the oracle sees every order that is missing, however the times fall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aradix import HostKVPool, SlotAllocator
from aradix.errors import TransferError
from aradix.memory.copiers import Job
from aradix.memory.fences import FutureFence
from aradix.memory.kv_pool import BookKVPool
from aradix.memory.transfer import Transfer
from stress.device import HOST_SLOTS, VirtualCopier, VirtualDevice, VirtualEvent

P = 2
SEEDS = range(20)


def no_fault(job: Job) -> tuple[int, Exception] | None:
    return None


class Site:
    """Pools of books on a virtual device; the streams are its own."""

    def __init__(self, seed: int = 0, fault: Callable[[Job], tuple[int, Exception] | None] = no_fault) -> None:
        self.device = VirtualDevice(seed)
        self.pool = BookKVPool(16, P, num_layers=2)
        self.host = HostKVPool(16, P, self.pool)
        self.wakes = 0
        self.copier = VirtualCopier(self.device, fault)
        self.transfer = Transfer(self.pool, self.host, copier=self.copier, on_done=self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def host_stamps(self, slots: torch.Tensor) -> list[int | None]:
        return list(self.device.peek(slots + HOST_SLOTS).values())


def slots(*pages: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * P + torch.arange(P)).flatten()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_follows_the_forward_and_a_second_reader_the_load(seed: int) -> None:
    site = Site(seed)
    compute, other = site.device.stream("compute"), site.device.stream("other")
    forward = compute.launch(writes=slots(1, 2))
    store = site.transfer.store(slots(1, 2), slots(3, 4), after=(compute,))
    load = site.transfer.load(slots(3, 4), slots(5, 6), after=(site.transfer.store_stream,))
    load.wait_on(other)
    reader = other.launch(reads=slots(5, 6))
    site.device.run_until_idle()
    assert store.done()
    assert load.done()
    assert set(reader.seen.values()) == {forward.stamp}
    assert site.host_stamps(slots(3, 4)) == [forward.stamp] * 4
    assert site.device.races == []


@pytest.mark.parametrize("forgotten", ["writer", "reader", "store"])
def test_an_order_that_is_left_out_is_a_race(forgotten: str) -> None:
    site = Site()
    compute, other = site.device.stream("compute"), site.device.stream("other")
    compute.launch(writes=slots(1))
    site.transfer.store(slots(1), slots(3), after=() if forgotten == "writer" else (compute,))
    after = () if forgotten == "store" else (site.transfer.store_stream,)
    load = site.transfer.load(slots(3), slots(5), after=after)
    if forgotten != "reader":
        load.wait_on(other)
    other.launch(reads=slots(5))
    site.device.run_until_idle()
    assert site.device.races != []


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_taken_for_the_load_stream_are_behind_their_last_reader(seed: int) -> None:
    site = Site(seed)
    allocator = SlotAllocator(16, P, event_factory=site.device.event)
    compute = site.device.stream("compute")
    taken = allocator.alloc(16)
    assert taken is not None
    forward = compute.launch(reads=taken, writes=taken)
    allocator.free(taken, streams=(compute,))
    assert allocator.alloc(P) is None
    again = allocator.alloc(16, stream=site.transfer.load_stream)
    assert again is not None
    site.device.host_write(slots(1, 2, 3, 4, 5, 6, 7, 8) + HOST_SLOTS)
    load = site.transfer.load(slots(1, 2, 3, 4, 5, 6, 7, 8), again)
    assert not load.done()
    site.device.run_until_idle()
    assert load.done()
    assert forward.done
    assert site.device.races == []
    allocator.free(again, fence=load.fence())
    assert allocator.reclaim() == 16
    allocator.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_retired_behind_a_store_are_not_written_before_it_ends(seed: int) -> None:
    site = Site(seed)
    allocator = SlotAllocator(16, P, event_factory=site.device.event)
    compute = site.device.stream("compute")
    taken = allocator.alloc(16)
    assert taken is not None
    forward = compute.launch(writes=taken)
    store = site.transfer.store(taken, taken, after=(compute,))
    allocator.free(taken, fence=FutureFence(store))
    for _ in range(200):
        again = allocator.alloc(16, stream=compute)
        if again is not None:
            break
        site.device.advance(0.25)
    assert again is not None
    compute.launch(writes=again)
    site.device.run_until_idle()
    assert site.host_stamps(taken) == [forward.stamp] * 16
    assert site.device.races == []


def test_by_layer_a_reader_starts_before_the_copy_is_over() -> None:
    site = Site()
    site.device.host_write(slots(1) + HOST_SLOTS)
    copy = site.transfer.load(slots(1), slots(2), by_layer=True)
    compute = site.device.stream("compute")
    copy.wait_on(compute, 0)
    first = compute.launch(duration=0.01)
    while not first.done:
        site.device.advance(0.01)
    assert copy.layer_done(0)
    assert not copy.done()
    site.device.run_until_idle()
    assert copy.done()


def test_nobody_calls_so_whoever_asks_first_finds_out() -> None:
    site = Site()
    copies = [site.transfer.store(slots(page), slots(page)) for page in (1, 2)]
    told: list[object] = []
    copies[0].add_done_callback(told.append)
    site.device.run_until_idle()
    assert site.wakes == 0
    site.transfer.poll()
    assert site.wakes == 1
    assert told == [copies[0]]
    assert site.transfer.take_done() == copies
    assert site.transfer.num_running() == 0


@pytest.mark.parametrize("num_pages", [0, 1])
def test_a_launch_that_fails_leaves_the_pages_before_it(num_pages: int) -> None:
    site = Site(fault=lambda job: (num_pages, OSError("out of memory")))
    copy = site.transfer.store(slots(1, 2), slots(3, 4))
    if num_pages:
        assert not copy.done()
    site.device.run_until_idle()
    assert copy.done()
    assert copy.num_tokens_done == num_pages * P
    assert isinstance(copy.error, TransferError)
    assert site.transfer.take_done() == [copy]


class BrokenEvents(VirtualCopier):
    """Events fail to be made, recorded or asked, once told so."""

    broken = ""

    def new_event(self) -> Any:
        if self.broken == "make":
            raise RuntimeError("the device is lost")
        return _BrokenEvent(self, super().new_event())


class _BrokenEvent:
    def __init__(self, copier: BrokenEvents, event: VirtualEvent) -> None:
        self._copier = copier
        self._event = event

    def record(self, stream: Any) -> None:
        if self._copier.broken == "record":
            raise RuntimeError("the device is lost")
        self._event.record(stream)

    def query(self) -> bool:
        if self._copier.broken == "query":
            raise RuntimeError("the device is lost")
        return self._event.query()


@pytest.mark.parametrize("how", ["make", "record", "query"])
def test_a_copy_whose_end_nobody_will_know_is_lost_and_its_slots_with_it(how: str) -> None:
    site = Site()
    copier = BrokenEvents(site.device)
    transfer = Transfer(site.pool, site.host, copier=copier)
    allocator = SlotAllocator(16, P, event_factory=site.device.event)
    taken = allocator.alloc(16)
    assert taken is not None
    copier.broken = how
    copy = transfer.store(taken, taken)
    site.device.run_until_idle()
    assert transfer.take_done() == [copy]
    assert copy.is_lost
    assert "lost" in str(copy.error)
    assert copy.num_tokens_done == 0
    with pytest.raises(TransferError):
        copy.done()
    with pytest.raises(TransferError):
        copy.wait_on(site.device.stream())
    with pytest.raises(TransferError):
        allocator.free(taken, fence=copy.fence())
        allocator.reclaim()
    assert allocator.quarantined_size() == 16
    assert allocator.alloc(P) is None


@pytest.mark.parametrize("how", ["make", "record"])
def test_a_stream_that_cannot_be_followed_stops_the_copy_before_it_starts(how: str) -> None:
    site = Site()
    copier = BrokenEvents(site.device)
    transfer = Transfer(site.pool, site.host, copier=copier)
    copier.broken = how
    with pytest.raises(TransferError):
        transfer.store(slots(1), slots(2), after=(site.device.stream("compute"),))
    assert transfer.num_running() == 0
    assert site.device.oracle.races == []
    site.device.run_until_idle()
    assert site.host_stamps(slots(2)) == [None, None]
