"""The synchronous core: a radix tree over token ids whose nodes own slots, which are plain integers here.

Nothing in this folder awaits, imports torch or knows an allocator: a call is one atomic step that returns what must
be freed, and the shell in `aradix.cache` does it.
"""

from __future__ import annotations

from typing import Any, Literal

from aradix.errors import ConfigError
from aradix.policies import EvictionPolicy, policy_named
from aradix.tree.protocol import TreeCore
from aradix.tree.radix_tree import RadixTree

__all__ = ["make_core"]


def make_core(
    tree_core: Literal["auto", "python", "cpp"], *, policy: str | EvictionPolicy, **settings: Any
) -> TreeCore:
    """The tree core of that name; `"auto"` is the fastest that is there. `RadixTree` explains the settings.

    Raises:
        ConfigError: this installation has no such core, or there is no such policy.
    """
    if tree_core == "cpp":
        raise ConfigError("tree_core='cpp' is not part of this installation; use 'auto' or 'python'")
    return RadixTree(policy=policy_named(policy), **settings)
