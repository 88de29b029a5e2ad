"""The migration page's Python, run as it stands there: each way of serving a request reuses what the last one left."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import aradix
from aradix import RadixKey, SlotAllocator
from aradix.adapters import sglang
from aradix.adapters.transformers import LeaseCache
from aradix.memory.kv_pool import MHAKVPool
from tests.adapters.generation import NUM_NEW, PROMPT, said
from tests.adapters.scheduler import MAX_LEN, Request
from tests.support.caches import opened
from tests.support.places import ROOT

pytestmark = pytest.mark.anyio

PAGE = (ROOT / "aradix/adapters/README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def defined(block: str, **names: Any) -> Any:
    """The function that a block of the page defines."""
    scope: dict[str, Any] = {"torch": torch, **names}
    exec(block, scope)
    return next(scope[name] for name in ("serve", "say") if name in scope)


class Run:
    """Stands in for a model; keeps how much of each prompt it had to compute."""

    def __init__(self) -> None:
        self.computed: list[int] = []

    def __call__(self, tokens: list[int], slots: torch.Tensor, num_matched: int) -> int:
        assert len(slots) > len(tokens) > num_matched
        self.computed.append(len(tokens) - num_matched)
        return 7


PROMPTS = (range(10), range(10), [*range(8), 50, 51], range(60, 75), range(10))
COMPUTED = [10, 1, 2, 15, 1]
ROOMY, TIGHT = 64, 27


@pytest.mark.parametrize("num_slots", [ROOMY, TIGHT])
async def test_all_three_ways_reuse_alike(num_slots: int) -> None:
    theirs, ours, rows = (Run() for _ in range(3))
    serve = defined(BLOCKS[0], **vars(sglang))
    table = sglang.ReqToTokenPool(1, MAX_LEN)
    cache = sglang.RadixCache(sglang.CacheInitParams(False, table, sglang.TokenToKVPoolAllocator(num_slots), 1))
    for prompt in PROMPTS:
        req = Request(list(prompt), fill_ids=list(prompt))
        table.alloc([req])
        req.kv_committed_len, req.kv_allocated_len = len(req.fill_ids), len(req.fill_ids) + 1
        serve(cache, req, theirs)
        assert req.output_ids == [7]
    cache.check()
    assert cache.protected_size() == 0
    assert cache.evictable_size() + cache.token_to_kv_pool_allocator.available_size() == num_slots

    async with opened(num_slots) as leased:
        serve = defined(BLOCKS[1], **vars(aradix))
        for prompt in PROMPTS:
            assert await serve(leased, prompt, None, ours) == [*prompt, 7]

    allocator, table = SlotAllocator(num_slots), sglang.ReqToTokenPool(1, MAX_LEN)
    async with opened(allocator=allocator, req_to_token_pool=table) as tabled:
        serve = defined(BLOCKS[2], table=table, **vars(aradix))
        for prompt in PROMPTS:
            req = Request(list(prompt), fill_ids=list(prompt))
            table.alloc([req])
            req.kv_committed_len, req.kv_allocated_len = len(req.fill_ids), len(req.fill_ids) + 1
            await serve(tabled, allocator, req, rows)
            table.free(req)
        assert tabled.stats().protected == tabled.stats().outside == 0
    assert ours.computed == rows.computed == COMPUTED
    # Their step evicts all that it needs, where only a part of it is short.
    assert theirs.computed == (COMPUTED if num_slots == ROOMY else [*COMPUTED[:4], 10])


def test_a_step_takes_ten_lines_or_so() -> None:
    assert [len(block.splitlines()) for block in BLOCKS] == [13, 5, 14, 7]


def test_every_name_that_the_page_moves_is_there() -> None:
    for name in re.findall(r"aradix\.adapters\.sglang import ([\w, ]+)", PAGE):
        for each in name.split(", "):
            assert hasattr(sglang, each)


async def test_generation_reuses_what_it_said(tiny_llama: Any) -> None:
    allocator = SlotAllocator(256, 4)
    pool = MHAKVPool(256, 4, 2, 2, 8, torch.float64)
    say = defined(BLOCKS[3], LeaseCache=LeaseCache, RadixKey=RadixKey)
    async with opened(allocator=allocator) as cache:
        for _ in range(2):
            assert await say(cache, pool, tiny_llama, torch.tensor([PROMPT]), NUM_NEW) == said(tiny_llama, PROMPT)
        assert cache.stats().hit_tokens == 28
