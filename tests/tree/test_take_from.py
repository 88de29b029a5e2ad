"""Taking slots out of a compiled tree in one call is the same as evicting, giving back and taking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aradix.keys import RadixKey
from aradix.memory.page_table import HELD, PageTable, make_page_table
from aradix.tree import cpp_core_error, make_core

pytestmark = pytest.mark.skipif(cpp_core_error() is not None, reason="needs the compiled core")

NUM_PAGES = 24


class Half:
    """A tree and the table its slots are from."""

    def __init__(self, page_size: int, evict_unit: str) -> None:
        self.core: Any = make_core("cpp", policy="lru", page_size=page_size, evict_unit=evict_unit)
        self.table: Any = make_page_table(NUM_PAGES, page_size)

    def adopt(self, tokens: list[int], slots: np.ndarray[Any, Any]) -> None:
        done = self.core.insert(RadixKey(tokens), slots)
        spare = slots[: done.prefix_len]
        assert self.table.give(spare, HELD)

    def take_in_steps(self, num_slots: int) -> tuple[np.ndarray[Any, Any], int] | None:
        missing = num_slots - self.table.free_slots
        if missing > self.core.evictable_tokens:
            return None
        parts = [freed.slots for freed in self.core.evict(missing)] if missing > 0 else []
        back = np.concatenate([*parts, np.empty(0, np.int64)])
        assert self.table.give(back, HELD)
        return self.table.take(num_slots, HELD), len(back)

    def state(self) -> Any:
        walked = [(view.node_id, view.tokens, view.slots.tolist(), view.last_access) for view in self.core.walk()]
        table: PageTable = self.table
        return walked, table.states.tolist(), table.stack[: table.num_free].tolist(), table.counts()


@pytest.mark.parametrize("evict_unit", ["page", "node"])
@pytest.mark.parametrize("page_size", [1, 4])
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_one_call_does_what_three_do(page_size: int, evict_unit: str, data: st.DataObject) -> None:
    short, long = Half(page_size, evict_unit), Half(page_size, evict_unit)
    for _ in range(data.draw(st.integers(1, 20))):
        num_pages = data.draw(st.integers(0, NUM_PAGES + 1))
        wanted = num_pages * page_size
        taken, expected = short.core.take_from(short.table, wanted, HELD), long.take_in_steps(wanted)
        if expected is None:
            assert taken is None
        else:
            assert taken[0].tolist() == expected[0].tolist()
            assert taken[1] == expected[1]
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=wanted, max_size=wanted))
            short.adopt(tokens, taken[0])
            long.adopt(tokens, expected[0])
        assert short.state() == long.state()


def test_a_tree_that_fences_its_slots_is_not_taken_from() -> None:
    half = Half(1, "page")
    half.adopt([1, 2], half.table.take(NUM_PAGES, HELD)[:2])
    node = half.core.match(RadixKey([1, 2])).node_id
    half.core.mark_streams(node, frozenset({"a stream"}))
    assert half.core.take_from(half.table, 1, HELD) is None
    assert half.core.evictable_tokens == 2


def test_slots_that_the_table_does_not_hold_are_an_error_and_not_handed_out() -> None:
    half = Half(1, "page")
    half.core.insert(RadixKey([1]), np.array([5], np.int64))  # never taken
    with pytest.raises(RuntimeError, match="does not hold"):
        half.core.take_from(half.table, NUM_PAGES + 1, HELD)
