"""The pools that hold KV: one buffer, seen by layer (for kernels) and by page (for copies).

Slot s is row s of every buffer; page k is rows k*P .. k*P+P-1. Page 0 is padding on top of the pool, as in
`SlotAllocator`. Two layouts of the one buffer:

    layer_first   [layers, parts, slots, heads, dim]   a layer is contiguous: what attention kernels like
    page_first    [slots, parts, layers, heads, dim]   a page is contiguous: one copy moves it

A part is what a layer keeps of a token: keys and values, or the one latent of MLA.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
import torch

from aradix.errors import ConfigError, UsageError

try:
    from aradix._native import page_ids as _page_ids_fast
except ImportError:  # not compiled, or it does not load; `aradix.tree` says so
    _page_ids_fast = None  # type: ignore[assignment]

__all__ = ["BookKVPool", "KVPool", "Layout", "MHAKVPool", "MLAKVPool", "check_pages", "positive"]

Layout = Literal["layer_first", "page_first"]
_LAYOUTS = ("layer_first", "page_first")


def positive(name: str, value: Any) -> int:
    """`value` as an int of at least 1. `ConfigError` if it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an int of at least 1, got {value!r}")
    return value


class KVPool:
    """What copies and tiers ask of a pool: how big a page is, and a view by pages. Nothing here waits.

    Args:
        pages: the view by pages, of shape `[num_slots / page_size + 1, *page_shape]`; None in a pool that only keeps
            books.
        layer_dim: the dimension of `pages` that counts layers.
        format_id: what the bytes of a page mean; pools with equal ones can read each other's pages.
    """

    def __init__(
        self,
        num_slots: int,
        page_size: int,
        num_layers: int,
        page_bytes: int,
        pages: torch.Tensor | None,
        layer_dim: int,
        format_id: str,
    ) -> None:
        self.num_slots = num_slots
        self.page_size = page_size
        self.num_layers = num_layers
        self.page_bytes = page_bytes
        self.pages = pages
        self.layer_dim = layer_dim
        self.format_id = format_id
        self._offsets = np.arange(page_size)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's KV, in all layers."""
        return self.page_bytes // self.page_size

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers, the padding page included."""
        return self.page_bytes * (self.num_slots // self.page_size + 1)

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return torch.device("cpu") if self.pages is None else self.pages.device

    def layer_pages(self, layer: int) -> torch.Tensor:
        """One layer's part of every page: a view of shape `[num_slots / page_size + 1, ...]`. `UsageError` without."""
        if self.pages is None:
            raise UsageError("a pool that only keeps books has no buffers")
        return self.pages.select(self.layer_dim, self.check_layer(layer))

    def check_layer(self, layer: int) -> int:
        """`layer`, if there is one of that number; else `UsageError`."""
        if not 0 <= layer < self.num_layers:
            raise UsageError(f"layer {layer} of {self.num_layers}; layers count from 0")
        return layer

    def page_ids(self, slots: Any) -> list[int]:
        """The pages that `slots` (int64 on the CPU, runs of whole pages) stand for; `UsageError` for others."""
        rows = slots.numpy() if isinstance(slots, torch.Tensor) and slots.is_cpu else np.asarray(slots)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise UsageError(f"slots must be a flat run of integers, not {rows.ndim}-d {rows.dtype}")
        size, last = self.page_size, self.num_slots // self.page_size
        if _page_ids_fast is not None:
            known = _page_ids_fast(rows, size, last)
            if known is not None:
                return known
        if len(rows) % size:
            raise UsageError(f"{len(rows)} slots do not make whole pages of {size}")
        if not rows.size:
            return []
        pages = rows[::size] // size
        ids: list[int] = pages.tolist()
        if not np.array_equal(rows.reshape(-1, size), (pages * size)[:, None] + self._offsets):
            raise UsageError(f"{len(rows)} slots are not runs of whole pages of {size}, each from its first slot up")
        if min(ids) < 1 or max(ids) > last:
            raise UsageError(f"slots {rows.min()} to {rows.max()}; the pool's are {size} to {(last + 1) * size - 1}")
        return ids

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_slots} slots, {self.size_bytes} bytes, {self.format_id})"


class BookKVPool(KVPool):
    """A pool that only keeps books: sizes and page numbers, no tensors. For replays and simulations."""

    def __init__(self, num_slots: int, page_size: int = 1, slot_bytes: int = 1, num_layers: int = 1) -> None:
        check_pages(num_slots, page_size)
        page_bytes = positive("slot_bytes", slot_bytes) * page_size
        layers = positive("num_layers", num_layers)
        super().__init__(num_slots, page_size, layers, page_bytes, None, 0, f"books-{layers}-{page_size}-{slot_bytes}")


class _TensorPool(KVPool):
    """The buffer of `parts` rows of shape `row` for each slot and layer."""

    key_buffer: list[torch.Tensor]
    value_buffer: list[torch.Tensor]

    def __init__(
        self,
        num_slots: int,
        page_size: int,
        num_layers: int,
        parts: int,
        row: tuple[int, int],
        dtype: torch.dtype,
        device: str | torch.device,
        layout: Layout,
        kind: str,
    ) -> None:
        check_pages(num_slots, page_size)
        positive("num_layers", num_layers)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype must be a torch.dtype, got {dtype!r}")
        if layout not in _LAYOUTS:
            raise ConfigError(f"layout must be one of {', '.join(_LAYOUTS)}, got {layout!r}")
        self.dtype = dtype
        self.layout: Layout = layout
        num_rows, num_pages = num_slots + page_size, num_slots // page_size + 1
        layer_first = layout == "layer_first"
        shape = (num_layers, parts, num_rows, *row) if layer_first else (num_rows, parts, num_layers, *row)
        try:
            self.buffer = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, TypeError, AssertionError) as error:
            size = num_rows * num_layers * parts * row[0] * row[1] * dtype.itemsize
            raise ConfigError(f"no buffer of {size} bytes on device {device!r}: {error}") from error
        if layer_first:
            pages = self.buffer.view(num_layers, parts, num_pages, page_size, *row).permute(2, 0, 1, 3, 4, 5)
            self._rows = [[self.buffer[layer, part] for layer in range(num_layers)] for part in range(parts)]
        else:
            pages = self.buffer.view(num_pages, page_size, parts, num_layers, *row)
            self._rows = [[self.buffer[:, part, layer] for layer in range(num_layers)] for part in range(parts)]
        page_bytes = page_size * _token_bytes(num_layers, parts, row, dtype)
        name = str(dtype).removeprefix("torch.")
        format_id = f"{kind}-{layout}-{name}-layers{num_layers}-page{page_size}"
        super().__init__(num_slots, page_size, num_layers, page_bytes, pages, 1 if layer_first else 3, format_id)

    def get_kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention takes as keys and as values of a layer, by slot: views of the buffer."""
        return self.key_buffer[self.check_layer(layer)], self.value_buffer[layer]

    def _write(self, rows: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Puts `values` of shape `[n, ...]` into `rows` at `slots`; where they stand in another dtype, converted."""
        expected = (len(slots), *rows.shape[1:])
        if tuple(values.shape) != expected:
            raise UsageError(f"{len(slots)} slots take values of shape {expected}, got {tuple(values.shape)}")
        index = slots.to(rows.device, non_blocking=True)
        values = values.to(rows.device, rows.dtype)
        if rows.dtype.itemsize == 1:  # torch copies float8 by index only as bytes
            rows, values = rows.view(torch.uint8), values.view(torch.uint8)
        rows.index_copy_(0, index, values)


class MHAKVPool(_TensorPool):
    """Keys and values of multi-head (or grouped-query) attention. No call waits.

    `key_buffer[layer]` and `value_buffer[layer]` are views of shape `[num_slots + page_size, num_heads, head_dim]`,
    indexed by slot; slots below `page_size` are padding.

    Args:
        num_slots: tokens it holds, a multiple of `page_size`.
        num_heads: KV heads, on this rank.
        layout: `"layer_first"` keeps layers together, `"page_first"` pages.

    Raises:
        ConfigError: a value that cannot work, or more than the device has.
    """

    def __init__(
        self,
        num_slots: int,
        page_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float16,
        device: str | torch.device = "cpu",
        layout: Layout = "layer_first",
    ) -> None:
        row = (positive("num_heads", num_heads), positive("head_dim", head_dim))
        kind = f"mha-heads{num_heads}-dim{head_dim}"
        super().__init__(num_slots, page_size, num_layers, 2, row, dtype, device, layout, kind)
        self.key_buffer, self.value_buffer = self._rows

    @classmethod
    def from_budget(
        cls,
        budget_bytes: int,
        page_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float16,
        device: str | torch.device = "cpu",
        layout: Layout = "layer_first",
    ) -> Self:
        """The largest pool of at most `budget_bytes`. `ConfigError` where one page and the padding do not fit."""
        row = (positive("num_heads", num_heads), positive("head_dim", head_dim))
        token = _token_bytes(positive("num_layers", num_layers), 2, row, dtype)
        num_slots = _slots_in(budget_bytes, page_size, token)
        return cls(num_slots, page_size, num_layers, num_heads, head_dim, dtype, device, layout)

    def set_kv(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores keys and values, each `[n, num_heads, head_dim]`, of `n` tokens into `slots` (int64, any device).

        Runs on the current stream of the device. Raises `UsageError` for other shapes.
        """
        self._write(self.key_buffer[self.check_layer(layer)], slots, k)
        self._write(self.value_buffer[layer], slots, v)


class MLAKVPool(_TensorPool):
    """The latent of multi-head latent attention: `kv_lora_rank` compressed values, then `rope_dim` of the rotary key.

    `key_buffer[layer]` is a view of shape `[num_slots + page_size, 1, kv_lora_rank + rope_dim]`, and
    `value_buffer[layer]` its first `kv_lora_rank` values, not a second copy. No call waits. Source: DeepSeek-V2.

    Args:
        num_slots: tokens it holds, a multiple of `page_size`.
        layout: `"layer_first"` keeps layers together, `"page_first"` pages.

    Raises:
        ConfigError: a value that cannot work, or more than the device has.
    """

    def __init__(
        self,
        num_slots: int,
        page_size: int,
        num_layers: int,
        kv_lora_rank: int,
        rope_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        layout: Layout = "layer_first",
    ) -> None:
        row = (1, positive("kv_lora_rank", kv_lora_rank) + positive("rope_dim", rope_dim))
        kind = f"mla-rank{kv_lora_rank}-rope{rope_dim}"
        super().__init__(num_slots, page_size, num_layers, 1, row, dtype, device, layout, kind)
        self.kv_lora_rank = kv_lora_rank
        self.rope_dim = rope_dim
        (self.key_buffer,) = self._rows
        self.value_buffer = [rows[..., :kv_lora_rank] for rows in self.key_buffer]

    @classmethod
    def from_budget(
        cls,
        budget_bytes: int,
        page_size: int,
        num_layers: int,
        kv_lora_rank: int,
        rope_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        layout: Layout = "layer_first",
    ) -> Self:
        """The largest pool of at most `budget_bytes`. `ConfigError` where one page and the padding do not fit."""
        row = (1, positive("kv_lora_rank", kv_lora_rank) + positive("rope_dim", rope_dim))
        token = _token_bytes(positive("num_layers", num_layers), 1, row, dtype)
        num_slots = _slots_in(budget_bytes, page_size, token)
        return cls(num_slots, page_size, num_layers, kv_lora_rank, rope_dim, dtype, device, layout)

    def set_kv(self, layer: int, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Stores latents `[n, 1, kv_lora_rank]` and rotary keys `[n, 1, rope_dim]` of `n` tokens into `slots`.

        Runs on the current stream of the device. Raises `UsageError` for other shapes.
        """
        rows = self.key_buffer[self.check_layer(layer)]
        self._write(rows[..., : self.kv_lora_rank], slots, latent)
        self._write(rows[..., self.kv_lora_rank :], slots, rope)


def _token_bytes(num_layers: int, parts: int, row: tuple[int, int], dtype: torch.dtype) -> int:
    return num_layers * parts * row[0] * row[1] * dtype.itemsize


def check_pages(num_slots: int, page_size: int) -> None:
    """`ConfigError` unless `num_slots` are whole pages."""
    if positive("num_slots", num_slots) % positive("page_size", page_size):
        raise ConfigError(f"num_slots={num_slots} is not a multiple of page_size={page_size}")


def _slots_in(budget_bytes: int, page_size: int, token_bytes: int) -> int:
    page_bytes = positive("page_size", page_size) * token_bytes
    num_pages = positive("budget_bytes", budget_bytes) // page_bytes - 1
    if num_pages < 1:
        raise ConfigError(
            f"a budget of {budget_bytes} bytes holds no page: one and the padding take {2 * page_bytes} bytes "
            f"({token_bytes} a token, {page_size} tokens a page)"
        )
    return num_pages * page_size
