"""Benchmarks: one figure a file. Each compares within one run, so that a noisy machine does not matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stress.bench import contention, eviction, lease, transfer

__all__ = ["BENCHMARKS", "Benchmark"]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A figure: what it shows, how it is measured, and how it is drawn."""

    about: str
    measure: Callable[[], dict[str, Any]]
    table: Callable[[dict[str, Any]], str]
    draw: Callable[[dict[str, Any], Path], None]


BENCHMARKS = {
    name: Benchmark(module.ABOUT, module.measure, module.table, module.draw)
    for name, module in {
        "contention": contention,
        "eviction": eviction,
        "lease": lease,
        "transfer": transfer,
    }.items()
}
