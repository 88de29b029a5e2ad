"""`CppRadixTree`: the compiled core. It does what `RadixTree` does, step by step, with the same ids and victims.

Importing this package fails with `ImportError` where the core was not compiled; `aradix.tree` takes the Python core
then. What lies where in `src/`: `tree.cpp` has the steps and `ledger.cpp` what they are made of, as `radix_tree.py` and
`ledger.py` have them; `ranking.cpp` is policies and index, `keeping.cpp` and `shares.cpp` are what `keeping.py`
and `shares.py` are, `page_hashes.cpp` and `recorded.cpp` have the events, `python_records.cpp` all that goes in and
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from aradix._native import Tree
from aradix.keys import TOKEN_BYTES
from aradix.policies import FIFO, FILO, LFU, LRU, MRU, SLRU, EvictionPolicy, Priority, Tenure, looks_at_priority
from aradix.tree.evictable import EvictableIndex

__all__ = ["CppRadixTree"]

_KNOWN: dict[type, str] = {
    LRU: "lru",
    MRU: "mru",
    FIFO: "fifo",
    FILO: "filo",
    LFU: "lfu",
    SLRU: "slru",
    Priority: "priority",
    Tenure: "tenure",
}
"""Policies that the core ranks by itself; a subclass of one is a user's."""


class _Leaf(NamedTuple):
    """A leaf in the index of a user's policy."""

    handle: int
    order: int


class CppRadixTree(Tree):
    """The compiled core; `TreeCore` says what each method promises, `RadixTree` explains the arguments.

    A user's policy is asked through its methods, with a copy of what it may look at. A call that comes in the middle of
    another (out of a policy, a finaliser, or another thread) raises RuntimeError. Priorities beyond 64 bits count as
    the nearest that fits.
    """

    name = "cpp"

    def __init__(
        self,
        page_size: int = 1,
        item_bytes: int = TOKEN_BYTES,
        policy: EvictionPolicy | None = None,
        evict_unit: Literal["page", "node"] = "page",
        record_events: bool = False,
        shares: Sequence[tuple[str | int | None, int]] = (),
        merge: bool = True,
    ) -> None:
        chosen = policy or LRU()
        known = _KNOWN.get(type(chosen), "user")
        super().__init__(
            page_size=page_size,
            item_bytes=item_bytes,
            whole_nodes=evict_unit == "node",
            record_events=record_events,
            has_priorities=looks_at_priority(chosen),
            merge=merge,
            policy=known,
            protected_from=chosen.protected_from if isinstance(chosen, SLRU) else 0,
            user_policy=chosen,
            state=getattr(chosen, "state", None),
            indexes=[EvictableIndex() for _ in shares or ((),)] if known == "user" else None,
            leaf=_Leaf,
            shares=shares,
        )
