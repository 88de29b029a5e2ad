"""Benchmarks: one figure a file. Each compares within one run, so that a noisy machine does not matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stress.bench import (
    allocator,
    contention,
    engine,
    events,
    eviction,
    lease,
    lookup,
    memory,
    policy,
    tiers,
    transfer,
    turns,
    waiting,
)

__all__ = ["BENCHMARKS", "Benchmark"]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A figure: what it shows, how it is measured and drawn; some also say where the time goes, or have longer runs."""

    about: str
    measure: Callable[[], dict[str, Any]]
    table: Callable[[dict[str, Any]], str]
    draw: Callable[[dict[str, Any], Path], None]
    profile: Callable[[], str] | None = None
    measure_long: Callable[[], dict[str, Any]] | None = None


_MODULES = {
    "turns": turns,
    "lease": lease,
    "allocator": allocator,
    "eviction": eviction,
    "lookup": lookup,
    "policy": policy,
    "memory": memory,
    "waiting": waiting,
    "events": events,
    "transfer": transfer,
    "contention": contention,
    "tiers": tiers,
    "engine": engine,
}

BENCHMARKS = {
    name: Benchmark(
        module.ABOUT,
        module.measure,
        module.table,
        module.draw,
        getattr(module, "profile", None),
        getattr(module, "measure_long", None),
    )
    for name, module in _MODULES.items()
}
