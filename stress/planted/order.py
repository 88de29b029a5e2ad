"""Bugs of what people see: who is served first, and what the events tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aradix import CacheInitParams, RadixCache
from aradix.cache.event_sinks import EventSink, EventSinks
from aradix.cache.hold import Hold
from aradix.cache.pressure import Pressure
from aradix.events import KVCacheEvent
from aradix.tree.node import TreeNode
from aradix.tree.radix_tree import RadixTree
from stress.harness.builder import Builder
from stress.planted.plant import Plant, become

__all__ = ["ORDER"]


class _WorsePressure(Builder):
    def __init__(self, worse: type[Pressure]) -> None:
        self._worse = worse

    def cache(self, params: CacheInitParams) -> RadixCache:
        cache = RadixCache(params)
        become(cache._pressure, self._worse)
        return cache


class _Barges(Pressure):
    """Who asks while others wait is served at once, where there is enough for him."""

    def grow_now(self, hold: Hold, num_tokens: int) -> bool:
        line, self.growth = self.growth, []
        try:
            return super().grow_now(hold, num_tokens)
        finally:
            self.growth = line


class _LastFirst(Pressure):
    """Who came last is served first."""

    def _serve_in_order(self) -> bool:
        for line in (self.growth, self.admission):
            line.reverse()
        try:
            return super()._serve_in_order()
        finally:
            for line in (self.growth, self.admission):
                line.reverse()


class _WorseSinks(Builder):
    def cache(self, params: CacheInitParams) -> RadixCache:
        cache = RadixCache(params)
        become(cache._event_sinks, _Swallows)
        return cache


class _Swallows(EventSinks):
    """A sink that raises is left out from then on, and nobody hears of it."""

    def _call(self, order: int, sink: EventSink, events: Sequence[KVCacheEvent]) -> None:
        try:
            sink(events)
        except Exception:
            self._remove(order)


class _WorseTree(Builder):
    def cache(self, params: CacheInitParams) -> RadixCache:
        cache = RadixCache(replace(params, tree_core="python"))
        become(cache._core, _TrimsSilently)
        return cache


class _TrimsSilently(RadixTree):
    """An eviction tells of whole nodes only, not of pages that it trims."""

    def _record_removed(self, node: TreeNode, first_page: int, medium: str) -> None:
        if not first_page:
            super()._record_removed(node, first_page, medium)


ORDER = (
    Plant("newcomer served before those that wait", "line", _WorsePressure(_Barges)),
    Plant("last come, first served", "line", _WorsePressure(_LastFirst)),
    Plant("exception of a sink swallowed", "broken sinks", _WorseSinks()),
    Plant("trimmed pages not told of", "sinks", _WorseTree()),
)
