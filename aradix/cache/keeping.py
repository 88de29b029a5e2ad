"""`KeepingCalls`: the calls of a cache that say what is kept and for whom: pins, flushes, and what tenants have."""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Callable

from anyio.abc import TaskGroup

from aradix.cache.base_prefix_cache import BasePrefixCache
from aradix.cache.calls import Calls
from aradix.cache.lease import count_of
from aradix.cache.leases import Leases
from aradix.cache.locks import Gates
from aradix.cache.pins import Pin
from aradix.cache.pool import SlotPool
from aradix.cache.pressure import Pressure
from aradix.errors import UsageError
from aradix.keys import Namespace, RadixKey
from aradix.params import FlushResult, TenantStats
from aradix.tree.protocol import TreeCore

__all__ = ["KeepingCalls"]

_log = logging.getLogger("aradix.cache")


class KeepingCalls(BasePrefixCache):
    """A part of `RadixCache`, which makes what is declared here."""

    _calls: Calls
    _core: TreeCore
    _leases: Leases
    _pool: SlotPool
    _pressure: Pressure
    _gates: Gates
    _task_group: TaskGroup | None

    @abc.abstractmethod
    async def _take_turn(self) -> None:
        """The first line of a call that can wait."""

    @abc.abstractmethod
    def _view(self, key: RadixKey) -> RadixKey:
        """What the tree looks up. InvalidKeyError if it is no key."""

    # ---- pins ----

    def pin(self, key: RadixKey, *, ttl: float | None = None, budget: int | None = None) -> Pin:
        self._calls.begin_open()
        view = self._view(key)
        if ttl is not None and (
            isinstance(ttl, bool) or not isinstance(ttl, int | float) or not ttl > 0 or math.isinf(ttl)
        ):
            raise UsageError(f"ttl must be seconds above 0, or None to keep it until released; got {ttl!r}")
        pins = self._leases.pins
        if pins.expire():  # they stand in nobody's budget any more
            self._leases.changed()
        pin = pins.add(view, ttl, None if budget is None else count_of("budget", budget))
        if ttl is not None:
            self._pressure.is_timed = True
            if pin.num_tokens and not pins.is_watched:
                assert self._task_group is not None
                pins.is_watched = True
                self._task_group.start_soon(pins.watch, name="aradix pins")
        self._leases.changed()
        return pin

    def _release_pin(self, step: Callable[[], None]) -> None:
        self._calls.begin_release()
        step()
        self._leases.changed()

    # ---- flushes ----

    async def flush(self, namespace: Namespace | str | None = None, **fields: str | int | None) -> FlushResult:
        await self._take_turn()
        return self._flush(namespace, fields)

    def _flush(self, namespace: Namespace | str | None, fields: dict[str, str | int | None]) -> FlushResult:
        concerned = self._concerned(namespace, fields)
        # Who waits to be entered is entered after the flush, so it must not bring along what it matched before.
        self._pressure.drop_waiting_pins(lambda hold: concerned(hold.key.namespace))
        self._leases.pins.end_all("flushed", lambda pin: concerned(pin.key.namespace))
        if namespace is not None:
            parts = [self._core.detach(Namespace.of(namespace))]
        elif fields:
            parts = [self._core.detach(known) for known in self._core.namespaces() if concerned(known)]
        else:
            parts = [self._core.detach()]
        self._pool.give_back_all(freed for part in parts for freed in part.freed)
        self._leases.joins.flushed(concerned)
        self._pressure.admission_unblocked()
        self._gates.serve_walkers()
        self._leases.changed()
        done = FlushResult(sum(part.num_freed for part in parts), sum(part.num_held for part in parts))
        _log.info("flushed: %d tokens freed, %d held by leases", done.num_freed_tokens, done.num_held_tokens)
        return done

    @staticmethod
    def _concerned(
        namespace: Namespace | str | None, fields: dict[str, str | int | None]
    ) -> Callable[[Namespace], bool]:
        """Whether a namespace is to be flushed."""
        if namespace is not None:
            if fields:
                raise UsageError(f"flush takes a namespace or fields of one, got {namespace!r} and {fields}")
            return Namespace.of(namespace).__eq__
        if unknown := sorted(set(fields) - set(Namespace._fields)):
            raise UsageError(f"no field of a namespace: {', '.join(unknown)}; it has {', '.join(Namespace._fields)}")
        wanted = Namespace(**fields)
        places = [Namespace._fields.index(name) for name in fields]
        return lambda known: all(known[place] == wanted[place] for place in places)

    def tenant_stats(self) -> dict[str | int | None, TenantStats]:
        self._calls.begin()
        return self._leases.tenants.stats()
