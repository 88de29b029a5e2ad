"""The one interface that both tree cores implement, and the records they answer with.

A call is one atomic step: it never waits, and it returns what has to be freed instead of freeing it. Lengths are in
tokens (bigrams where keys are bigrams). Nodes are named by ids that are never used again; 0 names no node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aradix.events import KVCacheEvent
from aradix.keys import Namespace, RadixKey
from aradix.params import NodeRef

__all__ = [
    "NOWHERE",
    "Closed",
    "Detached",
    "Freed",
    "Gate",
    "Inserted",
    "Match",
    "NodeView",
    "Ready",
    "Slots",
    "TreeCore",
]

Slots = npt.NDArray[np.int64]

NOWHERE = NodeRef(0, 0)
"""The end of an empty match: pinning it is allowed and holds nothing."""


class Gate(IntEnum):
    """What a walker meets at a node."""

    NONE = 0
    PASSING = 1
    """There is a gate, but walkers may pass for now."""
    PENDING = 2
    """Closed, but not granted yet: only a walker that was let in before may go on."""
    GRANTED = 3
    """Somebody has the subtree for himself."""


@dataclass(slots=True)
class Ready:
    """When the KV of a node is complete: opaque to the tree, which carries it through splits and merges.

    Args:
        stream: that writes it.
        event: recorded behind the write; `None` once it has passed.
        sequence: of recording; on one stream a later event covers an earlier one.
    """

    stream: Any
    event: Any
    sequence: int


class Freed(NamedTuple):
    """Slots that no node owns any longer, and the streams named by leases that used them."""

    slots: Slots
    streams: frozenset[Hashable]


class Match(NamedTuple):
    """Where a walk ended. `gate` is the gated node that stopped it (then nothing was touched or pinned), else 0."""

    num_matched: int
    node_id: int
    last: NodeRef
    gate: int
    ready: tuple[Ready, ...]


class Inserted(NamedTuple):
    """What an insert did.

    Args:
        prefix_len: tokens from the root that the tree held already.
        end: tokens from the root to where the key is now held; less than the key where a gate stood in the way.
        existing: the tree's own slots of the part that was walked and held already.
        last: where the key ends now.
        node_id: of the node pinned instead of the old one, where a pin was moved.
        ready: of the part that was held already.
    """

    prefix_len: int
    end: int
    existing: Slots
    last: NodeRef
    node_id: int
    ready: tuple[Ready, ...]


class Detached(NamedTuple):
    """A flush: what came back at once, and how many tokens come back when their pins end."""

    freed: list[Freed]
    num_freed: int
    num_held: int


class Closed(NamedTuple):
    """Where a gate was closed, or the gate that was met (`met`, and then nothing was changed)."""

    node_id: int
    num_matched: int
    met: bool


class NodeView(NamedTuple):
    """One node as `walk` shows it; `tokens` are raw int32 bytes. A root has `parent_id` 0 and no tokens."""

    node_id: int
    parent_id: int
    namespace: Namespace
    depth: int
    num_tokens: int
    tokens: bytes
    slots: Slots
    lock_ref: int
    gate: Gate
    detached: bool
    hit_count: int
    priority: int
    last_access: int
    created: int
    num_children: int
    indexed: bool
    state: Any
    hashes: list[bytes] | None


class TreeCore(Protocol):
    """A radix tree over token ids. See the module's docstring for the rules that hold for every method."""

    name: str
    page_size: int
    failure: BaseException | None
    """The first exception of a user's policy, after which the tree ranks by recency; the shell must report it."""

    merges: bool
    """Whether neighbours that became equal are one node; not after a failure, nor where whole leaves are evicted."""

    on_event: Callable[[], None] | None
    """Called in the middle of a step, when it records the first event since `take_events`. It may not raise, nor call
    the tree: all it can do is to ask for a step of its own."""

    @property
    def evictable_tokens(self) -> int: ...
    @property
    def protected_tokens(self) -> int: ...
    @property
    def detached_tokens(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_namespaces(self) -> int: ...
    @property
    def version(self) -> int:
        """Changes whenever a new prefix became matchable."""

    def match(self, key: RadixKey, *, limit: int | None = None, pin: bool = False, past_pending: bool = False) -> Match:
        """Walk, split at the end, touch the path, and pin it in the same step if asked. `limit` is in tokens.

        With `past_pending` only granted gates stop it.
        """

    def peek(self, key: RadixKey) -> int:
        """Tokens that a match would find: no split, no touch, no statistics; gates are looked through."""

    def insert(
        self,
        key: RadixKey,
        slots: Slots,
        *,
        priority: int = 0,
        ready: tuple[Ready, ...] = (),
        past_pending: bool = False,
    ) -> Inserted | int:
        """Insert the whole pages of a key from its root; or the id of the gate met, and then nothing was changed.

        `slots` are of all its tokens. The part that was held already counts a hit. With `past_pending` only granted
        gates stop it.
        """

    def extend(
        self, node_id: int, key: RadixKey, slots: Slots, *, priority: int = 0, ready: tuple[Ready, ...] = ()
    ) -> Inserted:
        """Insert the rest of a key below a pinned node, up to a gate, and move the pin to where it ends.

        `slots` are of the tokens beyond the node's depth. Never on a detached node.
        """

    def pin(self, ref: NodeRef) -> int:
        """Pin the path to a place, splitting there if need be; the id to unpin. KeyError if the place is no more."""

    def unpin(self, node_id: int, *, touch: bool = True) -> list[Freed]:
        """Undo one pin; gives back what was detached and is held by nobody now."""

    def record_hit(self, node_id: int) -> None:
        """Count a hit on a path."""

    def mark_streams(self, node_id: int, streams: frozenset[Hashable]) -> None:
        """Name streams that touched the slots of a path."""

    def slots_of(self, ref: NodeRef, start: int = 0) -> Slots:
        """The slots of a path from token `start` to the place: a copy. KeyError if the place is no more."""

    def is_detached(self, node_id: int) -> bool: ...
    def lock_ref(self, node_id: int) -> int: ...
    def is_below(self, node_id: int, ancestor_id: int) -> bool:
        """Whether `ancestor_id` is the node or above it."""

    def evict(self, num_tokens: int) -> list[Freed]:
        """Free so many tokens, in whole pages (or leaves), least valuable first; fewer if there are no more."""

    def detach(self, namespace: Namespace | None = None) -> Detached:
        """Make a namespace (or everything) unmatchable for ever."""

    def close_gate(self, key: RadixKey) -> Closed:
        """Gate the node at which the match of a key ends, and pin it; unless a gate is met, even one that lets pass."""

    def set_gate(self, node_id: int, gate: Gate) -> None:
        """Let walkers pass a gated node, or stop them again."""

    def open_gate(self, node_id: int) -> list[Freed]:
        """Remove a gate and its pin."""

    def pin_below(self, node_id: int) -> list[int]:
        """Pin every leaf at or below a node; the ids to unpin."""

    def evict_below(self, node_id: int) -> list[Freed]:
        """Free all below a node, of which nothing may be pinned."""

    def take_events(self) -> list[KVCacheEvent]: ...
    def walk(self, *, detached: bool = False) -> Iterator[NodeView]:
        """Every node, a parent before its children; with `detached` those that were flushed and are held."""
