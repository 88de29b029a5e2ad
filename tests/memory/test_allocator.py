"""SlotAllocator without fences: sizes, order, whole pages, who may free what, and who is told."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aradix.errors import ConfigError, DoubleFreeError, InvariantError, UsageError
from aradix.memory.allocator import SlotAllocator
from aradix.memory.page_table import RETIRING
from stress.device import VirtualDevice
from tests.memory.bench import assert_sizes, sizes, taken

# ---- construction


@pytest.mark.parametrize("num_slots", [0, -4, True, 4.0, "4", None])
def test_num_slots_must_be_a_positive_integer(num_slots: Any) -> None:
    with pytest.raises(ConfigError, match="num_slots"):
        SlotAllocator(num_slots)


@pytest.mark.parametrize("page_size", [0, -1, True, 1.0, "1", None])
def test_page_size_must_be_a_positive_integer(page_size: Any) -> None:
    with pytest.raises(ConfigError, match="page_size"):
        SlotAllocator(8, page_size)


def test_num_slots_must_be_whole_pages() -> None:
    with pytest.raises(ConfigError, match=r"10.*multiple.*4"):
        SlotAllocator(10, 4)


def test_page_ids_must_fit_int32() -> None:
    with pytest.raises(ConfigError, match="int32"):
        SlotAllocator(2**31)


@pytest.mark.parametrize("device", ["nonsense", 1.5])
def test_device_must_be_one(device: Any) -> None:
    with pytest.raises(ConfigError, match="device"):
        SlotAllocator(8, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where CUDA is absent")
def test_cuda_without_cuda_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="not available"):
        SlotAllocator(8, device="cuda")


def test_event_factory_must_be_callable() -> None:
    factory: Any = 5
    with pytest.raises(ConfigError, match="event_factory"):
        SlotAllocator(8, event_factory=factory)


def test_numpy_integers_are_integers() -> None:
    n: Any = np.int64(8)
    size: Any = np.int32(4)
    allocator = SlotAllocator(n, size)
    assert (allocator.num_slots, allocator.page_size, allocator.device) == (8, 4, torch.device("cpu"))
    assert type(allocator.num_slots) is int
    assert len(taken(allocator, n)) == 8


# ---- alloc


def test_a_fresh_pool_hands_out_ascending_slots_and_never_page_0() -> None:
    allocator = SlotAllocator(12, 4)
    assert taken(allocator, 4).tolist() == [4, 5, 6, 7]
    assert taken(allocator, 8).tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert allocator.alloc(4) is None
    assert_sizes(allocator, out=12)


def test_slots_are_an_int64_tensor_on_the_cpu() -> None:
    slots = taken(SlotAllocator(8), 3)
    assert slots.dtype == torch.int64
    assert slots.device.type == "cpu"
    held = SlotAllocator(8).alloc_held(3)
    assert isinstance(held, np.ndarray)
    assert held.dtype == np.int64


def test_alloc_is_all_or_nothing() -> None:
    allocator = SlotAllocator(8, 2)
    taken(allocator, 4)
    assert allocator.alloc(6) is None
    assert allocator.alloc(100) is None
    assert_sizes(allocator, free=4, out=4)
    assert len(taken(allocator, 4)) == 4


def test_alloc_of_nothing_is_an_empty_tensor_even_when_full() -> None:
    allocator = SlotAllocator(4)
    taken(allocator, 4)
    empty = taken(allocator, 0)
    assert empty.tolist() == []
    assert empty.dtype == torch.int64
    allocator.free(empty)
    allocator.free([])
    assert_sizes(allocator, out=4)


@pytest.mark.parametrize("n", [-4, 2, 5, True, 4.0, "4", None])
def test_alloc_takes_whole_pages_only(n: Any) -> None:
    allocator = SlotAllocator(8, 4)
    with pytest.raises(UsageError):
        allocator.alloc(n)
    assert_sizes(allocator, free=8)


def test_the_last_pages_freed_are_the_first_handed_out() -> None:
    allocator = SlotAllocator(16, 2)
    slots = taken(allocator, 12)
    allocator.free(slots[2:4])
    allocator.free(slots[6:10])
    assert taken(allocator, 6).tolist() == slots[6:10].tolist() + slots[2:4].tolist()


# ---- free


@pytest.mark.parametrize(
    "convert", [torch.Tensor.tolist, torch.Tensor.numpy, lambda t: t.to(torch.int32), tuple, lambda t: t]
)
def test_free_takes_tensors_arrays_and_sequences(convert: Callable[[torch.Tensor], Any]) -> None:
    allocator = SlotAllocator(16, 4)
    allocator.free(convert(taken(allocator, 12)))
    assert_sizes(allocator, free=16)


@pytest.mark.parametrize("page_size", [1, 4])
def test_free_takes_slots_in_any_order(page_size: int) -> None:
    allocator = SlotAllocator(64, page_size)
    slots = taken(allocator, 64).tolist()
    random.Random(1).shuffle(slots)
    allocator.free(slots)
    assert_sizes(allocator, free=64)
    one = taken(allocator, page_size).tolist()
    allocator.free(one[::-1])
    assert_sizes(allocator, free=64)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("num_pages", [1, 3])
def test_a_second_free_raises(page_size: int, num_pages: int) -> None:
    allocator = SlotAllocator(32, page_size)
    slots = taken(allocator, page_size * num_pages)
    allocator.free(slots)
    with pytest.raises(DoubleFreeError):
        allocator.free(slots)
    assert_sizes(allocator, free=32)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_slot_never_handed_out_is_no_double_free(page_size: int) -> None:
    allocator = SlotAllocator(32, page_size)
    taken(allocator, page_size)
    last = range(32, 32 + page_size)
    for slots in (
        list(last),
        list(range(page_size)),
        [slot + page_size for slot in last],
        [slot - 64 for slot in last],
    ):
        with pytest.raises(UsageError, match="never handed out") as raised:
            allocator.free(slots)
        assert not isinstance(raised.value, DoubleFreeError)
        with pytest.raises(UsageError):
            allocator.free([*range(page_size, 2 * page_size), *slots])
    assert_sizes(allocator, free=32 - page_size, out=page_size)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_slot_named_twice_in_one_call_is_a_double_free_and_changes_nothing(page_size: int) -> None:
    allocator = SlotAllocator(32, page_size)
    slots = taken(allocator, 16).tolist()
    for twice in (slots + slots[:page_size], slots[:page_size] * 2, sorted(slots + slots[:page_size])):
        with pytest.raises(DoubleFreeError, match="twice"):
            allocator.free(twice)
    assert_sizes(allocator, free=16, out=16)
    allocator.free(slots)


def test_free_validates_everything_before_it_changes_anything() -> None:
    allocator = SlotAllocator(32, 4)
    slots, gone = taken(allocator, 8), taken(allocator, 4)
    allocator.free(gone)
    with pytest.raises(DoubleFreeError, match=r"page 3 \(slots 12..15\)"):
        allocator.free(torch.cat([slots, gone]))
    assert_sizes(allocator, free=24, out=8)


@pytest.mark.parametrize("slots", [[4, 5, 6], [5, 6, 7, 8], [4, 5, 6, 8], [4, 4, 5, 6], [4], [4, 5, 6, 7, 8]])
def test_free_takes_whole_pages_only(slots: list[int]) -> None:
    allocator = SlotAllocator(16, 4)
    taken(allocator, 8)
    with pytest.raises(UsageError):
        allocator.free(slots)
    assert_sizes(allocator, free=8, out=8)


@pytest.mark.parametrize(
    "slots",
    [1, None, "slots", [1.0], [True], [[1, 2]], [[1], [2, 3]], [2**70], torch.ones(2), torch.ones(2, dtype=torch.bool),
     torch.ones(2, 2, dtype=torch.int64), torch.ones(2, dtype=torch.bfloat16)],
)  # fmt: skip
def test_slots_are_a_flat_run_of_integers(slots: Any) -> None:
    allocator = SlotAllocator(8)
    taken(allocator, 8)
    with pytest.raises(UsageError, match="flat run of integers"):
        allocator.free(slots)
    assert_sizes(allocator, out=8)


def test_a_device_tensor_is_refused_with_the_reason() -> None:
    allocator = SlotAllocator(8)
    with pytest.raises(UsageError, match="CPU"):
        allocator.free(torch.ones(2, dtype=torch.int64, device="meta"))


def test_free_leaves_the_callers_tensor_alone() -> None:
    allocator = SlotAllocator(16, 4)
    slots = taken(allocator, 8)
    before = slots.clone()
    allocator.free(slots.flip(0))
    assert torch.equal(slots, before)


def test_streams_without_events_are_refused_with_a_hint() -> None:
    allocator = SlotAllocator(8)
    slots = taken(allocator, 2)
    stream = VirtualDevice().stream()
    with pytest.raises(UsageError, match="event_factory"):
        allocator.free(slots, streams=(stream,))
    with pytest.raises(UsageError, match="event_factory"):
        allocator.record(stream)
    assert_sizes(allocator, free=6, out=2)


@pytest.mark.parametrize("event_factory", [None, VirtualDevice().event])
def test_what_is_no_stream_is_refused_as_that(event_factory: Callable[[], Any] | None) -> None:
    allocator = SlotAllocator(8, event_factory=event_factory)
    slots = taken(allocator, 2)
    stream: Any = object()
    with pytest.raises(UsageError, match="no wait_event"):
        allocator.free(slots, streams=(stream,))
    assert_sizes(allocator, free=6, out=2)


# ---- pages that a cache holds


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_callers_free_refuses_what_a_cache_holds(page_size: int) -> None:
    allocator = SlotAllocator(32, page_size)
    held = allocator.alloc_held(8)
    assert held is not None
    for free in (allocator.free, allocator.retire):
        with pytest.raises(UsageError, match=r"held by a cache.*hint") as raised:
            free(held)
        assert not isinstance(raised.value, DoubleFreeError)
    assert_sizes(allocator, free=24, held=8)
    allocator.free_held(held)
    assert_sizes(allocator, free=32)
    with pytest.raises(DoubleFreeError):
        allocator.free_held(held)


def test_a_cache_cannot_free_what_is_its_callers() -> None:
    allocator = SlotAllocator(8)
    slots = taken(allocator, 2)
    with pytest.raises(UsageError) as raised:
        allocator.free_held(slots.numpy())
    assert not isinstance(raised.value, DoubleFreeError)
    assert_sizes(allocator, free=6, out=2)


def test_adopted_pages_change_hands_and_back() -> None:
    allocator = SlotAllocator(32, 4)
    slots = taken(allocator, 12).numpy()
    allocator.adopt(slots[4:])
    assert_sizes(allocator, free=20, out=4, held=8)
    allocator.disown(slots[8:])
    assert_sizes(allocator, free=20, out=8, held=4)
    allocator.free(slots[:4])
    allocator.free(slots[8:])
    allocator.free_held(slots[4:8])
    assert_sizes(allocator, free=32)


def test_adopt_refuses_all_but_whole_pages_in_order_that_are_handed_out() -> None:
    allocator = SlotAllocator(32, 4)
    slots = taken(allocator, 16).numpy()
    gone, kept = slots[:4], slots[4:12]
    allocator.free(gone)
    allocator.adopt(slots[12:])
    page_backwards = kept.copy()
    page_backwards[:4] = page_backwards[:4][::-1]
    bad = [
        kept[:3], kept[1:5], kept[:4][::-1], page_backwards, np.concatenate([kept, gone]), np.concatenate([kept, kept]),
        np.concatenate([kept, slots[12:]]), np.arange(4), np.arange(28, 32), np.arange(36, 40),
    ]  # fmt: skip
    for value in bad:
        with pytest.raises(UsageError):
            allocator.adopt(value)
    assert_sizes(allocator, free=20, out=8, held=4)
    allocator.adopt(np.concatenate([kept[4:], kept[:4]]))  # pages may come in any order
    assert_sizes(allocator, free=20, held=12)


def test_disown_refuses_what_is_not_held() -> None:
    allocator = SlotAllocator(8)
    slots = taken(allocator, 2)
    with pytest.raises(UsageError, match="not held"):
        allocator.disown(slots)
    assert_sizes(allocator, free=6, out=2)


# ---- listeners


def test_listeners_hear_of_slots_that_came_back_until_they_unsubscribe() -> None:
    allocator = SlotAllocator(8)
    heard: list[int] = []
    unsubscribe = allocator.subscribe(lambda: heard.append(allocator.available_size()))
    slots = taken(allocator, 4)
    assert heard == []
    allocator.free(slots[:1])
    allocator.retire(slots[1:2])
    assert heard == [5, 6]
    allocator.free([])
    with pytest.raises(DoubleFreeError):
        allocator.free(slots[:1])
    assert heard == [5, 6]
    unsubscribe()
    unsubscribe()
    allocator.free(slots[2:])
    assert heard == [5, 6]


def test_a_listener_may_allocate_and_free() -> None:
    allocator = SlotAllocator(8)
    got: list[torch.Tensor] = []

    def serve() -> None:
        if len(got) < 4:
            slots = allocator.alloc(2)
            if slots is not None:
                got.append(slots)
                allocator.free(slots[1:])
                allocator.check()

    allocator.subscribe(serve)
    first = taken(allocator, 8)
    allocator.free(first[:2])
    # Each slot freed inside brought one more round, until nothing fitted any more.
    assert [len(slots) for slots in got] == [2]
    allocator.free(first[2:])
    assert len(got) == 4
    assert_sizes(allocator, free=4, out=4)


def test_a_change_during_a_round_brings_one_more_round_and_no_nested_one() -> None:
    allocator = SlotAllocator(8)
    slots = taken(allocator, 8)
    trace: list[str] = []

    def first() -> None:
        trace.append("first begins")
        if len(trace) == 1:
            allocator.free(slots[1:2])
        trace.append("first ends")

    allocator.subscribe(first)
    allocator.subscribe(lambda: trace.append("second"))
    allocator.free(slots[:1])
    assert trace == ["first begins", "first ends", "second"] * 2


def test_a_listener_that_raises_is_logged_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    allocator = SlotAllocator(8)
    heard: list[int] = []

    def broken() -> None:
        raise RuntimeError("listener broke")

    allocator.subscribe(broken)
    allocator.subscribe(lambda: heard.append(1))
    slots = taken(allocator, 2)
    with caplog.at_level(logging.ERROR):
        allocator.free(slots[:1])
        allocator.free(slots[1:])
    assert heard == [1, 1]
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert_sizes(allocator, free=8)


# ---- audits


def test_pages_in_names_its_states() -> None:
    allocator = SlotAllocator(16, 4)
    slots = taken(allocator, 8)
    allocator.adopt(slots[:4].numpy())
    assert allocator.pages_in("held").tolist() == [1]
    assert allocator.pages_in("out").tolist() == [2]
    assert allocator.pages_in("free").tolist() == [3, 4]
    with pytest.raises(UsageError, match="quarantined"):
        allocator.pages_in("lost")


def test_the_audit_sees_a_page_in_two_places_and_a_page_in_none() -> None:
    for state in (3, 2):
        allocator = SlotAllocator(8)
        slots = taken(allocator, 4)
        allocator.free(slots[:2])
        allocator.check()
        # A page that changes its state behind the allocator's back.
        allocator._table.states[int(slots[0 if state == 3 else 2])] = state
        with pytest.raises(InvariantError):
            allocator.check()


def test_the_audit_sees_a_claimed_page_that_nobody_sends_to_limbo() -> None:
    allocator = SlotAllocator(8)
    slots = taken(allocator, 4)
    allocator._table.claim(slots[:2].numpy(), RETIRING)
    with pytest.raises(InvariantError, match=r"2 pages .* never reached limbo"):
        allocator.check()


# ---- leaks


def test_thousands_of_requests_with_an_over_allocated_slot_each_leak_nothing() -> None:
    rng = random.Random(982)
    allocator = SlotAllocator(256, 4)
    running: list[torch.Tensor] = []
    for _ in range(2000):
        pages = -(-(rng.randint(1, 13) + 1) // 4)
        slots = allocator.alloc(pages * 4)
        while slots is None:
            allocator.free(running.pop(rng.randrange(len(running))))  # retract
            slots = allocator.alloc(pages * 4)
        end = rng.choice(("finish", "abort", "run on"))
        if end == "finish":
            kept = len(slots) // 2 // 4 * 4
            allocator.free(slots[kept:])
            allocator.adopt(slots[:kept].numpy())
            allocator.free_held(slots[:kept].numpy())
        elif end == "abort":
            allocator.free(slots)
            with pytest.raises(DoubleFreeError):
                allocator.free(slots)
        else:
            running.append(slots)
        assert sum(sizes(allocator).values()) == 256
    for slots in running:
        allocator.free(slots)
    assert_sizes(allocator, free=256)
