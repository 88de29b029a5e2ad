"""What only the low-level calls need: balanced pins by place, and slots that come in as a caller's value."""

from __future__ import annotations

from typing import Any

import numpy as np

from aradix.errors import UsageError
from aradix.params import NodeRef
from aradix.tree.protocol import Freed, Slots, TreeCore

__all__ = ["LowLevelPins", "value_array"]


def value_array(value: Any, least: int) -> Slots:
    """The slots a caller gave with a key, as int64. UsageError if they are no flat ints, or fewer than `least`."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        slots = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"value must be a flat sequence of slots, got {type(value).__name__}: {error}") from error
    if slots.ndim != 1 or (slots.dtype.kind not in "iu" and len(slots)):
        raise UsageError(f"value must be a flat sequence of int slots, got {slots.dtype} of shape {slots.shape}")
    if len(slots) < least:
        raise UsageError(f"value has {len(slots)} slots, but the key has {least} tokens; every token needs its slot")
    return slots.astype(np.int64)


class LowLevelPins:
    """The pins of `inc_lock_ref`, by the place they were asked for.

    A place can lie inside a node, which is then split, so the node pinned may have another id than the place names.
    """

    def __init__(self, core: TreeCore) -> None:
        self._core = core
        self._pinned: dict[NodeRef, list[int]] = {}

    def __bool__(self) -> bool:
        """Whether any pin holds something."""
        return any(node.node_id for node in self._pinned)

    def node_ids(self) -> list[int]:
        """The node of every pin, once for each."""
        return [node_id for pinned in self._pinned.values() for node_id in pinned if node_id]

    def has(self, node: NodeRef) -> bool:
        """Whether a place is pinned."""
        return node in self._pinned

    def node_id(self, node: NodeRef) -> int:
        """The node that a pin of this place holds."""
        return self._pinned[node][-1]

    def move(self, old: NodeRef, new: NodeRef) -> None:
        """A pin was moved, by the tree, from one place to the end of another's node."""
        pinned = self._pinned.get(old)
        if pinned:
            pinned.pop()
            if not pinned:
                del self._pinned[old]
        self._pinned.setdefault(new, []).append(new.node_id)

    def pin(self, node: NodeRef) -> int:
        """Pin a place; the tokens that became protected."""
        before = self._core.protected_tokens
        try:
            if self._core.is_detached(node.node_id):
                raise KeyError(node)
            node_id = self._core.pin(node)
        except (KeyError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{node!r} is stale: it was evicted, trimmed, merged or flushed since it was matched; match again, "
                "and pin before the next await"
            ) from error
        self._pinned.setdefault(node, []).append(node_id)
        return self._core.protected_tokens - before

    def unpin(self, node: NodeRef) -> list[Freed]:
        """Undo one pin of a place."""
        pinned = self._pinned.get(node) if isinstance(node, tuple) else None
        if not pinned:
            raise UsageError(f"dec_lock_ref({node!r}) without an inc_lock_ref of the same node before it")
        freed = self._core.unpin(pinned.pop())
        if not pinned:
            del self._pinned[node]
        return freed
