"""Bugs of the tiers below the device: what goes wrong between the two steps of a copy."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from aradix import CacheInitParams, HiRadixCache, RadixCache
from aradix.cache.backups import Backups
from aradix.cache.hold import Hold
from aradix.cache.leases import Leases
from aradix.cache.tiering import Tiers
from aradix.memory.transfer import Copy, Transfer
from aradix.tree.protocol import Freed
from aradix.tree.tiered import StoreJob
from stress.harness.builder import Builder
from stress.planted.plant import Plant, become

__all__ = ["TIERS"]


class _WorseTier(Builder):
    def __init__(self, part: str, worse: type[Any]) -> None:
        self._part = part
        self._worse = worse

    def cache(self, params: CacheInitParams) -> RadixCache:
        cache = HiRadixCache(params)
        become(attrgetter(self._part)(cache), self._worse)
        return cache


class _StoresEarly(Backups):
    """A copy to the host does not wait for the forward that writes."""

    def _start(self, job: StoreJob) -> None:
        super()._start(job._replace(ready=()))


class _BelievesCopies(Transfer):
    """A copy that failed half way counts as whole."""

    def take_done(self) -> list[Copy]:
        done = super().take_done()
        for copy in done:
            copy._job.num_pages_done = len(copy._job.source_pages)
        return done


class _EvictsUnheard(Tiers):
    """An eviction does not hear first of the copies that have ended."""

    def evict(self, num_tokens: int, **shares: Any) -> list[Freed]:
        if self._writes_back:
            return super().evict(num_tokens, **shares)
        return self.core.evict(num_tokens, **shares)


class _EndsCopies(Tiers):
    """Under pressure the slots of a copy to the host are let go, though it still reads them."""

    def evict(self, num_tokens: int, **shares: Any) -> list[Freed]:
        running, self.backups.running = self.backups.running, {}
        freed = [one for job, _ in running.values() for one in self.core.end_store(job.job_id, None).freed]
        for _, host_slots in running.values():
            self.host.give_back(host_slots)
        return freed + super().evict(num_tokens, **shares)


class _KeepsGlances(Leases):
    """The pin of a lease that loaded nothing outlives it."""

    def release(self, hold: Hold) -> None:
        if not hold.load_back and hold.held:
            hold.node_id = 0
        super().release(hold)


TIERS = (
    Plant("stored before the forward has written", "tiers", _WorseTier("_tiers.backups", _StoresEarly)),
    Plant("a failed copy counts as whole", "tiers", _WorseTier("_tiers.transfer", _BelievesCopies)),
    Plant("a look-up that loads nothing keeps its pin", "quiet tiers", _WorseTier("_leases", _KeepsGlances)),
    Plant("an eviction does not hear of ended copies", "quiet tiers", _WorseTier("_tiers", _EvictsUnheard)),
    Plant("a copy is not held hard under pressure", "quiet tiers", _WorseTier("_tiers", _EndsCopies)),
)
