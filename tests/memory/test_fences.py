"""Fences: none reads as passed before it is, and none without a record."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from aradix.errors import TransferError, UsageError
from aradix.memory.fences import CudaFence, EventFence, Fence, FutureFence, ReadyFence, query_event, record_event
from stress.device import VirtualDevice
from tests.memory.faults import FaultyEvents


def test_the_ready_fence_has_passed() -> None:
    assert ReadyFence().passed()


def test_every_kind_is_a_fence() -> None:
    device = VirtualDevice()
    for fence in (ReadyFence(), EventFence(device.event()), FutureFence(Future())):
        assert isinstance(fence, Fence)
    assert not isinstance(device.event(), Fence)
    assert CudaFence is EventFence


def test_an_event_fence_passes_with_its_stream() -> None:
    device = VirtualDevice()
    stream = device.stream()
    stream.launch(duration=3)
    fence = EventFence(device.event(), stream)
    stream.launch(duration=10)
    assert not fence.passed()
    device.advance(2.5)
    assert not fence.passed()
    device.advance(0.5)
    assert fence.passed()


def test_an_event_fence_never_recorded_never_passes_whatever_its_event_says() -> None:
    event = VirtualDevice().event()
    assert event.query()
    fence = EventFence(event)
    assert not fence.recorded
    assert not fence.passed()


def test_an_event_fence_may_be_recorded_later_and_once() -> None:
    device = VirtualDevice()
    stream = device.stream()
    fence = EventFence(device.event())
    fence.record(stream)
    assert fence.recorded
    assert fence.passed()
    with pytest.raises(UsageError, match="overwrite"):
        fence.record(stream)


def test_a_passed_event_fence_stays_passed() -> None:
    device = VirtualDevice()
    stream = device.stream()
    event = device.event()
    fence = EventFence(event, stream)
    assert fence.passed()
    stream.launch(duration=5)
    event.record(stream)
    assert not event.query()
    assert fence.passed()


def test_a_record_that_fails_leaves_the_fence_unrecorded() -> None:
    device = VirtualDevice()
    events = FaultyEvents(device)
    events.fail_record = True
    fence = EventFence(events())
    with pytest.raises(TransferError, match="device is lost") as raised:
        fence.record(device.stream())
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert not fence.recorded
    assert not fence.passed()
    with pytest.raises(TransferError):
        EventFence(events(), device.stream())


def test_an_event_that_cannot_be_queried_is_an_error() -> None:
    device = VirtualDevice()
    event = FaultyEvents(device)()
    fence = EventFence(event, device.stream())
    event.broken = True
    with pytest.raises(TransferError, match="device is lost"):
        fence.passed()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch.Event() is a real event there")
def test_torchs_event_without_an_accelerator_never_reads_as_passed() -> None:
    stream: Any = object()
    event = torch.Event()
    assert event.query()
    with pytest.raises(TransferError):
        query_event(event)
    with pytest.raises(TransferError):
        record_event(event, stream)
    with pytest.raises(TransferError):
        EventFence(event, stream)


class _SilentEvent(torch.Event):
    """A cpu event that takes a record without a word."""

    def record(self, stream: Any = None) -> None:
        pass


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch.Event() is a real event there")
def test_a_record_that_did_nothing_is_an_error() -> None:
    stream: Any = object()
    with pytest.raises(TransferError, match="did nothing"):
        record_event(_SilentEvent(), stream)


def test_a_future_fence_passes_when_the_future_is_done_in_any_way() -> None:
    futures: list[Future[None]] = [Future() for _ in range(3)]
    fences = [FutureFence(future) for future in futures]
    assert [fence.passed() for fence in fences] == [False] * 3
    called: list[object] = []
    for fence in fences:
        fence.add_done_callback(called.append)
    futures[0].set_result(None)
    futures[1].set_exception(OSError("the link went down"))
    futures[2].cancel()
    assert [fence.passed() for fence in fences] == [True] * 3
    assert called == futures


def test_a_future_fence_needs_a_future() -> None:
    with pytest.raises(UsageError, match="done"):
        FutureFence(object())
