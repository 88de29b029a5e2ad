"""What values of command line options are read by, for `argparse`: errors name the value, and what it may be."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

__all__ = ["above_zero", "at_least"]


def at_least(least: int, what: str) -> Callable[[str], int]:
    """Reads whole numbers from `least` on, also as 1e6; `what` names them in an error."""

    def parse(text: str) -> int:
        try:
            number = int(float(text)) if re.fullmatch(r"\d+(\.\d+)?e\d{1,2}", text) else int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{what} is a whole number of at least {least}, got {text!r}")
        return number

    return parse


def above_zero(what: str) -> Callable[[str], float]:
    """Reads finite numbers above 0; `what` names them in an error."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"{what} is a number above 0, got {text!r}")
        return number

    return parse
