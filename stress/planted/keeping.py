"""Bugs of quotas and pins: the wrong tenant gives, and a time ends what it must not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aradix import CacheInitParams, RadixCache
from aradix.cache.pins import Pin, PinEnd, Pins
from aradix.tree.node import TreeNode
from aradix.tree.shares import SharedIndex
from stress.harness.builder import Builder
from stress.planted.plant import Plant, become

__all__ = ["KEEPING"]


class _WorseShares(Builder):
    def cache(self, params: CacheInitParams) -> RadixCache:
        # The reference core is the one that can be made worse from outside.
        cache = RadixCache(replace(params, tree_core="python"))
        core: Any = cache._core
        become(core._shares, _AnybodyGives)
        return cache


class _WorsePins(Builder):
    def __init__(self, worse: type[Pins]) -> None:
        self._worse = worse

    def cache(self, params: CacheInitParams) -> RadixCache:
        cache = RadixCache(params)
        become(cache._leases.pins, self._worse)
        return cache


class _AnybodyGives(SharedIndex):
    """The oldest leaf goes, whoever's it is."""

    __slots__ = ()

    def least(self) -> TreeNode | None:
        leaves = [leaf for share in self.shares if (leaf := share.index.least()) is not None]
        return min(leaves, key=lambda leaf: leaf.last_access, default=None)


class _ExpiresEarly(Pins):
    """A pin is over a little before its time."""

    def expire(self) -> bool:
        due = [pin for pin in self._live.values() if pin.expires is not None and pin.expires <= self._clock() + 3]
        for pin in due:
            self.end(pin, "expired")
        return bool(due)


class _EndsReaders(Pins):
    """When the time of a pin is over, whoever reads there loses his hold too."""

    def end(self, pin: Pin, how: PinEnd) -> None:
        node_id = pin.node_id
        super().end(pin, how)
        if how == "expired" and node_id and self._core.lock_ref(node_id):
            self._core.unpin(node_id, touch=False)


KEEPING = (
    Plant("a tenant within its share gives", "keeping", _WorseShares()),
    Plant("a pin that ends before its time", "keeping", _WorsePins(_ExpiresEarly)),
    Plant("a pin's time ends a lease on the same prefix", "keeping", _WorsePins(_EndsReaders)),
)
