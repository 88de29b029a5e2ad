"""`Requests`: the two calls for schedulers that keep a table of requests. `request_rows.py` draws who owns what.

A request stands on the place it has pinned, as a lease does, and what it publishes goes below: the pin moves along in
the same step. So neither call can meet what has been evicted, and neither ever waits, for gates neither.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from aradix.cache.leases import Leases
from aradix.cache.request_rows import RequestRow, allocated_len, row_slots
from aradix.errors import UsageError
from aradix.keys import RadixKey
from aradix.params import CacheInitParams, NodeRef
from aradix.tree.protocol import NOWHERE, Inserted, Slots, TreeCore

__all__ = ["Requests"]


class Requests:
    """The steps that publish a row, or end it. None waits.

    Args:
        params: of the cache.
        core: its tree.
        leases: for pins, fences and those who wait.
    """

    def __init__(self, params: CacheInitParams, core: TreeCore, leases: Leases) -> None:
        self._params = params
        self._core = core
        self._leases = leases

    def unfinished(self, req: RequestRow, view: RadixKey, num_computed: int) -> None:
        """Publish the whole pages of what a request has computed, and move its pin and its row there."""
        table = self._params.req_to_token_pool
        row = row_slots(table, req, 0, num_computed)
        if not self._params.disable:
            self._publish(req, view)
            row = row_slots(table, req, 0, num_computed)
        req.prefix_indices = row
        self._leases.changed()

    def finished(self, req: RequestRow, view: RadixKey | None, num_committed: int) -> None:
        """Publish what a request has computed (not without a view), give back all else that it has, and unpin."""
        pool, pins = self._leases.pool, self._leases.low_pins
        pages = self._own_pages(req, num_committed)
        if view is not None and not self._params.disable:
            self._take_over(pages)
            pool.disown(pages)  # only looked at: what follows may rely on it
            self._publish(req, view)
            pages = self._own_pages(req, num_committed)
        node = self._node_of(req)
        self._take_over(pages)
        req.last_node = None
        pool.give_back_all(pins.unpin(node) if pins.has(node) else [])
        pool.give_back(pages, pool.streams)
        self._leases.changed()

    # ---- parts of a step ----

    def _node_of(self, req: RequestRow) -> NodeRef:
        """The place that a request has pinned. UsageError if it has not, or says that it owns less of its row."""
        node: NodeRef = NOWHERE if req.last_node is None else req.last_node
        if node.depth != req.cache_protected_len:
            raise UsageError(
                f"the request has pinned {node.depth} tokens, but says that the tree owns {req.cache_protected_len} of "
                "its row; set cache_protected_len to what was matched, and finish a request once"
            )
        if node != NOWHERE and not self._leases.low_pins.has(node):
            raise UsageError(f"the request's last_node {node!r} is not pinned; inc_lock_ref it when it is matched")
        return node

    def _own_pages(self, req: RequestRow, num_committed: int) -> Slots:
        """The slots of every page that the request owns something of: the last page may be used in part."""
        num_allocated = allocated_len(req, num_committed)
        slots = row_slots(self._params.req_to_token_pool, req, req.cache_protected_len, num_allocated).cpu().numpy()
        page_size = self._params.page_size
        pages = np.unique(slots // page_size)
        return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)

    def _take_over(self, slots: Slots) -> None:
        """From now on these are the cache's. UsageError, and nothing was changed, if they are not the request's."""
        if len(slots):
            self._leases.pool.adopt(slots)

    def _publish(self, req: RequestRow, view: RadixKey) -> None:
        page_size = self._params.page_size
        node = self._node_of(req)
        start = node.depth
        stop = len(view) // page_size * page_size
        if stop <= start:
            return
        table = self._params.req_to_token_pool
        slots = row_slots(table, req, start, stop).cpu().numpy()
        ready = self._leases.record_ready(self._leases.pool.streams)
        self._take_over(slots)
        done = self._extend(node, view, slots, getattr(req, "priority", 0) or 0, ready)
        if done is None:
            self._leases.pool.disown(slots)  # they stay the request's
            return
        adopted_from, adopted_to = done.prefix_len - start, done.end - start
        if adopted_to < len(slots):  # a gate stands in the way; the next call tries again
            self._leases.pool.disown(slots[adopted_to:])
        end = NodeRef(done.node_id, done.end)
        if done.end:
            self._leases.low_pins.move(node, end)
            req.last_node, req.cache_protected_len = end, done.end
        if adopted_from:
            # Re-pointed before the duplicates go back: whoever gets those must not be found in this row.
            table.write((req.req_pool_idx, slice(start, done.prefix_len)), torch.from_numpy(done.existing))
            self._leases.pool.give_back(slots[:adopted_from], self._leases.pool.streams)
        self._leases.order_after(self._leases.pool.streams, done.ready)

    def _extend(self, node: NodeRef, view: RadixKey, slots: Slots, priority: int, ready: Any) -> Inserted | None:
        """Add a key below the place that a request stands on.

        None where it was flushed since, so that what was computed before is published no more, or its root has a gate.
        """
        if node != NOWHERE:
            return self._core.extend(self._leases.low_pins.node_id(node), view, slots, priority=priority, ready=ready)
        root = self._core.match(view, limit=0, pin=True)
        if root.gate:
            return None
        done = self._core.extend(root.node_id, view, slots, priority=priority, ready=ready)
        if done is not None and not done.end:
            self._leases.pool.give_back_all(self._core.unpin(done.node_id, touch=False))
        return done
