"""The tree core, case by case: what is matched, what is pinned, what goes, and what stays what it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from aradix.keys import Namespace, RadixKey
from aradix.params import NodeRef
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import NOWHERE, Inserted, Ready, TreeCore
from tests.tree.lockstep import CoreFactory

A, B = Namespace(lora="x"), Namespace(salt="x")


def insert(core: TreeCore, ids: Sequence[int], first_slot: int = 0, namespace: Namespace | None = None) -> Inserted:
    done = core.insert(RadixKey(ids, namespace), np.arange(first_slot, first_slot + len(ids)))
    assert isinstance(done, Inserted)
    return done


def matched(core: TreeCore, ids: Sequence[int], namespace: Namespace | None = None) -> int:
    key = RadixKey(ids, namespace)
    num_peeked = core.peek(key)
    assert core.match(key).num_matched == num_peeked
    return num_peeked


def gone(core: TreeCore, num_tokens: int) -> list[int]:
    return sorted(slot for freed in core.evict(num_tokens) for slot in freed.slots.tolist())


def clean(core: TreeCore, *pins: int) -> bool:
    assert audit_tree(core, Counter(pin for pin in pins if pin)).problems == []
    return True


# ---- the right KV, or none ----


@pytest.mark.parametrize(
    ("one", "other"),
    [(A, B), (Namespace(lora="ab", salt="c"), Namespace(lora="a", salt="bc")), (Namespace(), Namespace(extra=""))],
)
def test_namespaces_share_nothing(core_factory: CoreFactory, one: Namespace, other: Namespace) -> None:
    core = core_factory()
    insert(core, range(1, 9), 0, one)
    assert matched(core, range(1, 9), other) == 0
    insert(core, range(1, 9), 10, other)
    found = core.match(RadixKey(range(1, 9), one))
    assert core.slots_of(found.last).tolist() == list(range(8))
    assert core.num_namespaces == 2
    core.detach(one)
    assert (matched(core, range(1, 9), one), matched(core, range(1, 9), other)) == (0, 8)
    assert core.num_namespaces == 1
    assert clean(core)


def test_a_flushed_epoch_is_never_matched_again_and_comes_back_once(core_factory: CoreFactory) -> None:
    core = core_factory()
    insert(core, [1, 2, 3, 4, 5])
    pin = core.match(RadixKey([1, 2, 3, 4]), pin=True).node_id
    done = core.detach()
    assert (done.num_freed, done.num_held, core.detached_tokens) == (1, 4, 4)
    assert [freed.slots.tolist() for freed in done.freed] == [[4]]
    assert matched(core, [1, 2, 3, 4]) == 0
    insert(core, [1, 2, 3, 4], 10)
    assert core.is_detached(pin)
    new = core.match(RadixKey([1, 2, 3, 4]))
    assert core.lock_ref(new.node_id) == 0
    assert sorted(s for freed in core.unpin(pin) for s in freed.slots.tolist()) == [0, 1, 2, 3]
    assert core.detached_tokens == 0
    assert core.slots_of(new.last).tolist() == [10, 11, 12, 13]
    with pytest.raises(KeyError):
        core.unpin(pin)
    assert clean(core)


def test_two_flushes_with_pins_in_each_keep_their_epochs_apart(core_factory: CoreFactory) -> None:
    core = core_factory()
    pins = []
    for epoch in range(3):
        insert(core, [1, 2, 3], 10 * epoch)
        pins.append(core.match(RadixKey([1, 2]), pin=True).node_id)
        core.detach(Namespace() if epoch % 2 else None)
    assert core.detached_tokens == 6
    assert clean(core, *pins)
    for epoch in (1, 0, 2):
        freed = core.unpin(pins[epoch])
        assert sorted(s for f in freed for s in f.slots.tolist()) == [10 * epoch, 10 * epoch + 1]
    assert (core.detached_tokens, core.num_namespaces) == (0, 0)


def test_match_and_pin_are_one_step(core_factory: CoreFactory) -> None:
    core = core_factory()
    insert(core, [1, 2, 3, 4])
    pin = core.match(RadixKey([1, 2, 3, 4]), pin=True).node_id
    assert gone(core, 8) == []
    core.unpin(pin)
    assert gone(core, 8) == [0, 1, 2, 3]


# ---- places, and what becomes of them ----


def test_a_place_that_is_no_more_is_refused_loudly(core_factory: CoreFactory) -> None:
    core = core_factory()
    evicted = insert(core, [1, 2, 3, 4]).last
    core.evict(4)
    trimmed = insert(core, [1, 2, 3, 4], 10).last
    core.evict(1)
    for stale in (evicted, trimmed):
        for ref in (stale, stale._replace(depth=2)):
            with pytest.raises(KeyError):
                core.pin(ref)
            with pytest.raises(KeyError):
                core.slots_of(ref)
    assert core.protected_tokens == 0
    assert clean(core)


@pytest.mark.parametrize("depth", [-4, 1, 3, 5, 12, 100])
def test_a_place_that_is_none_is_refused(core_factory: CoreFactory, depth: int) -> None:
    core = core_factory(page_size=2)
    last = insert(core, range(8)).last
    with pytest.raises(KeyError):
        core.pin(last._replace(depth=depth))
    assert (core.num_nodes, core.protected_tokens) == (1, 0)


def test_a_place_inside_a_node_pins_what_is_above_it(core_factory: CoreFactory) -> None:
    core = core_factory(page_size=2)
    last = insert(core, range(8)).last
    pin = core.pin(last._replace(depth=4))
    assert (core.protected_tokens, core.evictable_tokens) == (4, 4)
    assert core.slots_of(NodeRef(pin, 4)).tolist() == [0, 1, 2, 3]
    assert gone(core, 8) == [4, 5, 6, 7]
    assert core.unpin(pin) == []
    assert clean(core)


def test_nowhere_can_be_pinned_and_holds_nothing(core_factory: CoreFactory) -> None:
    core = core_factory(page_size=4)
    assert core.match(RadixKey([1, 2, 3])).last == NOWHERE
    pin = core.pin(NOWHERE)
    assert core.slots_of(NOWHERE).tolist() == []
    assert core.unpin(pin) == []
    held = core.match(RadixKey([1, 2, 3]), pin=True)
    assert held.last == NOWHERE
    done = core.extend(held.node_id, RadixKey([1, 2, 3]), np.arange(3))
    assert done is not None
    assert done.last == NOWHERE
    assert insert(core, [1, 2]).last == NOWHERE
    core.unpin(held.node_id)
    assert core.num_namespaces == 0


def test_a_pin_keeps_its_id_through_splits_merges_and_growth(core_factory: CoreFactory) -> None:
    core = core_factory()
    insert(core, range(8))
    pin = core.match(RadixKey(range(8)), pin=True).node_id
    core.match(RadixKey([0, 1, 2]))
    core.match(RadixKey([0, 1, 2, 3, 9]))
    assert core.slots_of(NodeRef(pin, 8)).tolist() == list(range(8))
    core.match(RadixKey(range(8)))
    insert(core, [*range(8), 8, 9], 20)
    assert core.slots_of(NodeRef(pin, 8)).tolist() == list(range(8))
    assert clean(core, pin)
    core.unpin(pin)
    assert core.num_nodes == 2
    core.match(RadixKey([*range(8), 8, 9]))
    assert core.num_nodes == 1
    assert clean(core)


def test_a_split_keeps_locks_times_hits_and_priority(core_factory: CoreFactory) -> None:
    core = core_factory(policy="lfu", record_events=True)
    core.insert(RadixKey([1, 2, 3, 4]), np.arange(4), priority=3, ready=(Ready("s", "e", 1),))
    pin = core.match(RadixKey([1, 2, 3, 4]), pin=True).node_id
    core.record_hit(pin)
    core.mark_streams(pin, frozenset({"copy"}))
    assert core.match(RadixKey([1, 2, 9])).ready == (Ready("s", "e", 1),)
    assert core.protected_tokens == 4
    root, head, tail = core.walk()
    assert (head.num_tokens, tail.num_tokens, tail.parent_id) == (2, 2, head.node_id)
    assert head.lock_ref == tail.lock_ref == root.lock_ref == 1
    assert head.hit_count == tail.hit_count == 1
    assert head.priority == tail.priority == 3
    assert head.created == tail.created
    assert head.last_access > tail.last_access
    assert core.is_below(pin, head.node_id)
    assert not core.is_below(head.node_id, pin)
    core.unpin(pin)
    assert all(freed.streams == {"copy"} for freed in core.evict(4))


def test_a_split_under_a_pin_then_two_releases(core_factory: CoreFactory) -> None:
    core = core_factory()
    insert(core, [1, 2, 3, 4])
    pin = core.match(RadixKey([1, 2, 3, 4]), pin=True).node_id
    assert matched(core, [1, 2, 9]) == 2
    assert (core.protected_tokens, core.evictable_tokens) == (4, 0)
    core.unpin(pin)
    assert (core.protected_tokens, core.evictable_tokens) == (0, 4)
    assert clean(core)


# ---- pages ----


def test_siblings_may_begin_with_the_same_token(core_factory: CoreFactory) -> None:
    core = core_factory(page_size=4)
    insert(core, [1, 2, 3, 4, 5, 6, 7, 8])
    insert(core, [1, 2, 9, 9, 5, 6, 7, 8], 10)
    assert core.num_nodes == 2
    assert matched(core, [1, 2, 3, 7]) == 0
    assert matched(core, [1, 2, 3]) == 0
    assert matched(core, [1, 2, 3, 4, 5, 6, 7]) == 4
    assert matched(core, [1, 2, 9, 9, 5, 6, 7, 8, 9]) == 8
    before = core.version
    assert insert(core, [5, 5, 5], 30).end == 0
    assert core.version == before
    assert clean(core)


def test_five_raw_tokens_are_a_page_of_four_bigrams(core_factory: CoreFactory) -> None:
    core = core_factory(page_size=4, item_bytes=8)
    for count, pages in ((4, 0), (5, 1), (8, 1), (9, 2)):
        key = RadixKey(range(count)).maybe_to_bigram_view(True)
        done = core.insert(key, np.arange(20, 20 + len(key)))
        assert isinstance(done, Inserted)
        assert done.end == 4 * pages == core.peek(key) == core.match(key).num_matched
    wrong_end = RadixKey([0, 1, 2, 3, 9]).maybe_to_bigram_view(True)
    assert core.peek(wrong_end) == 0
    assert clean(core)


@pytest.mark.parametrize("limit", [-1, 0, 3, 4, 7, 8, 100])
def test_a_limit_cuts_a_match_to_whole_pages(core_factory: CoreFactory, limit: int) -> None:
    core = core_factory(page_size=4)
    insert(core, range(8))
    found = core.match(RadixKey(range(8)), limit=limit, pin=True)
    assert found.num_matched == min(8, max(0, limit) // 4 * 4) == core.protected_tokens
    assert clean(core, found.node_id)


BLOCK = 1 << 14


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("item_bytes", [4, 8])
@pytest.mark.parametrize("differs", [0, 1, 15, 16, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 39_999])
def test_where_two_long_keys_part_is_found_to_the_page(
    core_factory: CoreFactory, page_size: int, item_bytes: int, differs: int
) -> None:
    core = core_factory(page_size=page_size, item_bytes=item_bytes)
    ids = np.zeros(40_000, np.int64)
    other = ids.copy()
    other[differs] = 1
    key, apart = (RadixKey(each).maybe_to_bigram_view(item_bytes == 8) for each in (ids, other))
    core.insert(key, np.arange(40_000))
    first = differs - (item_bytes == 8)
    expected = max(0, first) // page_size * page_size
    assert core.peek(apart) == expected
    assert core.match(apart).num_matched == expected
    assert core.slots_of(core.match(key).last).tolist() == list(range(len(key) // page_size * page_size))
    assert clean(core)


def test_a_key_cut_out_of_a_longer_one_is_that_key(core_factory: CoreFactory) -> None:
    core = core_factory(page_size=2)
    key = RadixKey([9, 1, 2, 3, 4, 5, 6, 9])
    core.insert(key[1:5], np.arange(4))
    assert (core.peek(key[1:]), core.peek(key[1:4]), core.peek(key)) == (4, 2, 0)
    assert core.match(RadixKey([1, 2, 3, 4, 5])).num_matched == 4


# ---- locks and eviction ----


def test_only_what_hangs_below_a_pin_goes(core_factory: CoreFactory) -> None:
    core = core_factory()
    insert(core, [1, 2, 3, 4, 5, 6])
    pin = core.match(RadixKey([1, 2, 3, 4]), pin=True).node_id
    assert gone(core, 10) == [4, 5]
    assert (core.protected_tokens, core.evictable_tokens) == (4, 0)
    core.unpin(pin)
    core.evict(10)
    insert(core, range(1, 101))
    held = core.match(RadixKey([*range(1, 31), 999]), pin=True)
    assert gone(core, 100) == list(range(30, 100))
    assert core.protected_tokens == held.num_matched == 30


def test_eviction_starts_at_the_deepest_and_leaves_nothing_unreachable(core_factory: CoreFactory) -> None:
    core = core_factory()
    for end in (1, 2, 3):
        insert(core, range(end))
    assert [gone(core, 1) for _ in range(4)] == [[2], [1], [0], []]
    assert (core.num_nodes, core.num_namespaces) == (0, 0)


@pytest.mark.parametrize(("asked", "freed"), [(-3, 0), (0, 0), (1, 4), (4, 4), (5, 8), (7, 8), (12, 12), (99, 12)])
def test_trimming_takes_whole_pages_and_no_more(core_factory: CoreFactory, asked: int, freed: int) -> None:
    core = core_factory(page_size=4)
    insert(core, range(12))
    assert gone(core, asked) == list(range(12 - freed, 12))
    assert matched(core, range(12)) == 12 - freed == core.evictable_tokens
    assert clean(core)


@pytest.mark.parametrize(("asked", "freed"), [(0, 0), (1, 8), (8, 8), (9, 12), (99, 12)])
def test_whole_leaves_go_where_nodes_are_the_unit(core_factory: CoreFactory, asked: int, freed: int) -> None:
    core = core_factory(page_size=4, evict_unit="node")
    insert(core, range(4))
    insert(core, range(12))
    assert gone(core, asked) == list(range(12 - freed, 12))


def test_the_tree_keeps_copies_of_slots(core_factory: CoreFactory) -> None:
    core = core_factory()
    mine = np.arange(4)
    last = core.insert(RadixKey([1, 2, 3, 4]), mine).last  # type: ignore[union-attr]
    mine[:] = 99
    shown = core.slots_of(last)
    assert shown.tolist() == [0, 1, 2, 3]
    shown[:] = 77
    for view in core.walk():
        if view.parent_id:
            view.slots[:] = 66
    assert core.slots_of(last).tolist() == [0, 1, 2, 3]
    assert core.slots_of(last, 3).tolist() == [3]
    assert core.slots_of(last, 4).tolist() == []


def test_what_was_there_already_keeps_its_slots(core_factory: CoreFactory) -> None:
    core = core_factory(page_size=2)
    insert(core, [1, 2, 3, 4])
    done = insert(core, [1, 2, 3, 4, 5, 6, 7], 10)
    assert (done.prefix_len, done.end, done.existing.tolist()) == (4, 6, [0, 1, 2, 3])
    assert core.slots_of(done.last).tolist() == [0, 1, 2, 3, 14, 15]


def test_a_peek_changes_nothing(core_factory: CoreFactory) -> None:
    core = core_factory(policy="lfu")
    insert(core, [1, 2, 3, 4])
    before = [view._replace(slots=view.slots.tolist()) for view in core.walk()]
    assert [core.peek(RadixKey(ids)) for ids in ([1, 2], [1, 9], [9], [])] == [2, 1, 0, 0]
    assert core.peek(RadixKey([1], A)) == 0
    assert [view._replace(slots=view.slots.tolist()) for view in core.walk()] == before
    assert core.num_namespaces == 1


def test_looking_for_nothing_leaves_no_namespace_behind(core_factory: CoreFactory) -> None:
    core = core_factory(page_size=2)
    for number in range(100):
        space = Namespace(salt=number)
        assert matched(core, [1, 2], space) == 0
        insert(core, [1], 0, space)
        core.unpin(core.match(RadixKey([1, 2], space), pin=True).node_id)
        core.open_gate(core.close_gate(RadixKey([1, 2], space)).node_id)
    assert (core.num_namespaces, core.num_nodes, list(core.walk())) == (0, 0, [])
