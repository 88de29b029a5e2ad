"""What the host tier promises, case by case: copies that outlive splits, flushes and eviction, and never a hole."""

from __future__ import annotations

import numpy as np
import pytest

from aradix.errors import ConfigError
from aradix.events import AllBlocksCleared, BlockRemoved, BlockStored
from aradix.keys import Namespace, RadixKey
from aradix.tree import make_tiered_core
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import NOWHERE, Freed, Latch, Ready, Slots
from aradix.tree.tiered import TieredCore


def made(backup_hits: int | None = None, page_size: int = 1, record_events: bool = False) -> TieredCore:
    return make_tiered_core(
        "python", policy="lru", backup_hits=backup_hits, page_size=page_size, record_events=record_events
    )


def ids(first: int, last: int) -> RadixKey:
    return RadixKey(range(first, last + 1))


def slots(first: int, count: int) -> Slots:
    return np.arange(first, first + count)


def on_host(core: TieredCore, key: RadixKey, first: int) -> None:
    """A key whose KV is on the host alone, in slots from `first` on."""
    core.insert(key, slots(0, len(key)))
    store = core.begin_store(core.match(key).node_id)
    assert store is not None
    core.end_store(store.job_id, slots(first, len(key)))
    assert device_slots(core.evict(len(key))) == list(range(len(key)))


def device_slots(freed: list[Freed]) -> list[int]:
    return sorted(slot for one in freed for slot in one.slots.tolist())


def host_slots(freed: list[Freed]) -> list[int]:
    return sorted(slot for one in freed for slot in one.host_slots.tolist())


def residencies(core: TieredCore) -> list[tuple[int, str]]:
    return [(view.depth, view.residency) for view in core.walk() if view.parent_id]


def test_a_backup_that_is_split_meanwhile_lands_on_both_halves() -> None:
    core = made(backup_hits=0)
    core.insert(ids(1, 8), slots(0, 8))
    (store,) = core.begin_stores()
    assert (store.start, store.end, store.slots.tolist()) == (0, 8, list(range(8)))
    assert core.match(RadixKey([1, 2, 3, 4, 99])).num_matched == 4
    assert core.evict(8) == [] == core.evict_host(8)
    landed = core.end_store(store.job_id, slots(100, 8))
    assert (landed.num_tokens, landed.unused.tolist(), landed.freed) == (8, [], [])
    assert core.jobs() == []
    assert device_slots(core.evict(8)) == list(range(8))
    assert {residency for _, residency in residencies(core)} == {"host"}
    assert host_slots(core.evict_host(8)) == list(range(100, 108))
    assert core.num_nodes == core.num_namespaces == 0


def test_a_load_holds_its_source_before_room_is_made() -> None:
    core = made()
    on_host(core, ids(1, 8), 100)
    core.insert(ids(21, 28), slots(20, 8))
    found = core.match(ids(1, 8), pin=True)
    assert (found.num_matched, found.host_hit, found.best.depth) == (0, 8, 8)
    load = core.begin_load(found.node_id, ids(1, 8))
    assert load.host_slots.tolist() == list(range(100, 108))
    assert core.evict_host(8) == []
    assert device_slots(core.evict(8)) == list(range(20, 28))
    landed = core.end_load(load.job_id, slots(20, 8), 8)
    assert (landed.num_tokens, landed.last.depth) == (8, 8)
    assert core.match(ids(1, 8)).num_matched == 8
    assert core.slots_of(landed.last).tolist() == list(range(20, 28))


def test_a_load_is_one_flight_for_all_who_want_it() -> None:
    core = made()
    on_host(core, ids(1, 8), 100)
    pins = [core.match(ids(1, 8), pin=True) for _ in range(3)]
    load = core.begin_load(pins[0].node_id, ids(1, 8), limit=6)
    assert (load.start, load.end, load.joined) == (0, 6, False)
    for found in pins:
        again = core.begin_load(found.node_id, ids(1, 8))
        assert (again.job_id, again.joined) == (load.job_id, True)
    for found in pins:  # the leader too: the flight goes on without any of them
        core.unpin(found.node_id)
    assert core.match(ids(1, 8)).loading == load.job_id
    assert core.end_load(load.job_id, slots(0, 6), 6).num_tokens == 6
    found = core.match(ids(1, 8))
    assert (found.num_matched, found.host_hit, found.loading) == (6, 2, 0)


def test_a_load_that_fails_in_part_leaves_a_shorter_true_prefix() -> None:
    core = made(page_size=4)
    on_host(core, ids(1, 12), 100)
    found = core.match(ids(1, 12), pin=True)
    load = core.begin_load(found.node_id, ids(1, 12))
    landed = core.end_load(load.job_id, slots(0, 12), 7)
    assert (landed.num_tokens, landed.end, landed.unused.tolist()) == (4, 4, list(range(4, 12)))
    assert residencies(core) == [(4, "both"), (12, "host")]
    assert core.peek_tiers(ids(1, 12)) == (4, 8)


def test_what_is_inserted_while_it_is_loaded_is_not_loaded_over() -> None:
    core = made()
    on_host(core, ids(1, 8), 100)
    found = core.match(ids(1, 8), pin=True)
    load = core.begin_load(found.node_id, ids(1, 8))
    done = core.insert(ids(1, 4), slots(50, 4))
    assert not isinstance(done, int)
    assert (done.prefix_len, done.end) == (0, 4)
    landed = core.end_load(load.job_id, slots(0, 8), 8)
    assert (landed.num_tokens, landed.unused.tolist()) == (4, [0, 1, 2, 3])
    assert core.slots_of(landed.last).tolist() == [50, 51, 52, 53, 4, 5, 6, 7]


@pytest.mark.parametrize("leased", [False, True])
def test_a_flush_leaves_nothing_to_match_on_any_tier(leased: bool) -> None:
    core = made(backup_hits=0)
    core.insert(ids(1, 8), slots(0, 8))
    (store,) = core.begin_stores()
    core.end_store(store.job_id, slots(100, 8))
    node_id = core.match(ids(1, 8), pin=leased).node_id
    done = core.detach()
    assert (done.num_freed, done.num_held) == ((0, 8) if leased else (8, 0))
    assert host_slots(done.freed) == list(range(100, 108))
    assert core.peek_tiers(ids(1, 8)) == (0, 0)
    if leased:
        assert device_slots(core.unpin(node_id)) == list(range(8))
    assert [*core.walk(), *core.walk(detached=True)] == []


def test_a_flush_under_copies_gives_everything_back_at_their_ends() -> None:
    core = made()
    on_host(core, ids(1, 4), 100)
    core.insert(ids(11, 14), slots(20, 4))
    store = core.begin_store(core.match(ids(11, 14)).node_id)
    assert store is not None
    found = core.match(ids(1, 4), pin=True)
    load = core.begin_load(found.node_id, ids(1, 4))
    core.unpin(found.node_id)
    done = core.detach()
    assert (done.num_freed, done.num_held, done.freed) == (0, 4, [])
    core.insert(ids(1, 4), slots(30, 4))
    assert audit_tree(core, {}).problems == []
    landed = core.end_load(load.job_id, slots(40, 4), 4)
    assert (landed.num_tokens, landed.last) == (0, NOWHERE)
    assert landed.unused.tolist() == [40, 41, 42, 43]
    assert host_slots(landed.freed) == [100, 101, 102, 103]
    landed = core.end_store(store.job_id, slots(110, 4))
    assert landed.unused.tolist() == [110, 111, 112, 113]
    assert device_slots(landed.freed) == [20, 21, 22, 23]
    assert list(core.walk(detached=True)) == []
    assert core.match(ids(1, 4)).num_matched == 4


def test_eviction_sees_every_backup_that_has_ended() -> None:
    core = made(backup_hits=0)
    for first in (10, 20, 30, 40):
        core.insert(ids(first, first + 3), slots(first, 4))
    jobs = core.begin_stores()
    assert len(jobs) == 4
    assert core.evict(16) == []
    for number, job in enumerate(jobs):
        core.end_store(job.job_id, slots(100 + 10 * number, 4))
    assert len(device_slots(core.evict(16))) == 16
    assert core.host_tokens == core.host_evictable_tokens == 16
    assert (core.jobs(), core.num_due) == ([], 0)


@pytest.mark.parametrize(("backup_hits", "due_after"), [(0, 0), (1, 1), (2, 2), (None, None)])
def test_tokens_are_due_once_they_were_found_so_often(backup_hits: int | None, due_after: int | None) -> None:
    core = made(backup_hits=backup_hits)
    core.insert(ids(1, 4), slots(0, 4))
    pin = core.match(ids(1, 4), pin=True).node_id
    for hits in range(4):
        jobs = core.begin_stores()
        assert bool(jobs) == (hits == due_after)
        for job in jobs:
            core.end_store(job.job_id, slots(100, 4))
        core.record_hit(pin)


def test_what_lies_below_a_backup_waits_for_it_and_is_due_then() -> None:
    core = made(backup_hits=0)
    core.insert(ids(1, 4), slots(0, 4))
    (upper,) = core.begin_stores()
    core.insert(ids(1, 8), slots(0, 8))
    assert (core.begin_stores(), core.num_due) == ([], 1)
    core.end_store(upper.job_id, slots(100, 4))
    (lower,) = core.begin_stores()
    assert (lower.start, lower.end) == (4, 8)
    assert core.end_store(lower.job_id, None).num_tokens == 0
    assert core.begin_stores() == []
    core.record_hit(core.match(ids(1, 8), pin=True).node_id)
    assert [(job.start, job.end) for job in core.begin_stores()] == [(4, 8)]


def test_a_backup_is_ordered_behind_what_wrote_its_tokens_and_readers_behind_a_load() -> None:
    core = made(backup_hits=0)
    core.insert(ids(1, 4), slots(0, 4), ready=(Ready("compute", "event 1", 1),))
    core.insert(ids(1, 8), slots(0, 8), ready=(Ready("compute", "event 2", 2),))
    (store,) = core.begin_stores()
    assert [ready.sequence for ready in store.ready] == [2]
    core.end_store(store.job_id, slots(100, 8))
    core.evict(8)
    found = core.match(ids(1, 8), pin=True)
    assert found.ready == ()
    load = core.begin_load(found.node_id, ids(1, 8))
    core.end_load(load.job_id, slots(0, 8), 8, ready=(Ready("load", "event 3", 3),))
    assert [ready.event for ready in core.match(ids(1, 8)).ready] == ["event 3"]


def test_a_match_of_what_is_written_back_rescues_it() -> None:
    core = made()
    core.insert(ids(1, 4), slots(0, 4))
    core.insert(ids(11, 14), slots(10, 4))
    done = core.write_back(4)
    assert (done.freed, done.num_coming) == ([], 4)
    (store,) = done.jobs
    assert store.slots.tolist() == [0, 1, 2, 3]
    found = core.match(ids(1, 4), pin=True)
    assert (found.num_matched, found.host_hit) == (4, 0)
    core.end_store(store.job_id, slots(100, 4))
    (other,) = core.write_back(4).jobs
    assert other.slots.tolist() == [10, 11, 12, 13]
    core.end_store(other.job_id, slots(110, 4))
    assert device_slots(core.write_back(4).freed) == [10, 11, 12, 13]
    assert sorted(residencies(core)) == [(4, "both"), (4, "host")]


def test_a_trimmed_leaf_leaves_its_tail_on_the_host_and_old_places_are_stale() -> None:
    core = made(backup_hits=0)
    core.insert(ids(1, 8), slots(0, 8))
    (store,) = core.begin_stores()
    last = core.end_store(store.job_id, slots(100, 8)).last
    assert device_slots(core.evict(3)) == [5, 6, 7]
    assert residencies(core) == [(5, "both"), (8, "host")]
    for stale in (last, core.match(ids(1, 8)).best):
        with pytest.raises(KeyError):
            core.pin(stale)
        with pytest.raises(KeyError):
            core.slots_of(stale)
    assert host_slots(core.evict_host(8)) == [105, 106, 107]
    assert core.host_evictable_tokens == 0


def test_a_read_holds_host_slots_and_names_their_hashes() -> None:
    core = made(page_size=2)
    on_host(core, ids(1, 8), 100)
    best = core.match(ids(1, 8)).best
    read = core.begin_read(best, 2)
    assert (read.start, read.end, read.host_slots.tolist()) == (2, 8, list(range(102, 108)))
    assert core.hashes_of(best, 2) == ids(1, 8).hash_chain(2)[1:]
    assert core.evict_host(8) == []
    assert core.end_read(read.job_id) == []
    assert host_slots(core.evict_host(8)) == list(range(100, 108))


def test_host_copies_from_elsewhere_join_where_the_host_ends_and_never_below_a_gap() -> None:
    core = made()
    assert core.insert_host(ids(1, 8), 4, slots(104, 4)).unused.tolist() == [104, 105, 106, 107]
    assert core.num_namespaces == 0
    assert core.insert_host(ids(1, 4), 0, slots(100, 4)).num_tokens == 4
    landed = core.insert_host(ids(1, 8), 2, slots(202, 6))
    assert (landed.num_tokens, landed.end, landed.unused.tolist()) == (4, 8, [202, 203])
    assert core.peek_tiers(ids(1, 8)) == (0, 8)
    assert core.peek(ids(1, 8)) == 0


def test_events_name_the_medium_in_the_order_of_a_life() -> None:
    core = made(backup_hits=0, record_events=True)
    core.insert(ids(1, 4), slots(0, 4))
    (store,) = core.begin_stores()
    core.end_store(store.job_id, slots(100, 4))
    core.evict(4)
    found = core.match(ids(1, 4), pin=True)
    load = core.begin_load(found.node_id, ids(1, 4))
    core.end_load(load.job_id, slots(0, 4), 4)
    core.unpin(found.node_id)
    core.evict(4)
    core.evict_host(4)
    told = core.take_events()
    assert [(type(event), getattr(event, "medium", None)) for event in told] == [
        (BlockStored, "GPU"),
        (BlockStored, "CPU"),
        (BlockRemoved, "GPU"),
        (BlockStored, "GPU"),
        (BlockRemoved, "GPU"),
        (BlockRemoved, "CPU"),
    ]
    core.insert(ids(1, 4), slots(0, 4))
    core.take_events()
    core.detach(Namespace())
    core.detach()
    assert [type(event) for event in core.take_events()] == [BlockRemoved, AllBlocksCleared]


def test_many_lookups_that_load_nothing_leave_no_hold() -> None:
    core = made()
    on_host(core, ids(1, 8), 100)
    for _ in range(1000):
        assert core.match(ids(1, 8)).host_hit == 8
    assert all(view.lock_ref == view.host_ref == 0 and view.latch is Latch.NONE for view in core.walk())
    assert len(host_slots(core.evict_host(8))) == 8


def test_a_job_ends_once_and_as_what_it_was() -> None:
    core = made(backup_hits=0)
    core.insert(ids(1, 4), slots(0, 4))
    (store,) = core.begin_stores()
    with pytest.raises(KeyError):
        core.end_load(store.job_id, slots(0, 4), 4)
    with pytest.raises(KeyError):
        core.end_read(store.job_id)
    core.end_store(store.job_id, None)
    with pytest.raises(KeyError):
        core.end_store(store.job_id, None)


def test_the_compiled_core_says_that_it_has_no_host_tier() -> None:
    with pytest.raises(ConfigError, match="no host tier"):
        make_tiered_core("cpp", policy="lru")
