"""The hit ratio over the capacity, a line for each policy. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aradix.replay.driver import ReplayResult
from aradix.replay.optimal import OPTIMAL
from aradix.replay.request import ReplayError

__all__ = ["check_plot", "save_plot"]

_SUFFIXES = (".svg", ".png")


def check_plot(path: Path) -> None:
    """See that a plot can be saved there, before the runs that it would show.

    Raises:
        ReplayError: another suffix than .svg and .png, no such folder, or matplotlib is missing.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ReplayError(f"--plot {path}: the name must end in .svg or .png")
    if not path.parent.is_dir():
        raise ReplayError(f"--plot {path}: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise ReplayError("--plot needs matplotlib: pip install 'aradix[cli]'")


def save_plot(path: Path, results: Sequence[ReplayResult], *, title: str) -> None:
    """Draw the runs and save them as the suffix says. Does not wait; blocks while it draws.

    Raises:
        ReplayError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(result.setup.policy for result in results):
        points = sorted(
            (result.setup.num_pages * result.setup.page_size, result.hit_ratio)
            for result in results
            if result.setup.policy == policy
        )
        line: dict[str, Any] = {"linestyle": "--", "color": "0.4"} if policy == OPTIMAL else {}
        axes.plot([tokens for tokens, _ in points], [ratio for _, ratio in points], marker="o", label=policy, **line)
    axes.set(xscale="log", xlabel="capacity, tokens", ylabel="hit ratio, by tokens", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ReplayError(f"--plot {path}: {error.strerror or error}") from error
