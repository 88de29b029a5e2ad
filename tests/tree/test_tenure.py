"""`Tenure`: victims are those of a full sort, both cores learn the same, and uses outlive eviction."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from aradix.keys import Namespace, RadixKey
from aradix.policies import Tenure, use_class, use_credit
from aradix.tree import make_core, make_tiered_core
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import NodeView, TreeCore
from aradix.tree.reuse import NUM_RUNGS, ReuseRecord, page_prints
from tests.tree.lockstep import CORES, CoreFactory

PAGE = 4
Prompt = list[int]


def pages(*numbers: int) -> Prompt:
    return [token for number in numbers for token in (number, number + 1, number + 2, number + 3)]


def loyal(seed: int, num_requests: int) -> Iterator[Prompt]:
    """A few documents asked about again and again, and twice as many prompts that nobody sends twice."""
    rng = random.Random(seed)
    for number in range(num_requests):
        if number % 3:
            yield pages(*range(1_000_000 + 100 * number, 1_000_000 + 100 * number + 8))
        else:
            document = rng.randrange(30)
            yield pages(*range(100 * document, 100 * document + 10), 500_000 + number)


def passing(seed: int, num_requests: int) -> Iterator[Prompt]:
    """Conversations that are busy for a while and then over: what was used much is what will not be used again."""
    rng = random.Random(seed)
    for number in range(num_requests):
        conversation = number // 40 + rng.randrange(3)
        yield pages(*range(1000 * conversation, 1000 * conversation + 20), 900_000 + number)


def even(seed: int, num_requests: int) -> Iterator[Prompt]:
    """Documents that are all asked about as often: whichever was used more so far was only lucky."""
    rng = random.Random(seed)
    for _ in range(num_requests):
        document = rng.randrange(40)
        yield pages(*range(100 * document, 100 * document + 10))


def soon_or_never(seed: int, num_requests: int) -> Iterator[Prompt]:
    """Documents that are asked about twice, always as far apart, between prompts that only begin alike."""
    rng = random.Random(seed)
    numbers = itertools.count(1000)
    documents: list[list[int]] = []
    for request in range(num_requests):
        fresh = [next(numbers) for _ in range(31)]
        if request % 2:
            yield pages(*range(30 * (head := rng.randrange(15)), 30 * head + 3), *fresh[:30])
        elif request % 4 == 0 or len(documents) <= 6:
            documents.append(fresh[:20])
            yield pages(*fresh[:21])
        else:
            yield pages(*documents[-6], fresh[0])


class Engine:
    """Takes prompts one after another through a core that holds so many tokens."""

    def __init__(self, core: TreeCore, capacity: int) -> None:
        self.core = core
        self.capacity = capacity
        self.hit_tokens = 0
        self.free = list(range(capacity))
        self.stays: set[int] = set()

    def make_room(self, num_tokens: int) -> list[int]:
        freed = [slot for part in self.core.evict(num_tokens - len(self.free)) for slot in part.slots.tolist()]
        self.free += freed
        return freed

    def serve(self, prompt: Prompt, namespace: Namespace | None = None) -> list[int]:
        """The slots that had to go."""
        key = RadixKey(prompt, namespace)
        found = self.core.match(key, pin=True)
        gone = self.make_room(len(prompt) - found.num_matched)
        self.core.record_hit(found.node_id)
        self.hit_tokens += found.num_matched
        taken = [self.free.pop() for _ in range(len(prompt) - found.num_matched)]
        grown = self.core.extend(found.node_id, key, np.array(taken, np.int64))
        assert grown is not None
        self.core.unpin(grown.node_id)
        self.stays.add(self.core.stay)
        return gone


def rank(leaf: NodeView, stay: int) -> int:
    of_uses, last_access = leaf.state
    return 2 * int(last_access) + stay * use_credit(of_uses)


@pytest.mark.parametrize("evict_unit", ["page", "node"])
def test_victims_are_those_of_a_full_sort_whatever_stay_was_learned(core_factory: CoreFactory, evict_unit: str) -> None:
    core = core_factory(policy="tenure", page_size=PAGE, evict_unit=evict_unit)
    engine = Engine(core, 400)
    looked = 0
    for number, prompt in enumerate(loyal(0, 900)):
        engine.serve(prompt)
        if number < 600 or number % 3:
            continue
        leaves = [view for view in core.walk() if view.parent_id and not view.num_children]
        least = min(rank(leaf, core.stay) for leaf in leaves)
        candidates = [leaf for leaf in leaves if rank(leaf, core.stay) == least]
        gone = [slot for part in core.evict(1) for slot in part.slots.tolist()]
        engine.free += gone
        tails = [leaf.slots.tolist()[-PAGE if evict_unit == "page" else 0 :] for leaf in candidates]
        assert gone in tails
        looked += core.stay > 0
    assert looked > 50
    assert audit_tree(core, {}).problems == []


@pytest.mark.skipif(len(CORES) < 2, reason="the core was not compiled")
@pytest.mark.parametrize("capacity", [200, 1000, 3000])
@pytest.mark.parametrize("load", [loyal, passing])
def test_both_cores_learn_the_same(load: type[Iterator[Prompt]], capacity: int) -> None:
    engines = [Engine(make_core(name, policy="tenure", page_size=PAGE), capacity) for name in CORES]
    for number, prompt in enumerate(load(1, 1500)):  # type: ignore[call-arg]
        namespace = Namespace(salt=number % 2) if number % 5 == 0 else None
        gone = [engine.serve(prompt, namespace) for engine in engines]
        assert gone[0] == gone[1]
        assert len({engine.core.stay for engine in engines}) == 1
        if number % 300 == 299:
            assert [engine.core.detach(Namespace(salt=0)).num_freed for engine in engines].count(0) in (0, 2)
            for engine in engines:
                engine.free = sorted(set(range(capacity)) - held(engine.core))
            shown = [[view.state for view in engine.core.walk()] for engine in engines]
            assert shown[0] == shown[1]


def held(core: TreeCore) -> set[int]:
    return {slot for view in core.walk() for slot in view.slots.tolist()}


def test_a_load_of_loyal_documents_is_held_against_what_comes_once(core_factory: CoreFactory) -> None:
    hits = {}
    for policy in ("tenure", "lru"):
        engine = Engine(core_factory(policy=policy, page_size=PAGE), 600)
        for prompt in loyal(2, 3000):
            engine.serve(prompt)
        hits[policy] = engine.hit_tokens
    assert hits["tenure"] > 2 * hits["lru"]


@pytest.mark.parametrize("capacity", [200, 400, 1000])
def test_where_past_uses_say_nothing_it_is_no_worse_than_recency(core_factory: CoreFactory, capacity: int) -> None:
    hits = {}
    for policy in ("tenure", "lru"):
        engine = Engine(core_factory(policy=policy, page_size=PAGE), capacity)
        for prompt in passing(3, 2000):
            engine.serve(prompt)
        hits[policy] = engine.hit_tokens
    assert hits["tenure"] >= hits["lru"] > 0


def test_who_goes_by_luck_finds_no_less_than_recency(core_factory: CoreFactory) -> None:
    hits = Counter[str]()
    for seed in range(6):
        for policy in ("tenure", "lru"):
            engine = Engine(core_factory(policy=policy, page_size=PAGE), 800)
            for prompt in even(seed, 2000):
                engine.serve(prompt)
            hits[policy] += engine.hit_tokens
    assert hits["tenure"] >= 0.99 * hits["lru"] > 0


def test_what_would_be_held_is_known_to_the_tick(core_factory: CoreFactory) -> None:
    """Here a candidate that holds a little less than it is thought to hold finds next to nothing."""
    hits = {}
    for policy in ("tenure", "lru"):
        engine = Engine(core_factory(policy=policy, page_size=PAGE), 2380)
        for prompt in soon_or_never(1, 2500):
            engine.serve(prompt)
        hits[policy] = engine.hit_tokens
    assert hits["tenure"] >= 0.98 * hits["lru"] > 0


def test_what_leases_take_for_a_moment_is_not_forgotten() -> None:
    record = ReuseRecord(PAGE, 4 * PAGE)
    record._epoch = 10
    record.note_capacity(3200)
    record.note_capacity(40)
    assert record.capacity == 3100
    record.note_capacity(0)
    record.note_capacity(40)
    assert record.capacity == 3100  # in one epoch it falls once
    record._epoch += 1
    record.note_capacity(3050)
    assert record.capacity == 3050
    record.note_capacity(3100)
    assert record.capacity == 3100
    for _ in range(300):
        record._epoch += 1
        record.note_capacity(1)
    assert record.capacity == 1
    assert record._in_capacities(1 << 60) == -record._in_capacities(-(1 << 60)) < 1 << 25


@pytest.mark.parametrize(
    ("lead", "noise", "rung"),
    [
        (0, 0, 0),
        (40, 1000, 1),  # a clear part of what recency found, whatever the noise
        (20, 1000, 0),
        (20, 3, 1),
        (20, 10, 0),
        (10, 0, 0),  # too small to be worth it
    ],
)
def test_recency_is_left_for_a_lead_that_is_clear_or_above_the_noise(lead: int, noise: int, rung: int) -> None:
    record = ReuseRecord(PAGE, 4 * PAGE)
    record.capacity = 256
    record._found = [1000] * NUM_RUNGS
    record._found[5] += lead
    record._squares = [noise**2] * NUM_RUNGS
    record._choose()
    assert record.rung == rung


def test_uses_are_remembered_beyond_eviction_and_only_of_what_comes_back(core_factory: CoreFactory) -> None:
    core = core_factory(policy="tenure", page_size=PAGE)
    engine = Engine(core, 10 * PAGE)
    first, other = pages(*range(6)), pages(0, 1, 2, 77, 78, 79)
    for prompt in (first, first, pages(*range(100, 110)), first):
        engine.serve(prompt)
    assert {view.state[0] for view in core.walk() if view.parent_id} == {0, 2}  # 0 is what is left of the others
    engine.serve(pages(*range(200, 210)))
    engine.serve(other, Namespace(salt="elsewhere"))
    assert {view.state[0] for view in core.walk() if view.parent_id and view.namespace.salt} == {0}
    assert {view.hit_count for view in core.walk() if view.parent_id} == {0}


def test_what_is_remembered_is_bounded() -> None:
    core = make_core("python", policy="tenure", page_size=PAGE)
    engine = Engine(core, 100 * PAGE)
    for number in range(400):
        engine.serve(pages(*range(100 * number, 100 * number + 20)))
    record = core._reuse  # type: ignore[attr-defined]
    assert 0 < sum(ghost.num_tokens for ghost in record._ghosts.values()) <= 6 * 100 * PAGE


def test_two_caches_learn_apart_even_from_one_policy_object(core_factory: CoreFactory) -> None:
    policy = Tenure()
    taught = Engine(core_factory(policy=policy, page_size=PAGE), 400)
    for prompt in loyal(4, 900):
        taught.serve(prompt)
    assert taught.core.stay > 0
    assert core_factory(policy=policy, page_size=PAGE).stay == 0


def test_the_name_of_a_path_is_the_sum_of_its_pages_wherever_it_is_cut() -> None:
    tokens = np.arange(512, dtype=np.int32).tobytes()
    whole = page_prints(tokens, 0, 16)
    assert len(set(whole.tolist())) == 128
    assert len(set(page_prints(bytes([1, 0, 0, 0]) * 512, 0, 16).tolist())) == 128  # the same tokens, elsewhere
    for cut in range(0, len(tokens) + 1, 16):
        parts = np.concatenate((page_prints(tokens[:cut], 0, 16), page_prints(tokens[cut:], cut, 16)))
        assert parts.tolist() == whole.tolist()
    assert page_prints(tokens[:16], 16, 16).tolist() != page_prints(tokens[:16], 0, 16).tolist()


def test_a_class_is_a_half_doubling() -> None:
    assert [use_class(uses) for uses in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)] == [0, 1, 2, 3, 3, 4, 4, 5, 6, 7]
    assert [use_credit(use_class(uses)) for uses in (1, 2, 4, 8, 16, 256, 10**9)] == [0, 2, 4, 6, 8, 16, 16]


def test_room_made_by_writing_back_says_how_much_fits_and_what_left_both_tiers_is_remembered() -> None:
    core = make_tiered_core("python", policy="tenure", page_size=PAGE)
    prompt = pages(1, 2, 3)
    core.insert(RadixKey(prompt), np.arange(12))
    core.record_hit(core.match(RadixKey(prompt)).node_id)
    (job,) = core.write_back(12).jobs
    core.end_store(job.job_id, np.arange(12))
    assert sum(len(freed.slots) for freed in core.write_back(12).freed) == 12
    assert [view.state[0] for view in core.walk() if view.parent_id] == [1]
    assert sum(len(freed.host_slots) for freed in core.evict_host(12)) == 12
    core.insert(RadixKey(prompt), np.arange(12))
    assert [view.state[0] for view in core.walk() if view.parent_id] == [2]  # the third use
    assert audit_tree(core, {}).problems == []
