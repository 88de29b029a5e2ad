"""`KeepingCalls`: the calls of a cache that say what is kept and for whom: flushes, and what tenants have."""

from __future__ import annotations

import abc

from aradix.cache.base_prefix_cache import BasePrefixCache
from aradix.cache.leases import Leases
from aradix.cache.locks import Gates
from aradix.cache.pool import SlotPool
from aradix.cache.pressure import Pressure
from aradix.keys import Namespace
from aradix.params import FlushResult, TenantStats
from aradix.tree.protocol import TreeCore

__all__ = ["KeepingCalls"]


class KeepingCalls(BasePrefixCache):
    """A part of `RadixCache`, which makes what is declared here."""

    _core: TreeCore
    _leases: Leases
    _pool: SlotPool
    _pressure: Pressure
    _gates: Gates

    @abc.abstractmethod
    def _begin(self) -> None:
        """The first line of every public call."""

    @abc.abstractmethod
    async def _take_turn(self) -> None:
        """The first line of a call that can wait."""

    async def flush(self, namespace: Namespace | str | None = None) -> FlushResult:
        await self._take_turn()
        flushed = None if namespace is None else Namespace.of(namespace)
        # Who waits to be entered is entered after the flush, so it must not bring along what it matched before.
        self._pressure.drop_waiting_pins(lambda hold: flushed in (None, hold.key.namespace))
        done = self._core.detach(flushed)
        self._pool.give_back_all(done.freed)
        self._pressure.admission_unblocked()
        self._gates.serve_walkers()
        self._leases.changed()
        return FlushResult(done.num_freed, done.num_held)

    def tenant_stats(self) -> dict[str | int | None, TenantStats]:
        self._begin()
        return self._leases.tenants.stats()
