"""`TreeNode` in SGLang's shape: a plain one that anybody can make, and the views of the nodes of a tree.

A view holds nothing of the tree but a place in it; each attribute is asked of the tree when it is read. There is one
view of a node at a time, so that `is` tells nodes apart as it does among theirs.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aradix.adapters.sglang.keys import RadixKey
from aradix.errors import UsageError
from aradix.params import NodeRef
from aradix.tree.protocol import NO_SLOTS, NodeView

if TYPE_CHECKING:
    from aradix.adapters.sglang.radix_cache import RadixCache

__all__ = ["NodeInTree", "RootNode", "TreeNode"]


class TreeNode:
    """A node that stands for itself. `counter` numbers those that are made without an id."""

    counter = 0

    def __init__(self, id: int | None = None, priority: int = 0) -> None:  # noqa: A002 (their name for it)
        self.children: dict[Any, TreeNode] = {}
        self.parent: TreeNode | None = None
        self.key: Any = None
        self.value: Any = None
        self.lock_ref = 0
        self.last_access_time: float = time.monotonic()
        self.creation_time: float = self.last_access_time
        self.hit_count = 0
        self.host_ref_counter = 0
        self.host_value: Any = None
        self.hash_value: list[str] | None = None
        self.priority = priority
        self.id = TreeNode.counter if id is None else id
        TreeNode.counter += 1

    @property
    def evicted(self) -> bool:
        """Whether it has no slots on the device."""
        return self.value is None

    @property
    def backuped(self) -> bool:
        """Whether it has a copy on the host."""
        return self.host_value is not None

    def protect_host(self) -> None:
        """Keep the host copy. Does not wait."""
        self.host_ref_counter += 1

    def release_host(self) -> None:
        """Undo one `protect_host`. RuntimeError if there is none."""
        if self.host_ref_counter == 0:
            raise RuntimeError("release_host() without a protect_host() before it")
        self.host_ref_counter -= 1

    def get_last_hash_value(self) -> str | None:
        """The hash of its last page, `None` where none is known. Does not wait."""
        return self.hash_value[-1] if self.hash_value else None

    def get_prefix_hash_values(self, node: TreeNode | None) -> list[str]:
        """The hashes of a node and of all above it, from the top, as a new list. Does not wait."""
        parts: list[list[str]] = []
        while node is not None and node.hash_value is not None:
            parts.append(node.hash_value)
            node = node.parent
        return [value for part in reversed(parts) for value in part]

    def __lt__(self, other: TreeNode) -> bool:
        return self.last_access_time < other.last_access_time


class RootNode(TreeNode):
    """What every namespace hangs below. It has lock_ref 1 and the lowest priority, as theirs."""

    def __init__(self, cache: RadixCache) -> None:
        super().__init__(priority=-sys.maxsize)
        self._cache = cache
        self.key = RadixKey([])
        self.value = []
        self.host_value = []
        self.hash_value = []
        self.lock_ref = 1

    @property
    def children(self) -> dict[Any, TreeNode]:
        """The nodes that begin a prefix, of whatever namespace."""
        cache = self._cache
        if cache.root_node is not self:
            return {}
        roots = cache.core.child_ids(0)
        return cache.children_named([node_id for root in roots for node_id in cache.core.child_ids(root)])

    @children.setter
    def children(self, children: dict[Any, TreeNode]) -> None:
        if children:
            raise UsageError("the children of a root are what was inserted")


class NodeInTree(TreeNode):
    """A node of a cache's tree, to look at.

    Reading what it is raises `UsageError` once it was evicted, trimmed or reset; `evicted` is true then.
    """

    def __init__(self, cache: RadixCache, ref: NodeRef) -> None:
        self._cache = cache
        self._core = cache.core
        self.ref = ref

    @property
    def is_live(self) -> bool:
        """Whether the tree still has it."""
        if self._core is not self._cache.core:
            return False
        try:
            self._core.lock_ref(self.ref.node_id)
        except KeyError:
            return False
        return True

    def _check_live(self) -> None:
        if not self.is_live:
            raise UsageError(
                f"node {self.ref.node_id}, the end of {self.ref.depth} tokens, is gone: it was evicted or reset since; "
                "match again, and lock before anything evicts"
            )

    def _view(self) -> NodeView:
        self._check_live()
        return self._core.view(self.ref.node_id)

    @property
    def id(self) -> int:  # type: ignore[override]
        return self.ref.node_id

    @property
    def key(self) -> RadixKey:
        view = self._view()
        ids = np.frombuffer(view.tokens, np.int32)
        if self._cache.is_eagle:
            ids = np.append(ids[::2], ids[-1])
        return RadixKey(ids.tolist(), self._cache.extra_key_of(view.namespace), self._cache.is_eagle)

    @property
    def value(self) -> Any:
        slots = self._view().slots if self.is_live else NO_SLOTS
        return self._cache.on_device(slots) if len(slots) else None

    @property
    def children(self) -> dict[Any, TreeNode]:  # type: ignore[override]
        self._check_live()
        return self._cache.children_named(self._core.child_ids(self.ref.node_id))

    @property
    def parent(self) -> TreeNode:  # type: ignore[override]
        return self._cache.node_named(self._view().parent_id)

    @property
    def lock_ref(self) -> int:  # type: ignore[override]
        self._check_live()
        return self._core.lock_ref(self.ref.node_id) - self._cache.debt_below(self.ref.node_id)

    @property
    def last_access_time(self) -> float:  # type: ignore[override]
        return self._view().last_access

    @property
    def creation_time(self) -> float:  # type: ignore[override]
        return self._view().created

    @property
    def hit_count(self) -> int:  # type: ignore[override]
        return self._view().hit_count

    @property
    def priority(self) -> int:  # type: ignore[override]
        return self._view().priority

    @property
    def hash_value(self) -> list[str] | None:  # type: ignore[override]
        hashes = self._view().hashes
        return None if hashes is None else [self._cache.digest_of(digest).hex() for digest in hashes]

    @property
    def host_value(self) -> torch.Tensor | None:
        host_slots = self._view().host_slots if self.is_live else None
        return None if host_slots is None else torch.from_numpy(host_slots)

    @property
    def host_ref_counter(self) -> int:  # type: ignore[override]
        return self._view().host_ref

    def protect_host(self) -> None:
        self._cache.protect_host(self)

    def release_host(self) -> None:
        self._cache.release_host(self)

    def __repr__(self) -> str:
        state = "" if self.is_live else ", gone"
        return f"<TreeNode {self.ref.node_id}, the end of {self.ref.depth} tokens{state}>"
