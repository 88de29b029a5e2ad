"""VirtualCopier: the copies of `aradix.memory.transfer.Transfer` as kernels of a virtual device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aradix.memory.copiers import Job
from aradix.memory.host_pool import HostKVPool
from aradix.memory.kv_pool import KVPool
from stress.device.streams import VirtualEvent, VirtualStream
from stress.device.virtual import VirtualDevice

__all__ = ["HOST_SLOTS", "VirtualCopier"]

HOST_SLOTS = 1 << 40
"""Host slot s is slot `HOST_SLOTS + s` of the device's memory: the oracle watches both sides."""


class VirtualCopier:
    """Copies as kernels: slow by the device's seed, racing where they are not ordered, failing on demand.

    Args:
        fault: asked before each launch; an exception that it returns is raised instead, after `num_pages` of the
            job (the first thing it returns) were copied all the same.
        duration: of a copy, in virtual seconds; by default the device draws it.
    """

    needs_polling = True

    def __init__(
        self,
        device: VirtualDevice,
        fault: Callable[[Job], tuple[int, Exception] | None] = lambda job: None,
        duration: float | None = None,
    ) -> None:
        self._device = device
        self._fault = fault
        self._duration = duration

    def new_stream(self, name: str) -> VirtualStream:
        """A stream of the device."""
        return self._device.stream(name)

    def new_event(self) -> VirtualEvent:
        """An event of the device."""
        return self._device.event()

    def launch(self, stream: Any, job: Job, layer: int | None) -> None:
        """Queues the copy of all pages, or of those before a fault; a layer takes its share of the time."""
        fault = self._fault(job)
        num_pages = len(job.source_pages) if fault is None else fault[0]
        if num_pages:
            reads = _slots(job.source, list(job.source_pages[:num_pages]))
            writes = _slots(job.target, list(job.target_pages[:num_pages]))
            stream.copy(reads, writes, self._duration, label=job.what)
        if layer is None or layer == job.source.num_layers - 1:
            job.num_pages_done = num_pages
        if fault is not None:
            raise fault[1]

    def when_done(self, event: Any, callback: Callable[[Any], object]) -> None:
        """Never called: the device has to be asked."""
        raise AssertionError("a virtual device calls nobody")

    def close(self) -> None:
        """Nothing."""


def _slots(pool: KVPool, pages: list[int]) -> list[int]:
    base = HOST_SLOTS if isinstance(pool, HostKVPool) else 0
    return [base + page * pool.page_size + i for page in pages for i in range(pool.page_size)]
