"""What the compiled plain case of a lease's calls needs of one cache; `src/short_calls.hpp` of the core says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aradix.cache.calls import LISTEN_FROM, MAX_RUN
from aradix.cache.hold import make_hold
from aradix.cache.lease import Lease
from aradix.cache.leases import NO_DUPLICATES
from aradix.keys import RadixKey
from aradix.memory.page_table import HELD
from aradix.params import CacheInitParams, InsertResult

if TYPE_CHECKING:
    from aradix.cache.calls import Calls
    from aradix.cache.leases import Leases

try:
    from aradix import _native
except ImportError:  # not compiled, or it does not load; `aradix.tree` says so
    _native = None  # type: ignore[assignment]

__all__ = ["make_short_calls"]


def make_short_calls(params: CacheInitParams, item_bytes: int, calls: Calls, leases: Leases, core: Any) -> Any:
    """By which a cache's leases do what is plain without Python; `None` where nothing ever is."""
    if _native is None or not leases.takes_short_ways:
        return None
    # The lists and dicts are looked at, and `holds` is written to: none of them may ever be exchanged for another.
    return _native.ShortCalls(
        {
            "calls": calls,
            "leases": leases,
            "pool": leases.pool,
            "pressure": leases.pressure,
            "holds": leases.holds,
            "growth": leases.pressure.growth,
            "admission": leases.pressure.admission,
            "standing": leases.gates.standing,
            "listening": params.allocator.listening,
            "tree": core,
            "table": params.allocator.table,
            "clock": params.clock,
            "hold_type": make_hold,
            "lease_type": Lease,
            "key_type": RadixKey,
            "insert_result": InsertResult,
            "no_duplicates": NO_DUPLICATES,
            "to_tensor": torch.from_numpy,
            "held": HELD,
            "item_bytes": item_bytes,
            "low_slots": leases.low_slots,
            "listen_from": LISTEN_FROM,
            "max_run": MAX_RUN,
        }
    )
