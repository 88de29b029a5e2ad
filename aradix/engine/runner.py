"""What an engine asks of a model: `ModelRunner`, and the stream that its steps run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import anyio
import torch

from aradix.cache.home import Home
from aradix.engine.sampling import Sampler
from aradix.memory.streams import HostEvent, HostStream, InlineStream

__all__ = ["Chunk", "ModelRunner", "StepEvent", "StepStream", "run_on"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's part of a step: some tokens whose KV is to be computed, behind those whose KV is there.

    Args:
        token_ids: the tokens to compute, at least one: some of a prompt, or the one that was chosen last.
        slots: int64 on the CPU, of all tokens of the sequence up to the last of these. The KV of the new ones is
            written to the last `len(token_ids)`, that of all before them is read.
        sampler: chooses the token that follows; `None` where nobody wants it, in the middle of a prompt.
    """

    token_ids: Sequence[int]
    slots: torch.Tensor
    sampler: Sampler | None

    @property
    def position(self) -> int:
        """The place of the token that follows."""
        return len(self.slots)


class ModelRunner(Protocol):
    """A model over the slots of a pool: prefill and decode of a ragged batch, off the loop.

    Args:
        vocab_size: token ids are below it.
        max_context: the most tokens of a sequence, prompt and answer.
        stream: what the steps run on, one after the other; the cache has it among its `streams`, and so gives no slot
            that a running step uses to anybody else. `None` where a step is over before `step` first waits.
    """

    vocab_size: int
    max_context: int
    stream: Any

    async def step(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """The token that follows each chunk, `None` where it has no sampler. Waits until they are computed.

        All work is queued on `stream` before this first waits. Cancelled, it stops waiting, and the work goes on:
        the slots come back behind the stream. Only one call runs at a time, but a cancelled one may still be at work.

        Raises:
            Exception: whatever stopped it; the KV of the chunks' new tokens is worth nothing then.
        """
        ...


class StepStream(HostStream):
    """The thread on which the steps of a model run, in order, whatever the device.

    A step is over when the device has done it, so to the cache this thread is the stream that the model computes on.
    """

    def wait_event(self, event: Any) -> None:
        """Orders what comes next after the event; one of a device is waited for on the thread."""
        if isinstance(event, HostEvent) and not (isinstance(event, StepEvent) and event.is_of_a_device):
            super().wait_event(event)
        else:
            self.launch(event.synchronize)


class StepEvent(HostEvent):
    """A point on a thread, or on a stream of a device, that each can wait for: the allocator's `event_factory`.

    The copies of a tier run on streams of the device, the steps of a model on a `StepStream`.
    """

    __slots__ = ("_device_event",)

    def __init__(self) -> None:
        super().__init__()
        self._device_event: Any = None

    @property
    def is_of_a_device(self) -> bool:
        """Whether it was last recorded on a stream of a device."""
        return self._device_event is not None

    def record(self, stream: Any) -> None:
        """Stands from now on for all that `stream` was given so far."""
        if isinstance(stream, HostStream | InlineStream):
            super().record(stream)
            self._device_event = None
        else:
            self._device_event = stream.record_event()

    def query(self) -> bool:
        """Whether the point is reached; False without a record."""
        return super().query() if self._device_event is None else bool(self._device_event.query())

    def wait(self, stream: Any) -> None:
        """Has `stream` wait. A device cannot wait for a thread: there the caller does, until the step is over.

        Copies meet an unfinished step only where they get slots that an aborted request left in the middle of one.
        """
        if self._device_event is not None and not isinstance(stream, HostStream | InlineStream):
            stream.wait_event(self._device_event)
        elif isinstance(stream, HostStream | InlineStream):
            stream.wait_event(self)
        else:
            self.synchronize()

    def synchronize(self) -> None:
        """Blocks the calling thread until the point is reached."""
        if self._device_event is None:
            super().synchronize()
        else:
            self._device_event.synchronize()


async def run_on(stream: HostStream, function: Callable[[], _T]) -> _T:
    """Queue a function on a stream, and wait for what it returns or raises. Cancelled, it runs all the same."""
    home, done = Home(), anyio.Event()
    value: _T | None = None
    error: BaseException | None = None

    def call() -> None:
        nonlocal value, error
        try:
            value = function()
        except BaseException as raised:
            error = raised
        home.call_soon(done.set)

    stream.launch(call)
    await done.wait()
    if error is not None:
        try:
            raise error
        finally:
            error = None  # else its traceback would hold this frame, and this frame the error
    return cast(_T, value)
