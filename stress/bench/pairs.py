"""How the figures measure: rivals in turn, in processor time, and ratios of what was measured side by side.

A shared machine is slow for minutes at a time, and other processes stretch whatever is timed by the clock. So rivals
run in turn, a little of each at a time, a ratio is taken of what was measured in the same moment, and the median of
many such ratios is what counts. Times are the processor's, of this process with all its threads.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["median_ratio", "quiet"]


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the ratios of two rivals, pair by pair."""
    return statistics.median(first / second for first, second in zip(above, below, strict=True))


@contextmanager
def quiet() -> Iterator[None]:
    """torch on one thread, and what was imported left out of garbage collections, for as long as it lasts.

    Otherwise who imports much would pay for collecting it, and so would all who run in the same process.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(num_threads)
