"""Schedules that hypothesis draws."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["Drawn"]


class Drawn:
    """A chooser for `stress.schedules` whose answers hypothesis draws, and so shrinks towards the plain order.

    Args:
        data: from `st.data()`.
    """

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def choose(self, n: int) -> int:
        return self._data.draw(st.integers(0, n - 1), label="next")
