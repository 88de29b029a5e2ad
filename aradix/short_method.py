"""`short_method`: a method whose plain case is compiled, where the compiled module is there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

try:
    from aradix import _native
except ImportError:  # not compiled, or it does not load; `aradix.tree` says so
    _native = None  # type: ignore[assignment]

__all__ = ["short_method", "short_properties"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

# What `inspect` takes for a function by, so that an `async def` is still seen to be one.
_MARKS_OF_A_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__")


def short_method(kind: str, fact: object = None) -> Callable[[_Method], _Method]:
    """Put the compiled plain case of a method in front of it. Does not wait.

    The function stays the whole truth: it is called for whatever is not plain, for keyword arguments and for instances
    of subclasses, and where nothing is compiled it is the method. The coroutine of an `async def` is still lazy.

    Args:
        kind: which case; `src/short_methods.cpp` of the compiled core has them.
        fact: what that case needs to know besides.
    """

    def put_in_front(slow: _Method) -> _Method:
        if _native is None:
            return slow
        method: Any = _native.ShortMethod(kind, slow, fact)
        functools.update_wrapper(method, slow)
        for name in _MARKS_OF_A_FUNCTION:
            setattr(method, name, getattr(slow, name))
        shown: _Method = method
        return shown

    return put_in_front


def short_properties(owner: _Class) -> _Class:
    """Tell the short methods that are properties of a class whose they are. Does not wait.

    Python tells what stands in the class itself, and that is the property.
    """
    for name, member in vars(owner).items():
        if isinstance(member, property) and _native is not None and isinstance(member.fget, _native.ShortMethod):
            method: Any = member.fget
            method.__set_name__(owner, name)
    return owner
