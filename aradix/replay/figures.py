"""The drawings of a report, as SVG within the page: its style sheet gives them their colours, light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from aradix.replay.reuse import ReuseDistances

__all__ = ["Curve", "distance_figure", "hit_ratio_figure", "percent", "tokens_text"]

_WIDTH, _HEIGHT = 920.0, 400.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 150.0, 16.0, 58.0
_LABEL_HEIGHT, _LABEL_WIDTH, _LABEL_ROWS = 17.0, 62.0, 3
_TOKEN_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


class Curve(NamedTuple):
    """One policy's hit ratios.

    Args:
        name: of the policy.
        colour: in CSS.
        bound: whether it is the bound, which is drawn apart.
        points: (capacity in tokens, hit ratio), by capacity.
    """

    name: str
    colour: str
    bound: bool
    points: tuple[tuple[int, float], ...]


def percent(ratio: float) -> str:
    """A ratio in percent, with three digits: 5.40 %, 13.1 %, 100 %."""
    return f"{100 * ratio:#.3g} %" if 0 < ratio < 0.9995 else f"{100 * ratio:.0f} %"


def tokens_text(tokens: float) -> str:
    """A number of tokens in short: 999,936 is 1M, 65,536 is 65.5k."""
    for unit, name in _TOKEN_UNITS:
        if tokens >= 0.9995 * unit:
            return f"{tokens / unit:.3g}{name}" if tokens < 999.5 * unit else f"{tokens / unit:,.0f}{name}"
    return f"{tokens:.0f}"


class _Axes:
    """A frame: tokens to the right on a log scale, a ratio upwards."""

    def __init__(self, low: float, high: float, most: float, right: float = _RIGHT) -> None:
        self._low, self._span = math.log(low), math.log(high / low) or 1.0
        self._step = _nice_step(most)
        self.top = self._step * math.ceil(max(most, 1e-9) / self._step - 1e-9)
        self.right = _WIDTH - right

    def x(self, tokens: float) -> float:
        return _LEFT + (math.log(tokens) - self._low) / self._span * (self.right - _LEFT)

    def y(self, ratio: float) -> float:
        return _HEIGHT - _BOTTOM - ratio / self.top * (_HEIGHT - _BOTTOM - _TOP)

    def grid(self) -> list[str]:
        """Lines at round ratios, with their numbers."""
        drawn = []
        for number in range(round(self.top / self._step) + 1):
            ratio = number * self._step
            y, kind = self.y(ratio), "grid" if number else "axis"
            drawn.append(f'<line class="{kind}" x1="{_LEFT}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            drawn.append(f'<text x="{_LEFT - 10}" y="{y + 4.5:.1f}" text-anchor="end">{100 * ratio:.3g} %</text>')
        return drawn


def _nice_step(most: float) -> float:
    """A round step that divides a range into some five."""
    rough = max(most, 1e-9) / 5
    unit = float(10 ** math.floor(math.log10(rough)))
    return next(unit * factor for factor in (1, 2, 2.5, 5, 10) if rough <= unit * factor * 1.0001)


def _svg(parts: Sequence[str], label: str) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{escape(label)}">\n{body}\n</svg>'


def _spread(heights: Sequence[float]) -> list[float]:
    """Heights of labels moved apart so that none covers another, in the order given; none leaves the frame."""
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    placed = list(heights)
    least = _TOP
    for place in order:
        placed[place] = least = max(placed[place], least)
        least += _LABEL_HEIGHT
    most = _HEIGHT - _BOTTOM + 4
    for place in reversed(order):
        placed[place] = most = min(placed[place], most)
        most -= _LABEL_HEIGHT
    return placed


def hit_ratio_figure(
    curves: Sequence[Curve], capacities: Sequence[tuple[str, int]], below: Callable[[int], str | None]
) -> str:
    """Hit ratio over capacity, a line for each policy, and the bound.

    Args:
        curves: at least one, each with a point for each capacity.
        capacities: (name, tokens), by size.
        below: what to write below a capacity of so many tokens, or None.
    """
    low, high = float(capacities[0][1]), float(capacities[-1][1])
    if low == high:
        low, high = low / 2, high * 2
    axes = _Axes(low, high, max((ratio for curve in curves for _, ratio in curve.points), default=0.0))
    parts = axes.grid()
    last_x = -math.inf
    for name, tokens in capacities:
        x, y = axes.x(tokens), _HEIGHT - _BOTTOM
        if x - last_x < _LABEL_WIDTH:
            continue
        last_x = x
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 5}"/>')
        parts.append(f'<text class="strong" x="{x:.1f}" y="{y + 22}" text-anchor="middle">{escape(name)}</text>')
        if (more := below(tokens)) is not None:
            parts.append(f'<text x="{x:.1f}" y="{y + 39}" text-anchor="middle">{escape(more)}</text>')
    bounds = [curve for curve in curves if curve.bound]
    base = next((curve for curve in curves if not curve.bound), None)
    if bounds and base is not None:
        around = [*bounds[0].points, *reversed(base.points)]
        parts.append(f'<polygon class="gap" points="{_path(axes, around)}"/>')
    heights = _spread([axes.y(curve.points[-1][1]) for curve in curves])
    for curve, height in zip(curves, heights, strict=True):
        kind = "line bound" if curve.bound else "line"
        style = "" if curve.bound else f' style="stroke:{curve.colour}"'
        parts.append(f'<polyline class="{kind}"{style} points="{_path(axes, curve.points)}"/>')
        fill = "var(--soft)" if curve.bound else curve.colour
        for tokens, ratio in curve.points:
            x, y = axes.x(tokens), axes.y(ratio)
            what = f"{curve.name}, {tokens:,} tokens: {percent(ratio)}"
            at, radius = f'cx="{x:.1f}" cy="{y:.1f}"', 3.5 if curve.bound else 5.0
            parts.append(
                f'<g class="point"><title>{escape(what)}</title><circle class="hit" {at} r="12"/>'
                f'<circle class="dot" style="fill:{fill}" {at} r="{radius}"/></g>'
            )
        at = f'x="{axes.x(curve.points[-1][0]) + 14:.1f}" y="{height + 4.5:.1f}"'
        parts.append(f'<text class="strong" style="fill:{fill}" {at}>{escape(curve.name)}</text>')
    return _svg(parts, "Hit ratio over capacity, a line for each policy")


def _path(axes: _Axes, points: Sequence[tuple[int, float]]) -> str:
    return " ".join(f"{axes.x(tokens):.1f},{axes.y(ratio):.1f}" for tokens, ratio in points)


def distance_figure(distances: ReuseDistances, capacities: Sequence[tuple[str, int]]) -> str:
    """Input tokens by the distance of their reuse, and what lies within each capacity.

    Args:
        distances: with at least one reused token.
        capacities: (name, tokens), by size; those off the scale are left out.
    """
    bins = [(max(low, upto / 2), upto, tokens) for low, upto, tokens in distances.bins]
    used = [place for place, (_, _, tokens) in enumerate(bins) if tokens]
    bins = bins[used[0] : used[-1] + 1]
    low, high = bins[0][0], bins[-1][1]
    most = max(tokens for _, _, tokens in bins) / distances.input_tokens
    axes = _Axes(low, high, most * 1.25, right=24)
    parts = axes.grid()
    floor = axes.y(0)
    for begin, end, tokens in bins:
        ratio = tokens / distances.input_tokens
        left, width, y = axes.x(begin) + 1.5, axes.x(end) - axes.x(begin) - 3, axes.y(ratio)
        what = f"{tokens_text(begin)} to {tokens_text(end)} tokens: {percent(ratio)} of all input tokens"
        parts.append(
            f'<rect class="bar" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{floor - y:.1f}" rx="2">'
            f"<title>{escape(what)}</title></rect>"
        )
    for exponent in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        x = axes.x(10.0**exponent)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 5}"/>')
        parts.append(f'<text x="{x:.1f}" y="{floor + 22}" text-anchor="middle">{tokens_text(10.0**exponent)}</text>')
    middle = (_LEFT + axes.right) / 2
    parts.append(f'<text x="{middle}" y="{floor + 44}" text-anchor="middle">distinct tokens used in between</text>')
    within = dict(distances.within)
    ends = [-math.inf] * _LABEL_ROWS
    for name, tokens in capacities:
        if not low < tokens < high:
            continue
        x = axes.x(tokens)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{floor}"/>')
        row = next((row for row, end in enumerate(ends) if x - end >= _LABEL_WIDTH), None)
        if row is None:
            continue
        ends[row] = x
        y = _TOP + 10 + 2 * _LABEL_HEIGHT * row
        found = percent(within[tokens] / distances.input_tokens)
        parts.append(f'<text class="strong" x="{x - 6:.1f}" y="{y}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 16}" text-anchor="end">{found}</text>')
    return _svg(parts, "Input tokens by the distance of their reuse")
