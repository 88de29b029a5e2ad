"""`Loads`: copies from the host to the device, shared by whoever wants the same tokens.

A load is nobody's: no task stands behind it. The lease that begins one leaves it its pin, and waits like those that
join; so whoever is cancelled, the load goes on for the others. It takes its slots as an admission does, and while it
waits for them it can be told to give up. When it ends, every lease that shares it is matched again, with a pin, in
that very step, before anybody can evict what came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from aradix.cache.calls import closed_error
from aradix.cache.hold import Hold
from aradix.cache.slot_waiter import SlotWaiter
from aradix.errors import AradixError, LeaseReleasedError
from aradix.keys import Namespace
from aradix.tree.protocol import NO_SLOTS, Slots
from aradix.tree.tiered import LoadJob, TieredCore

if TYPE_CHECKING:
    from aradix.cache.leases import Leases
    from aradix.memory.transfer import Copy, Transfer

__all__ = ["Loads"]


class _Sharer:
    """A lease that waits for a load; it holds nothing meanwhile."""

    __slots__ = ("error", "event", "hold", "is_over")

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self.is_over = False
        """Whether this was the last load that it asks for, however much came."""
        self.error: BaseException | None = None
        self.event = anyio.Event()


class _Load:
    """One load: waiting for slots (`waiter` is queued), copying (`copy`), or over."""

    __slots__ = ("_loads", "began", "copy", "job", "sharers", "slots", "waiter")

    def __init__(self, loads: Loads, job: LoadJob, hold: Hold) -> None:
        self._loads = loads
        self.job = job
        self.slots: Slots = NO_SLOTS
        self.copy: Copy | None = None
        self.began: float | None = None
        """When the copy began, if somebody watched then."""
        self.sharers: list[_Sharer] = []
        self.waiter = SlotWaiter(hold, job.end - job.start, reserve=True, load=self)

    def take_off(self) -> bool:
        """Take the slots and begin to copy; False where they cannot be had."""
        return self._loads.take_off(self)

    def give_up(self) -> None:
        """Bring nothing: whoever shares this load goes on without it."""
        self._loads.give_up(self)


class Loads:
    """The loads of one cache. Only `share` waits.

    Args:
        core: the tree.
        leases: of the cache.
        transfer: makes the copies.
        stream: that device slots are taken for; none where the device has no streams.
        threshold: fewer tokens are not worth a copy.
        on_failure: told of each copy of which a part or all failed.
        clock: in seconds, for who watches.
    """

    def __init__(
        self,
        core: TieredCore,
        leases: Leases,
        transfer: Transfer,
        stream: Any,
        threshold: int,
        on_failure: Callable[[str, BaseException, int], None],
        clock: Callable[[], float],
    ) -> None:
        self.num_done = 0
        self.num_tokens = 0
        self.running: dict[Copy, _Load] = {}
        self.on_begun: Callable[[], None] = lambda: None
        self._loads: dict[int, _Load] = {}
        self._core = core
        self._leases = leases
        self._pool = leases.pool
        self._pressure = leases.pressure
        self._transfer = transfer
        self._stream = stream
        self._threshold = threshold
        self._on_failure = on_failure
        self._clock = clock

    def __len__(self) -> int:
        """Loads that wait for slots, or copy."""
        return len(self._loads)

    def copying(self) -> set[Namespace]:
        """The namespaces of which something is being loaded."""
        return {load.waiter.hold.key.namespace for load in self.running.values()}

    @property
    def job_ids(self) -> set[int]:
        """The jobs of the tree that are to be ended here."""
        return set(self._loads)

    @property
    def targets(self) -> list[Slots]:
        """The device slots that are being copied into."""
        return [load.slots for load in self._loads.values() if len(load.slots)]

    @property
    def num_target_slots(self) -> int:
        """How many those are."""
        return sum(map(len, self.targets))

    # ---- the leases' side ----

    def is_worth_it(self, hold: Hold) -> bool:
        """Whether what a lease's match found on the host should be copied."""
        return hold.load_back and hold.host_hit >= self._threshold and hold.node_id != 0

    def is_queued_for(self, hold: Hold) -> bool:
        """Whether a lease waits for a load that waits for slots."""
        return any(sharer.hold is hold for load in self._loads.values() if load.copy is None for sharer in load.sharers)

    async def share(self, hold: Hold) -> bool:
        """Begin a load of what a lease's match found on the host, or join the one under way. Waits until it is over.

        The lease gives up its pin meanwhile, and has a new one afterwards, unless a gate is in the way: then it has
        none. Cancelled, it is released. False where there is nothing more to load.

        Raises:
            CacheClosedError: the cache was closed meanwhile.
            LeaseReleasedError: the lease was released meanwhile.
        """
        sharer = self._board(hold)
        if sharer is None:
            return False
        try:
            await sharer.event.wait()
            if sharer.error is not None:
                raise sharer.error
        except BaseException:
            self._leave(sharer)
            self._leases.passing.discard(hold)
            self._leases.release(hold)
            raise
        self._leases.passing.discard(hold)
        return not sharer.is_over

    def _board(self, hold: Hold) -> _Sharer | None:
        limit = min(hold.limit, self._pool.capacity)
        job = self._core.begin_load(hold.node_id, hold.key, limit=limit, at_least=self._threshold)
        if not job.job_id:
            return None
        sharer = _Sharer(hold)
        if job.joined:
            self._loads[job.job_id].sharers.append(sharer)
            self._leases.drop_pins(hold)
            self._leases.changed()  # it can give nothing back any more: perhaps nobody can
            return sharer
        stand_in = self._leases.new(
            hold.key, hold.given, hold.limit, 0, False, False, self._stream, hold.opened_in, hold.opened_near
        )
        stand_in.node_id, hold.node_id = hold.node_id, 0
        self._leases.drop_pins(hold)
        load = self._loads[job.job_id] = _Load(self, job, stand_in)
        load.sharers.append(sharer)
        if not self._pressure.load_now(load) and job.job_id in self._loads:
            self._pressure.queue_load(load.waiter)
        return sharer

    def _leave(self, sharer: _Sharer) -> None:
        """A lease waits no longer. A load that waits for slots and is shared by nobody any more is not begun."""
        for load in list(self._loads.values()):
            if sharer in load.sharers:
                load.sharers.remove(sharer)
                if not load.sharers and load.copy is None:
                    self.give_up(load)
                    self._leases.changed()

    def drop(self, hold: Hold) -> None:
        """End the wait of a lease that was released."""
        for load in list(self._loads.values()):
            for sharer in load.sharers:
                if sharer.hold is hold:
                    sharer.error = LeaseReleasedError(
                        f"the lease opened at {hold.where} was released while it waited for a copy from the host"
                    )
                    sharer.event.set()
                    self._leave(sharer)
                    return

    # ---- the life of a load ----

    def take_off(self, load: _Load) -> bool:
        """Take the slots for a load, and begin the copy; False where they cannot be had."""
        slots = self._pressure.take(load.job.end - load.job.start, load.waiter.hold)
        if slots is None:
            return False
        load.slots = slots
        self._leases.drop_pins(load.waiter.hold)  # the tree's own pin keeps what stands above
        try:
            load.copy = self._transfer.load(load.job.host_slots, slots)
        except AradixError as error:
            self._failed(error, len(slots))
            self._pool.give_back(self._end(load, slots, 0, is_over=True), ())
            return True
        if self._leases.watch is not None:
            load.began = self._clock()
        self.running[load.copy] = load
        self.on_begun()
        return True

    def finish(self, copy: Copy) -> None:
        """A copy has ended: what came over is on the device now, and whoever shares it has it pinned."""
        load = self.running.pop(copy)
        if copy.error is not None:
            self._failed(copy.error, len(load.slots) - copy.num_tokens_done)
        if copy.is_lost:
            unused = np.concatenate((load.slots, self._end(load, NO_SLOTS, 0, is_over=True)))
            self._pool.give_back(unused, (), copy.fence())
            return
        unused = self._end(load, load.slots, copy.num_tokens_done, is_over=copy.error is not None)
        self._pool.give_back(unused, ())
        if self._leases.watch is not None and load.began is not None and copy.error is None:
            self._leases.watch.loaded(load.began)

    def give_up(self, load: _Load) -> None:
        """End a load that waits for slots."""
        self.resume(self._stop(load))

    def _stop(self, load: _Load) -> list[_Sharer]:
        """End a load that waits for slots; who shared it."""
        self._pressure.unqueue_load(load.waiter)
        landed = self._core.end_load(load.job.job_id, NO_SLOTS, 0)
        del self._loads[load.job.job_id]
        self._pool.give_back_all(landed.freed)
        sharers, load.sharers = load.sharers, []
        for sharer in sharers:
            sharer.is_over = True
        return sharers

    def _end(self, load: _Load, slots: Slots, num_ok: int, *, is_over: bool) -> Slots:
        """End the job of a load that took off, and match again who shares it; the slots that the tree did not adopt."""
        landed = self._core.end_load(load.job.job_id, slots, num_ok)
        del self._loads[load.job.job_id]
        load.slots = NO_SLOTS
        if landed.num_tokens:
            self.num_done += 1
            self.num_tokens += landed.num_tokens
        sharers, load.sharers = load.sharers, []
        for sharer in sharers:
            sharer.is_over = is_over
        self.resume(sharers)
        self._pool.give_back_all(landed.freed)
        return landed.unused

    def resume(self, sharers: list[_Sharer]) -> None:
        """Match again, with a pin, and wake."""
        for sharer in sharers:
            if self._leases.rematch(sharer.hold):
                self._leases.passing.add(sharer.hold)
            sharer.event.set()

    def _failed(self, error: BaseException, num_tokens: int) -> None:
        self._on_failure("load", error, num_tokens)

    # ---- flushing and closing ----

    def stop_waiting(self, is_concerned: Callable[[Hold], bool]) -> list[_Sharer]:
        """End every load that waits for slots and is concerned; the caller resumes who shared them."""
        loads = [load for load in self._loads.values() if load.copy is None and is_concerned(load.waiter.hold)]
        return [sharer for load in loads for sharer in self._stop(load)]

    def close(self) -> None:
        """End every load at once; slots that a copy still touches come back behind it."""
        for load in list(self._loads.values()):
            sharers, load.sharers = load.sharers, []
            self._pressure.unqueue_load(load.waiter)
            slots, copy = load.slots, load.copy
            landed = self._core.end_load(load.job.job_id, NO_SLOTS, 0)
            del self._loads[load.job.job_id]
            fence = copy.fence() if copy is not None else None
            self._pool.give_back_all(landed.freed, fence)
            self._pool.give_back(slots, (), fence)
            for sharer in sharers:
                sharer.error = closed_error()
                sharer.event.set()
        self.running.clear()
