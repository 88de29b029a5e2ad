"""`watch`: who is told of what happens in a cache while it happens: metrics, the inspector.

Where nobody watches, each place that would tell costs one test of an attribute. A watcher runs in the middle of a step:
it takes note, and may neither raise nor call the cache; the tree may be looked at (`glance`, `look`), for looking
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aradix.cache.hold import Hold
    from aradix.cache.radix_cache import RadixCache

__all__ = ["Watcher", "watch"]


class Watcher:
    """What can be heard of a cache. Times are of its own clock, in seconds. No call waits."""

    def matching(self, hold: Hold) -> None:
        """A lease is about to match its key, perhaps once more."""

    def queried(self, hold: Hold) -> None:
        """A lease was admitted: it counts as a query, or as a resume."""

    def released(self, hold: Hold) -> None:
        """A lease that was held was released."""

    def waited_for_slots(self, began: float) -> None:
        """A call that had to wait for slots goes on, or was cancelled."""

    def waited_at_gate(self, began: float) -> None:
        """A call that had to wait for a subtree goes on, or was cancelled."""

    def waited_to_join(self, began: float) -> None:
        """A lease that waited for what another one computes goes on, or was cancelled; not of those with `reserve`."""

    def evicting(self) -> None:
        """The tree is about to evict."""

    def evicted(self, num_tokens: int, began: float) -> None:
        """The tree has evicted, and the slots were given back."""

    def loaded(self, began: float) -> None:
        """What a copy from the host brought is on the device; a copy that failed is not told of."""


class _Watchers(Watcher):
    """Several watchers as one."""

    def __init__(self, watchers: tuple[Watcher, ...]) -> None:
        self._watchers = watchers

    def matching(self, hold: Hold) -> None:
        for watcher in self._watchers:
            watcher.matching(hold)

    def queried(self, hold: Hold) -> None:
        for watcher in self._watchers:
            watcher.queried(hold)

    def released(self, hold: Hold) -> None:
        for watcher in self._watchers:
            watcher.released(hold)

    def waited_for_slots(self, began: float) -> None:
        for watcher in self._watchers:
            watcher.waited_for_slots(began)

    def waited_at_gate(self, began: float) -> None:
        for watcher in self._watchers:
            watcher.waited_at_gate(began)

    def waited_to_join(self, began: float) -> None:
        for watcher in self._watchers:
            watcher.waited_to_join(began)

    def evicting(self) -> None:
        for watcher in self._watchers:
            watcher.evicting()

    def evicted(self, num_tokens: int, began: float) -> None:
        for watcher in self._watchers:
            watcher.evicted(num_tokens, began)

    def loaded(self, began: float) -> None:
        for watcher in self._watchers:
            watcher.loaded(began)


def watch(cache: RadixCache, watcher: Watcher) -> Callable[[], None]:
    """Tell a watcher what happens in a cache from now on; gives what ends that. Does not wait."""
    leases = cache._leases
    watching = [*leases.watchers, watcher]

    def tell(watchers: list[Watcher]) -> None:
        leases.watchers = tuple(watchers)
        told = None if not watchers else watchers[0] if len(watchers) == 1 else _Watchers(leases.watchers)
        leases.watch = leases.pressure.watch = leases.gates.watch = told

    def end() -> None:
        tell([each for each in leases.watchers if each is not watcher])

    tell(watching)
    return end
