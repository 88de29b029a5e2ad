"""Copiers: how pages get from one pool to another on each kind of device.

A copier makes the streams and events of its device and queues copies on a stream. `Transfer` decides what is copied,
behind what, and who hears of it. A virtual device brings a copier of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from aradix.errors import ConfigError
from aradix.memory.kv_pool import KVPool
from aradix.memory.streams import HostEvent, HostStream, InlineStream

__all__ = ["BookCopier", "Copier", "CudaCopier", "HostCopier", "Job", "as_words", "runs"]

_Words = NDArray[Any]

STAGING_BYTES = 64 * 1024 * 1024
"""The most that a copy through the device's own memory takes of it at a time."""


class Job:
    """Pages to copy, in order, from one pool to another; the copier notes how far it came and what stopped it.

    Args:
        source_pages: page ids in `source`; the i-th goes to the i-th of `target_pages`.
    """

    def __init__(
        self, source: KVPool, target: KVPool, source_pages: Sequence[int], target_pages: Sequence[int], what: str
    ) -> None:
        self.source = source
        self.target = target
        self.source_pages = source_pages
        self.target_pages = target_pages
        self.what = what
        self.num_pages_done = 0
        self.cause: Exception | None = None


class Copier(Protocol):
    """What `Transfer` needs of a device.

    `needs_polling`: the device calls nobody when a copy is done, so somebody has to ask.
    """

    needs_polling: bool

    def new_stream(self, name: str) -> Any:
        """A stream for copies."""
        ...

    def new_event(self) -> Any:
        """An event, not recorded yet."""
        ...

    def launch(self, stream: Any, job: Job, layer: int | None) -> None:
        """Queues the copy of a job's pages, or of one layer of them, on `stream`; sets `num_pages_done` as pages are.

        With a `layer`, the pages are done once the last layer is. May raise: what was queued before goes on.
        """
        ...

    def when_done(self, event: Any, callback: Callable[[Any], object]) -> None:
        """Has `callback(anything)` called, on any thread, once `event` is reached; not asked under `needs_polling`."""
        ...

    def close(self) -> None:
        """Ends what threads there are. Streams are closed by whoever made them."""
        ...


def runs(source_pages: Sequence[int], target_pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(source, target, number) of the longest runs in which both page ids ascend by one."""
    begin = 0
    for i in range(1, len(source_pages) + 1):
        if (
            i == len(source_pages)
            or source_pages[i] != source_pages[i - 1] + 1
            or target_pages[i] != target_pages[i - 1] + 1
        ):
            yield source_pages[begin], target_pages[begin], i - begin
            begin = i


class BookCopier:
    """For pools that only keep books: each copy is done at once."""

    needs_polling = False

    def new_stream(self, name: str) -> InlineStream:
        """A stream that runs everything at once."""
        return InlineStream()

    def new_event(self) -> HostEvent:
        """An event, not recorded yet."""
        return HostEvent()

    def launch(self, stream: Any, job: Job, layer: int | None) -> None:
        """Says that it is done."""
        job.num_pages_done = len(job.source_pages)

    def when_done(self, event: HostEvent, callback: Callable[[Any], object]) -> None:
        """Calls back now."""
        event.add_done_callback(callback)

    def close(self) -> None:
        """Nothing."""


class HostCopier:
    """Copies between pools in host memory: a thread for each stream.

    numpy moves the bytes, without the GIL and without torch's own threads: those belong to the engine, and on a busy
    core a copy that is shared among them waits for the slowest.
    """

    needs_polling = False

    def __init__(self) -> None:
        # Views by (source, target, layer). Pools are few and live long; holding them keeps their ids from being reused.
        self._views: dict[tuple[int, int, int | None], tuple[KVPool, KVPool, _Words, _Words]] = {}

    def new_stream(self, name: str) -> HostStream:
        """A stream with a thread of its own."""
        return HostStream(f"aradix {name}")

    def new_event(self) -> HostEvent:
        """An event, not recorded yet."""
        return HostEvent()

    def launch(self, stream: Any, job: Job, layer: int | None) -> None:
        """Queues the copy. A failure is found in the job's `cause`."""
        key = (id(job.source), id(job.target), layer)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = (job.source, job.target, *as_words(job, layer))
        stream.launch(functools.partial(self._copy, job, views[2], views[3], layer))

    def when_done(self, event: HostEvent, callback: Callable[[Any], object]) -> None:
        """Has the stream's thread call back."""
        event.add_done_callback(callback)

    def close(self) -> None:
        """Nothing: the streams have the threads."""

    def copy_run(self, source: _Words, target: _Words) -> None:
        """Copies one run of pages: `[n, ...]` words to as many of another pool."""
        target[...] = source

    def _copy(self, job: Job, source: _Words, target: _Words, layer: int | None) -> None:
        if job.cause is not None:
            return
        counts = layer is None or layer == job.source.num_layers - 1
        try:
            for s, t, n in runs(job.source_pages, job.target_pages):
                self.copy_run(source[s : s + n], target[t : t + n])
                if counts:
                    job.num_pages_done += n
        except Exception as error:
            job.cause = error


def as_words(job: Job, layer: int | None) -> tuple[_Words, _Words]:
    """Both pools' pages as the widest words, and with the fewest dimensions, in which they have one shape."""
    pools = (job.source, job.target)
    tensors = [pool.pages if layer is None else pool.layer_pages(layer) for pool in pools]
    if any(tensor is None or not tensor.is_cpu for tensor in tensors):
        raise ConfigError("a HostCopier copies between two pools in host memory")
    arrays: list[_Words] = [tensor.view(torch.uint8).numpy() for tensor in tensors if tensor is not None]
    while arrays[0].ndim > 2 and all(a.strides[-2] == a.shape[-1] * a.strides[-1] for a in arrays):
        arrays = [a.reshape(*a.shape[:-2], -1) for a in arrays]
    for word in (8, 4, 2):
        if all(
            a.strides[-1] == 1
            and a.shape[-1] % word == 0
            and a.ctypes.data % word == 0
            and not any(s % word for s in a.strides[:-1])
            for a in arrays
        ):
            arrays = [a.view(f"u{word}") for a in arrays]
            break
    return arrays[0], arrays[1]


class CudaCopier:
    """Copies between a CUDA device and host memory: gathered or scattered on the device, one DMA for a run of pages.

    The device's side goes through a piece of its own memory in which the pages stand together. No call makes the host
    wait where the host pool is pinned.
    """

    needs_polling = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiter = HostStream("aradix copy waiter")

    def new_stream(self, name: str) -> Any:
        """A stream of the device."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def new_event(self) -> Any:
        """An event whose waiter sleeps instead of spinning."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def launch(self, stream: Any, job: Job, layer: int | None) -> None:
        """Queues gather and copies, or copies and scatter."""
        source = job.source.pages if layer is None else job.source.layer_pages(layer)
        target = job.target.pages if layer is None else job.target.layer_pages(layer)
        if source is None or target is None:
            raise ConfigError("a CudaCopier copies between pools that have memory")
        at_a_time = max(1, STAGING_BYTES // (source[0].numel() * source.element_size()))
        last = layer is None or layer == job.source.num_layers - 1
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for begin in range(0, len(job.source_pages), at_a_time):
                from_pages = job.source_pages[begin : begin + at_a_time]
                to_pages = job.target_pages[begin : begin + at_a_time]
                if source.is_cuda:
                    staging = source.index_select(0, self._index(from_pages))
                    for s, t, n in runs(range(len(to_pages)), to_pages):
                        _copy_pieces(staging[s : s + n], target[t : t + n])
                else:
                    staging = torch.empty((len(from_pages), *source.shape[1:]), dtype=source.dtype, device=self._device)
                    for s, t, n in runs(from_pages, range(len(from_pages))):
                        _copy_pieces(source[s : s + n], staging[t : t + n])
                    target.index_copy_(0, self._index(to_pages), staging)
                job.num_pages_done += len(from_pages) if last else 0

    def when_done(self, event: Any, callback: Callable[[Any], object]) -> None:
        """Has a thread that waits for events, in the order of the calls, call back."""

        def wait() -> None:
            try:
                event.synchronize()
            finally:
                callback(event)

        self._waiter.launch(wait)

    def close(self) -> None:
        """Ends the waiter; blocks until the last copy is done."""
        self._waiter.close()

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)


def _copy_pieces(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies between device and host in pieces that are contiguous on both sides: torch would wait for any other."""
    if source.is_contiguous() and target.is_contiguous():
        target.copy_(source, non_blocking=True)
    else:
        for s, t in zip(source, target, strict=True):
            _copy_pieces(s, t)
