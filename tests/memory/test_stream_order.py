"""Allocation by stream order: who gets slots that are still in use, behind which waits, and what they carry."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aradix.errors import TransferError, UsageError
from aradix.memory.allocator import SlotAllocator
from tests.memory.bench import Bench, Counting, RecordsThrough, assert_sizes, taken


def test_free_slots_go_first_then_the_streams_own_then_others_behind_waits(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    allocator.free(slots[0:2], streams=(bench.busy(bench.b, 50),))
    allocator.free(slots[2:4], streams=(bench.busy(bench.a, 50),))
    allocator.free(slots[4:6], streams=(bench.a, bench.busy(bench.c, 60)))
    allocator.free(slots[6:8])
    starts = []
    got = []
    for _ in range(8):
        slot = bench.taken_by(bench.a, 1)
        got.append(int(slot))
        starts.append(bench.a.launch(writes=slot, duration=1e-6).start)
    assert got == [7, 8, 3, 4, 1, 2, 5, 6]
    # Behind stream a's own kernel of 50; b's ends then as well; c's at 60.
    assert [round(start) for start in starts] == [50] * 6 + [60] * 2


def test_a_slot_whose_other_users_are_done_counts_as_the_streams_own(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    allocator.free(slots[:4], streams=(bench.busy(bench.b, 50),))
    allocator.free(slots[4:], streams=(bench.busy(bench.a, 50), bench.busy(bench.c, 10)))
    bench.device.advance(10)
    assert bench.taken_by(bench.a, 4).tolist() == slots[4:].tolist()


def test_a_streams_own_slots_need_no_wait(bench: Bench) -> None:
    stream: Any = Counting(bench.a)
    allocator = SlotAllocator(8, event_factory=lambda: RecordsThrough(bench.device))
    bench.busy(bench.a, 50)
    allocator.free(taken(allocator, 8), streams=(stream,))
    assert allocator.alloc(8, stream) is not None
    assert stream.waits == []


def test_a_stream_waits_once_per_other_stream_for_the_newest_event(bench: Bench) -> None:
    allocator = bench.allocator
    consumer: Any = Counting(bench.a)
    bench.busy(bench.b, 10)
    bench.busy(bench.c, 20)
    slots = taken(allocator, 8)
    for slot in slots[:4]:
        allocator.free(slot[None], streams=(bench.b,))
    allocator.free(slots[4:], streams=(bench.b, bench.c))
    got = allocator.alloc(8, consumer)
    assert got is not None
    assert sorted(got.tolist()) == sorted(slots.tolist())
    made = bench.events.made
    assert set(consumer.waits) == {made[4], made[5]}
    assert len(consumer.waits) == 2
    assert bench.a.launch(writes=got).start == 20


def test_the_device_waits_and_the_host_does_not(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    bench.b.launch(reads=slots, duration=30)
    allocator.free(slots, streams=(bench.b,))
    kernel = bench.a.launch(writes=bench.taken_by(bench.a, 8))
    assert bench.device.clock.now == 0
    assert kernel.start == 30
    assert bench.device.races == []


def test_nothing_is_waited_for_unless_all_can_be_had(bench: Bench) -> None:
    allocator = bench.allocator
    consumer: Any = Counting(bench.a)
    slots = taken(allocator, 8)
    allocator.free(slots[:6], streams=(bench.busy(bench.b, 30),))
    assert allocator.alloc(7, consumer) is None
    assert consumer.waits == []
    assert_sizes(allocator, retired=6, out=2)
    assert allocator.alloc(6, consumer) is not None
    assert len(consumer.waits) == 1


def test_a_batch_can_be_taken_in_part(bench: Bench) -> None:
    allocator = bench.allocator
    allocator.free(taken(allocator, 8), streams=(bench.busy(bench.b, 30),))
    first = bench.taken_by(bench.a, 3)
    assert_sizes(allocator, retired=5, out=3)
    second = bench.taken_by(bench.b, 2)
    assert_sizes(allocator, retired=3, out=5)
    assert len({*first.tolist(), *second.tolist()}) == 5
    bench.device.run_until_idle()
    assert allocator.reclaim() == 3
    assert_sizes(allocator, free=3, out=5)


@pytest.mark.parametrize("options", [{}, {"host_visible": True}])
def test_consumers_that_no_stream_orders_get_only_what_has_passed(bench: Bench, options: dict[str, bool]) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    allocator.free(slots[:4], streams=(bench.busy(bench.a, 5),))
    allocator.free(slots[4:])
    stream = bench.a if options else None
    assert allocator.takeable(stream, **options) == 4
    assert allocator.takeable(bench.a) == 8
    assert allocator.alloc(5, stream, **options) is None
    got = allocator.alloc(4, stream, **options)
    assert got is not None
    assert sorted(got.tolist()) == slots[4:].tolist()
    bench.device.advance(5)
    assert allocator.takeable(stream, **options) == 4
    assert allocator.alloc(4, stream, **options) is not None


def test_alloc_held_follows_the_same_order(bench: Bench) -> None:
    allocator = bench.allocator
    allocator.free(taken(allocator, 8), streams=(bench.busy(bench.b, 5),))
    assert allocator.alloc_held(8) is None
    held = allocator.alloc_held(8, bench.a)
    assert held is not None
    assert_sizes(allocator, held=8)
    allocator.free_held(held)
    assert_sizes(allocator, retired=8)


def test_a_stream_that_cannot_wait_is_given_nothing_in_use(bench: Bench) -> None:
    allocator = bench.allocator
    allocator.free(taken(allocator, 8), streams=(bench.busy(bench.b, 5),))
    no_stream: Any = "stream"
    with pytest.raises(UsageError, match="wait_event"):
        allocator.alloc(8, no_stream)

    class Broken:
        def wait_event(self, event: Any, /) -> None:
            raise RuntimeError("the device is lost")

    with pytest.raises(TransferError, match="device is lost"):
        allocator.alloc(8, Broken())
    assert_sizes(allocator, retired=8)


# ---- what was still pending when slots went out


def test_slots_taken_by_stream_order_and_cancelled_are_not_clean(bench: Bench) -> None:
    allocator = bench.allocator
    bench.busy(bench.a, 5)
    allocator.free(taken(allocator, 8), streams=(bench.a,))
    for stream in (bench.b, bench.a, bench.c):
        cancelled = bench.taken_by(stream, 8)
        allocator.free(cancelled)
        assert_sizes(allocator, retired=8)
        assert allocator.alloc(1) is None
    bench.device.advance(5)
    assert len(taken(allocator, 8)) == 8
    assert bench.num_queries() > 0


def test_a_cancelled_allocation_behind_a_pending_fence_hands_nothing_out_early(bench: Bench) -> None:
    allocator = SlotAllocator(4, event_factory=bench.events)
    allocator.free(taken(allocator, 4), streams=(bench.busy(bench.a, 5),))
    assert allocator.alloc(4) is None
    cancelled = allocator.alloc(4, bench.b)
    assert cancelled is not None
    allocator.free(cancelled)
    assert allocator.alloc(4) is None
    assert allocator.fenced_size() == 4
    bench.device.advance(5)
    assert len(taken(allocator, 4)) == 4


def test_carried_events_stand_beside_new_ones(bench: Bench) -> None:
    allocator = bench.allocator
    allocator.free(taken(allocator, 8), streams=(bench.busy(bench.a, 9),))
    slots = bench.taken_by(bench.b, 8)
    # Used on c alone: neither c's event nor time says anything of a.
    allocator.free(slots, streams=(bench.busy(bench.c, 2),))
    bench.device.advance(2)
    assert allocator.reclaim() == 0
    bench.device.advance(7)
    assert allocator.reclaim() == 8


def test_an_event_on_the_stream_that_waited_stands_for_what_it_waited_for(bench: Bench) -> None:
    allocator = bench.allocator
    allocator.free(taken(allocator, 8), streams=(bench.busy(bench.a, 9),))
    slots = bench.taken_by(bench.b, 8)
    bench.b.launch(writes=slots, duration=1)
    allocator.free(slots, streams=(bench.b,))
    consumer: Any = Counting(bench.c)
    assert allocator.alloc(8, consumer) is not None
    assert len(consumer.waits) == 1
    assert bench.c.launch().start == 10


def test_clean_pages_freed_with_carriers_are_free_at_once(bench: Bench) -> None:
    allocator = bench.allocator
    slots = taken(allocator, 8)
    allocator.free(slots[:2], streams=(bench.busy(bench.a, 9),))
    allocator.free(slots[2:4], streams=(bench.busy(bench.c, 5),))
    carriers = bench.taken_by(bench.b, 4)
    allocator.free(torch.cat([slots[4:6], carriers, slots[6:]]))
    assert_sizes(allocator, free=4, retired=4)
    bench.device.advance(5)
    assert allocator.reclaim() == 2
    bench.device.advance(4)
    assert allocator.reclaim() == 2


def test_carried_events_follow_pages_through_a_cache(bench: Bench) -> None:
    allocator = bench.allocator
    allocator.free(taken(allocator, 8), streams=(bench.busy(bench.a, 9),))
    slots = bench.taken_by(bench.b, 8).numpy()
    allocator.adopt(slots)
    allocator.free_held(slots[:4])
    allocator.disown(slots[4:])
    allocator.free(slots[4:])
    assert_sizes(allocator, retired=8)
    bench.device.advance(9)
    assert allocator.reclaim() == 8


def test_carried_events_that_passed_meanwhile_hold_nothing(bench: Bench) -> None:
    allocator = bench.allocator
    allocator.free(taken(allocator, 8), streams=(bench.busy(bench.a, 9),))
    slots = bench.taken_by(bench.b, 8)
    bench.device.advance(9)
    allocator.reclaim()
    allocator.free(slots)
    assert_sizes(allocator, free=8)
