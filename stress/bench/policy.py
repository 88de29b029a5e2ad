"""What a turn costs under the policy that learns, over LRU's: chats that grow, in a pool for half of them, C++ core.

The load is that of `chats.py`, at page sizes 1 and 16, through leases; the two take turns, a stretch each, and also at
going first, since who does fetches the tokens from memory. All of it several times over, in new caches: a stretch takes
half a millisecond, and on a machine that others use as well the median of few says little.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio

from aradix import CacheInitParams, RadixCache, RadixKey, SlotAllocator
from stress.bench.chats import NUM_SLOTS, Turn, chat_turns
from stress.bench.pairs import median_ratio, quiet
from stress.bench.plots import pyplot, save

__all__ = ["ABOUT", "draw", "measure", "table"]

ABOUT = "a turn under the policy that learns, over one under LRU"

POLICIES = ("lru", "tenure")
PAGE_SIZES = (1, 16)
STRETCH = 50
ROUNDS = 8
MOST = 1.15


async def _play(cache: RadixCache, turns: list[Turn]) -> float:
    """Processor time of a stretch of turns, in microseconds a turn."""
    began = time.process_time()
    for turn in turns:
        async with cache.lease(RadixKey(turn.tokens[: turn.num_prompt])) as lease:
            await lease.allocate(turn.num_prompt - lease.num_matched)
            lease.commit(RadixKey(turn.tokens[: turn.num_prompt]))
            await lease.allocate(len(turn.tokens) - turn.num_prompt)
            lease.commit(RadixKey(turn.tokens))
    return (time.process_time() - began) / len(turns) * 1e6


async def _round(page_size: int, turns: list[Turn], times: dict[str, list[float]]) -> dict[str, int]:
    """The whole load once under each policy; adds to the times, and gives the tokens found."""
    async with AsyncExitStack() as stack:
        caches = {}
        for policy in POLICIES:
            params = CacheInitParams(
                SlotAllocator(NUM_SLOTS, page_size),
                page_size,
                eviction_policy=policy,
                low_watermark=0,
                high_watermark=0,
                tree_core="cpp",
            )
            caches[policy] = await stack.enter_async_context(RadixCache(params))
        with quiet():
            order = list(caches.items())
            for begin in range(0, len(turns), STRETCH):
                for policy, cache in order:
                    times[policy].append(await _play(cache, turns[begin : begin + STRETCH]))
                order.reverse()
        for cache in caches.values():
            cache.check()
        return {policy: cache.stats().hit_tokens for policy, cache in caches.items()}


async def _compare(page_size: int) -> dict[str, Any]:
    turns = chat_turns()
    times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for _ in range(ROUNDS):
        hits = await _round(page_size, turns, times)
    ratio = median_ratio(times["tenure"], times["lru"])
    row: dict[str, Any] = {"page_size": page_size, "ratio": ratio, "most": MOST}
    for policy in POLICIES:
        row[policy] = {"turn_us": statistics.median(times[policy]), "hit_tokens": hits[policy]}
    return row


def measure() -> dict[str, Any]:
    """Medians at page sizes 1 and 16; takes a few seconds."""
    return {"bench": "policy", "rows": [anyio.run(_compare, page_size) for page_size in PAGE_SIZES]}


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'page':>4} {'lru us':>7} {'tenure us':>9} {'ratio':>6} {'lru hits':>10} {'tenure hits':>11}"]
    for row in found["rows"]:
        lru, tenure = row["lru"], row["tenure"]
        lines.append(
            f"{row['page_size']:>4} {lru['turn_us']:>7.1f} {tenure['turn_us']:>9.1f} {row['ratio']:>6.2f} "
            f"{lru['hit_tokens']:>10,} {tenure['hit_tokens']:>11,}"
        )
    return "\n".join([*lines, f"the ratio is to be at most {MOST}"])


def draw(found: dict[str, Any], path: Path) -> None:
    """A turn under each policy, by page size. Needs matplotlib."""
    figure, axis = pyplot().subplots(figsize=(6, 3), layout="constrained")
    for place, policy in enumerate(POLICIES):
        places = [number + 0.4 * place for number in range(len(found["rows"]))]
        axis.bar(places, [row[policy]["turn_us"] for row in found["rows"]], 0.4, label=policy)
    axis.set_xticks(range(len(found["rows"])), [f"pages of {row['page_size']}" for row in found["rows"]])
    axis.set(ylim=0, ylabel="us a turn")
    axis.legend(frameon=False)
    save(figure, path)
