"""The one interface that both tree cores implement, and the records they answer with.

A call is one atomic step: it never waits, and it returns what has to be freed instead of freeing it. Lengths are in
tokens (bigrams where keys are bigrams). Nodes are named by ids that are never used again; 0 names no node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aradix.events import KVCacheEvent
from aradix.keys import Namespace, RadixKey
from aradix.params import NodeRef

__all__ = [
    "NOWHERE",
    "NO_SLOTS",
    "Closed",
    "Detached",
    "Freed",
    "Gate",
    "Glance",
    "Inserted",
    "Latch",
    "Match",
    "NodeView",
    "Ready",
    "ShareView",
    "Slots",
    "TreeCore",
]

Slots = npt.NDArray[np.int64]

NO_SLOTS: Slots = np.empty(0, np.int64)
NO_SLOTS.flags.writeable = False

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


class Latch(IntEnum):
    """The one transition that a node is in; a walk never waits for it."""

    NONE = 0
    WRITING = 1
    """Its slots are being copied to the host. It is pinned meanwhile, and can be matched as ever."""
    LOADING = 2
    """Its host slots are being copied to the device. Whoever wants it too joins that copy and looks again after it."""


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
    """Slots that no node owns any longer: on the device, with the streams named by leases that used them, and on the
    host, where no copy touches them either. Each of the two may be empty."""

    slots: Slots
    streams: frozenset[Hashable]
    host_slots: Slots = NO_SLOTS


class Match(NamedTuple):
    """Where a walk ended.

    Args:
        num_matched: tokens that the device holds.
        node_id: of the node at which they end; the one pinned, if a pin was asked for.
        last: their end as a place.
        gate: the gated node that stopped the walk (then nothing was touched or pinned), else 0.
        ready: events behind which the KV of the matched tokens is complete.
        host_hit: tokens that follow and that the host holds, but not the device: what can be loaded.
        best: where those end; `last` where there are none. Only for looking: it cannot be pinned while it is on the
            host alone.
        loading: the job that is loading the first of them already, else 0.
    """

    num_matched: int
    node_id: int
    last: NodeRef
    gate: int
    ready: tuple[Ready, ...]
    host_hit: int = 0
    best: NodeRef = NOWHERE
    loading: int = 0


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
    """One node as `walk` shows it; `tokens` are raw int32 bytes. A root has `parent_id` 0 and no tokens.

    `slots` are empty where the node has left the device, `host_slots` are `None` where the host has no copy. `indexed`
    says whether `evict` may take it next, `host_indexed` whether `evict_host` may. `timed` tells of a priority that was
    given for a time when that ends, and the priority after it.
    """

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
    host_slots: Slots | None = None
    host_ref: int = 0
    latch: Latch = Latch.NONE
    host_indexed: bool = False
    timed: tuple[int, int] | None = None

    @property
    def residency(self) -> Literal["device", "host", "both"]:
        """Where the node's KV is; a root counts as being on the device."""
        if self.host_slots is None:
            return "device"
        return "both" if len(self.slots) else "host"


class ShareView(NamedTuple):
    """What one tenant may keep and has on the device, in tokens; the last one, of `None`, is for all not named.

    Args:
        tenant: the field of `Namespace`.
        num_tokens: that it has a claim on.
        cached: in the tree, pinned or not, and flushed while somebody holds them.
        leased: slots of its leases that are not in the tree.
        evicted: so far, by `evict`.
    """

    tenant: str | int | None
    num_tokens: int
    cached: int
    leased: int
    evicted: int


class Glance(NamedTuple):
    """One node as `glance` shows it: little enough to be asked for often. `first_tokens` are of up to eight items."""

    node_id: int
    parent_id: int
    namespace: Namespace
    depth: int
    num_tokens: int
    first_tokens: bytes
    lock_ref: int
    gate: Gate
    latch: Latch
    residency: str
    detached: bool
    hit_count: int
    priority: int
    last_access: int
    created: int
    children: list[int]


class TreeCore(Protocol):
    """A radix tree over token ids. See the module's docstring for the rules that hold for every method.

    These are the steps of a tree that knows the device alone; `aradix.tree.tiered.TieredCore` adds the host, and says
    there what it changes in these.
    """

    name: str
    page_size: int
    failure: BaseException | None
    """The first exception of a user's policy, after which the tree ranks by recency; the shell must report it."""

    merges: bool
    """Whether neighbours that became equal are one node; not after a failure, nor where whole leaves are evicted."""

    on_event: Callable[[], None] | None
    """Called in the middle of a step, when it records the first event since they were taken. It may not raise, nor call
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
    def stay(self) -> int:
        """Under `Tenure`: ticks that each doubling of its uses keeps a leaf longer; 0 for recency."""

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
        held_hits: int = 1,
        new_hits: int = 0,
    ) -> Inserted | int:
        """Insert the whole pages of a key from its root; or the id of the gate met, and then nothing was changed.

        `slots` are of all its tokens. The part that was held already counts `held_hits`, what is new begins with
        `new_hits`. With `past_pending` only granted gates stop it.
        """

    def extend(
        self, node_id: int, key: RadixKey, slots: Slots, *, priority: int = 0, ready: tuple[Ready, ...] = ()
    ) -> Inserted | None:
        """Insert the rest of a key below a pinned node, up to a gate, and move the pin to where it ends.

        `slots` are of the tokens beyond the node's depth. `None`, and then nothing was changed, on a detached node.
        """

    def pin(self, ref: NodeRef) -> int:
        """Pin the path to a place, splitting there if need be; the id to unpin. KeyError if the place is no more."""

    def unpin(self, node_id: int, *, touch: bool = True) -> list[Freed]:
        """Undo one pin; gives back what was detached and is held by nobody now."""

    def record_hit(self, node_id: int) -> None:
        """Count a hit on a path."""

    def mark_streams(self, node_id: int, streams: frozenset[Hashable]) -> None:
        """Name streams that touched the slots of a path."""

    def prioritize(self, node_id: int, start: int, stop: int, priority: int, expires: int) -> None:
        """Give the tokens from `start` to `stop` (whole pages) of the path to a pinned node a priority of their own.

        It stands in place of the highest one among the inserts, which still is counted and takes over at the time
        `expires`; 0 is never, and then a later insert of a higher priority raises it. Never on a detached node.
        Nothing happens under a policy that is known not to look at priorities.
        """

    def decay(self, now: int) -> None:
        """End the priorities whose time is up, on the clock of `expires`."""

    def slots_of(self, ref: NodeRef, start: int = 0) -> Slots:
        """The slots of a path from token `start` to the place: a copy. KeyError if the place is no more."""

    def is_detached(self, node_id: int) -> bool: ...
    def lock_ref(self, node_id: int) -> int: ...
    def is_below(self, node_id: int, ancestor_id: int) -> bool:
        """Whether `ancestor_id` is the node or above it."""

    def evict(
        self, num_tokens: int, *, namespace: Namespace | None = None, demand: int = 0, only_excess: bool = False
    ) -> list[Freed]:
        """Free so many tokens, in whole pages (or leaves), least valuable first; fewer if there are no more.

        Where tenants have shares, the one most above its own gives first, its own least valuable leaves, down to its
        share; `demand` tokens count as those of the tenant of `namespace` meanwhile. With `only_excess` what tenants
        have a claim on is not touched.
        """

    def share_of(self, namespace: Namespace) -> int:
        """The number of the share that a namespace counts to; 0 where there are none."""

    def charge(self, share: int, num_tokens: int) -> None:
        """So many more slots (fewer, below 0) are held for a share's tenants outside of the tree."""

    def shares(self) -> list[ShareView]:
        """All shares, in the order of their numbers; none where tenants have none."""

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

    def namespaces(self) -> list[Namespace]:
        """Those that the tree has a root for, the oldest first."""

    def take_events(self) -> list[KVCacheEvent]:
        """What was recorded since it was last taken."""

    def take_recorded(self) -> Sequence[KVCacheEvent]:
        """The same, as it was recorded: who looks at it first, on whatever thread, pays for what it takes to tell."""

    def view(self, node_id: int) -> NodeView:
        """One node, as `walk` shows it. KeyError if it is no more."""

    def child_ids(self, node_id: int) -> list[int]:
        """The children of a node, those of 0 being the roots that can be matched. KeyError if it is no more."""

    @property
    def tick(self) -> int:
        """Counts the steps that touch; `last_access` and `created` are in it."""

    def roots(self) -> list[int]:
        """The ids of the roots, a namespace each."""

    def glance(self, node_id: int, *, children: bool = True) -> Glance | None:
        """One node, and the ids of its children if asked; None if there is no such node any more."""

    def look(self, key: RadixKey) -> list[int]:
        """The ids of the nodes that a match of a key would walk, from the root on, the last perhaps matched in part."""

    def next_victim(self) -> int:
        """The id of the leaf that `evict` would begin with; 0 if there is none."""

    def walk(self, *, detached: bool = False) -> Iterator[NodeView]:
        """Every node, a parent before its children; with `detached` those that were flushed and are held."""
