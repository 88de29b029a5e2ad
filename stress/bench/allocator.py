"""What handing out and taking back 8,192 slots of a pool of 1M costs.

The pool has been in use: its free slots lie in no order. A turn is alloc(8192) and free of what it gave. Beside ours: a
free list kept in a tensor, cut at its head and joined by `torch.cat` at its end, as the sketch that this project began
with has it; and SGLang's allocators. Ours also looks that no slot is freed twice.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from aradix import SlotAllocator
from stress.bench.pairs import median_ratio, quiet
from stress.bench.peers import PeerMissing
from stress.bench.peers.sglang_release import load_sglang, sglang_allocator
from stress.bench.plots import pyplot, save

__all__ = ["ABOUT", "draw", "measure", "table"]

ABOUT = "8,192 slots of a pool of 1M, out and in"

NUM_SLOTS = 1 << 20
NUM_ASKED = 8_192
PAGE_SIZES = (1, 16)
ROUNDS = 200

OURS = "aradix"
Side = Callable[[], tuple[float, float]]
"""One alloc and one free, in seconds."""


class _JoinedList:
    """A free list of pages in a tensor."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self._page_size = page_size
        self._free = torch.arange(1, num_slots // page_size + 1)

    def alloc(self, num_slots: int) -> torch.Tensor:
        num_pages = num_slots // self._page_size
        pages, self._free = self._free[:num_pages], self._free[num_pages:]
        if self._page_size == 1:
            return pages
        return (pages[:, None] * self._page_size + torch.arange(self._page_size)).reshape(-1)

    def free(self, slots: torch.Tensor) -> None:
        pages = slots if self._page_size == 1 else slots[:: self._page_size] // self._page_size
        self._free = torch.cat((self._free, pages))


def _used(allocator: Any, page_size: int) -> Any:
    """The allocator, after all its slots were out and came back in another order."""
    size = NUM_ASKED // 8
    out = [allocator.alloc(size) for _ in range(NUM_SLOTS // size)]
    random.Random(1).shuffle(out)
    for slots in out:
        allocator.free(slots)
    return allocator


def _side(allocator: Any) -> Side:
    def turn() -> tuple[float, float]:
        began = time.process_time()
        slots = allocator.alloc(NUM_ASKED)
        between = time.process_time()
        allocator.free(slots)
        return between - began, time.process_time() - between

    return turn


def measure() -> dict[str, Any]:
    """Medians of each side, and its ratio to ours; takes some seconds."""
    skipped = []
    sglang = None
    try:
        sglang = load_sglang()
    except PeerMissing as missing:
        skipped.append(str(missing))
    rows = []
    with quiet():
        for page_size in PAGE_SIZES:
            makes: dict[str, Any] = {OURS: SlotAllocator, "torch.cat": _JoinedList}
            if sglang is not None:
                makes[f"SGLang {sglang.version}"] = lambda num_slots, page: sglang_allocator(sglang, num_slots, page)
            sides = {name: _side(_used(make(NUM_SLOTS, page_size), page_size)) for name, make in makes.items()}
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
            for number in range(ROUNDS):
                for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                    taken[name].append(sides[name]())
            for name, seconds in taken.items():
                rows.append(
                    {
                        "side": name,
                        "page_size": page_size,
                        "alloc_us": statistics.median(first for first, _ in seconds) * 1e6,
                        "free_us": statistics.median(second for _, second in seconds) * 1e6,
                        "over_ours": median_ratio([sum(both) for both in seconds], [sum(both) for both in taken[OURS]]),
                    }
                )
    return {"bench": "allocator", "slots": NUM_SLOTS, "asked": NUM_ASKED, "rows": rows, "skipped": skipped}


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'':<16} {'page':>5} {'alloc us':>9} {'free us':>9} {'over ours':>10}"]
    lines += [
        f"{row['side']:<16} {row['page_size']:>5} {row['alloc_us']:>9.1f} {row['free_us']:>9.1f} "
        f"{row['over_ours']:>10.1f}"
        for row in found["rows"]
    ]
    return "\n".join([*lines, *found["skipped"]])


def draw(found: dict[str, Any], path: Path) -> None:
    """Alloc and free together, each side at each page size. Needs matplotlib."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(PAGE_SIZES), figsize=(9, 2.0), layout="constrained", sharey=True)
    for axis, page_size in zip(axes, PAGE_SIZES, strict=True):
        rows = [row for row in found["rows"] if row["page_size"] == page_size]
        values = [row["alloc_us"] + row["free_us"] for row in rows]
        colours = ["#2463eb" if row["side"] == OURS else "#8a909c" for row in rows]
        bars = axis.barh([row["side"] for row in rows], values, color=colours)
        axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=4, fontsize=9)
        axis.set_title(f"us, out and in, page size {page_size} (log)", fontsize=10, loc="left")
        axis.set_xscale("log")
        axis.margins(x=0.2)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
        axis.tick_params(axis="y", length=0)
    axes[0].invert_yaxis()
    save(figure, path)
