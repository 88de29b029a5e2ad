"""Benchmarks: one figure a file. Each compares within one run, so that a noisy machine does not matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stress.bench import contention, eviction, lease, turns

__all__ = ["BENCHMARKS", "Benchmark"]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A figure: what it shows, how it is measured, how it is drawn, and perhaps where the time goes."""

    about: str
    measure: Callable[[], dict[str, Any]]
    table: Callable[[dict[str, Any]], str]
    draw: Callable[[dict[str, Any], Path], None]
    profile: Callable[[], str] | None = None


BENCHMARKS = {
    name: Benchmark(module.ABOUT, module.measure, module.table, module.draw, getattr(module, "profile", None))
    for name, module in {"turns": turns, "lease": lease, "eviction": eviction, "contention": contention}.items()
}
