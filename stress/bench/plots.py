"""What the figures share: a headless matplotlib, and files that do not change from run to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

__all__ = ["line_figure", "pyplot", "save"]


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into memory. ImportError where it is not installed."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "aradix"
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG or PNG, by the file's ending, and close it."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot().close(figure)


def line_figure(
    path: Path,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    y_scale: Literal["linear", "log"] = "linear",
) -> None:
    """One line a name, over a logarithmic x; ours in blue, the rivals in grey. Needs matplotlib."""
    figure, axis = pyplot().subplots(figsize=(6, 3), layout="constrained")
    greys, blues = iter(["#8a909c", "#b8bcc4", "#5f6672"] * 3), iter(["#2463eb", "#8ab0ff", "#123a91"] * 3)
    for name, (xs, ys) in series.items():
        colour = next(blues if name.startswith("aradix") else greys)
        axis.plot(xs, ys, marker="o", label=name, color=colour)
    axis.set(xscale="log", yscale=y_scale, xlabel=x, ylabel=y)
    if y_scale == "linear":
        axis.set_ylim(0)
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)
