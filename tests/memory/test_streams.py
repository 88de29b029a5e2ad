"""Streams of the host keep their order, and events say where on it they stand."""

from __future__ import annotations

import functools
import gc
import logging
import threading
from concurrent.futures import Future

import pytest

from aradix.errors import TransferError, UsageError
from aradix.memory.fences import EventFence, FutureFence
from aradix.memory.lines import LineStream, host_copier
from aradix.memory.streams import HostEvent, HostStream, InlineStream

KINDS: list[type[HostStream]] = [HostStream]
if isinstance(host_copier().new_stream("probe"), LineStream):  # the core is compiled
    KINDS.append(LineStream)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[HostStream]:
    """Streams in Python, and compiled ones."""
    found: type[HostStream] = request.param
    return found


def blocked(stream: HostStream) -> Future[None]:
    """Holds `stream` up until the future is done."""
    gate: Future[None] = Future()
    stream.launch(gate.result)
    return gate


def test_steps_run_in_order_on_a_thread_of_the_stream(kind: type[HostStream]) -> None:
    stream = kind("one")
    seen: list[tuple[int, str]] = []
    for i in range(100):
        stream.launch(functools.partial(lambda i: seen.append((i, threading.current_thread().name)), i))
    stream.synchronize()
    assert seen == [(i, "one") for i in range(100)]
    stream.close()


def test_an_event_is_reached_when_what_was_queued_before_it_has_run(kind: type[HostStream]) -> None:
    stream = kind()
    gate = blocked(stream)
    event = stream.record_event()
    assert not event.query()
    assert not stream.query()
    gate.set_result(None)
    event.synchronize()
    assert event.query()
    stream.close()


def test_a_stream_that_waits_for_an_event_does_not_hold_up_the_caller_or_others(kind: type[HostStream]) -> None:
    first, second, third = kind(), kind(), kind()
    gate = blocked(first)
    event = first.record_event()
    event.wait(second)
    seen: list[str] = []
    second.launch(lambda: seen.append("second"))
    third.launch(lambda: seen.append("third"))
    third.synchronize()
    assert seen == ["third"]
    gate.set_result(None)
    second.synchronize()
    assert seen == ["third", "second"]
    for stream in (first, second, third):
        stream.close()


def test_an_event_recorded_again_stands_for_the_new_point_and_a_waiter_for_the_old(kind: type[HostStream]) -> None:
    first, second = kind(), kind()
    event = first.record_event()
    event.synchronize()
    gate = blocked(second)
    waiting = kind()
    event.wait(waiting)
    event.record(second)
    assert not event.query()
    waiting.synchronize()
    gate.set_result(None)
    event.synchronize()
    for stream in (first, second, waiting):
        stream.close()


def test_an_event_never_recorded_is_not_reached() -> None:
    event = HostEvent()
    assert not event.query()
    for act in (event.synchronize, lambda: event.wait(InlineStream()), lambda: event.add_done_callback(print)):
        with pytest.raises(UsageError, match="never recorded"):
            act()


def test_events_of_the_host_make_fences(kind: type[HostStream]) -> None:
    stream = kind()
    gate = blocked(stream)
    fence = EventFence(HostEvent(), stream)
    done = FutureFence(stream.mark())
    assert not fence.passed()
    assert not done.passed()
    gate.set_result(None)
    stream.synchronize()
    assert fence.passed()
    assert done.passed()
    stream.close()
    with pytest.raises(TransferError, match="closed"):
        EventFence(HostEvent(), stream)


def test_a_step_that_raises_is_told_and_the_next_one_runs(
    kind: type[HostStream], caplog: pytest.LogCaptureFixture
) -> None:
    stream = kind()
    seen: list[int] = []
    with caplog.at_level(logging.ERROR):
        stream.launch(lambda: 1 // 0)
        stream.launch(lambda: seen.append(1))
        stream.synchronize()
    assert seen == [1]
    assert "ZeroDivisionError" in caplog.text
    stream.close()


def test_closing_runs_what_is_queued_and_ends_the_thread(kind: type[HostStream]) -> None:
    stream = kind("closing")
    seen: list[int] = []
    stream.launch(lambda: seen.append(1))
    stream.close()
    stream.close()
    assert seen == [1]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("closing")]
    with pytest.raises(UsageError, match="closed"):
        stream.launch(lambda: None)


def test_a_stream_that_is_dropped_takes_its_thread_along(kind: type[HostStream]) -> None:
    stream = kind("dropped")
    stream.launch(lambda: None)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("dropped")]
    assert threads
    del stream
    gc.collect()
    for thread in threads:
        thread.join()


def test_an_inline_stream_runs_each_step_at_once_and_refuses_to_wait(kind: type[HostStream]) -> None:
    stream = InlineStream()
    seen: list[int] = []
    stream.launch(lambda: seen.append(1))
    assert seen == [1]
    event = HostEvent()
    event.record(stream)
    assert event.query()
    stream.wait_event(event)
    other = kind()
    gate = blocked(other)
    with pytest.raises(UsageError, match="cannot wait"):
        stream.wait_event(other.record_event())
    gate.set_result(None)
    other.close()
