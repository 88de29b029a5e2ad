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

    A step is over when the device has done it, so that to the cache, and to copies, this thread is the device's stream.
    """

    def wait_event(self, event: Any) -> None:
        """Orders what comes next after the event; one of a device is waited for on the thread."""
        if isinstance(event, HostEvent):
            super().wait_event(event)
        else:
            self.launch(event.synchronize)


class StepEvent(HostEvent):
    """A point in the order of a `StepStream`: the `event_factory` of the allocator."""

    def wait(self, stream: Any) -> None:
        """Has `stream` wait. One of a device cannot wait for a thread: there the caller does, until the step is over.

        Copies meet an unfinished step only where slots are reused that an aborted request left in the middle of one.
        """
        if isinstance(stream, HostStream | InlineStream):
            stream.wait_event(self)
        else:
            self.synchronize()


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
