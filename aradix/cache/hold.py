"""`Hold`: what one lease has in its hands. The cache keeps the holds; a `Lease` is the user's handle to one.

Ownership of the tokens of a lease, in token order:

    0 ............ published ............ published + num_own ........ published + len(own)
    |  the tree's, pinned |  the lease's own, computed |  the rest of its last page  |
                          or being computed               (or given back by truncate)
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from aradix.keys import RadixKey
from aradix.params import NodeRef
from aradix.tree.protocol import NOWHERE, Slots

if TYPE_CHECKING:
    from aradix.cache.tenants import Account

__all__ = ["Hold"]


class Hold:
    """The state of a lease. `order` grows, so the youngest lease has the highest; `version` counts changes.

    `given` is the user's key; `key` is what the tree looks up, its bigrams under EAGLE.
    """

    __slots__ = (
        "account",
        "committed",
        "counted",
        "entered",
        "given",
        "key",
        "limit",
        "node_id",
        "num_matched",
        "num_opened",
        "num_own",
        "opened_at",
        "opened_in",
        "opened_when",
        "opening",
        "order",
        "own",
        "priority",
        "published",
        "released",
        "resume",
        "store",
        "stream",
        "used",
        "version",
        "waiting",
    )

    def __init__(
        self,
        order: int,
        key: RadixKey,
        given: RadixKey,
        *,
        limit: int,
        priority: int,
        store: bool,
        resume: bool,
        stream: Any,
        opened_in: CodeType,
        opened_at: int,
    ) -> None:
        self.order = order
        self.key = key
        self.given = given
        self.num_opened = len(given)
        self.limit = limit
        self.priority = priority
        self.store = store
        self.resume = resume
        self.stream = stream
        self.used: set[Hashable] | None = None
        self.account: Account | None = None
        self.opened_in = opened_in
        self.opened_at = opened_at
        self.opened_when = 0.0
        self.node_id = 0
        self.num_matched = 0
        self.published = 0
        self.committed = 0
        self.own: array[int] = array("q")
        self.num_own = 0
        self.version = 0
        self.opening = False
        self.entered = False
        self.released = False
        self.counted = False
        self.waiting = False

    @property
    def num_tokens(self) -> int:
        """Tokens with a slot: pinned and own."""
        return self.published + self.num_own

    @property
    def ref(self) -> NodeRef:
        """The place in the tree that this lease pins; nowhere while nothing of it is there."""
        return NodeRef(self.node_id, self.published) if self.published else NOWHERE

    @property
    def where(self) -> str:
        """File and line that opened the lease."""
        return f"{self.opened_in.co_filename}:{self.opened_at}"

    def fresh_slots_for(self, num_tokens: int, page_size: int) -> int:
        """Slots, in whole pages, that so many more tokens need beyond the rest of the last page."""
        missing = self.num_own + num_tokens - len(self.own)
        return -(-missing // page_size) * page_size if missing > 0 else 0

    def add(self, slots: Slots, num_tokens: int) -> None:
        """Take slots, and count so many more tokens as held."""
        self.own.frombytes(slots.tobytes())
        if self.account is not None:
            self.account.charge(len(slots))
        self.num_own += num_tokens
        self.version += 1

    def own_slots(self, start: int = 0, stop: int | None = None) -> Slots:
        """A copy of the own slots from `start` to `stop`."""
        return np.array(self.own[start:stop], np.int64)

    def take_front(self, num_slots: int) -> None:
        """Let go of the first slots, which the tree now has."""
        del self.own[:num_slots]
        if self.account is not None:
            self.account.charge(-num_slots)
        self.num_own -= num_slots
        self.version += 1

    def cut(self, num_own: int, page_size: int) -> Slots:
        """Keep `num_own` own tokens; the slots of the pages beyond them."""
        keep = -(-num_own // page_size) * page_size
        freed = self.own_slots(keep)
        del self.own[keep:]
        if self.account is not None:
            self.account.charge(-len(freed))
        self.num_own = num_own
        self.version += 1
        return freed

    def touching(self, streams: tuple[Any, ...]) -> tuple[Any, ...]:
        """The streams that may touch these slots: those named by `used_on`, else the engine's and the lease's."""
        if self.used is not None:
            return tuple(self.used)
        if self.stream is None or self.stream in streams:
            return streams
        return (*streams, self.stream)
