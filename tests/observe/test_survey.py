"""The survey of a tree: its sums are a snapshot's, what it keeps is bounded, and the tree may change under it."""

from __future__ import annotations

import random
from typing import Any, Literal

import numpy as np
import pytest

from aradix.keys import Namespace, RadixKey
from aradix.observe.survey import Summary, Survey, summary_dict
from aradix.tree import make_core
from aradix.tree.protocol import Gate, TreeCore
from tests.tree.lockstep import CORES

Core = Literal["python", "cpp"]


def grown(name: Core, num_keys: int, seed: int = 3) -> TreeCore:
    core = make_core(name, policy="lru", page_size=1)
    rng = random.Random(seed)
    for number in range(num_keys):
        ids = [0] * rng.randrange(30) + [rng.randrange(50) for _ in range(rng.randrange(1, 9))]
        core.insert(RadixKey(ids, Namespace(tenant=number % 3)), np.arange(len(ids)))
    return core


def surveyed(survey: Survey) -> list[Summary]:
    while not survey.step(7):
        pass
    return survey.done


def everything(top: Summary) -> list[Summary]:
    found, stack = [], [top]
    while stack:
        summary = stack.pop()
        found.append(summary)
        stack += summary.parts
    return found


@pytest.mark.parametrize("name", CORES)
def test_sums_are_those_of_the_tree(name: Core) -> None:
    core = grown(name, 300)
    pinned = core.match(RadixKey([0] * 9, Namespace(tenant=1)), pin=True)
    core.set_gate(core.close_gate(RadixKey([0] * 3, Namespace(tenant=2))).node_id, Gate.PENDING)
    roots = surveyed(Survey(core))
    assert sum(root.num_tokens for root in roots) == core.evictable_tokens + core.protected_tokens
    assert sum(root.num_nodes for root in roots) == core.num_nodes + core.num_namespaces
    assert sum(root.num_pinned for root in roots) == core.protected_tokens
    assert sum(root.num_gates for root in roots) == 1
    assert [root.num_tokens for root in roots] == sorted((root.num_tokens for root in roots), reverse=True)
    for root in roots:
        for summary in everything(root):
            assert summary.num_tokens == summary.glance.num_tokens + summary.rest_tokens + sum(
                part.num_tokens for part in summary.parts
            )
            assert summary.num_nodes == 1 + summary.num_rest + sum(part.num_nodes for part in summary.parts)
            assert all(summary.age <= part.age for part in summary.parts)
    core.unpin(pinned.node_id)


@pytest.mark.parametrize("name", CORES)
def test_a_tree_that_changes_under_it_does_no_harm(name: Core) -> None:
    core = grown(name, 200)
    survey, rng = Survey(core), random.Random(1)
    for number in range(400):
        survey.step(5)
        if number % 3 == 0:
            core.evict(rng.randrange(40))
        else:
            ids = [0] * rng.randrange(30) + [rng.randrange(50)]
            core.insert(RadixKey(ids, Namespace(tenant=number % 4)), np.arange(len(ids)))
    assert survey.num_walks > 1
    core.detach()
    surveyed(survey)
    assert surveyed(survey) == []
    assert survey.progress == 0.0
    assert core.num_nodes == 0


def test_what_is_kept_of_a_large_tree_is_bounded() -> None:
    core = make_core("auto", policy="lru", page_size=1)
    rng = np.random.default_rng(0)
    for _ in range(20_000):
        ids = np.concatenate((np.zeros(rng.integers(1, 30), np.int32), rng.integers(0, 50_000, 4, np.int32)))
        core.insert(RadixKey(ids), np.arange(len(ids)))
    assert core.num_nodes > 20_000
    (root,) = surveyed(Survey(core))
    kept = everything(root)
    assert root.num_nodes == core.num_nodes + 1
    assert root.num_tokens == core.evictable_tokens
    assert len(kept) < 2_000


def test_of_many_namespaces_the_largest_are_kept_and_the_others_summed_up() -> None:
    core = make_core("auto", policy="lru", page_size=1)
    for number in range(1_000):
        ids = np.arange(1 + number % 500, dtype=np.int32)
        core.insert(RadixKey(ids, Namespace(salt=str(number))), np.arange(len(ids)))
    survey = Survey(core)
    kept = surveyed(survey)
    assert [root.num_tokens for root in kept] == sorted([*range(401, 501)] * 2, reverse=True)
    others = survey.others
    assert (others.num_roots, others.num_tokens) == (800, core.evictable_tokens - sum(root.num_tokens for root in kept))
    assert others.num_nodes + sum(root.num_nodes for root in kept) == core.num_nodes + 1_000
    core.detach()
    surveyed(survey)
    surveyed(survey)
    assert survey.others.num_roots == 0


def test_a_step_sees_no_more_nodes_than_it_was_told() -> None:
    core = grown("python", 200)
    seen = []
    glance = core.glance
    core.glance = lambda node_id, **options: seen.append(node_id) or glance(node_id, **options)  # type: ignore[method-assign,func-returns-value]
    survey = Survey(core)
    for _ in range(50):
        before = len(seen)
        survey.step(10)
        assert len(seen) - before <= 10


def test_the_page_gets_short_names_and_no_tokens_unless_allowed() -> None:
    core = make_core("auto", policy="lru", page_size=1)
    core.insert(RadixKey(range(1, 21), Namespace(salt="x", lora="l")), np.arange(20), priority=2)
    core.insert(RadixKey([1, 2, 9], Namespace(salt="x", lora="l")), np.arange(3))
    (root,) = surveyed(Survey(core))
    shown: dict[str, Any] = summary_dict(root, show_tokens=False)
    assert shown["ns"].startswith("lora=l,salt=#")
    assert (shown["t"], shown["c"], shown["n"]) == (21, 4, 0)
    (top,) = shown["k"]
    assert (top["n"], top["t"], top["d"], len(top["k"])) == (2, 21, 2, 2)
    assert "tok" not in str(shown)
    allowed = summary_dict(root, show_tokens=True)["k"][0]
    assert allowed["tok"] == [1, 2]
    assert sorted(part["tok"] for part in allowed["k"]) == [[3, 4, 5, 6, 7, 8, 9, 10], [9]]
