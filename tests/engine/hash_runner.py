"""A model whose next token tells which slots it read: a `ModelRunner` on the loop's own, perhaps virtual, clock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from aradix import CacheInitParams, SlotAllocator
from aradix.engine import Chunk
from tests.support.core import TREE_CORE

__all__ = ["ClockEvent", "ClockStream", "HashRunner", "expected"]

VOCAB_SIZE = 1000


class ClockStream:
    """A stream whose work ends when the clock of the loop says so."""

    def __init__(self) -> None:
        self.idle_at = -1.0

    def wait_event(self, event: ClockEvent) -> None:
        self.idle_at = max(self.idle_at, event.at)


class ClockEvent:
    """A point on a `ClockStream`."""

    def __init__(self) -> None:
        self.at = float("inf")

    def record(self, stream: ClockStream) -> None:
        self.at = stream.idle_at

    def query(self) -> bool:
        return anyio.current_time() >= self.at


def _next_stamp(stamp: int, token: int) -> int:
    """What stands in a slot after a prefix: its last token, behind all that stands before it."""
    return int.from_bytes(hashlib.blake2b(f"{stamp} {token}".encode(), digest_size=8).digest(), "big")


def _choose(stamps: Sequence[int | None]) -> int:
    """The next token, of which every slot has a say."""
    said = " ".join(map(str, stamps)).encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big") % VOCAB_SIZE


def expected(prompt: Sequence[int], num_new: int) -> list[int]:
    """The tokens that follow a prompt, worked out without slots."""
    stamps: list[int | None] = []
    stamp, new = 0, list(prompt)
    tokens: list[int] = []
    while len(tokens) < num_new:
        for token in new:
            stamp = _next_stamp(stamp, token)
            stamps.append(stamp)
        tokens.append(_choose(stamps))
        new = tokens[-1:]
    return tokens


class HashRunner:
    """Leaves in each slot a stamp of the prefix that ends there, and chooses by all that it finds.

    A step writes as it begins and reads as it ends, so whoever uses its slots meanwhile is found out by a wrong token.

    Args:
        duration: seconds of a step, asked for each.
        fail: asked for each step; what it returns, if anything, stops the step at its end.
    """

    vocab_size = VOCAB_SIZE

    def __init__(
        self,
        duration: Callable[[], float] = lambda: 1.0,
        fail: Callable[[Sequence[Chunk]], Exception | None] = lambda chunks: None,
        max_context: int = 10_000,
    ) -> None:
        self.max_context = max_context
        self.stream = ClockStream()
        self.batches: list[list[int]] = []
        """How many new tokens each chunk of each step had."""
        self._duration = duration
        self._fail = fail
        self._memory: dict[int, int] = {}
        self.is_running = False

    def cache_params(self, num_slots: int, page_size: int, **options: Any) -> CacheInitParams:
        """For a cache over its slots."""
        allocator = SlotAllocator(num_slots, page_size, event_factory=ClockEvent)
        options = {"low_watermark": 0.0, "high_watermark": 0.0, "tree_core": TREE_CORE, **options}
        return CacheInitParams(allocator, page_size, streams=(self.stream,), **options)

    async def step(self, chunks: Sequence[Chunk]) -> list[int | None]:
        assert not self.is_running, "one step at a time"
        assert chunks
        self.batches.append([len(chunk.token_ids) for chunk in chunks])
        self.is_running = True
        self.stream.idle_at = max(self.stream.idle_at, anyio.current_time()) + self._duration()
        all_slots = [chunk.slots.tolist() for chunk in chunks]
        for chunk, slots in zip(chunks, all_slots, strict=True):
            self._write(chunk.token_ids, slots)
        try:
            await anyio.sleep_until(self.stream.idle_at)
        finally:
            self.is_running = False
        if (error := self._fail(chunks)) is not None:
            for chunk, slots in zip(chunks, all_slots, strict=True):
                self._memory.update(dict.fromkeys(slots[-len(chunk.token_ids) :], -1))
            raise error
        return [
            None if chunk.sampler is None else _choose([self._memory.get(slot) for slot in slots])
            for chunk, slots in zip(chunks, all_slots, strict=True)
        ]

    def _write(self, token_ids: Sequence[int], slots: list[int]) -> None:
        num_before = len(slots) - len(token_ids)
        stamp = self._memory.get(slots[num_before - 1], -2) if num_before else 0
        for token, slot in zip(token_ids, slots[num_before:], strict=True):
            self._memory[slot] = stamp = _next_stamp(stamp, token)
