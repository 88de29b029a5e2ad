"""Bugs of single flight: who waits for what another one computes is forgotten, or let go on too soon."""

from __future__ import annotations

from aradix import CacheInitParams, RadixCache
from aradix.cache.hold import Hold
from aradix.cache.joins import Flight, Joins
from stress.harness.builder import Builder
from stress.planted.plant import Plant, become

__all__ = ["JOINS"]


class _WorseJoins(Builder):
    def __init__(self, worse: type[Joins]) -> None:
        self._worse = worse

    def cache(self, params: CacheInitParams) -> RadixCache:
        cache = RadixCache(params)
        become(cache._leases.joins, self._worse)
        return cache


class _Strands(Joins):
    """Who waits hears of commits, but not of the end of the one that would have made them."""

    def _end(self, flight: Flight) -> None:
        pass


class _WakesEarly(Joins):
    """Who waits goes on at the next commit, whatever that is of, and does not look again."""

    def progressed(self, hold: Hold) -> bool:
        if (flight := self.flights.get(hold.order)) is not None:
            for joiner in flight.joiners:
                joiner.target = min(joiner.target, hold.published)
        return super().progressed(hold)

    def _find(self, hold: Hold) -> tuple[Flight, int] | None:
        return None if hold.order in self.joiners else super()._find(hold)


class _JoinsWithSomethingInHand(Joins):
    """A task waits for a flight though it holds another lease, for whose slots the one that computes may wait."""

    def _task_holds_another(self, hold: Hold) -> bool:
        return False


JOINS = (
    Plant("a leader's death strands joiners", "joins", _WorseJoins(_Strands)),
    Plant("joiner wakes before the commit", "joins", _WorseJoins(_WakesEarly)),
    Plant("who joins holds another lease", "nested joins", _WorseJoins(_JoinsWithSomethingInHand)),
)
