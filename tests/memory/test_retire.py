"""retire(): as free(), from worker threads and from the middle of another call."""

from __future__ import annotations

import functools
import itertools
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aradix.errors import DoubleFreeError, TransferError, UsageError
from aradix.memory.allocator import SlotAllocator
from aradix.memory.fences import FutureFence
from stress.device import VirtualDevice, VirtualEvent
from tests.memory.bench import Bench, assert_sizes, taken


def in_thread(call: Callable[[], object]) -> BaseException | None:
    """Runs `call` in a thread of its own; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_retire_frees_at_once_what_nothing_uses(bench: Bench) -> None:
    slots = taken(bench.allocator, 8)
    assert in_thread(lambda: bench.allocator.retire(slots[:5])) is None
    assert_sizes(bench.allocator, free=5, out=3)


def test_retire_fences_like_free(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    bench.busy(bench.a, 5)
    copy = bench.device.start_copy(reads=slots[4:], duration=9)
    assert in_thread(lambda: allocator.retire(slots[:4], (bench.a,))) is None
    assert in_thread(lambda: allocator.retire(slots[4:], fence=FutureFence(copy))) is None
    assert_sizes(allocator, retired=8)
    bench.device.advance(5)
    assert allocator.reclaim() == 4
    bench.device.advance(4)
    assert allocator.reclaim() == 4
    assert bench.device.races == []


def test_retire_validates_on_the_calling_thread_before_anything_changes(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 6)
    allocator.free(slots[:1])
    for bad, kind in ((slots[:2], DoubleFreeError), ([8], UsageError), ([1.5], UsageError), ([2, 2], DoubleFreeError)):
        error = in_thread(lambda bad=bad: allocator.retire(bad))  # type: ignore[misc]
        assert type(error) is kind
    assert_sizes(allocator, free=3, out=5)


def test_retire_tells_listeners_on_the_thread_that_retires(bench: Bench) -> None:
    allocator = bench.allocator
    heard: list[tuple[bool, int]] = []
    here = threading.get_ident()
    allocator.subscribe(lambda: heard.append((threading.get_ident() == here, allocator.available_size())))
    slots = taken(allocator, 8)
    in_thread(lambda: allocator.retire(slots[:3]))
    allocator.retire(slots[3:])
    assert heard == [(False, 3), (True, 8)]


def test_retire_reports_a_record_that_fails(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    bench.events.fail_record = True
    assert isinstance(in_thread(lambda: allocator.retire(slots[:3], (bench.a,))), TransferError)
    assert_sizes(allocator, out=5, quarantined=3)
    assert allocator.reclaim() == 0


def test_many_threads_retire_each_slot_once() -> None:
    allocator = SlotAllocator(4096, 4)
    slots = taken(allocator, 4096).reshape(-1, 4)
    heard: list[int] = []
    allocator.subscribe(lambda: heard.append(1))
    barrier = threading.Barrier(4)
    refused: list[int] = []

    def work() -> None:
        barrier.wait()
        for page in slots:
            try:
                allocator.retire(page)
            except DoubleFreeError:
                refused.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3 * 1024
    assert heard
    assert_sizes(allocator, free=4096)


def test_a_thread_may_retire_while_another_allocates() -> None:
    allocator = SlotAllocator(64)
    handed: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
    room = threading.Event()
    allocator.subscribe(room.set)
    refused: list[BaseException | None] = []

    def work() -> None:
        while (slots := handed.get()) is not None:
            allocator.retire(slots)

    thread = threading.Thread(target=lambda: refused.append(in_thread(work)))
    thread.start()
    for _ in range(500):
        room.clear()
        while (slots := allocator.alloc(16)) is None:
            room.wait()
            room.clear()
        handed.put(slots)
    handed.put(None)
    thread.join()
    assert refused == [None]
    assert_sizes(allocator, free=64)


# ---- in the middle of another call, as finalisers come


class Interrupting:
    """An event factory that calls somebody in the middle of the allocator's step, as a finaliser would."""

    def __init__(self, device: VirtualDevice) -> None:
        self.device = device
        self.call: Callable[[], object] | None = None

    def __call__(self) -> VirtualEvent:
        call, self.call = self.call, None
        if call is not None:
            call()
        return self.device.event()


@pytest.fixture
def interrupted() -> tuple[SlotAllocator, Interrupting]:
    events = Interrupting(VirtualDevice())
    return SlotAllocator(8, event_factory=events), events


def test_a_retire_in_the_middle_of_a_step_takes_effect_with_the_next(
    interrupted: tuple[SlotAllocator, Interrupting],
) -> None:
    allocator, events = interrupted
    stream = events.device.stream()
    stream.launch(duration=5)
    slots = taken(allocator, 8)
    heard: list[int] = []
    allocator.subscribe(lambda: heard.append(allocator.fenced_size()))
    events.call = lambda: allocator.retire(slots[4:6], (stream,))
    allocator.free(slots[:4], (stream,))
    assert heard
    assert_sizes(allocator, retired=6, out=2)
    with pytest.raises(DoubleFreeError):
        allocator.free(slots[4:6])
    events.device.advance(5)
    assert allocator.reclaim() == 6


def test_a_retire_in_the_middle_of_a_step_is_claimed_at_once(interrupted: tuple[SlotAllocator, Interrupting]) -> None:
    allocator, events = interrupted
    stream = events.device.stream()
    slots = taken(allocator, 8)
    raised: list[type[BaseException]] = []

    def twice() -> None:
        allocator.retire(slots[4:6])
        try:
            allocator.retire(slots[5:7])
        except DoubleFreeError as error:
            raised.append(type(error))

    events.call = twice
    allocator.free(slots[:4], (stream,))
    assert raised == [DoubleFreeError]
    assert_sizes(allocator, free=2, retired=4, out=2)


def test_a_failed_record_of_an_interrupting_retire_is_raised_by_the_next_poll(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)

    class Flag:
        def passed(self) -> bool:
            allocator.retire(slots[:2], (bench.a,))
            bench.events.fail_record = True
            return True

    allocator.free(slots[2:4], fence=Flag())
    assert allocator.quarantined_size() == 2
    bench.events.fail_record = False
    allocator.free(slots[4:5])
    with pytest.raises(TransferError):
        allocator.reclaim()
    assert allocator.reclaim() == 0
    assert_sizes(allocator, free=3, out=3, quarantined=2)


@pytest.mark.parametrize("name", ["alloc", "free", "reclaim", "takeable", "adopt", "check"])
def test_every_other_call_in_the_middle_of_a_step_is_refused(
    interrupted: tuple[SlotAllocator, Interrupting], name: str
) -> None:
    allocator, events = interrupted
    slots = taken(allocator, 8)
    arguments: dict[str, tuple[Any, ...]] = {"alloc": (0,), "free": (slots[4:],), "adopt": (slots[4:],)}
    refused: list[str] = []

    def call() -> None:
        with pytest.raises(UsageError, match="in the middle") as raised:
            getattr(allocator, name)(*arguments.get(name, ()))
        refused.append(str(raised.value))

    events.call = call
    allocator.free(slots[:4], (events.device.stream(),))
    assert len(refused) == 1
    assert_sizes(allocator, retired=4, out=4)


def interrupted_at(point: int, call: Callable[[], object], interrupt: Callable[[], object]) -> bool:
    """Runs `call` with `interrupt` in its middle, at its `point`-th event, as a finaliser; False where it has fewer."""
    left = point

    def on_event(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            interrupt()

    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
    return left <= 0


@pytest.mark.parametrize("carrying", [False, True])
def test_the_audit_holds_wherever_a_finaliser_retires(carrying: bool) -> None:
    """Whatever is still pending on the pages: those claimed meanwhile are out until the next call."""
    bench = Bench()
    allocator = bench.allocator
    num_deferred = 0

    for point in itertools.count(1):
        bench.busy(bench.a, 5)
        slots = taken(allocator, 8)
        if carrying:
            allocator.free(slots, (bench.a,))
            slots = bench.taken_by(bench.b, 8)
        reached = interrupted_at(point, allocator.check, functools.partial(allocator.retire, slots[:4]))
        num_deferred += bool(allocator._returned)
        if not reached:
            break
        allocator.free(slots[4:])
        bench.device.advance(100)
        allocator.reclaim()
        assert_sizes(allocator, free=8)
    assert num_deferred > 5
