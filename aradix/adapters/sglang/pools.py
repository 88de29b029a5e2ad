"""The pools in SGLang's shapes: slots of tokens over a `SlotAllocator`, and the table of requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from aradix.errors import UsageError
from aradix.memory.allocator import SlotAllocator

__all__ = ["BaseTokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator", "ReqToTokenPool", "TokenToKVPoolAllocator"]


class BaseTokenToKVPoolAllocator:
    """Slots as int64 tensors on the pool's device.

    Args:
        size: slots, a multiple of `page_size`; page 0 is padding on top of them.
        page_size: slots a page.
        dtype: of the KV, for whoever asks.
        device: that the slots are given on.
        kvcache: the buffers, for whoever asks.
        need_sort: taken and not looked at: pages are handed out as they come.

    `slots` is the allocator below, which an async cache could share. A second free raises `DoubleFreeError`.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: Any = None,
        device: str | torch.device = "cpu",
        kvcache: Any = None,
        need_sort: bool = False,
    ) -> None:
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.need_sort = need_sort
        self._kvcache = kvcache
        self.clear()

    def clear(self) -> None:
        """Take every slot back, whoever has it. Does not wait."""
        self.slots = SlotAllocator(self.size, self.page_size, self.device)
        self._group: list[torch.Tensor] | None = None

    def get_kvcache(self) -> Any:
        """The buffers it was made with."""
        return self._kvcache

    def available_size(self) -> int:
        """Slots that can be handed out now. Does not wait."""
        self.slots.reclaim()
        return self.slots.available_size()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """So many slots, in whole pages, or `None`. `UsageError` where they are no whole pages. Does not wait."""
        slots = self.slots.alloc(need_size)
        return None if slots is None else slots.to(self.device)

    def free(self, free_index: torch.Tensor) -> None:
        """Give back the pages that any of these slots lie in; within a group, when it ends. Does not wait."""
        if not len(free_index):
            return
        # A copy, since it may be a view of a row that is rewritten before the group ends.
        slots = free_index.detach().to("cpu", torch.int64, copy=True)
        if self._group is not None:
            self._group.append(slots)
        else:
            self._free_pages(slots)

    def _free_pages(self, slots: torch.Tensor) -> None:
        if self.page_size > 1:
            pages = np.unique(slots.numpy() // self.page_size)
            whole = pages[:, None] * self.page_size + np.arange(self.page_size)
            slots = torch.from_numpy(whole.reshape(-1))
        self.slots.free(slots)

    def free_segment(self, free_index: torch.Tensor, start_pos: int = 0) -> None:
        """As `free`; where in its row the segment began says nothing here. Does not wait."""
        self.free(free_index)

    def free_group_begin(self) -> None:
        """Collect what is freed from now on."""
        self._group = []

    def free_group_end(self) -> None:
        """Free what was collected, each page once."""
        group, self._group = self._group or [], None
        if group:
            self._free_pages(torch.cat(group))

    def backup_state(self) -> Any:
        """What is handed out now, for `restore_state`. Does not wait."""
        return self.slots.pages_in("out")

    def restore_state(self, state: Any) -> None:
        """Take back what was handed out since. `UsageError` if something was freed meanwhile."""
        handed_out = self.slots.pages_in("out")
        freed = np.setdiff1d(state, handed_out)
        if len(freed):
            raise UsageError(f"{len(freed)} pages were freed since backup_state(); only allocations can be undone")
        since = np.setdiff1d(handed_out, state)
        if len(since):
            self._free_pages(torch.from_numpy(since * self.page_size))

    def merge_and_sort_free(self) -> None:
        """There is nothing to sort."""

    def debug_print(self) -> str:
        """A line for logs."""
        return f"{self.slots!r}"


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Slots one by one: `TokenToKVPoolAllocator(size, dtype, device, kvcache, need_sort)`."""

    def __init__(
        self,
        size: int,
        dtype: Any = None,
        device: str | torch.device = "cpu",
        kvcache: Any = None,
        need_sort: bool = False,
    ) -> None:
        super().__init__(size, 1, dtype, device, kvcache, need_sort)


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Slots in pages. A request's slots are contiguous within a page, and its last page may be partly used."""

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Slots for requests that grow from their prefix to their length, one request after the other, or `None`.

        Args:
            prefix_lens, prefix_lens_cpu: tokens that have slots, int, shape `[num_requests]`.
            seq_lens, seq_lens_cpu: tokens that shall have slots.
            last_loc: the slot of each request's last token; anything where there is none.
            extend_num_tokens: the sum of what is missing.

        Returns:
            int64, shape `[extend_num_tokens]`. Does not wait.
        """
        starts = np.asarray(prefix_lens_cpu, np.int64)
        stops = np.asarray(seq_lens_cpu, np.int64)
        if (stops < starts).any() or int((stops - starts).sum()) != extend_num_tokens:
            raise UsageError(f"extend_num_tokens={extend_num_tokens}, but the lengths make {(stops - starts).sum()}")
        page_size = self.page_size
        num_pages = -(-stops // page_size) - -(-starts // page_size)
        fresh = self.slots.alloc(int(num_pages.sum()) * page_size)
        if fresh is None:
            return None
        slots, taken = fresh.numpy(), 0
        parts = []
        for start, stop, last, pages in zip(starts, stops, last_loc.tolist(), num_pages, strict=True):
            rest = min(int(stop - start), int(-start % page_size))
            own = int(stop - start) - rest
            parts += [np.arange(last + 1, last + 1 + rest), slots[taken : taken + own]]
            taken += int(pages) * page_size
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(self.device)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot for each request, whose lengths count it already, or `None`. int64, shape `[num_requests]`."""
        before = np.asarray(seq_lens_cpu, np.int64) - 1
        lengths = torch.from_numpy(before)
        return self.alloc_extend(lengths, lengths, seq_lens, seq_lens_cpu, last_loc, len(before))


class ReqToTokenPool:
    """The table of requests: which slot each of their tokens has.

    Args:
        size: requests.
        max_context_len: tokens a request.
        device: of the table.
        enable_memory_saver: taken and not looked at.
    """

    def __init__(
        self,
        size: int,
        max_context_len: int,
        device: str | torch.device = "cpu",
        enable_memory_saver: bool = False,
    ) -> None:
        self.size = size
        self.max_context_len = max_context_len
        self.device = torch.device(device)
        self.req_to_token = torch.zeros((size, max_context_len), dtype=torch.int32, device=self.device)
        self.clear()

    def clear(self) -> None:
        """Take every row back."""
        self.free_slots = list(range(self.size))

    def available_size(self) -> int:
        """Rows that are free."""
        return len(self.free_slots)

    def write(self, indices: Any, values: torch.Tensor) -> None:
        """Write slots at `(row, positions)`. Does not wait."""
        self.req_to_token[indices] = values.to(self.device, torch.int32)

    def alloc(self, need: int | list[Any]) -> list[int] | None:
        """Rows for so many requests, or for these, whose `req_pool_idx` is set; `None` where there are too few."""
        num_rows = need if isinstance(need, int) else len(need)
        if num_rows > len(self.free_slots):
            return None
        rows, self.free_slots = self.free_slots[:num_rows], self.free_slots[num_rows:]
        if not isinstance(need, int):
            for req, row in zip(need, rows, strict=True):
                req.req_pool_idx = row
        return rows

    def free(self, free_index: Any) -> None:
        """Give back a row, some rows, or a request's, whose `req_pool_idx` becomes `None`.

        Raises:
            UsageError: a row that is free already, or that there is not.
        """
        if not isinstance(free_index, int | list):
            free_index.req_pool_idx, free_index = None, free_index.req_pool_idx
        rows = [free_index] if isinstance(free_index, int) else free_index
        for row in rows:
            if not 0 <= row < self.size or row in self.free_slots:
                raise UsageError(f"row {row} is free already, or none of the {self.size}")
            self.free_slots.append(row)
