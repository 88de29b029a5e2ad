"""`Tiers`: what moves KV between the device and the tiers below it.

`loads.py` brings it up, `backups.py` takes it down, `host_slots.py` is the door to the host's slots. This file makes
the copies, hears of their end, and says what it all comes to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio

from aradix.cache.archive import Archive
from aradix.cache.backups import Backups
from aradix.cache.calls import closed_error
from aradix.cache.host_slots import HostSlots
from aradix.cache.loads import Loads
from aradix.errors import ConfigError, TierError, TransferError
from aradix.events import TierFault
from aradix.keys import Namespace
from aradix.memory.streams import HostStream
from aradix.memory.transfer import Transfer
from aradix.tree.protocol import Freed, Slots

if TYPE_CHECKING:
    from aradix.cache.hold import Hold
    from aradix.cache.leases import Leases
    from aradix.params import CacheInitParams
    from aradix.tree.tiered import TieredCore

__all__ = ["Tiers"]

_MAX_FAULTS = 1000


class Tiers:
    """The host tier of one cache. Only `load_back` and `wait_for_backup` wait.

    Args:
        params: of the cache.
        core: its tree.
        leases: of the cache.
        on_failure: told what ends the cache: a fence that broke.
        on_done: called from whatever thread when copies ended; `drain` is to follow on the loop.

    Raises:
        ConfigError: pools that do not fit together, or a device that needs a copier.
    """

    def __init__(
        self,
        params: CacheInitParams,
        core: TieredCore,
        leases: Leases,
        on_failure: Callable[[BaseException], None],
        on_done: Callable[[], None],
    ) -> None:
        self.transfer = Transfer(params.kv_pool, params.host, copier=params.copier, on_done=on_done)
        self.host = HostSlots(params.host, core, on_failure)
        self.backups = Backups(core, leases.pool, self.host, self.transfer, self._failed)
        self.num_failed_copies = 0
        self._faults: deque[TierFault] = deque(maxlen=_MAX_FAULTS)
        self.core = core
        self._leases = leases
        self._writes_back = params.write_policy == "write_back"
        self._is_hasty = False
        self._backup_waiters: dict[anyio.Event, None] = {}  # in the order in which they came, which a set has not
        stream = self.transfer.load_stream if params.streams else None
        if params.streams and isinstance(stream, HostStream) and not isinstance(params.streams[0], HostStream):
            raise ConfigError(
                f"copies on threads cannot be ordered with streams of {type(params.streams[0]).__name__}; "
                "give copier= for them"
            )
        self.loads = Loads(core, leases, self.transfer, stream, params.load_back_threshold, self._failed, params.clock)
        self.archive = Archive(params, self) if params.storage is not None else None
        leases.pool.host = self.host
        leases.tiers = self

    # ---- going up ----

    def may_bring(self, hold: Hold) -> bool:
        """Whether a lease's match left something that a tier below may have."""
        return self.loads.is_worth_it(hold) or (self.archive is not None and self.archive.wants(hold))

    async def load_back(self, hold: Hold) -> None:
        """Bring to the device what a lease's match found on the host, if it is enough. Waits; safe to cancel.

        The lease is matched and pinned afterwards as before, however much came. A task that holds a subtree brings
        nothing, since it may wait for nothing.
        """
        if self._leases.gates.is_held_by_this_task():
            return
        if self.archive is not None:
            await self._prefetch(self.archive, hold)
        while self.loads.is_worth_it(hold):
            goes_on = await self.loads.share(hold)
            while not hold.released and not hold.node_id and not self._leases.rematch(hold):
                await self._leases.wait_at_gate(hold)
            if hold.released or not goes_on or self._leases.gates.is_held_by_this_task():
                return

    async def _prefetch(self, archive: Archive, hold: Hold) -> None:
        """Bring to the host what the store has of a lease's key. Waits until one deadline; safe to cancel."""
        deadline = archive.deadline()
        while archive.wants(hold):
            num_found = hold.num_matched + hold.host_hit
            self._leases.passing.add(hold)
            try:
                joined = await archive.prefetch(hold, deadline)
            except BaseException:
                self._leases.passing.discard(hold)
                self._leases.release(hold)
                raise
            self._leases.passing.discard(hold)
            while not hold.released and not self._leases.rematch(hold):
                if hold.node_id:
                    self._leases.drop_pins(hold)
                    self._leases.changed()  # the gate may be waiting for just this pin
                else:
                    await self._leases.wait_at_gate(hold)
            if self._leases.is_closed:
                self._leases.release(hold)
                raise closed_error()
            # Somebody else's key may have been shorter.
            if hold.released or not joined or hold.num_matched + hold.host_hit <= num_found:
                return
            if anyio.current_time() >= deadline:
                return

    # ---- going down ----

    def begin_due(self) -> None:
        """Begin the copies to the host that are due."""
        if self.core.num_due:
            self.backups.begin_due()

    def begin_store(self, node_id: int) -> None:
        """Begin to copy a path to the host, due or not, unless that has begun or was done."""
        self.backups.begin(node_id)

    def evict(self, num_tokens: int, **shares: Any) -> list[Freed]:
        """Make room on the device for so many tokens, as the write policy has it; what came at once.

        `shares` are as `TreeCore.evict` takes them; what is written back is chosen without them.
        """
        self.drain()
        if not self._writes_back or self._is_hasty:
            return self.core.evict(num_tokens, **shares)
        freed = self.backups.evict(num_tokens)
        # Copies that are over as soon as they begin are no reason to wait.
        while (missing := num_tokens - sum(len(one.slots) for one in freed)) > 0 and self.drain():
            freed += self.backups.evict(missing)
        return freed

    def grow_hastily(self, hold: Hold, num_tokens: int) -> bool:
        """Serve a growth that cannot wait: what has to be evicted for it goes without a copy."""
        was_hasty, self._is_hasty = self._is_hasty, True
        try:
            return self._leases.pressure.grow_now(hold, num_tokens)
        finally:
            self._is_hasty = was_hasty

    @property
    def storing(self) -> list[Slots]:
        """The host slots that are being copied into."""
        return self.backups.targets + (self.archive.targets if self.archive is not None else [])

    @property
    def job_ids(self) -> set[int]:
        """The jobs of the tree that are to be ended here."""
        reading = self.archive.job_ids if self.archive is not None else set()
        return self.loads.job_ids | self.backups.job_ids | reading

    @property
    def will_make_room(self) -> bool:
        """Whether an eviction that fell short should be tried again when a copy to the host has ended."""
        return self._writes_back and bool(self.backups.running)

    async def wait_for_backup(self) -> None:
        """Wait until the next copy to the host has ended."""
        event = anyio.Event()
        self._backup_waiters[event] = None
        try:
            await event.wait()
        finally:
            self._backup_waiters.pop(event, None)

    # ---- hearing of it ----

    @property
    def is_copying(self) -> bool:
        """Whether a copy is under way: its slots will come back, or become evictable, by themselves."""
        return bool(self.backups.running or self.loads.running)

    def copying(self) -> set[Namespace]:
        """The namespaces of which something is being copied."""
        return self.loads.copying() | {job.namespace for job, _ in self.backups.running.values()}

    @property
    def will_settle(self) -> bool:
        """Whether something here has slots or pins that will come back by themselves."""
        return self.is_copying or (self.archive is not None and self.archive.is_fetching)

    def changed(self) -> None:
        """The host, or what is pinned, changed outside a copy: see who waits for it."""
        self._leases.changed()

    def give_back(self, freed: list[Freed]) -> None:
        """Give back what the tree let go."""
        self._leases.pool.give_back_all(freed)

    def drain(self) -> bool:
        """Let the tree know of the copies that have ended; whether there were any. In the middle of a step too."""
        if not self.is_copying:
            return False
        done = self.transfer.take_done()
        for copy in done:
            if copy in self.loads.running:
                self.loads.finish(copy)
            elif copy in self.backups.running:
                self.backups.finish(copy)
                for event in self._backup_waiters:
                    event.set()
        if done:
            self.begin_due()  # what had to wait for one of them, before it can be evicted
        return bool(done)

    def _failed(self, operation: str, error: BaseException, num_tokens: int) -> None:
        """A copy failed: a miss, and not the cache's end."""
        self.num_failed_copies += 1
        known = error if isinstance(error, TierError) else TransferError(str(error))
        self._faults.append(TierFault(operation, known, num_tokens))

    def take_faults(self) -> list[TierFault]:
        """What failed since the last call."""
        faults = list(self._faults)
        self._faults.clear()
        return faults + (self.archive.take_faults() if self.archive is not None else [])

    # ---- the end ----

    def close(self) -> None:
        """End every load and backup, and free what is on the host; the tree was flushed before. Does not wait."""
        self.loads.close()
        self.backups.close()
        if self.archive is not None:
            self.archive.close()

    async def close_transfer(self) -> None:
        """End the threads that copy. Waits for the copies under way, under a cancellation too."""
        if not self.transfer.num_running() or self.transfer.needs_polling:
            self.transfer.close()  # which has nothing to wait for
            return
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.transfer.close)

    def stats(self) -> dict[str, Any]:
        """The fields of `CacheStats` that are about these tiers."""
        allocator = self.host.allocator
        return {
            "loading": self.loads.num_target_slots,
            "host_slots": allocator.num_slots,
            "host_free": allocator.available_size(),
            "host_used": self.core.host_tokens,
            "host_evictable": self.core.host_evictable_tokens,
            "storing": self.host.num_held - self.core.host_tokens,
            "load_backs": self.loads.num_done,
            "load_back_tokens": self.loads.num_tokens,
            "backups": self.backups.num_done,
            "backuped_tokens": self.backups.num_tokens,
            "failed_copies": self.num_failed_copies,
            "host_evicted": self.host.num_evicted,
            "prefetched_tokens": self.archive.num_fetched_tokens if self.archive is not None else 0,
            "archived_tokens": self.archive.num_put_tokens if self.archive is not None else 0,
            "unarchived_tokens": self.archive.num_skipped_tokens if self.archive is not None else 0,
        }
