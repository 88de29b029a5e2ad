"""Modules that a peer imports and that its cache never uses, stood in for where they are not installed.

SGLang imports image, data-set and GPU-kernel packages on the way to its cache. Each is large or needs a GPU, and none
has a part in what is measured here. What is installed is always taken: a stand-in is only the last place to look.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["stand_ins"]


class _Anything(type):
    """The type of whatever a stand-in is asked for: a class, all of whose attributes are such classes again."""

    def __getattr__(cls, name: str) -> Any:
        return _anything(name)


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


class _StandIns(MetaPathFinder, Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._names:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _anything


@contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """While it lasts, `import` finds an empty module of these names where there is no other."""
    finder = _StandIns(frozenset(names))
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
