"""The figures measure what they say: every side does the work, and is found out where it does not."""

from __future__ import annotations

import random
import sys
from contextlib import AsyncExitStack
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
import pytest

from aradix import RadixKey, SlotAllocator
from aradix.tree import make_core
from stress.bench import allocator, engine, eviction, lease, lookup, memory, turns, waiting
from stress.bench.chats import HIT_TOKENS, NUM_SLOTS, PROMPT_TOKENS, chat_turns
from stress.bench.pairs import median_ratio
from stress.bench.peers import PeerMissing, sglang_release
from stress.bench.peers.dynamo_index import load_dynamo
from stress.bench.peers.stand_ins import stand_ins
from stress.cli import main

CORES: list[Literal["python", "cpp"]] = ["python", "cpp"]


def test_the_chats_are_the_known_load() -> None:
    played = chat_turns()
    assert len(played) == 1600
    assert sum(turn.num_prompt for turn in played) == PROMPT_TOKENS
    assert round(HIT_TOKENS / PROMPT_TOKENS, 3) == 0.782
    # A tree of all that was ever said: twice the pool.
    distinct = {turn.tokens[:size].tobytes() for turn in played for size in range(256, len(turn.tokens) + 1, 256)}
    assert 256 * len(distinct) == 2 * NUM_SLOTS
    again = chat_turns()
    assert all(np.array_equal(first.tokens, second.tokens) for first, second in zip(played, again, strict=True))


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_side_of_ours_finds_and_evicts_what_lru_does(page_size: int) -> None:
    taken = anyio.run(turns._play, chat_turns(), None, page_size, True)
    assert {len(stretches) for stretches in taken.values()} == {1600 // turns.STRETCH}


def test_a_side_that_leaves_turns_out_is_found_out() -> None:
    with pytest.raises(AssertionError, match="core found"):
        anyio.run(turns._play, chat_turns()[:-1], None, 16, False)


def test_the_profile_of_a_turn_names_every_phase() -> None:
    taken = anyio.run(turns._by_phase, chat_turns()[:50], "python", 16)
    assert {phase: len(steps) for phase, steps in taken.items()} == dict.fromkeys(turns.PHASES, 50)


@pytest.mark.parametrize("core", CORES)
def test_evictions_and_look_ups_are_sampled_on_each_core(core: Literal["python", "cpp"]) -> None:
    async def sample() -> None:
        evicts = await eviction._core(core, 100)
        looks_up = await lookup._core(core, 30)
        chance = random.Random(1)
        for _ in range(3):
            assert await evicts() >= 0
            assert await looks_up(chance) >= 0

    anyio.run(sample)


def test_evictions_and_look_ups_are_sampled_on_the_cache() -> None:
    async def sample() -> None:
        async with AsyncExitStack() as exits:
            evicts = await eviction._cache(100, exits)
            looks_up = await lookup._cache(30, exits)
            for _ in range(3):
                assert await evicts() >= 0
                assert await looks_up(random.Random(1)) >= 0

    anyio.run(sample)


def test_look_ups_go_through_trees_of_the_size_they_name() -> None:
    core = make_core("python", policy="lru", page_size=lookup.PAGE_SIZE)
    for prompt in lookup._prompts(3_000):
        core.insert(RadixKey(prompt), np.arange(lookup.PROMPT_TOKENS))
    assert core.num_nodes == 3_000 + lookup.NUM_SYSTEM_PROMPTS


@pytest.mark.parametrize("num_nodes", lease.DEPTHS)
def test_the_path_of_the_long_prompt_has_the_nodes_it_names(num_nodes: int) -> None:
    ids = np.arange(lease.NUM_TOKENS, dtype=np.int32)
    core = make_core("python", policy="lru", page_size=lease.PAGE_SIZE)
    for branch in lease._branches(ids, num_nodes):
        core.insert(RadixKey(branch), np.arange(len(branch)))
    assert core.match(RadixKey(ids)).num_matched == lease.NUM_TOKENS
    assert core.num_nodes == 2 * num_nodes  # and as many leaves that branch off


@pytest.mark.parametrize("grows", [True, False])
def test_every_task_that_waits_is_served(grows: bool) -> None:
    assert anyio.run(waiting._cache_side, 20, grows) >= 0


def test_every_side_of_the_engine_answers_and_the_cache_saves_what_is_shared() -> None:
    found = anyio.run(engine._measure, engine._random_model(), 3, 32, 1)
    tokens = {(row["side"], row["phase"]): row["prefill_tokens"] for row in found}
    assert tokens == {
        ("no cache", "together"): 120,
        ("no cache", "again"): 120,
        ("cache", "together"): 120,
        ("cache", "again"): 24,
        ("cache and join", "together"): 56,
        ("cache and join", "again"): 24,
    }
    text = engine.table({"rows": found, "clients": 3, "shared_tokens": 32, "model": "random weights"})
    assert "cache and join" in text


@pytest.mark.parametrize("side", ["core", "cache"])
@pytest.mark.parametrize("core", CORES)
def test_memory_is_counted_on_each_side(core: Literal["python", "cpp"], side: str) -> None:
    assert isinstance(memory._growth(side, core, 16, 200), float)


@pytest.mark.parametrize("make", [SlotAllocator, allocator._JoinedList])
def test_allocators_give_back_what_they_gave(make: Any) -> None:
    side = allocator._side(allocator._used(make(allocator.NUM_SLOTS, 16), 16))
    assert min(*side(), *side()) >= 0


def test_a_ratio_is_taken_pair_by_pair() -> None:
    assert median_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == 3.0


def test_a_stand_in_is_the_last_place_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "no_such_module_anywhere"
    with stand_ins(name, "json"):
        module = import_module(f"{name}.deep.down")
        for loaded in (name, f"{name}.deep", f"{name}.deep.down"):
            monkeypatch.delitem(sys.modules, loaded)
        assert import_module("json").loads("1") == 1
    assert isinstance(module.Whatever.it_has, type)
    with pytest.raises(AttributeError):
        _ = module.__wrapped__
    with pytest.raises(ModuleNotFoundError):
        import_module(name)


def test_without_sglang_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(sglang_release, "version", absent)
    with pytest.raises(PeerMissing, match="SGLang is skipped: not installed"):
        sglang_release.load_sglang()


def test_without_dynamo_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dynamo._core", None)
    with pytest.raises(PeerMissing, match="Dynamo is skipped: not installed"):
        load_dynamo()


def test_tables_and_drawings_have_every_side(tmp_path: Path) -> None:
    row = {"side": "aradix cpp", "page_size": 1, "with_slots": False, "turns_per_s": 1.0, "turn_us": 2.0}
    rows = [{**row, "page_size": page, "with_slots": slots} for page in (1, 16) for slots in (False, True)]
    found = {
        "rows": rows,
        "ratios": [{"ratio": "a / b", "page_size": 1, "with_slots": False, "value": 3.0, "at_least": 10}],
        "hit_ratio": 0.5,
        "evicted_tokens": 1,
        "stretch": 2,
        "skipped": ["a peer is skipped"],
    }
    text = turns.table(found)
    assert "aradix cpp" in text
    assert "a / b, at least 10: 3.00" in text
    assert text.endswith("a peer is skipped")
    turns.draw(found, tmp_path / "turns.svg")
    assert (tmp_path / "turns.svg").stat().st_size > 0


def test_only_some_figures_say_where_the_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "contention", "--profile"]) == 2
    assert "contention has no --profile" in capsys.readouterr().err
