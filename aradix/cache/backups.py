"""`Backups`: copies from the device to the host, from the step that begins one to the one that hears of its end.

Nothing waits for a copy: its nodes are pinned by the tree meanwhile, and matched as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aradix.cache.host_slots import HostSlots
from aradix.cache.pool import SlotPool
from aradix.errors import AradixError
from aradix.tree.protocol import Freed, Slots
from aradix.tree.tiered import Landed, StoreJob, TieredCore

if TYPE_CHECKING:
    from aradix.memory.transfer import Copy, Transfer

__all__ = ["Backups"]


class Backups:
    """The stores of one cache. No call waits.

    Args:
        core: the tree.
        pool: the device's slots.
        host: the host's.
        transfer: makes the copies.
        on_failure: told of each copy of which a part or all failed.
    """

    def __init__(
        self,
        core: TieredCore,
        pool: SlotPool,
        host: HostSlots,
        transfer: Transfer,
        on_failure: Callable[[str, BaseException, int], None],
    ) -> None:
        self.num_done = 0
        self.num_tokens = 0
        self.running: dict[Copy, tuple[StoreJob, Slots]] = {}
        self.on_begun: Callable[[], None] = lambda: None
        self.on_landed: Callable[[StoreJob, Landed], None] = lambda job, landed: None
        self._core = core
        self._pool = pool
        self._host = host
        self._transfer = transfer
        self._on_failure = on_failure
        self._num_forgone = 0
        """Tokens that could not be stored. The eviction that wanted them drops them: else a host that fails, or is
        full, would hold up the device."""

    @property
    def job_ids(self) -> set[int]:
        """The jobs of the tree that are to be ended here."""
        return {job.job_id for job, _ in self.running.values()}

    @property
    def targets(self) -> list[Slots]:
        """The host slots that are being copied into."""
        return [slots for _, slots in self.running.values()]

    def begin_due(self) -> None:
        """Begin to store what the tree says is due."""
        for job in self._core.begin_stores():
            self._start(job)

    def begin(self, node_id: int) -> None:
        """Begin to store a path, due or not, unless that has begun or was done."""
        job = self._core.begin_store(node_id)
        if job is not None:
            self._start(job)

    def evict(self, num_tokens: int) -> list[Freed]:
        """Make room for so many device tokens: what has a host copy goes at once, for the rest a store is begun.

        Where the host has no room, or a store failed, tokens go without a copy.
        """
        freed: list[Freed] = []
        if self._num_forgone:
            freed = self._core.evict(min(num_tokens, self._num_forgone))
            self._num_forgone -= _num_slots(freed)
        missing = num_tokens - _num_slots(freed)
        if missing <= 0:
            return freed
        done = self._core.write_back(missing)
        freed += done.freed
        for job in done.jobs:
            self._start(job)
        if self._num_forgone:
            missing = num_tokens - _num_slots(freed)
            dropped = self._core.evict(min(missing, self._num_forgone)) if missing > 0 else []
            freed += dropped
            self._num_forgone = 0
        return freed

    def _start(self, job: StoreJob) -> None:
        num_tokens = job.end - job.start
        host_slots = self._host.take(num_tokens)
        self._num_forgone += num_tokens - len(host_slots)
        if not len(host_slots):
            self._end(job, None, 0)
            return
        after = [ready.event for ready in job.ready if ready.event is not None]
        try:
            copy = self._transfer.store(job.slots[: len(host_slots)], host_slots, after=after)
        except AradixError as error:
            self._failed(error, len(host_slots))
            self._end(job, None, 0)
            self._host.give_back(host_slots)
            return
        self.running[copy] = (job, host_slots)
        self.on_begun()

    def finish(self, copy: Copy) -> None:
        """A copy has ended: what came over gets its nodes."""
        job, host_slots = self.running.pop(copy)
        if copy.error is not None:
            self._failed(copy.error, len(host_slots) - copy.num_tokens_done)
        if copy.is_lost:
            self._end(job, None, 0)
            self._host.give_back(host_slots, copy.fence())
            return
        self._host.give_back(self._end(job, host_slots, copy.num_tokens_done).unused)

    def _end(self, job: StoreJob, host_slots: Slots | None, num_ok: int) -> Landed:
        landed = self._core.end_store(job.job_id, host_slots, num_ok=num_ok)
        if landed.num_tokens:
            self.num_done += 1
            self.num_tokens += landed.num_tokens
        self._pool.give_back_all(landed.freed)
        self.on_landed(job, landed)
        return landed

    def _failed(self, error: BaseException, num_tokens: int) -> None:
        self._num_forgone += num_tokens
        self._on_failure("store", error, num_tokens)

    def close(self) -> None:
        """End every store at once; slots that a copy still touches come back behind it."""
        running, self.running = self.running, {}
        for copy, (job, host_slots) in running.items():
            landed = self._core.end_store(job.job_id, None)
            self._pool.give_back_all(landed.freed, copy.fence())
            self._host.give_back(host_slots, copy.fence())


def _num_slots(freed: list[Freed]) -> int:
    return sum(len(one.slots) for one in freed)
