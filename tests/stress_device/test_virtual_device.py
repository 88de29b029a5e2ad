"""The virtual device: in-order streams on a clock that nothing but the test moves, with torch's traps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stress.device import VirtualClock, VirtualDevice


def test_time_passes_only_when_told_to() -> None:
    device = VirtualDevice()
    kernel = device.stream().launch(duration=5)
    assert device.clock.time() == 0
    device.advance(4.75)
    assert not kernel.done
    device.advance(0.25)
    assert kernel.done
    assert device.clock.time() == 5
    for seconds in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="finite"):
            device.advance(seconds)


def test_what_is_due_runs_in_the_order_of_time_and_then_of_the_calls() -> None:
    clock = VirtualClock()
    ran: list[tuple[str, float]] = []
    clock.schedule(2, lambda: ran.append(("second", clock.now)))
    clock.schedule(2, lambda: ran.append(("third", clock.now)))
    clock.schedule(1, lambda: clock.schedule(1.5, lambda: ran.append(("first", clock.now))))
    clock.advance(3)
    assert ran == [("first", 1.5), ("second", 2), ("third", 2)]
    assert clock.now == 3
    clock.advance_to(2)
    assert clock.now == 3


def test_kernels_of_one_stream_run_in_order_and_streams_run_side_by_side() -> None:
    device = VirtualDevice()
    a, b = device.stream("a"), device.stream("b")
    kernels = [a.launch(duration=2), a.launch(duration=3), b.launch(duration=4)]
    assert [(kernel.start, kernel.end) for kernel in kernels] == [(0, 2), (2, 5), (0, 4)]
    device.advance(10)
    late = a.launch(duration=1)
    assert late.start == 10


def test_durations_are_seeded() -> None:
    def ends(seed: int) -> list[float]:
        device = VirtualDevice(seed, durations=(1, 2))
        stream = device.stream()
        return [kernel.end - kernel.start for kernel in [stream.launch() for _ in range(20)]]

    assert ends(7) == ends(7)
    assert ends(7) != ends(8)
    assert all(1 - 1e-9 <= duration <= 2 + 1e-9 for duration in ends(7))


@pytest.mark.parametrize("duration", [0, -1, float("nan")])
def test_device_work_takes_time(duration: float) -> None:
    device = VirtualDevice()
    with pytest.raises(ValueError, match="more than"):
        device.stream().launch(duration=duration)
    with pytest.raises(ValueError, match="more than"):
        device.start_copy(duration=duration)


def test_an_event_stands_for_what_was_queued_before_its_record() -> None:
    device = VirtualDevice()
    stream = device.stream()
    stream.launch(duration=2)
    event = stream.record_event()
    stream.launch(duration=9)
    device.advance(1)
    assert not event.query()
    device.advance(1)
    assert event.query()
    assert not stream.query()


def test_an_event_never_recorded_queries_true_and_is_waited_for_by_nobody() -> None:
    device = VirtualDevice()
    event = device.event()
    device.default_stream.launch(duration=5)
    assert event.query()
    event.wait()
    event.synchronize()
    assert device.clock.now == 0
    event.record()
    assert not event.query()


def test_an_event_recorded_again_forgets_what_it_stood_for() -> None:
    device = VirtualDevice()
    slow, quick = device.stream(), device.stream()
    slow.launch(duration=9)
    event = slow.record_event()
    quick.launch(duration=1)
    event.record(quick)
    device.advance(1)
    assert event.query()
    assert not slow.query()


def test_a_wait_holds_for_the_record_of_its_moment() -> None:
    device = VirtualDevice()
    a, b = device.stream(), device.stream()
    a.launch(duration=3)
    event = a.record_event()
    b.wait_event(event)
    a.launch(duration=30)
    event.record(a)
    assert b.launch(duration=1).start == 3
    event.wait(b)
    assert b.launch(duration=1).start == 33


def test_synchronizing_moves_the_clock_no_further_than_it_must() -> None:
    device = VirtualDevice()
    a, b = device.stream(), device.stream()
    a.launch(duration=3)
    event = a.record_event()
    a.launch(duration=4)
    b.launch(duration=20)
    event.synchronize()
    assert device.clock.now == 3
    a.synchronize()
    assert device.clock.now == 7
    device.run_until_idle()
    assert device.clock.now == 20


@pytest.mark.parametrize("slots", [[3, 4], (3, 4), np.array([3, 4]), torch.tensor([3, 4])])
def test_kernels_leave_stamps_and_see_them(slots: object) -> None:
    device = VirtualDevice()
    stream = device.stream()
    writer = stream.launch(writes=slots, duration=1)
    reader = stream.launch(reads=slots, duration=1)
    device.run_until_idle()
    assert reader.seen == {3: writer.stamp, 4: writer.stamp}
    stream.synchronize()
    assert device.host_read(slots) == reader.seen
    stamp = device.host_write(slots)
    assert device.peek([3, 4, 5]) == {3: stamp, 4: stamp, 5: None}
    assert device.races == []


def test_a_reader_sees_what_landed_while_it_ran() -> None:
    device = VirtualDevice()
    a, b = device.stream(), device.stream()
    a.launch(writes=[1], duration=1, stamp=10)
    reader = a.launch(reads=[1], duration=10)
    device.advance(5)
    b.launch(writes=[1], duration=1, stamp=66)
    device.run_until_idle()
    assert reader.seen == {1: 66}
    assert len(device.races) == 2


def test_a_copy_completes_as_a_future_does() -> None:
    device = VirtualDevice()
    called: list[object] = []
    copy = device.start_copy(writes=[1], duration=2, stamp=5)
    copy.add_done_callback(called.append)
    assert not copy.done()
    device.advance(2)
    assert copy.done()
    assert called == [copy]
    copy.add_done_callback(called.append)
    assert called == [copy, copy]
    assert device.host_read([1]) == {1: 5}
