"""`HiRadixCache`: a `RadixCache` whose prefixes outlive the device, on the host and in a page store."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import anyio

from aradix.cache.lease import count_of
from aradix.cache.radix_cache import RadixCache
from aradix.cache.tiering import Tiers
from aradix.errors import ConfigError, UsageError
from aradix.events import TierFault
from aradix.keys import Namespace, RadixKey
from aradix.params import (
    CacheInitParams,
    CacheStats,
    EvictParams,
    EvictResult,
    FlushResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from aradix.tree import make_tiered_core
from aradix.tree.tiered import Peeked, TieredCore

__all__ = ["HiRadixCache"]

_LAST_PUTS_S = 5.0
"""How long closing waits for what is on its way into the page store."""
_BACKUP_HITS = {"write_through": 0, "write_through_selective": 1, "write_back": None}


class HiRadixCache(RadixCache):
    """A prefix cache with a host tier: what left the device comes back by a copy instead of a prefill.

    As `RadixCache`, and besides: `cache.lease(key)` brings back what the host holds of the key before it is entered,
    one copy for all who want the same. `CacheInitParams.write_policy` says when tokens are copied to the host. A copy
    that fails is a miss, counted in `stats()` and told by `take_faults()`.

    Args:
        params: with `kv_pool=` and `host=`.

    Raises:
        ConfigError: as `RadixCache`, and for pools that are missing or do not fit together.
    """

    def __init__(self, params: CacheInitParams) -> None:
        if not isinstance(params, CacheInitParams):
            raise UsageError(f"HiRadixCache takes CacheInitParams(allocator=...), got {type(params).__name__}")
        if params.host is None:
            raise ConfigError("HiRadixCache needs host=, a HostKVPool, and kv_pool=; without them take RadixCache")
        super().__init__(params)
        self._tiers = Tiers(params, self._tiered, self._leases, self._calls.fail, self._on_copies)
        if self._tiers.transfer.needs_polling:
            self._tiers.loads.on_begun = self._tiers.backups.on_begun = self._on_begun

    def _make_core(self, params: CacheInitParams) -> TieredCore:
        backup_hits = None if params.disable else _BACKUP_HITS[params.write_policy]
        self._tiered = make_tiered_core(params.tree_core, backup_hits=backup_hits, **self._core_settings(params))
        return self._tiered

    # ---- copies ----

    def _on_begun(self) -> None:
        self._background.somebody_waits()

    def _on_copies(self) -> None:
        """Copies ended, on whatever thread; who waits for them is served in a step of its own."""
        if self._home is not None and not self._calls.closed:
            self._home.call_soon(self._copies_changed)

    def _copies_changed(self) -> None:
        if self._calls.closed:
            return
        try:
            self._tiers.drain()
            # Even if some step in between has heard of them already: it may not have looked who waits.
            self._leases.changed()
        except Exception as error:
            self._calls.fail(error)

    def _settle(self) -> None:
        """Hear of the copies that have ended, and serve who waits for them."""
        if not self._calls.closed and self._tiers.drain():
            self._leases.changed()

    def _wants_polls(self) -> bool:
        return super()._wants_polls() or (self._tiers.is_copying and self._tiers.transfer.needs_polling)

    def _poll(self) -> None:
        super()._poll()
        self._settle()

    async def _all_archived(self) -> None:
        """Wait until what is on its way down has arrived."""
        assert self._tiers.archive is not None
        while self._tiers.backups.running:
            await self._tiers.wait_for_backup()
        await self._tiers.archive.wait_idle()

    def _close(self) -> None:
        super()._close()
        self._tiers.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            if self._tiers.archive is not None and error is None and not self._calls.closed:
                try:
                    with anyio.move_on_after(_LAST_PUTS_S):
                        await self._all_archived()
                except BaseException as failure:  # cancelled, by who is around or by a failure in the background
                    if not await super().__aexit__(type(failure), failure, failure.__traceback__):
                        raise
                    return None
            return await super().__aexit__(kind, error, trace)
        finally:
            await self._tiers.close_transfer()

    # ---- calls that hear of copies first ----

    async def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        self._calls.begin_open()
        self._settle()
        return await super().match_prefix(params)

    async def insert(self, params: InsertParams) -> InsertResult:
        self._calls.begin_open()
        self._settle()
        return await super().insert(params)

    async def evict(self, params: EvictParams) -> EvictResult:
        """As `RadixCache.evict`; under `write_back` it waits for the copies that make room."""
        result = await super().evict(params)
        num_freed = result.num_freed_tokens
        num_tokens = count_of("num_tokens", params.num_tokens)
        while num_freed < num_tokens and self._tiers.will_make_room and not self._gates.is_held_by_this_task():
            await self._tiers.wait_for_backup()
            self._calls.begin_open()
            num_freed += self._leases.evict_slots(num_tokens - num_freed)
            self._leases.changed()
        return EvictResult(num_freed)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        archive = self._tiers.archive
        if archive is not None and self._task_group is not None:
            archive.open(self._task_group)
        return self

    async def flush(self, namespace: Namespace | str | None = None, **fields: str | int | None) -> FlushResult:
        """As `RadixCache.flush`, on every tier; the page store is cleared of all where only fields are given. Waits for
        the store, if there is one. This cache finds nothing cleared from the call on, whatever the store answers.

        Where the store could not be told (a `clear` fault in `take_faults()`), its object clears before it asks for
        anything else. Another process, or this one begun anew, may find the pages until then: flush again when the
        store is back, or move to a new `Namespace(version=)`, which needs nobody to be told.
        """
        await self._take_turn()
        self._settle()
        concerned = self._concerned(namespace, fields)
        sharers = self._tiers.loads.stop_waiting(lambda hold: concerned(hold.key.namespace))
        archive = self._tiers.archive
        if archive is not None:
            archive.forget(concerned)
        try:
            done = self._flush(namespace, fields)
        finally:
            self._tiers.loads.resume(sharers)
        if archive is not None:
            await archive.clear(None if namespace is None else Namespace.of(namespace))
        return done

    def stats(self) -> CacheStats:
        self._calls.begin()
        self._settle()
        return super().stats()

    def check(self) -> None:
        self._calls.begin()
        self._settle()
        super().check()

    # ---- what only this cache can say ----

    def peek_tiers(self, key: RadixKey) -> Peeked:
        """Tokens that a match would find, on the device and beyond that on the host. Does not wait."""
        self._calls.begin()
        return self._tiered.peek_tiers(self._view(key))

    def take_faults(self) -> list[TierFault]:
        """The copies that failed since the last call, the oldest first; the latest thousand. Does not wait."""
        self._calls.begin()
        return self._tiers.take_faults()
