"""What a planted fault is: a builder that makes one part of the cache worse, and the emphasis under which it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stress.harness.builder import Builder

__all__ = ["Plant", "become"]


@dataclass(frozen=True, slots=True)
class Plant:
    """One planted fault.

    Args:
        name: of the bug, as the table shows it.
        emphasis: of the worlds it is looked for in; the clean cache runs in the same ones.
        builder: of the cache that has it.
    """

    name: str
    emphasis: str
    builder: Builder


def become(part: object, worse: type[Any]) -> None:
    """Turns one part of one cache into a subclass of what it is. The class that the product uses stays as it was.

    The cache hands its parts to one another as it is built, so a part cannot be exchanged afterwards; it can be told
    that it is something else. `worse` must add no state.
    """
    assert issubclass(worse, type(part))
    object.__setattr__(part, "__class__", worse)
