"""Bugs of the tiers below the device: what goes wrong between the two steps of a copy."""

from __future__ import annotations

from typing import Any

from aradix import CacheInitParams, HiRadixCache, RadixCache
from aradix.cache.backups import Backups
from aradix.memory.transfer import Copy, Transfer
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
        become(getattr(cache._tiers, self._part), self._worse)
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


TIERS = (
    Plant("stored before the forward has written", "tiers", _WorseTier("backups", _StoresEarly)),
    Plant("a failed copy counts as whole", "tiers", _WorseTier("transfer", _BelievesCopies)),
)
