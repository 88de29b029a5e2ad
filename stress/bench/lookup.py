"""What a look-up costs as the tree grows: prompts of 128 tokens, drawn at random, three nodes deep in all trees.

8 system prompts of 64 tokens, below them chats of 32, each with two turns of 32; pages of 16. Trees of all sizes stand
at the same time and are asked in turn. `match` is the tree alone: walk, touch and answer. `lease` is the public way,
`async with cache.lease(key)`. Keys are made beforehand. SGLang's caches match the same prompts with `match_prefix`, and
NVIDIA Dynamo's index finds them by their hashes, which it is given.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
import numpy.typing as npt

from aradix import CacheInitParams, InsertParams, RadixCache, RadixKey, SlotAllocator
from aradix.tree import core_name, make_core
from stress.bench.pairs import median_ratio, quiet
from stress.bench.peers import PeerMissing
from stress.bench.peers.dynamo_index import DynamoIndex, load_dynamo
from stress.bench.peers.sglang_release import SGLangCache, load_sglang
from stress.bench.plots import line_figure

__all__ = ["ABOUT", "draw", "measure", "measure_long", "table"]

ABOUT = "a look-up, over the number of nodes in the tree"

SIZES = (1_000, 30_000, 1_000_000)
PAGE_SIZE = 16
NUM_SYSTEM_PROMPTS = 8
NODES_A_CHAT = 3
PROMPT_TOKENS = 128
ROUNDS = 200
LOOKUPS = 20
AT_MOST = 2.0

Sample = Callable[[random.Random], Awaitable[float]]
"""Looks some prompts up that are drawn at random, and gives the seconds of one."""


def _prompt(chat: int, turn: int) -> npt.NDArray[np.int32]:
    tokens = np.empty(PROMPT_TOKENS, np.int32)
    tokens[:64] = chat % NUM_SYSTEM_PROMPTS
    tokens[64:96] = 100 + chat
    tokens[96:] = turn
    return tokens


def _num_chats(num_nodes: int) -> int:
    return num_nodes // NODES_A_CHAT


def _prompts(num_nodes: int) -> Iterator[npt.NDArray[np.int32]]:
    for chat in range(_num_chats(num_nodes)):
        yield _prompt(chat, 1)
        yield _prompt(chat, 2)


def _drawn(num_nodes: int, chance: random.Random) -> list[npt.NDArray[np.int32]]:
    return [_prompt(chance.randrange(_num_chats(num_nodes)), chance.randrange(1, 3)) for _ in range(LOOKUPS)]


# ---- the sides


async def _core(which: Literal["python", "cpp"], num_nodes: int) -> Sample:
    core = make_core(which, policy="lru", page_size=PAGE_SIZE)
    slots = np.arange(PROMPT_TOKENS)
    for prompt in _prompts(num_nodes):
        core.insert(RadixKey(prompt), slots)

    async def sample(chance: random.Random) -> float:
        keys = [RadixKey(prompt) for prompt in _drawn(num_nodes, chance)]
        began = time.process_time()
        for key in keys:
            found = core.match(key).num_matched
        seconds = time.process_time() - began
        assert found == PROMPT_TOKENS
        return seconds / LOOKUPS

    return sample


async def _cache(num_nodes: int, exits: AsyncExitStack) -> Sample:
    num_slots = (_num_chats(num_nodes) * 3 * PROMPT_TOKENS // PAGE_SIZE + 64) * PAGE_SIZE
    allocator = SlotAllocator(num_slots, PAGE_SIZE)
    params = CacheInitParams(allocator, PAGE_SIZE, low_watermark=0, high_watermark=0)
    cache = await exits.enter_async_context(RadixCache(params))
    for prompt in _prompts(num_nodes):
        done = await cache.insert(InsertParams(RadixKey(prompt), allocator.alloc(PROMPT_TOKENS)))
        allocator.free(done.duplicates)

    async def sample(chance: random.Random) -> float:
        keys = [RadixKey(prompt) for prompt in _drawn(num_nodes, chance)]
        began = time.process_time()
        for key in keys:
            async with cache.lease(key) as lease:
                found = lease.num_matched
        seconds = time.process_time() - began
        assert found == PROMPT_TOKENS
        return seconds / LOOKUPS

    return sample


async def _sglang(sglang: Any, which: Literal["rust", "python"], num_nodes: int) -> Sample:
    cache = SGLangCache(sglang, which, PAGE_SIZE, _num_chats(num_nodes) * 2 * PROMPT_TOKENS + PROMPT_TOKENS)
    for prompt in _prompts(num_nodes):
        cache.put(SGLangCache.packed(prompt.tolist()))

    async def sample(chance: random.Random) -> float:
        given = [SGLangCache.packed(prompt.tolist()) for prompt in _drawn(num_nodes, chance)]
        began = time.process_time()
        for tokens in given:
            found = cache.find(tokens)
        seconds = time.process_time() - began
        assert found == PROMPT_TOKENS
        return seconds / LOOKUPS

    return sample


async def _dynamo(dynamo: Any, num_nodes: int) -> Sample:
    index = DynamoIndex(dynamo, PAGE_SIZE)
    for prompt in _prompts(num_nodes):
        index.put(prompt.tolist())

    async def sample(chance: random.Random) -> float:
        given = [index.hashes(prompt.tolist()) for prompt in _drawn(num_nodes, chance)]
        began = time.process_time()
        for hashes in given:
            found = index.find(hashes)
        seconds = time.process_time() - began
        assert found == PROMPT_TOKENS
        return seconds / LOOKUPS

    return sample


# ---- the figure


async def _measure(
    sglang: Any, dynamo: Any, cache_sizes: tuple[int, ...], peer_sizes: tuple[int, ...]
) -> list[dict[str, Any]]:
    sides: dict[str, dict[int, Sample]] = {}
    async with AsyncExitStack() as exits:
        sides[f"aradix lease, {core_name()}"] = {size: await _cache(size, exits) for size in cache_sizes}
        if core_name() == "cpp":
            sides["aradix match, cpp"] = {size: await _core("cpp", size) for size in SIZES}
        sides["aradix match, python"] = {size: await _core("python", size) for size in SIZES[:-1]}
        if sglang is not None:
            sides["SGLang match, rust"] = {size: await _sglang(sglang, "rust", size) for size in peer_sizes}
            sides["SGLang match, python"] = {size: await _sglang(sglang, "python", size) for size in peer_sizes}
        if dynamo is not None:
            sides["Dynamo find"] = {size: await _dynamo(dynamo, size) for size in peer_sizes}
        chance = random.Random(1)
        taken: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sides[name]} for name in sides}
        for _ in range(ROUNDS):
            for name, samples in sides.items():
                for size, sample in samples.items():
                    taken[name][size].append(await sample(chance))
    return [
        {
            "side": name,
            "nodes": size,
            "lookup_us": statistics.median(seconds) * 1e6,
            "over_smallest": median_ratio(seconds, by_size[SIZES[0]]),
        }
        for name, by_size in taken.items()
        for size, seconds in by_size.items()
    ]


def _run(cache_sizes: tuple[int, ...], peer_sizes: tuple[int, ...]) -> dict[str, Any]:
    peers: dict[str, Any] = {"sglang": None, "dynamo": None}
    skipped = []
    for name, load in (("sglang", load_sglang), ("dynamo", load_dynamo)):
        try:
            peers[name] = load()
        except PeerMissing as missing:
            skipped.append(str(missing))
    with quiet():
        rows = anyio.run(_measure, peers["sglang"], peers["dynamo"], cache_sizes, peer_sizes)
    return {"bench": "lookup", "tokens": PROMPT_TOKENS, "rows": rows, "at_most": AT_MOST, "skipped": skipped}


def measure() -> dict[str, Any]:
    """Medians for small and large trees; takes some ten seconds."""
    return _run(SIZES[:-1], SIZES[:-1])


def measure_long() -> dict[str, Any]:
    """With the whole cache at all sizes; takes a minute or two."""
    return _run(SIZES, SIZES[:-1])


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'':<22} {'nodes':>9} {'look-up us':>11} {'ratio':>6}"]
    lines += [
        f"{row['side']:<22} {row['nodes']:>9,} {row['lookup_us']:>11.2f} {row['over_smallest']:>6.2f}"
        for row in found["rows"]
    ]
    lines.append(f"ratio: over the smallest of the same side, of ours at most {found['at_most']}; processor time")
    return "\n".join([*lines, *found["skipped"]])


def draw(found: dict[str, Any], path: Path) -> None:
    """The cost over the number of nodes. Needs matplotlib."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in found["rows"]:
        xs, ys = series.setdefault(row["side"], ([], []))
        xs.append(row["nodes"])
        ys.append(row["lookup_us"])
    line_figure(path, series, x="nodes in the tree", y="us a look-up", y_scale="log")
