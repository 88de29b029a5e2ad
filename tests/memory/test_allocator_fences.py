"""SlotAllocator behind fences: no slot comes back before its fence allows, and no fence holds up another."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from aradix.errors import DoubleFreeError, TransferError, UsageError
from aradix.memory.allocator import SlotAllocator
from aradix.memory.fences import CudaFence, EventFence, FutureFence, ReadyFence
from tests.memory.bench import Bench, assert_sizes, taken

# ---- retiring


def test_retired_slots_come_back_when_the_fence_has_passed_and_somebody_polls(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    allocator.free(slots[:4], streams=(bench.busy(bench.a, 5),))
    assert_sizes(allocator, retired=4, out=4)
    assert allocator.reclaim() == 0
    assert allocator.alloc(1) is None
    bench.device.advance(5)
    assert_sizes(allocator, retired=4, out=4)
    assert allocator.reclaim() == 4
    assert allocator.reclaim() == 0
    assert_sizes(allocator, free=4, out=4)
    assert sorted(taken(allocator, 4).tolist()) == slots[:4].tolist()


def test_a_later_change_to_the_callers_slots_changes_nothing(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    given = slots.clone()
    allocator.free(given[:4], streams=(bench.a,))
    allocator.retire(given[4:], streams=(bench.a,))
    given.fill_(1)
    assert allocator.reclaim() == 8
    allocator.check()
    again = taken(allocator, 8)
    assert sorted(again.tolist()) == slots.tolist()
    again.fill_(1)
    allocator.check()


def test_a_slot_waits_for_every_stream_that_used_it(bench: Bench) -> None:
    allocator = bench.allocator
    allocator.free(taken(allocator, 8), streams=(bench.busy(bench.a, 2), bench.busy(bench.b, 6), bench.c))
    bench.device.advance(2)
    assert allocator.reclaim() == 0
    bench.device.advance(4)
    assert allocator.reclaim() == 8


def test_a_second_free_of_retired_slots_raises(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 4)
    allocator.free(slots, streams=(bench.busy(bench.a, 2),))
    for free in (allocator.free, allocator.retire):
        with pytest.raises(DoubleFreeError, match="retired already"):
            free(slots[:1])
    assert_sizes(allocator, free=4, retired=4)


def test_one_slow_stream_holds_nobody_else_up_and_costs_one_query_a_poll(bench: Bench) -> None:
    allocator = bench.allocator
    bench.busy(bench.a, 100)
    slots = taken(allocator, 8)
    for slot in slots[:6]:
        allocator.free(slot[None], streams=(bench.a,))
    bench.busy(bench.b, 1)
    for slot in slots[6:]:
        allocator.free(slot[None], streams=(bench.b,))
    bench.device.advance(1)
    assert bench.num_queries() == 0
    assert allocator.reclaim() == 2
    assert bench.num_queries() == 1 + 2
    assert allocator.reclaim() == 0
    assert bench.num_queries() == 1 + 2 + 1
    bench.device.run_until_idle()
    assert allocator.reclaim() == 6


def test_one_event_is_recorded_per_batch_and_stream(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    allocator.free(slots[:6], streams=[bench.a, bench.b, bench.a])
    allocator.free(slots[6:], streams=iter([bench.a]))
    assert len(bench.events.made) == 3
    assert [event.num_records for event in bench.events.made] == [1, 1, 1]


def test_an_event_is_used_again_only_after_it_passed(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    allocator.free(slots[:1], streams=(bench.busy(bench.a, 5),))
    allocator.free(slots[1:2], streams=(bench.a,))
    first, second = bench.events.made
    bench.device.advance(5)
    assert allocator.reclaim() == 2
    allocator.free(slots[2:3], streams=(bench.busy(bench.a, 5),))
    allocator.free(slots[3:4], streams=(bench.a,))
    allocator.free(slots[4:5], streams=(bench.a,))
    assert bench.events.made[:2] == [first, second]
    assert [event.num_records for event in bench.events.made] == [2, 2, 1]


def test_free_with_no_stream_and_a_passed_fence_is_at_once(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    allocator.free(slots[:1])
    allocator.free(slots[1:2], streams=[])
    allocator.free(slots[2:3], fence=ReadyFence())
    allocator.free(slots[3:4], fence=EventFence(bench.device.event(), bench.a))
    done: Future[None] = Future()
    done.set_result(None)
    allocator.free(slots[4:5], fence=FutureFence(done))
    assert_sizes(allocator, free=5, out=3)


# ---- fences of other kinds


def test_slots_behind_a_future_come_back_when_it_is_done_and_listeners_hear_of_it(bench: Bench) -> None:
    allocator = bench.allocator
    heard: list[int] = []
    allocator.subscribe(lambda: heard.append(allocator.reclaim()))
    future: Future[None] = Future()
    allocator.free(taken(allocator, 8), fence=FutureFence(future))
    assert heard == [0]
    assert_sizes(allocator, retired=8)
    future.set_result(None)
    # The completion brought the 8 back; that they came back brought one more round.
    assert heard == [0, 8, 0]
    assert_sizes(allocator, free=8)


def test_a_fence_and_streams_both_have_to_pass(bench: Bench) -> None:
    allocator = bench.allocator
    future: Future[None] = Future()
    slots = taken(allocator, 8)
    allocator.free(slots[:4], streams=(bench.busy(bench.a, 2),), fence=FutureFence(future))
    other: Future[None] = Future()
    allocator.free(slots[4:], streams=(bench.a,), fence=FutureFence(other))
    other.set_result(None)
    assert allocator.reclaim() == 0
    bench.device.advance(2)
    assert allocator.reclaim() == 4
    assert allocator.reclaim() == 0
    future.set_result(None)
    assert allocator.reclaim() == 4


def test_no_stream_is_given_slots_behind_a_future(bench: Bench) -> None:
    allocator = bench.allocator
    future: Future[None] = Future()
    allocator.free(taken(allocator, 8), streams=(bench.busy(bench.a, 1),), fence=FutureFence(future))
    assert allocator.alloc(1, bench.a) is None
    assert allocator.takeable(bench.a) == 0
    future.set_result(None)
    assert allocator.takeable(bench.a) == 8


def test_a_recorded_event_fence_can_be_waited_for_on_the_device(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    bench.a.launch(reads=slots, duration=5)
    allocator.free(slots, fence=CudaFence(bench.device.event(), bench.a))
    assert allocator.alloc(1) is None
    kernel = bench.b.launch(writes=bench.taken_by(bench.b, 4))
    assert kernel.start == 5
    kernel = bench.a.launch(writes=bench.taken_by(bench.a, 4))
    assert kernel.start == 5
    assert bench.device.races == []


def test_a_callers_event_stays_the_callers_and_is_asked_no_more_once_it_passed(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    event = bench.events()
    allocator.free(slots[:4], fence=EventFence(event, bench.busy(bench.a, 5)))
    bench.device.advance(5)
    assert allocator.reclaim() == 4
    num_queries = event.num_queries
    allocator.free(slots[4:], streams=(bench.a,))
    assert allocator.reclaim() == 4
    assert (event.num_queries, event.num_records) == (num_queries, 1)


def test_anything_with_passed_is_a_fence(bench: Bench) -> None:
    class Flag:
        up = False

        def passed(self) -> bool:
            return self.up

    flag = Flag()
    bench.allocator.free(taken(bench.allocator, 8), fence=flag)
    assert bench.allocator.reclaim() == 0
    flag.up = True
    assert bench.allocator.reclaim() == 8


def test_an_event_that_was_never_recorded_is_an_error_and_never_done(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    assert bench.device.event().query()
    with pytest.raises(UsageError, match="never recorded"):
        allocator.free(slots, fence=EventFence(bench.device.event()))
    bare: Any = bench.device.event()
    for free in (allocator.free, allocator.retire):
        with pytest.raises(UsageError, match="EventFence"):
            free(slots, fence=bare)
    bench.device.run_until_idle()
    assert allocator.reclaim() == 0
    assert_sizes(allocator, out=8)


@pytest.mark.parametrize("streams", [5, [None], [[]], object()])
def test_streams_must_be_streams(bench: Bench, streams: Any) -> None:
    slots = taken(bench.allocator, 8)
    with pytest.raises(UsageError):
        bench.allocator.free(slots, streams)
    assert_sizes(bench.allocator, out=8)


def test_a_fence_must_have_passed() -> None:
    allocator = SlotAllocator(8)
    fence: Any = object()
    with pytest.raises(UsageError, match="passed"):
        allocator.free(taken(allocator, 8), fence=fence)
    assert_sizes(allocator, out=8)


# ---- what fails


@pytest.mark.parametrize("failure", ["fail_record", "fail_make"])
def test_a_record_that_fails_puts_the_batch_in_quarantine_for_good(bench: Bench, failure: str) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    heard: list[int] = []
    allocator.subscribe(lambda: heard.append(allocator.quarantined_size()))
    setattr(bench.events, failure, True)
    with pytest.raises(TransferError) as raised:
        allocator.free(slots[:3], streams=(bench.busy(bench.a, 1), bench.b))
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert heard == [3]
    setattr(bench.events, failure, False)
    assert_sizes(allocator, out=5, quarantined=3)
    allocator.free(slots[3:], streams=(bench.a, bench.b))
    bench.device.run_until_idle()
    assert allocator.reclaim() == 5
    assert allocator.alloc(6, bench.a) is None
    with pytest.raises(DoubleFreeError, match="quarantine"):
        allocator.free(slots[:1])
    assert_sizes(allocator, free=5, quarantined=3)


def test_a_query_that_fails_quarantines_its_batches_and_serves_the_others(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    for slot in slots[:4]:
        allocator.free(slot[None], streams=(bench.a,))
    allocator.free(slots[4:5], streams=(bench.a, bench.b))
    allocator.free(slots[5:6], streams=(bench.b,))
    bench.events.made[1].broken = True
    bench.events.made[5].broken = True
    with pytest.raises(TransferError, match="device is lost"):
        allocator.reclaim()
    assert_sizes(allocator, free=4, out=2, quarantined=2)
    assert allocator.reclaim() == 0


def test_a_broken_fence_is_reported_by_alloc_before_it_hands_anything_out(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    allocator.free(slots[:2], streams=(bench.a,))
    allocator.free(slots[2:6], streams=(bench.b,))
    bench.events.made[0].broken = True
    with pytest.raises(TransferError):
        allocator.alloc(3)
    assert_sizes(allocator, free=4, out=2, quarantined=2)
    assert len(taken(allocator, 3)) == 3


def test_a_fence_that_raises_quarantines_its_pages(bench: Bench) -> None:
    class Broken:
        up = True

        def passed(self) -> bool:
            if self.up:
                return False
            raise OSError("the link went down")

    allocator = bench.allocator
    slots = taken(allocator, 8)
    fence = Broken()
    allocator.free(slots[:2], fence=fence)
    fence.up = False
    with pytest.raises(TransferError, match="link went down"):
        allocator.reclaim()
    with pytest.raises(TransferError, match="link went down"):
        allocator.free(slots[2:4], fence=fence)
    assert_sizes(allocator, out=4, quarantined=4)


def test_a_carried_event_that_broke_quarantines_pages_that_nothing_else_vouches_for(bench: Bench) -> None:
    allocator = bench.allocator
    allocator.free(taken(allocator, 8), streams=(bench.busy(bench.a, 9),))
    slots = bench.taken_by(bench.b, 8)
    bench.events.made[0].broken = True
    with pytest.raises(TransferError):
        allocator.reclaim()
    assert_sizes(allocator, out=8)
    # Stream b waited for a on the device, so what is recorded on b stands for both.
    allocator.free(slots[:4], streams=(bench.b,))
    with pytest.raises(TransferError):
        allocator.free(slots[4:])
    assert_sizes(allocator, retired=4, quarantined=4)


# ---- ready events


def test_record_gives_an_event_that_passes_with_its_stream(bench: Bench) -> None:
    allocator = bench.allocator
    bench.busy(bench.a, 5)
    event = allocator.record(bench.a)
    assert not allocator.passed(event)
    bench.device.advance(5)
    assert allocator.passed(event)
    assert allocator.record(bench.a) is not event


def test_a_ready_event_that_fails_is_an_error(bench: Bench) -> None:
    event = bench.allocator.record(bench.a)
    bench.events.made[0].broken = True
    with pytest.raises(TransferError):
        bench.allocator.passed(event)
    bench.events.fail_record = True
    with pytest.raises(TransferError):
        bench.allocator.record(bench.a)
