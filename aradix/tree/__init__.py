"""The synchronous core: a radix tree over token ids whose nodes own slots, which are plain integers here.

Nothing in this folder awaits, imports torch or knows an allocator: a call is one atomic step that returns what must
be freed, and the shell in `aradix.cache` does it.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

from aradix.errors import ConfigError
from aradix.policies import EvictionPolicy, policy_named
from aradix.tree.protocol import TreeCore
from aradix.tree.radix_tree import RadixTree
from aradix.tree.tiered import TieredCore

__all__ = ["core_name", "cpp_core_error", "make_core", "make_tiered_core"]

_cpp_error: ImportError | None = None
try:
    from aradix.tree import cpp_radix_tree
except ModuleNotFoundError as error:
    _cpp_error = error  # not compiled
except ImportError as error:
    _cpp_error = error
    warnings.warn(f"the compiled tree core does not load, the Python one runs: {error}", RuntimeWarning, stacklevel=2)


def cpp_core_error() -> ImportError | None:
    """Why the compiled core cannot be imported; `None` where it can."""
    return _cpp_error


def core_name() -> Literal["python", "cpp"]:
    """The core that `tree_core="auto"` takes: the compiled one where it is there."""
    return "python" if _cpp_error is not None else "cpp"


def make_core(
    tree_core: Literal["auto", "python", "cpp"], *, policy: str | EvictionPolicy, **settings: Any
) -> TreeCore:
    """The tree core of that name; `"auto"` is `core_name()`. `RadixTree` explains the settings.

    Raises:
        ConfigError: the compiled core is asked for and is not there, or there is no such policy.
    """
    chosen = policy_named(policy)
    if tree_core == "python" or (tree_core == "auto" and _cpp_error is not None):
        return RadixTree(policy=chosen, **settings)
    if _cpp_error is not None:
        raise ConfigError(
            f"tree_core='cpp' is not part of this installation ({_cpp_error}); install again where a C++20 compiler "
            "is found, or use 'auto' or 'python'"
        )
    return cpp_radix_tree.CppRadixTree(policy=chosen, **settings)


def make_tiered_core(
    tree_core: Literal["auto", "python", "cpp"],
    *,
    policy: str | EvictionPolicy,
    backup_hits: int | None = None,
    **settings: Any,
) -> TieredCore:
    """A tree core that knows the host tier too; `TieredCore` explains `backup_hits`, `RadixTree` the settings.

    Only the Python core does, so that is what `"auto"` is here.

    Raises:
        ConfigError: the compiled core is asked for, or there is no such policy.
    """
    if tree_core == "cpp":
        raise ConfigError("tree_core='cpp' has no host tier; use 'auto' or 'python' with one")
    return RadixTree(policy=policy_named(policy), backup_hits=backup_hits, **settings)
