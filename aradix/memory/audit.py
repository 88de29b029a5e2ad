"""The recount behind `SlotAllocator.check()`: every page is in one place, and every counter says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aradix.errors import InvariantError
from aradix.memory.carry import CarryTable
from aradix.memory.limbo import Limbo, Pages
from aradix.memory.page_table import HELD, OUT, PLACES, RETIRED, RETIRING, PageTable
from aradix.memory.pages import PageReader

__all__ = ["audit_pages"]


def audit_pages(
    table: PageTable, pages: PageReader, limbo: Limbo, carry: CarryTable, returned: Callable[[], list[Pages]]
) -> None:
    """Recounts; `InvariantError` naming what differs. `returned()`: given to `retire()`, and not in limbo yet."""
    # A finaliser may retire at any point in here, which changes states and no counter: one copy is audited.
    states = table.states.copy()
    claimed = [np.empty(0, dtype=np.int64), *returned()]
    lost = np.setdiff1d(np.flatnonzero(states == RETIRING), np.concatenate(claimed))
    if len(lost):
        raise InvariantError(f"{len(lost)} pages were given to retire() and never reached limbo")
    states[states == RETIRING] = OUT
    pages.check(states)
    limbo.check()
    carry.check()
    retired = [batch.pages for batch in limbo.batches()]
    listed = np.sort(np.concatenate(retired)) if retired else np.empty(0, dtype=np.int64)
    if not np.array_equal(listed, np.flatnonzero(states == RETIRED)):
        raise InvariantError(
            f"limbo lists {len(listed)} pages, {len(np.unique(listed))} of them distinct; "
            f"{table.count(RETIRED)} pages are retired by their state"
        )
    carriers = carry.carriers()
    if not np.isin(states[carriers], (OUT, HELD)).all():
        raise InvariantError("a page that is not handed out carries marks")
    places = {name: sum(table.count(state) for state in states) for name, states in PLACES.items()}
    places["free"] = table.num_free
    if sum(places.values()) != table.num_pages:
        raise InvariantError(f"the pool has {table.num_pages} pages, but {places} makes {sum(places.values())}")
