"""Bugs of the async shell: what goes wrong between two awaits, and when a call is cancelled."""

from __future__ import annotations

from typing import Any, Self

import anyio
import torch

from aradix import CacheInitParams, InsertResult, Lease, RadixCache, RadixKey
from aradix.cache.hold import Hold
from aradix.cache.leases import Leases
from aradix.cache.locks import Gates, StandingGate
from aradix.cache.pressure import Pressure
from aradix.cache.slot_waiter import SlotWaiter
from stress.harness.builder import Builder
from stress.planted.plant import Plant, become

__all__ = ["SHELL"]


class _WorsePart(Builder):
    def __init__(self, part: str, worse: type[Any]) -> None:
        self._part = part
        self._worse = worse

    def cache(self, params: CacheInitParams) -> RadixCache:
        cache = RadixCache(params)
        become(getattr(cache, self._part), self._worse)
        return cache


class _WorseLease(Builder):
    """Every lease of the cache is a worse one; what it needs to remember stands in a table of the cache's own."""

    def __init__(self, worse: type[Lease], leases: type[Leases] = Leases) -> None:
        self._worse = worse
        self._leases = leases

    def cache(self, params: CacheInitParams) -> RadixCache:
        worse = self._worse

        class Cache(RadixCache):
            def __init__(self, params: CacheInitParams) -> None:
                super().__init__(params)
                self.remembered: dict[int, list[tuple[int, list[int]]]] = {}

            def lease(self, key: RadixKey, **options: Any) -> Lease:
                lease = super().lease(key, **options)
                become(lease, worse)
                return lease

        cache = Cache(params)
        become(cache._leases, self._leases)
        if self._leases is _KeepsDuplicates:
            cache.remembered = cache._leases.remembered = {}  # type: ignore[attr-defined]
        return cache


class _ShowsRemembered(Lease):
    """A lease whose slots are partly what they once were."""

    __slots__ = ()

    @property
    def slots(self) -> torch.Tensor:
        cache: Any = self._cache
        hold = self._entered()
        remembered = cache.remembered.get(hold.order, [])
        if len(remembered) == 1 and remembered[0][0] == 0 and len(remembered[0][1]) == hold.published:
            shown = [*remembered[0][1], *hold.own[: hold.num_own].tolist()]
        else:
            shown = super().slots.tolist()
        for start, slots in remembered:
            shown[start : start + len(slots)] = slots
        return torch.tensor(shown, dtype=torch.int64)


class _LatePin(_ShowsRemembered):
    """A lease that matches, lets others run, and then pins what it matched: or the root, where that is gone."""

    __slots__ = ()

    async def __aenter__(self) -> Self:
        cache: Any = self._cache
        hold, core = self._hold, self._cache._core
        match = core.match(hold.key, limit=hold.limit)
        if match.gate or self._reserve is not None or not match.num_matched:
            return await super().__aenter__()
        cache.remembered[hold.order] = [(0, core.slots_of(match.last).tolist())]
        await anyio.sleep(0.0005)
        try:
            hold.node_id = core.pin(match.last)
        except KeyError:
            hold.node_id = core.match(hold.key, limit=0, pin=True).node_id
        hold.num_matched = hold.published = hold.committed = match.num_matched
        cache._leases.enter(hold)
        return self


class _KeepsDuplicates(Leases):
    """A commit frees the duplicates, and the lease goes on with them."""

    remembered: dict[int, list[tuple[int, list[int]]]]

    def commit(self, hold: Hold, given: RadixKey, view: RadixKey) -> InsertResult:
        done = super().commit(hold, given, view)
        if len(done.duplicates):
            self.remembered.setdefault(hold.order, []).append((done.repointed[0], done.duplicates.tolist()))
        return done


class _WokenTwice(Pressure):
    """A waiter that was served stays in line, once."""

    def _serve(self, waiter: SlotWaiter) -> bool:
        again = waiter.granted
        served = super()._serve(waiter)
        if served and not again and not waiter.reserve:
            self.growth.append(waiter)
        return served


class _LosesHandOver(Pressure):
    """What a waiter was given in the moment in which it was cancelled belongs to nobody."""

    def _hand_back(self, waiter: SlotWaiter) -> None:
        hold = waiter.hold
        if not waiter.reserve and not hold.released:
            hold.cut(max(0, hold.num_own - waiter.num_tokens))


class _LeaksPin(Pressure):
    """Who leaves the line of those that wait to be entered leaves its pins behind."""

    def _leave(self, waiter: SlotWaiter, error: BaseException | None = None) -> None:
        if waiter.reserve and error is None:
            waiter.hold.node_id = 0
        super()._leave(waiter, error)


class _LeavesGate(Gates):
    """A gate that was still waiting when its owner was cancelled stays."""

    def open(self, gate: StandingGate) -> None:
        if gate.granted:
            super().open(gate)


SHELL = (
    Plant("pin after an await", "churn", _WorseLease(_LatePin)),
    Plant("waiter woken twice", "waiting", _WorsePart("_pressure", _WokenTwice)),
    Plant("hand-over lost on cancel", "waiting", _WorsePart("_pressure", _LosesHandOver)),
    Plant("pin leaked on cancel", "admission", _WorsePart("_pressure", _LeaksPin)),
    Plant(
        "duplicates freed while a lease still points at them", "crowd", _WorseLease(_ShowsRemembered, _KeepsDuplicates)
    ),
    Plant("gate left closed by a cancelled exclusive", "gates", _WorsePart("_gates", _LeavesGate)),
)
