"""Steps on a thread: the loop goes on meanwhile, and a step's slots are nobody else's before it is over."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
import torch
from anyio.to_thread import run_sync

from aradix import MHAKVPool, RadixCache
from aradix.engine import AsyncEngine, LlamaModel, LlamaRunner, SamplingParams, StepError
from aradix.engine.runner import StepEvent, StepStream, run_on
from aradix.errors import ConfigError, UsageError
from aradix.memory.streams import HostStream
from tests.engine.tiny_llama import cold, tiny_model

pytestmark = pytest.mark.anyio

PROMPT = list(range(10, 30))


class SlowModel(LlamaModel):
    """Each call begins, and ends when the test says so."""

    begun: threading.Semaphore
    may_end: threading.Semaphore

    def hidden(self, runs: Sequence[tuple[Sequence[int], torch.Tensor]], pool: MHAKVPool) -> torch.Tensor:
        self.begun.release()
        assert self.may_end.acquire(timeout=60)
        return super().hidden(runs, pool)


@pytest.fixture
def slow() -> SlowModel:
    plain = tiny_model()
    model = SlowModel(plain.config, plain.weights)
    model.begun, model.may_end = threading.Semaphore(0), threading.Semaphore(0)
    return model


async def begun(model: SlowModel) -> None:
    assert await run_sync(lambda: model.begun.acquire(timeout=60))


async def test_slots_of_a_running_step_come_back_behind_it(slow: SlowModel) -> None:
    runner = LlamaRunner(slow, slow.make_pool(32, 1))
    params = runner.cache_params(low_watermark=0, high_watermark=0)
    allocator = params.allocator
    async with RadixCache(params) as cache, AsyncEngine(cache, runner) as engine:
        answer = engine.generate(PROMPT, SamplingParams(max_tokens=4))
        await begun(slow)
        while cache.stats().leased < 21:  # the slot for the token that is being chosen
            await anyio.lowlevel.checkpoint()
        answer.abort()
        assert (cache.stats().num_leases, cache.stats().leased) == (0, 0)
        assert (allocator.available_size(), allocator.fenced_size()) == (11, 21)
        assert allocator.alloc(12) is None
        # Whoever comes next computes on the same stream, and so behind it.
        other = engine.generate(PROMPT[::-1], SamplingParams(max_tokens=1))
        while cache.stats().leased < 20:
            await anyio.lowlevel.checkpoint()
        assert allocator.available_size() == 0
        slow.may_end.release(2)
        assert [token async for token in other] == cold(tiny_model(), PROMPT[::-1], 1)
        await engine.drain()
        allocator.reclaim()
        assert allocator.fenced_size() == 0
        cache.check()
    runner.close()


async def test_leaving_the_engine_waits_for_no_step(slow: SlowModel) -> None:
    runner = LlamaRunner(slow, slow.make_pool(32, 1))
    params = runner.cache_params(low_watermark=0, high_watermark=0)
    async with RadixCache(params) as cache:
        async with AsyncEngine(cache, runner) as engine:
            answer = engine.generate(PROMPT, SamplingParams(max_tokens=4))
            await begun(slow)
        assert answer.finish_reason == "abort"
        assert cache.stats().leased == 0
        assert params.allocator.fenced_size() >= 20
        cache.check()
    slow.may_end.release()
    await run_sync(runner.close)
    params.allocator.reclaim()
    assert params.allocator.available_size() == 32


async def test_a_model_that_raises_fails_its_requests_alone(slow: SlowModel) -> None:
    runner = LlamaRunner(slow, slow.make_pool(64, 1))
    slow.may_end.release(100)
    plain = slow._norm
    async with RadixCache(runner.cache_params()) as cache, AsyncEngine(cache, runner) as engine:
        slow._norm = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
        with pytest.raises(StepError, match="ZeroDivisionError"):
            await anext(engine.generate(PROMPT))
        assert cache.total_size() == 0
        slow._norm = plain  # type: ignore[method-assign]
        assert [token async for token in engine.generate(PROMPT)] == cold(tiny_model(), PROMPT, 16)
        assert engine.stats().failed == 1
    runner.close()


async def test_a_function_on_a_stream_answers_the_loop() -> None:
    stream = HostStream()
    assert await run_on(stream, threading.get_ident) != threading.get_ident()
    error = ValueError("no")

    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="no") as caught:
        await run_on(stream, fail)
    assert caught.value is error
    gate, ran = threading.Event(), threading.Event()

    def wait() -> None:
        assert gate.wait(60)
        ran.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_on, stream, wait)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert not ran.is_set()
    gate.set()
    await run_sync(stream.close)
    assert ran.is_set()


class DeviceEvent:
    """An event of a device, reached when the test says so."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached.wait(60)


class DeviceStream:
    """A stream of a device in torch's shape: it asks the event to make it wait."""

    def __init__(self) -> None:
        self.recorded: list[DeviceEvent] = []
        self.waits_for: list[Any] = []

    def record_event(self) -> DeviceEvent:
        self.recorded.append(DeviceEvent())
        return self.recorded[-1]

    def wait_event(self, event: Any) -> None:
        if isinstance(event, DeviceEvent):
            self.waits_for.append(event)
        else:
            event.wait(self)


def test_a_step_waits_for_a_device_on_its_thread() -> None:
    stream, device, after = StepStream(), DeviceStream(), StepEvent()
    copied = StepEvent()
    copied.record(device)
    assert not copied.query()
    for event in (copied, DeviceEvent()):
        stream.wait_event(event)
        after.record(stream)
        assert not after.query()
        (event if isinstance(event, DeviceEvent) else device.recorded[0]).reached.set()
        after.synchronize()
    assert copied.query()
    copied.synchronize()
    stream.close()


def test_a_device_waits_for_a_device_by_itself_and_for_a_step_with_its_caller() -> None:
    stream, device, copied, computed = StepStream(), DeviceStream(), StepEvent(), StepEvent()
    copied.record(DeviceStream())
    device.wait_event(copied)
    assert len(device.waits_for) == 1
    gate = DeviceEvent()
    stream.wait_event(gate)
    computed.record(stream)
    caller = threading.Thread(target=device.wait_event, args=(computed,))
    caller.start()
    assert caller.is_alive()
    gate.reached.set()
    caller.join(60)
    assert computed.query()
    computed.record(device)  # recorded again elsewhere, it stands for that alone
    assert not computed.query()
    stream.close()


def test_between_threads_nobody_is_held_up() -> None:
    stream, other, gate, computed, later = StepStream(), StepStream(), DeviceEvent(), StepEvent(), StepEvent()
    assert not computed.query()
    stream.wait_event(gate)
    computed.record(stream)
    other.wait_event(computed)
    computed.wait(other)
    later.record(other)
    assert not later.query()
    gate.reached.set()
    later.synchronize()
    assert computed.query()
    stream.close()
    other.close()


def test_a_pool_of_another_shape_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match="pool"):
        LlamaRunner(model, MHAKVPool(32, 1, 2, 2, 16, torch.float64))
    runner = LlamaRunner(model, model.make_pool(32, 1))
    runner.close()
    runner.close()
    with pytest.raises(UsageError, match="closed"):
        runner.stream.launch(int)
