"""HostKVPool: the tier below the device, in pages that are each one piece of memory."""

from __future__ import annotations

import logging
from typing import Any, Self

import torch

from aradix.errors import ConfigError, UsageError
from aradix.memory.allocator import SlotAllocator
from aradix.memory.fences import Fence
from aradix.memory.kv_pool import KVPool, check_pages, positive

__all__ = ["HostKVPool"]

_log = logging.getLogger("aradix.memory")


class HostKVPool(KVPool):
    """Pages of a device pool, in host memory: pinned where CUDA is present, each contiguous. No call waits.

    A page has the shape that it has in the device pool. Slots are handed out by whole pages, as a `SlotAllocator`
    does it: page k holds slots k*P .. k*P+P-1, page 0 is padding. Slots that a copy still touches are given back
    with its fence.

    Args:
        num_slots: tokens it holds, a multiple of `page_size`.
        page_size: that of `kv_pool`.
        kv_pool: whose pages it keeps; over one that only keeps books this one has no memory either.
        pin_memory: page-locked memory; None where CUDA is present. Where it cannot be had, plain memory does.

    Raises:
        ConfigError: a value that cannot work, or more than the machine has.
    """

    def __init__(self, num_slots: int, page_size: int, kv_pool: KVPool, pin_memory: bool | None = None) -> None:
        if page_size != kv_pool.page_size:
            raise ConfigError(f"page_size is {page_size} but the device pool's is {kv_pool.page_size}")
        check_pages(num_slots, page_size)
        pages = None
        if kv_pool.pages is not None:
            shape = (num_slots // page_size + 1, *kv_pool.pages.shape[1:])
            pages = _host_memory(
                shape, kv_pool.pages.dtype, torch.cuda.is_available() if pin_memory is None else pin_memory
            )
        self.allocator = SlotAllocator(num_slots, page_size)
        super().__init__(
            num_slots, page_size, kv_pool.num_layers, kv_pool.page_bytes, pages, kv_pool.layer_dim, kv_pool.format_id
        )
        self._bytes = None if pages is None else pages.view(torch.uint8).view(len(pages), -1).numpy()

    @classmethod
    def from_budget(cls, budget_bytes: int, kv_pool: KVPool, pin_memory: bool | None = None) -> Self:
        """The largest pool of at most `budget_bytes`. `ConfigError` where one page and the padding do not fit."""
        num_pages = positive("budget_bytes", budget_bytes) // kv_pool.page_bytes - 1
        if num_pages < 1:
            raise ConfigError(
                f"a budget of {budget_bytes} bytes holds no page: one and the padding take "
                f"{2 * kv_pool.page_bytes} bytes"
            )
        return cls(num_pages * kv_pool.page_size, kv_pool.page_size, kv_pool, pin_memory)

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is page-locked, so that a device copies from and to it without waiting."""
        return self.pages is not None and self.pages.is_pinned()

    # ---- slots

    def alloc(self, n: int) -> torch.Tensor | None:
        """`n` slots (a multiple of the page size) as int64, or None where so many are not free."""
        return self.allocator.alloc(n, host_visible=True)

    def free(self, slots: Any, *, fence: Fence | None = None) -> None:
        """Takes whole pages back; with a `fence`, once that has passed. Raises as `SlotAllocator.free`."""
        self.allocator.free(slots, fence=fence)

    def available_size(self) -> int:
        """Tokens that can be had now."""
        return self.allocator.available_size()

    def fenced_size(self) -> int:
        """Tokens given back behind a fence that has not passed."""
        return self.allocator.fenced_size()

    # ---- pages as bytes, for storage

    def get_page(self, page: int) -> bytes:
        """A copy of the page's bytes, `page_bytes` of them; none where the pool only keeps books."""
        self._check_page(page)
        return b"" if self._bytes is None else self._bytes[page].tobytes()

    def set_page(self, page: int, data: bytes | bytearray | memoryview) -> None:
        """Writes a page's bytes, as `get_page` gave them. `UsageError` where they are too few or too many."""
        self._check_page(page)
        expected = 0 if self._bytes is None else self.page_bytes
        if len(data) != expected:
            raise UsageError(f"a page has {expected} bytes, got {len(data)}")
        if self._bytes is not None:
            memoryview(self._bytes[page])[:] = memoryview(data)

    def _check_page(self, page: int) -> None:
        if not 1 <= page <= self.num_slots // self.page_size:
            raise UsageError(f"page {page} of a host pool whose pages run from 1 to {self.num_slots // self.page_size}")


def _host_memory(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> torch.Tensor:
    if pin:
        try:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            _log.warning("no pinned memory for the host pool, so copies will be slower: %s", error)
    try:
        return torch.zeros(shape, dtype=dtype)
    except RuntimeError as error:
        raise ConfigError(f"no host memory for {shape[0]} pages: {error}") from error
