"""Limbo: retired pages, in batches, until their fences have passed.

A batch is pages that retired together, behind at most one mark per stream and perhaps a fence of another kind. The
marks wait in one queue per stream, and a poll asks only the head of each: streams run in order, so nothing behind a
pending head can have passed, and one slow stream holds nobody else up.

Stream-ordered taking (a page that is still in use may go to a stream that is ordered after that use) follows the
stream-ordered pools of RMM.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aradix.errors import InvariantError, TransferError
from aradix.memory.fences import Fence, Stream
from aradix.memory.marks import EventPool, Mark, newest_per_stream

__all__ = ["Batch", "Limbo", "Pages", "Polled", "Share", "Take"]

# Page ids on the move are of the width that numpy indexes with: int32 ones make each look-up three times as slow.
Pages = NDArray[np.int64]


class Batch:
    """Pages behind one set of fences. `sole` is the only stream still in use of them, where there is just one."""

    __slots__ = ("fence", "gone", "marks", "pages", "sole")

    def __init__(self, pages: Pages, marks: list[Mark], fence: Fence | None) -> None:
        self.pages = pages
        self.marks = marks
        self.fence = fence
        self.sole: Stream | None = None
        self.gone = False


class Polled(NamedTuple):
    """What a poll found: pages whose fences passed, pages whose fences broke, and how the first one broke."""

    passed: list[Pages]
    broken: list[Pages]
    error: TransferError | None


class Share(NamedTuple):
    """The first `num_pages` pages of `batch`."""

    batch: Batch
    num_pages: int


class Take(NamedTuple):
    """Which pages of limbo to hand to a stream, and the marks that the stream must wait for first."""

    shares: list[Share]
    waits: list[Mark]


class Limbo:
    """Every retired batch, findable by stream, by age and by kind of fence. Never waits; not thread-safe."""

    __slots__ = ("_events", "_fenced", "_loose", "_queues", "_sole", "_waitable", "num_pages", "num_waitable_pages")

    def __init__(self, events: EventPool) -> None:
        self._events = events
        self._queues: dict[Stream, deque[Mark]] = {}
        self._loose: list[Mark] = []
        # Oldest first, and O(1) to leave from anywhere (a plain dict is slow to give up its first keys).
        self._fenced: OrderedDict[Batch, None] = OrderedDict()
        self._waitable: OrderedDict[Batch, None] = OrderedDict()
        self._sole: dict[Stream, OrderedDict[Batch, None]] = {}
        self.num_pages = 0
        self.num_waitable_pages = 0

    def enqueue(self, mark: Mark) -> None:
        """Has polls ask for `mark`; the pool's own marks come in the order of their records."""
        if mark.number is None:
            self._loose.append(mark)
            return
        queue = self._queues.get(mark.stream)
        if queue is None:
            queue = self._queues[mark.stream] = deque()
        queue.append(mark)

    def add(self, pages: Pages, marks: Sequence[Mark], fence: Fence | None) -> None:
        """Retires `pages` behind enqueued, pending `marks` and `fence`; there is at least one of these."""
        batch = Batch(pages, list(marks), fence)
        for mark in batch.marks:
            mark.batches.append(batch)
        self.num_pages += len(pages)
        self._file(batch)

    def poll(self) -> Polled:
        """Asks the head of each stream's queue, and each other fence, and lets go of all that passed."""
        passed: list[Pages] = []
        broken: list[Pages] = []
        first: TransferError | None = None
        for stream, queue in list(self._queues.items()):
            while queue:
                mark = queue[0]
                if not self._events.poll(mark) and mark.error is None:
                    break
                queue.popleft()
                first = first or mark.error
                self._settle(mark, passed, broken)
            if not queue:
                del self._queues[stream]
        if self._loose:
            pending = []
            for mark in self._loose:
                if not self._events.poll(mark) and mark.error is None:
                    pending.append(mark)
                    continue
                first = first or mark.error
                self._settle(mark, passed, broken)
            self._loose = pending
        for batch in list(self._fenced):
            assert batch.fence is not None
            try:
                done = batch.fence.passed()
            except Exception as error:
                first = first or _fence_error(batch.fence, error)
                self._remove(batch)
                broken.append(batch.pages)
                continue
            if done:
                self._unfile(batch)
                batch.fence = None
                self._refile(batch, passed)
        return Polled(passed, broken, first)

    def plan(self, stream: Stream, num_pages: int) -> Take | None:
        """How to give `stream` `num_pages` retired pages, or None where so many cannot be had. Changes nothing.

        First come pages whose only user is `stream` itself, oldest first; then the others, oldest first, behind waits.
        """
        if num_pages > self.num_waitable_pages:
            return None
        shares: list[Share] = []
        for batch in self._sole.get(stream, ()):
            if num_pages == 0:
                break
            share = min(num_pages, len(batch.pages))
            shares.append(Share(batch, share))
            num_pages -= share
        waits: list[Mark] = []
        if num_pages:
            for batch in self._waitable:
                if num_pages == 0:
                    break
                if batch.sole is not None and batch.sole == stream:
                    continue
                share = min(num_pages, len(batch.pages))
                shares.append(Share(batch, share))
                waits.extend(mark for mark in batch.marks if mark.stream != stream)
                num_pages -= share
        return Take(shares, newest_per_stream(waits))

    def take(self, share: Share) -> tuple[Pages, list[Mark]]:
        """The pages of a planned share, out of limbo, and the marks that were still pending on them."""
        batch, num_pages = share
        marks = list(batch.marks)
        if num_pages == len(batch.pages):
            self._remove(batch)
            return batch.pages, marks
        taken, batch.pages = batch.pages[:num_pages], batch.pages[num_pages:]
        self.num_pages -= num_pages
        self.num_waitable_pages -= num_pages
        return taken, marks

    def batches(self) -> Iterator[Batch]:
        """Every batch, once, in no promised order."""
        yield from self._waitable
        yield from self._fenced

    def check(self) -> None:
        """Recounts; `InvariantError` naming what differs."""
        counts = {
            "num_pages": (self.num_pages, sum(len(batch.pages) for batch in self.batches())),
            "num_waitable_pages": (self.num_waitable_pages, sum(len(batch.pages) for batch in self._waitable)),
            "batches with a sole user": (
                sum(len(batches) for batches in self._sole.values()),
                sum(batch.sole is not None for batch in self._waitable),
            ),
        }
        for name, (kept, counted) in counts.items():
            if kept != counted:
                raise InvariantError(f"limbo: {name} is kept as {kept} and counts to {counted}")
        for batch in self.batches():
            if batch.gone or not len(batch.pages) or not (batch.marks or batch.fence):
                raise InvariantError("limbo: a batch is listed that is gone, empty or behind no fence")
            for mark in batch.marks:
                listed = self._loose if mark.number is None else self._queues.get(mark.stream, ())
                if mark not in listed or batch not in mark.batches:
                    raise InvariantError(f"limbo: a batch waits for {mark!r}, which nobody polls for it")
        for queue in self._queues.values():
            numbers = [mark.number for mark in queue if mark.number is not None]
            if numbers != sorted(numbers):
                raise InvariantError(f"limbo: marks are queued out of the order of their records: {numbers}")

    def _settle(self, mark: Mark, passed: list[Pages], broken: list[Pages]) -> None:
        """Tells the batches behind `mark` that it has passed or failed."""
        for batch in mark.batches:
            if batch.gone:
                continue
            if mark.error is not None:
                self._remove(batch)
                broken.append(batch.pages)
                continue
            self._unfile(batch)
            batch.marks.remove(mark)
            self._refile(batch, passed)
        mark.batches = []

    def _refile(self, batch: Batch, passed: list[Pages]) -> None:
        if batch.marks or batch.fence is not None:
            self._file(batch)
        else:
            # Its marks are gone, so nobody comes by this batch again.
            self.num_pages -= len(batch.pages)
            passed.append(batch.pages)

    def _file(self, batch: Batch) -> None:
        if batch.fence is not None:
            self._fenced[batch] = None
            return
        self._waitable[batch] = None
        self.num_waitable_pages += len(batch.pages)
        stream = batch.marks[0].stream
        if len(batch.marks) == 1 or all(mark.stream == stream for mark in batch.marks):
            batch.sole = stream
            sole = self._sole.get(stream)
            if sole is None:
                sole = self._sole[stream] = OrderedDict()
            sole[batch] = None

    def _unfile(self, batch: Batch) -> None:
        if batch.fence is not None:
            del self._fenced[batch]
            return
        del self._waitable[batch]
        self.num_waitable_pages -= len(batch.pages)
        if batch.sole is not None:
            sole = self._sole[batch.sole]
            del sole[batch]
            if not sole:
                del self._sole[batch.sole]
            batch.sole = None

    def _remove(self, batch: Batch) -> None:
        self._unfile(batch)
        batch.gone = True
        self.num_pages -= len(batch.pages)


def _fence_error(fence: Fence, cause: Exception) -> TransferError:
    error = TransferError(f"{fence!r} could not be asked: {cause}")
    error.__cause__ = cause
    return error
