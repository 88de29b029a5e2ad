"""The happens-before oracle: it finds what is unordered, also where timing hid it, and nothing else."""

from __future__ import annotations

import pytest

from stress.device import VirtualDevice, VirtualStream


@pytest.fixture
def device() -> VirtualDevice:
    return VirtualDevice()


@pytest.fixture
def streams(device: VirtualDevice) -> tuple[VirtualStream, VirtualStream]:
    return device.stream("a"), device.stream("b")


Pair = tuple[VirtualStream, VirtualStream]


@pytest.mark.parametrize(
    ("first", "second", "num_races"),
    [("writes", "writes", 1), ("writes", "reads", 1), ("reads", "writes", 1), ("reads", "reads", 0)],
)
def test_two_streams_conflict_unless_both_read(
    device: VirtualDevice, streams: Pair, first: str, second: str, num_races: int
) -> None:
    a, b = streams
    a.launch(**{first: [1]}, duration=1)  # type: ignore[arg-type]
    device.run_until_idle()  # the kernel is long over, but nothing says so
    b.launch(**{second: [1]}, duration=1)  # type: ignore[arg-type]
    assert len(device.races) == num_races


def test_a_race_names_slot_and_both_accesses(device: VirtualDevice, streams: Pair) -> None:
    a, b = streams
    a.launch(reads=[7, 8], label="attention")
    b.launch(writes=[8], label="prefill")
    (race,) = device.races
    assert str(race) == "slot 8: write by prefill 1 on b is not ordered after read by attention 1 on a"
    assert (race.slot, race.first.kind, race.second.kind) == (8, "read", "write")


def test_one_stream_is_ordered_with_itself(device: VirtualDevice, streams: Pair) -> None:
    a, _ = streams
    for _ in range(3):
        a.launch(writes=[1])
        a.launch(reads=[1])
    assert device.races == []


def test_other_slots_are_no_conflict(device: VirtualDevice, streams: Pair) -> None:
    a, b = streams
    a.launch(writes=[1])
    b.launch(writes=[2])
    assert device.races == []


def test_a_wait_orders_after_the_record_and_not_after_what_came_later(device: VirtualDevice, streams: Pair) -> None:
    a, b = streams
    a.launch(writes=[1])
    event = a.record_event()
    a.launch(writes=[2])
    b.wait_event(event)
    b.launch(reads=[1])
    assert device.races == []
    b.launch(reads=[2])
    assert [race.slot for race in device.races] == [2]


def test_order_is_transitive(device: VirtualDevice, streams: Pair) -> None:
    a, b = streams
    c = device.stream("c")
    a.launch(writes=[1])
    b.wait_event(a.record_event())
    c.wait_event(b.record_event())
    c.launch(writes=[1])
    assert device.races == []


def test_a_write_is_ordered_after_every_reader(device: VirtualDevice, streams: Pair) -> None:
    a, b = streams
    c = device.stream("c")
    a.launch(writes=[1])
    for reader in (b, c):
        reader.wait_event(a.record_event())
        reader.launch(reads=[1])
    a.wait_event(b.record_event())
    a.launch(writes=[1])
    (race,) = device.races
    assert race.first.actor.name == "c"


def test_what_the_host_saw_pass_orders_what_it_launches(device: VirtualDevice, streams: Pair) -> None:
    a, b = streams
    a.launch(writes=[1], duration=2)
    event = a.record_event()
    assert not event.query()
    device.advance(2)
    assert event.query()
    b.launch(writes=[1])
    device.host_read([2])
    assert device.races == []


def test_a_query_that_said_no_orders_nothing(device: VirtualDevice, streams: Pair) -> None:
    a, b = streams
    a.launch(writes=[1], duration=2)
    event = a.record_event()
    assert not event.query()
    assert not a.query()
    b.launch(writes=[1])
    assert len(device.races) == 1


def test_an_unrecorded_or_overwritten_event_orders_nothing(device: VirtualDevice, streams: Pair) -> None:
    a, b = streams
    a.launch(writes=[1], duration=2)
    unrecorded = device.event()
    overwritten = a.record_event()
    overwritten.record(device.stream("idle"))
    for event in (unrecorded, overwritten):
        assert event.query()
        b.wait_event(event)
    b.launch(writes=[1])
    assert len(device.races) == 1


@pytest.mark.parametrize("access", ["host_read", "host_write"])
def test_the_host_is_ordered_only_by_what_it_saw(device: VirtualDevice, streams: Pair, access: str) -> None:
    a, _ = streams
    a.launch(writes=[1])
    device.run_until_idle()
    getattr(device, access)([1])
    assert len(device.races) == 1
    a.synchronize()
    getattr(device, access)([1])
    assert len(device.races) == 1


def test_a_launch_is_ordered_after_what_the_host_did_before_it_only(device: VirtualDevice, streams: Pair) -> None:
    a, b = streams
    device.host_write([1])
    a.launch(reads=[1])
    assert device.races == []
    b.launch(reads=[2])
    device.host_write([2])
    assert [race.slot for race in device.races] == [2]


def test_a_copy_knows_what_the_host_knew_when_it_started(device: VirtualDevice, streams: Pair) -> None:
    a, _ = streams
    a.launch(writes=[1, 2], duration=1)
    device.start_copy(reads=[1])
    assert [race.slot for race in device.races] == [1]
    a.synchronize()
    copy = device.start_copy(reads=[2], duration=5)
    assert len(device.races) == 1
    a.launch(writes=[2])
    assert len(device.races) == 2
    device.advance(5)
    assert copy.done()
    a.launch(writes=[2])
    assert len(device.races) == 2


def test_two_copies_are_unordered_until_the_host_saw_one_end(device: VirtualDevice) -> None:
    first = device.start_copy(writes=[1], duration=1)
    device.advance(1)
    device.start_copy(writes=[1], duration=1)
    assert len(device.races) == 1
    assert first.done()
    device.run_until_idle()
    device.start_copy(writes=[2], duration=1).add_done_callback(lambda _: None)
    device.run_until_idle()
    device.start_copy(writes=[2], duration=1)
    assert len(device.races) == 1
