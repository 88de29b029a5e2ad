"""A scheduler that keeps a table of requests, over the async cache or the one in SGLang's shape, and what it may see.

Each slot's KV is stood for by the tokens up to it, so that a row that names a wrong slot is seen at once.
"""

from __future__ import annotations

import abc
import random
from dataclasses import dataclass, field
from typing import Any

import torch

from aradix import EvictParams, MatchPrefixParams, RadixCache, RadixKey, SlotAllocator
from aradix.adapters import sglang

__all__ = ["AsyncPort", "Port", "Request", "Scheduler", "ShapedPort"]

MAX_LEN = 64


@dataclass
class Request:
    """What a cache is told of a request."""

    origin_input_ids: list[int]
    extra_key: str | None = None
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    req_pool_idx: Any = None
    last_node: Any = None
    cache_protected_len: int = 0
    prefix_indices: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    priority: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.origin_input_ids + self.output_ids


class Port(abc.ABC):
    """The calls of a cache that a scheduler makes."""

    page_size: int
    table: sglang.ReqToTokenPool

    @abc.abstractmethod
    async def match(self, tokens: list[int], extra_key: str | None) -> tuple[torch.Tensor, Any]: ...
    @abc.abstractmethod
    def lock(self, node: Any) -> None: ...
    @abc.abstractmethod
    def alloc(self, num_slots: int) -> torch.Tensor | None: ...
    @abc.abstractmethod
    async def evict(self, num_tokens: int) -> int: ...
    @abc.abstractmethod
    def unfinished(self, req: Request, chunked: bool) -> None: ...
    @abc.abstractmethod
    def finished(self, req: Request, is_insert: bool) -> None: ...
    @abc.abstractmethod
    def sizes(self) -> tuple[int, int, int]:
        """Tokens evictable and protected, and slots available."""

    @abc.abstractmethod
    def check(self) -> None: ...


class ShapedPort(Port):
    """The cache and the pools in SGLang's shape."""

    def __init__(self, num_slots: int, page_size: int, **params: Any) -> None:
        self.page_size = page_size
        self.table = sglang.ReqToTokenPool(16, MAX_LEN)
        self.allocator = sglang.PagedTokenToKVPoolAllocator(num_slots, page_size)
        self.cache = sglang.RadixCache(sglang.CacheInitParams(False, self.table, self.allocator, page_size, **params))

    async def match(self, tokens: list[int], extra_key: str | None) -> tuple[torch.Tensor, Any]:
        found = self.cache.match_prefix(sglang.MatchPrefixParams(sglang.RadixKey(tokens, extra_key)))
        return found.device_indices, found.last_device_node

    def lock(self, node: Any) -> None:
        self.cache.inc_lock_ref(node)

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        return self.allocator.alloc(num_slots)

    async def evict(self, num_tokens: int) -> int:
        return self.cache.evict(sglang.EvictParams(num_tokens)).num_tokens_evicted

    def unfinished(self, req: Request, chunked: bool) -> None:
        self.cache.cache_unfinished_req(req, chunked=chunked)

    def finished(self, req: Request, is_insert: bool) -> None:
        sglang.release_kv_cache(req, self.cache, is_insert)

    def sizes(self) -> tuple[int, int, int]:
        return self.cache.evictable_size(), self.cache.protected_size(), self.allocator.available_size()

    def check(self) -> None:
        self.cache.check()
        self.allocator.slots.check()


class AsyncPort(Port):
    """The async cache, by its low-level calls. The cache is open, and made with `table`."""

    def __init__(self, cache: RadixCache, allocator: SlotAllocator, table: sglang.ReqToTokenPool) -> None:
        self.page_size = allocator.page_size
        self.cache, self.allocator, self.table = cache, allocator, table

    async def match(self, tokens: list[int], extra_key: str | None) -> tuple[torch.Tensor, Any]:
        found = await self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens, extra_key)))
        return found.device_indices, found.last_device_node

    def lock(self, node: Any) -> None:
        self.cache.inc_lock_ref(node)

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        return self.allocator.alloc(num_slots)

    async def evict(self, num_tokens: int) -> int:
        return (await self.cache.evict(EvictParams(num_tokens))).num_freed_tokens

    def unfinished(self, req: Request, chunked: bool) -> None:
        self.cache.cache_unfinished_req(req, chunked=chunked)

    def finished(self, req: Request, is_insert: bool) -> None:
        self.cache.cache_finished_req(req, is_insert)
        self.table.free(req)

    def sizes(self) -> tuple[int, int, int]:
        return self.cache.evictable_size(), self.cache.protected_size(), self.allocator.available_size()

    def check(self) -> None:
        self.cache.check()


class Scheduler:
    """Requests that come, are prefilled in chunks, decode with drafts, and end, are retracted or aborted, at random.

    Args:
        port: the cache.
        seed: of everything.
    """

    def __init__(self, port: Port, seed: object) -> None:
        self.port = port
        self.running: list[Request] = []
        self.log: list[tuple[Any, ...]] = []
        self._random = random.Random(str(seed))
        self._kv: dict[int, tuple[Any, ...]] = {}

    def _row(self, req: Request, stop: int) -> list[int]:
        row: list[int] = self.port.table.req_to_token[req.req_pool_idx, :stop].tolist()
        return row

    def _check_row(self, req: Request, stop: int) -> None:
        """The row's slots hold the KV of these very tokens."""
        for place, slot in enumerate(self._row(req, stop)):
            assert self._kv[slot] == (req.extra_key, *req.tokens[: place + 1]), (place, slot)

    async def _grow(self, req: Request, num_tokens: int) -> bool:
        """Slots for so many tokens in all: whole pages beyond the last one. False where there is no room."""
        page_size = self.port.page_size
        have = -(-req.kv_allocated_len // page_size) * page_size
        missing = -(-num_tokens // page_size) * page_size - have
        slots = self.port.alloc(missing) if missing > 0 else torch.empty(0, dtype=torch.int64)
        if slots is None:
            await self.port.evict(missing)
            slots = self.port.alloc(missing)
        if slots is None:
            return False
        self.port.table.write((req.req_pool_idx, slice(have, have + len(slots))), slots)
        req.kv_allocated_len = max(req.kv_allocated_len, num_tokens)
        return True

    def _compute(self, req: Request, stop: int) -> None:
        for place, slot in enumerate(self._row(req, stop)[req.kv_committed_len :], req.kv_committed_len):
            self._kv[slot] = (req.extra_key, *req.tokens[: place + 1])
        req.kv_committed_len = stop

    async def admit(self) -> None:
        if len(self.running) == 16:
            return
        family = self._random.randint(0, 2)
        prompt = [family] * self._random.randint(1, 9) + [self._random.randint(0, 1) for _ in range(8)]
        req = Request(prompt[: self._random.randint(1, 17)], self._random.choice((None, None, "lora")))
        self.port.table.alloc([req])
        slots, node = await self.port.match(req.tokens[:-1], req.extra_key)
        self.port.lock(node)
        req.last_node, req.cache_protected_len, req.prefix_indices = node, len(slots), slots
        req.kv_committed_len = req.kv_allocated_len = len(slots)
        self.port.table.write((req.req_pool_idx, slice(0, len(slots))), slots)
        self._check_row(req, len(slots))
        self.log.append(("matched", len(slots)))
        self.running.append(req)

    async def advance(self, req: Request) -> None:
        """A chunk of the prompt, or a decode step that keeps some of its draft tokens."""
        prompt = len(req.origin_input_ids)
        if req.kv_committed_len < prompt:
            stop = min(prompt, req.kv_committed_len + self._random.randint(1, 6))
            if not await self._grow(req, stop):
                return self.end(req, is_insert=True)
            self._compute(req, stop)
            req.fill_ids = req.tokens[:stop]
            self.port.unfinished(req, chunked=stop < prompt)
            assert req.prefix_indices.tolist() == self._row(req, stop)
            self._check_row(req, stop)
        else:
            if len(req.tokens) > MAX_LEN - 8 or not await self._grow(req, len(req.tokens) + 4):
                return self.end(req, is_insert=True)
            req.output_ids += [self._random.randint(0, 1) for _ in range(self._random.randint(1, 4))]
            self._compute(req, len(req.tokens) - 1)
            if self._random.random() < 0.3:
                req.fill_ids = req.tokens[: req.kv_committed_len]
                self.port.unfinished(req, chunked=False)
        self.log.append(("held", req.cache_protected_len, req.kv_committed_len))
        return None

    def end(self, req: Request, is_insert: bool) -> None:
        """It is finished, or gives way: what is committed stays, or with it all goes."""
        self._check_row(req, req.kv_committed_len)
        self.running.remove(req)
        self.port.finished(req, is_insert)
        self.log.append(("ended", is_insert))

    async def step(self) -> None:
        chance = self._random.random()
        if not self.running or chance < 0.15:
            await self.admit()
        elif chance < 0.25:
            self.end(self._random.choice(self.running), is_insert=self._random.random() < 0.7)
        elif chance < 0.3:
            self.log.append(("evicted", await self.port.evict(self._random.randint(1, 20))))
        else:
            await self.advance(self._random.choice(self.running))
        self.log.append(self.port.sizes())

    def drain(self) -> None:
        for req in list(self.running):
            self.end(req, is_insert=True)
