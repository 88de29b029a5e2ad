"""`TieredCore`: a tree that also knows the host tier, and the records of its jobs.

**Residency.** A node is on the device, on the host, or on both; a node on neither is gone. On each tier what is there
is prefix-closed: a node on the device has its parent on the device, a node with a host copy has a parent with one
(roots count as both). So a path is on both tiers at first, and then on one of the two alone. Host slots are integers
like device slots, handed in by the shell and handed back when no node owns them.

**Jobs.** A copy is a job between two steps: `begin_...` decides what is copied and protects both ends, the shell
copies for as long as it takes, `end_...` says how that went. Every job that was begun is ended exactly once, whatever
happened meanwhile: splits, inserts, flushes, a cancelled waiter. Its id is never used again. Jobs are never refused at
their end; what cannot be adopted any more is handed back. In all that is handed in or out, slots are in token order and
those of one job cover the tokens `start` to `end` of one path.

**Latches.** Nodes of a store are `WRITING`, those of a load `LOADING`; no node is in two jobs that have a latch, and a
latched node is never merged. Splits take part: both halves are in the job. Walks do not look at latches, so nothing
is ever delayed by a copy:

- A `WRITING` node is pinned by its job, as by a lease: it cannot be evicted, trimmed or flushed away under the copy.
  It is matched, pinned and inserted below as always.
- A `LOADING` node is on the host alone, with its host slots held by the job, and its parent on the device pinned. If
  somebody computes the same tokens and inserts them before the load ends, the insert wins: the node is on both from
  then on, and the slots that the load brings for it come back unused.

**What the host tier changes in the steps of `TreeCore`:**

- `match` gives the device part as ever, and says how far the host goes on (`host_hit`, `best`, `loading`). It touches
  all of it, the host part too, and pins the device part only. `peek` counts the device part.
- `insert` and `extend` over tokens that are on the host alone adopt the caller's slots for them; `prefix_len` and
  `existing` are of the device part, as ever.
- `evict` takes the device slots of its victims. A victim with a host copy stays as a node on the host (a trimmed one
  leaves its tail there); one without is gone. It gets a new id either way, so that a place named earlier is stale.
- `detach`, `unpin`, `open_gate`, `evict_below` may hand back host slots too, in `Freed.host_slots`. A flush hands back
  at once what no pin and no job holds; the rest comes back from the step that ends the last of them.
- `pin`, `slots_of`: a place on the host alone raises KeyError, as one that is no more.
- `close_gate`, `pin_below` know the device part only: a gate stands where that ends, and what is on the host lies below
  it. Host eviction goes on below a gate, jobs do not begin there, and a gate is granted only after they have ended.
- Counters without `host` in their name count device tokens; `num_nodes` counts all nodes.
- Events carry their medium: stored on the host when a store ends, removed from the device when a victim drops to the
  host, stored on the device when a load ends, removed from the host by `evict_host`.

Source of the idea: SGLang's HiRadixCache (host copies as a prefix from the root, backup thresholds, load-back); that a
job's end revalidates instead of locking the tree meanwhile is this project's own.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from aradix.keys import Namespace, RadixKey
from aradix.params import NodeRef
from aradix.tree.protocol import Freed, Latch, Ready, Slots, TreeCore

__all__ = ["HostRead", "JobView", "Landed", "LoadJob", "Peeked", "StoreJob", "TieredCore", "WrittenBack"]


class Peeked(NamedTuple):
    """Tokens that a match would find: on the device, and beyond that on the host."""

    device: int
    host: int


class StoreJob(NamedTuple):
    """A copy from the device to the host that has begun.

    Args:
        job_id: for `end_store`.
        namespace: of the path.
        start: tokens from the root to the first one to copy; everything before it has a host copy.
        end: tokens from the root to behind the last one.
        slots: device slots of the tokens between, pinned until the job ends.
        ready: events behind which their KV is complete: the copy has to wait for them.
        last: where they end.
    """

    job_id: int
    namespace: Namespace
    start: int
    end: int
    slots: Slots
    ready: tuple[Ready, ...]
    last: NodeRef


class LoadJob(NamedTuple):
    """What `begin_load` found.

    Args:
        job_id: for `end_load`; 0 where there is nothing to load.
        joined: somebody else's job loads the first of these tokens already: wait until it has ended, then match again.
            The job is not yours to end, and `host_slots` are empty.
        start: tokens from the root to the first one to load, where the device part ends.
        end: tokens from the root to behind the last one.
        host_slots: of the tokens between, held until the job ends.
    """

    job_id: int
    joined: bool
    start: int
    end: int
    host_slots: Slots


class HostRead(NamedTuple):
    """Host slots that stay as they are until `end_read(job_id)`; they cover the tokens `start` to `end` of a path."""

    job_id: int
    start: int
    end: int
    host_slots: Slots


class Landed(NamedTuple):
    """How much of a copy the tree adopted.

    Args:
        num_tokens: adopted.
        end: tokens from the root to behind the last adopted one.
        last: that place; `NOWHERE` if nothing of the path is left to name.
        unused: of the slots handed in, those that were not adopted: the caller's to free.
        freed: what the job had held and nobody else holds, after a flush.
    """

    num_tokens: int
    end: int
    last: NodeRef
    unused: Slots
    freed: list[Freed]


class WrittenBack(NamedTuple):
    """What `write_back` could do at once, and what it began.

    Args:
        freed: device slots that are free now.
        jobs: stores that were begun; when they have ended, ask again, and the victims go at once.
        num_coming: device tokens that will be evictable at once when these jobs, and those that stand in the way of
            further victims, have ended.
    """

    freed: list[Freed]
    jobs: list[StoreJob]
    num_coming: int


class JobView(NamedTuple):
    """A job between its two steps: what an audit has to count. A node id of 0 names none.

    Args:
        job_id: its id.
        latch: of its nodes; `NONE` for a `HostRead`.
        pinned: the node at which the job's pin on the device ends: the last of a store, the one above a load.
        held: the node at which its hold on host copies ends.
        start: tokens from the root to the first of its tokens.
        end: tokens from the root to behind the last.
    """

    job_id: int
    latch: Latch
    pinned: int
    held: int
    start: int
    end: int


class TieredCore(TreeCore, Protocol):
    """A radix tree whose nodes may have a host copy. See the module's docstring for what holds for every method.

    A core is made with `backup_hits`: tokens are due for a store once `NodeView.hit_count` is so high; `None` is never.
    Whether an insert is a hit its caller says (`new_hits`): for the async cache, which does not count it, 0 is SGLang's
    write-through and 1 its selective one; the SGLang adapter counts it, unless it is of a chunk, and says 1 and 2.
    """

    @property
    def host_tokens(self) -> int:
        """Tokens that have a host copy."""

    @property
    def host_evictable_tokens(self) -> int:
        """Those of them that `evict_host` could free one after the other: on the host alone, and not held."""

    @property
    def detached_host_tokens(self) -> int:
        """Tokens whose host copies were flushed and are still held by a job."""

    @property
    def num_due(self) -> int:
        """How many nodes may be due for a store; nodes that wait for a job to end are counted."""

    def peek_tiers(self, key: RadixKey) -> Peeked:
        """`peek` by tier: no split, no touch, no statistics; gates are looked through."""

    # ---- device to host ----

    def begin_stores(self, max_tokens: int | None = None) -> list[StoreJob]:
        """Begin to store what is due, the newest first: one job for each path.

        A job covers all of a path that has no host copy, so that copies stay prefix-closed. What lies below a node
        that is being stored already stays due: call again after each `end_store` (and after each step that counts
        hits or inserts). Stops before a further job that would exceed `max_tokens` in sum; the rest stays due. The
        shell takes host slots for each job; if there are none, it ends the job with `None`, and the tokens are due
        again at their next hit.
        """

    def begin_store(self, node_id: int) -> StoreJob | None:
        """Begin to store a path, due or not. `None` if it has a host copy, or where part of it is in a job already.

        Raises:
            KeyError: there is no such node.
        """

    def end_store(self, job_id: int, host_slots: Slots | None, *, num_ok: int | None = None) -> Landed:
        """Say that a store is over, and give the host slots their nodes, however those were split meanwhile.

        Args:
            job_id: of the job.
            host_slots: for the job's first tokens, in token order (fewer than all is allowed); `None` if it failed.
            num_ok: how many of these slots hold what was copied, counted from the first; all if not given. It is
                rounded down to whole pages; what lies behind stays on the device alone.

        After a flush nothing is adopted. The pin on the device slots ends here, and no victim is taken: whoever wanted
        the device slots evicts again, and gets them unless somebody matched, pinned or extended the path meanwhile.

        Raises:
            KeyError: no such store is under way.
        """

    def write_back(self, num_tokens: int) -> WrittenBack:
        """Make room for so many device tokens without losing any: `evict`, but victims without a host copy are stored.

        Least valuable first, as `evict` goes: a victim with a host copy goes at once, for one without a store is
        begun; both count towards `num_tokens`. It may be less than asked for, since what lies above a victim can go
        only after it: wait for the jobs and ask again. Fall back to `evict` if the host has no room.
        """

    # ---- host to device ----

    def begin_load(self, node_id: int, key: RadixKey, *, limit: int | None = None, at_least: int = 1) -> LoadJob:
        """Begin to load what the host holds of a key below a pinned node: the source is held before room is made.

        Args:
            node_id: a node that the caller has pinned: where the device part of the key's match ended, or above.
            key: from the root on.
            limit: in tokens from the root; whole pages are loaded.
            at_least: fewer tokens than this are not worth a job: nothing is begun.

        Nothing is found on a flushed path, behind a pending gate, or where the device holds it by now. If the first
        token is being loaded already, the answer names that job (`joined`), whatever its length: single flight.

        Raises:
            KeyError: there is no such node.
        """

    def end_load(self, job_id: int, slots: Slots, num_ok: int, *, ready: tuple[Ready, ...] = ()) -> Landed:
        """Say that a load is over: the first tokens are on the device now, as far as it succeeded.

        Args:
            job_id: of the job; not one that was joined.
            slots: device slots for the job's first tokens, in token order; fewer than all, or none, is allowed.
            num_ok: how many of them hold their KV, counted from the first; rounded down to whole pages, so what is
                adopted is a shorter, but true prefix.
            ready: events behind which the copy is complete, for readers on other streams.

        What was flushed, or inserted by somebody meanwhile, is not adopted. The job's pins end here: whoever wants to
        keep what was loaded matches it with a pin in the same step of the loop (the leader and all that joined).

        Raises:
            KeyError: no such load is under way.
        """

    # ---- the host alone ----

    def evict_host(self, num_tokens: int) -> list[Freed]:
        """Free so many host tokens, in whole pages (or nodes), least valuable first; fewer if there are no more.

        Only what left the device, is held by no job, and has nothing below it on any tier.
        """

    def insert_host(self, key: RadixKey, start: int, host_slots: Slots) -> Landed:
        """Give host copies that came from elsewhere (a storage tier) to the tokens of a key from `start` on.

        New nodes are on the host alone; tokens that are on the device get their host copy beside it. What has a host
        copy already is not adopted, nor what lies behind a gate, a store under way, or a gap (`start` deeper than the
        host copies of the path go). `host_slots` are of whole pages.
        """

    def begin_read(self, ref: NodeRef, start: int = 0) -> HostRead:
        """Hold the host slots of a path from token `start` to a place, for somebody who reads them (a write-behind).

        Raises:
            KeyError: the place is no more, or has no host copy.
        """

    def end_read(self, job_id: int) -> list[Freed]:
        """End a `begin_read`; gives back what was flushed meanwhile and is held by nobody now.

        Raises:
            KeyError: no such read is under way.
        """

    def hashes_of(self, ref: NodeRef, start: int = 0) -> list[bytes]:
        """The chained digests of the pages of a path from token `start` to a place, on whatever tier they are.

        They are those of `RadixKey.hash_chain`. Costs the length of the path unless events are recorded.

        Raises:
            KeyError: the place is no more.
        """

    def jobs(self) -> list[JobView]:
        """Every job that has begun and not ended, the oldest first."""
