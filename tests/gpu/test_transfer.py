"""Copies between a CUDA device and pinned memory: the bytes, the order, and a host that waits for none of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from aradix import HostKVPool, MHAKVPool, SlotAllocator
from aradix.memory.kv_pool import Layout
from aradix.memory.transfer import Transfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYOUTS: tuple[Layout, ...] = ("layer_first", "page_first")
P, NUM_PAGES = 16, 32
SPIN = 300_000_000


def site(layout: Layout) -> tuple[MHAKVPool, HostKVPool]:
    pool = MHAKVPool(P * NUM_PAGES, P, 4, 8, 64, torch.bfloat16, "cuda", layout)
    host = HostKVPool(P * NUM_PAGES, P, pool)
    assert host.is_pinned
    pool.buffer.normal_()
    assert host.pages is not None
    host.pages.normal_()
    torch.cuda.synchronize()
    return pool, host


def slots(*pages: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * P + torch.arange(P)).flatten()


def busy_stream() -> Any:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN)  # type: ignore[no-untyped-call]
    return stream


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_arrive_whole_and_nothing_else_changes(layout: Layout, by_layer: bool) -> None:
    pool, host = site(layout)
    assert pool.pages is not None
    assert host.pages is not None
    device_before, host_before = pool.pages.cpu().clone(), host.pages.clone()
    transfer = Transfer(pool, host)
    transfer.store(slots(2, 3, 9), slots(7, 8, 1)).synchronize()
    host_before[[7, 8, 1]] = device_before[[2, 3, 9]]
    assert torch.equal(host.pages, host_before)
    transfer.load(slots(8, 4, 5), slots(1, 30, 31), by_layer=by_layer).synchronize()
    device_before[[1, 30, 31]] = host_before[[8, 4, 5]]
    assert torch.equal(pool.pages.cpu(), device_before)
    transfer.close()


def test_a_store_follows_the_writer_and_a_reader_the_load_while_the_host_goes_on() -> None:
    pool, host = site("layer_first")
    transfer = Transfer(pool, host)
    transfer.store(slots(1), slots(1)).synchronize()  # loads the kernels, which may wait for the device
    transfer.load(slots(1), slots(1)).synchronize()
    writer = busy_stream()
    with torch.cuda.stream(writer):
        pool.buffer.fill_(3.0)
    reader = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    store = transfer.store(slots(2, 3), slots(2, 3), after=(writer,))
    load = transfer.load(slots(2, 3), slots(5, 6), after=(transfer.store_stream,))
    load.wait_on(reader)
    with torch.cuda.stream(reader):
        seen = pool.key_buffer[0][P * 5 : P * 7].clone()
    assert not writer.query()
    assert not store.done()
    torch.cuda.synchronize()
    assert seen.eq(3.0).all()
    assert host.pages is not None
    assert host.pages[2:4].eq(3.0).all()
    transfer.close()


def test_completion_is_told_without_being_asked_for() -> None:
    pool, host = site("page_first")
    told = threading.Event()
    transfer = Transfer(pool, host, on_done=told.set)
    copies = [transfer.store(slots(page), slots(page), after=(busy_stream(),)) for page in (1, 2)]
    assert told.wait(60)
    for copy in copies:
        copy.synchronize()
    transfer.close()
    assert transfer.take_done() == copies


def test_slots_retire_behind_a_copy() -> None:
    pool, host = site("layer_first")
    transfer = Transfer(pool, host)
    allocator = SlotAllocator(P * NUM_PAGES, P, device="cuda")
    taken = allocator.alloc(P * NUM_PAGES)
    assert taken is not None
    copy = transfer.store(taken, taken, after=(busy_stream(),))
    allocator.free(taken, fence=copy.fence())
    assert allocator.alloc(P) is None
    transfer.close()
    assert allocator.alloc(P * NUM_PAGES) is not None
    allocator.check()
