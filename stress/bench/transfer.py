"""What copies between the pools reach, over a plain torch copy of the same bytes.

Batches of 1 MiB of scattered pages of 16 tokens (8 KV heads of 128 in bfloat16), all in flight, from the first call
until all are known to be done. The plain copy moves 1 MiB from one contiguous piece to another in place of each, on
one thread of the host, as ours has one: the cores are the engine's. Ratios are of neighbours in time, by the clock and
by the processor time of all threads. Where others want the cores too, the clock also shows how long ours waits for one.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from aradix import HostKVPool, MHAKVPool
from aradix.memory.kv_pool import Layout
from aradix.memory.transfer import Copy, Transfer
from stress.bench.pairs import median_ratio, quiet
from stress.bench.plots import pyplot, save

__all__ = ["ABOUT", "draw", "measure", "table"]

ABOUT = "copies of 1 MiB between device and host pools, over a plain torch copy of the same bytes"

BATCH_BYTES = 1 << 20
PAGE_SIZE, NUM_HEADS, HEAD_DIM = 16, 8, 128
NUM_BATCHES = 64
ROUNDS = 25
SHAPES: tuple[tuple[Layout, int], ...] = (
    ("layer_first", 16),
    ("layer_first", 4),
    ("page_first", 16),
    ("page_first", 4),
)


class _Setup:
    """A device pool, a host pool of the same size, the batches, and as many plain buffers."""

    def __init__(self, layout: Layout, num_layers: int, seed: int = 0) -> None:
        page_bytes = num_layers * 2 * PAGE_SIZE * NUM_HEADS * HEAD_DIM * 2
        pages_each = BATCH_BYTES // page_bytes
        num_slots = NUM_BATCHES * pages_each * PAGE_SIZE
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.pool = MHAKVPool(num_slots, PAGE_SIZE, num_layers, NUM_HEADS, HEAD_DIM, torch.bfloat16, device, layout)
        self.host = HostKVPool(num_slots, PAGE_SIZE, self.pool)
        self.pool.buffer.fill_(1.0)
        assert self.host.pages is not None
        self.host.pages.fill_(2.0)
        self.transfer = Transfer(self.pool, self.host)
        rng = random.Random(seed)
        self.batches = list(
            zip(_scattered(rng, NUM_BATCHES, pages_each), _scattered(rng, NUM_BATCHES, pages_each), strict=True)
        )
        words = (NUM_BATCHES, BATCH_BYTES // 2)
        self.plain_device = torch.empty(words, dtype=torch.bfloat16, device=device).fill_(1.0)
        self.plain_host = torch.empty(words, dtype=torch.bfloat16, pin_memory=device == "cuda").fill_(2.0)

    def store(self, i: int) -> Copy:
        return self.transfer.store(*self.batches[i])

    def load(self, i: int) -> Copy:
        return self.transfer.load(*reversed(self.batches[i]))

    def through_transfer(self, start: Callable[[int], Copy]) -> None:
        copies = [start(i) for i in range(NUM_BATCHES)]
        copies[-1].synchronize()
        assert all(copy.done() and copy.error is None for copy in copies)
        self.transfer.take_done()

    def plain(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for i in range(NUM_BATCHES):
            target[i].copy_(source[i], non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _scattered(rng: random.Random, num_batches: int, pages_each: int) -> list[torch.Tensor]:
    pages = list(range(1, num_batches * pages_each + 1))
    rng.shuffle(pages)
    slots = (torch.tensor(pages)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).view(num_batches, -1)
    return list(slots)


def _time(action: Callable[[], None]) -> tuple[float, float]:
    """Microseconds a batch, by the clock and of processor time."""
    clock, processor = time.perf_counter(), time.process_time()
    action()
    taken = time.perf_counter() - clock, time.process_time() - processor
    return taken[0] / NUM_BATCHES * 1e6, taken[1] / NUM_BATCHES * 1e6


def _row(layout: Layout, num_layers: int) -> dict[str, Any]:
    setup = _Setup(layout, num_layers)
    row: dict[str, Any] = {"layout": layout, "layers": num_layers, "page_kib": setup.pool.page_bytes >> 10}
    for name, start, pools in (
        ("store", setup.store, (setup.plain_device, setup.plain_host)),
        ("load", setup.load, (setup.plain_host, setup.plain_device)),
    ):
        ours = functools.partial(setup.through_transfer, start)
        plain = functools.partial(setup.plain, *pools)
        for action in (ours, plain):
            action()
        pairs = [(_time(ours), _time(plain)) for _ in range(ROUNDS)]
        for clock, label in ((0, ""), (1, "_processor")):
            ours_us, plain_us = ([side[clock] for side in sides] for sides in zip(*pairs, strict=True))
            row |= {
                f"{name}{label}_us": statistics.median(ours_us),
                f"plain_{name}{label}_us": statistics.median(plain_us),
                f"{name}{label}_ratio": median_ratio(plain_us, ours_us),
            }
    setup.transfer.close()
    return row


def measure() -> dict[str, Any]:
    """Medians of the time of a batch, and the share of a plain copy's speed; takes a few seconds."""
    with quiet():
        rows = [_row(layout, num_layers) for layout, num_layers in SHAPES]
    return {"bench": "transfer", "batch_bytes": BATCH_BYTES, "rows": rows}


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    columns = "  ".join(f"{name + ' us':>8} {'plain':>6} {'ratio':>5} {'by cpu':>6}" for name in ("store", "load"))
    head = f"{'layout':>12} {'page KiB':>8}  {columns}"
    lines = [
        f"{row['layout']:>12} {row['page_kib']:>8}  "
        + "  ".join(
            f"{row[f'{name}_us']:>8.1f} {row[f'plain_{name}_us']:>6.1f} {row[f'{name}_ratio']:>5.2f} "
            f"{row[f'{name}_processor_ratio']:>6.2f}"
            for name in ("store", "load")
        )
        for row in found["rows"]
    ]
    return "\n".join([head, *lines])


def draw(found: dict[str, Any], path: Path) -> None:
    """The share of a plain copy's speed by layout and page size. Needs matplotlib."""
    figure, axis = pyplot().subplots(figsize=(6, 3), layout="constrained")
    labels = [f"{row['layout']}\n{row['page_kib']} KiB pages" for row in found["rows"]]
    for offset, name in ((-0.2, "store"), (0.2, "load")):
        places = [i + offset for i in range(len(labels))]
        axis.bar(places, [row[f"{name}_ratio"] for row in found["rows"]], width=0.4, label=name)
    axis.axhline(0.7, color="grey", linestyle=":")
    axis.set_xticks(range(len(labels)), labels)
    axis.set(ylabel="of a plain copy's speed")
    axis.legend(frameon=False)
    save(figure, path)
