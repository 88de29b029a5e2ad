"""`ReuseRecord`: what a tree remembers of how its tokens were used, evicted ones too, and what that says of the future.

It is the working part of the policy `Tenure`, whose docstring has the idea. Everything here is whole numbers, so that
the compiled core, which does the same in `reuse.cpp`, comes to the same answers.

Time goes in epochs of 2^n ticks, n such that a cache that goes by recency turns over in some ten to thirty of them. A
table counts tokens by epoch of last use and class of uses, held or evicted. Among tokens of one class the later used
ones rank higher, so a rank is a level in the table, and for each candidate stay the levels that a cache of this
capacity would hold follow from it: what is used next is a hit for every candidate that would hold it. That is kept
exact from tick to tick: where all comes back after much the same time, a little too much held makes all the difference.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from aradix.keys import Namespace
from aradix.policies import NodeStats, use_class, use_credit
from aradix.tree.node import TreeNode

__all__ = ["ReuseRecord", "page_prints", "seed_of"]

NUM_CLASSES = 16
NUM_EPOCHS = 512
MIN_SHIFT = 2
NUM_RUNGS = 11
"""Candidate stays: none, then 1, 2, 4, ... epochs a doubling of uses."""

OLD_EPOCHS, YOUNG_EPOCHS = 32, 10
DECAY = 9
CLEAR = 32
"""A candidate that found more than recency by one part in so many is clearly better."""
SMALL = 64
"""A lead of less than one part in so many is not worth leaving recency for, however sure it is."""
SURE = 6
"""A lead between the two must, squared, be so many variances of it, if stretches are independent of each other."""
SAMPLE_EPOCHS = 4
"""What a candidate gains on recency is looked at in stretches of so many epochs."""

_WHOLE = 256
_MOST = 1 << 24
CHUNK_PAGES, CHUNK_TOKENS = 8, 512
"""What is remembered together is at most so many pages, or tokens if that is more."""
SLOWNESS = 32
"""The capacity falls by no more than one part in so many in an epoch."""
MEMORY = 6
"""Evicted tokens that are remembered, in capacities."""
_PRINT = (1 << 64) - 1
_MIXER = np.uint64(0xD6E8FEB86659FD93)

Prints = np.ndarray[tuple[int], np.dtype[np.uint64]]


def _mixed(numbers: Prints) -> Prints:
    mixed = numbers * _MIXER
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIXER
    mixed ^= mixed >> np.uint64(29)
    return mixed


NUM_KEYS = np.uint64(128)
_KEYS = _mixed(np.arange(1, NUM_KEYS + 1, dtype=np.uint64)) >> np.uint64(32) | np.uint64(1)
"""Keys of the words of a path: these again and again, times a factor that differs from one time round to the next."""


class Ghost(NamedTuple):
    """What is remembered of evicted tokens."""

    num_tokens: int
    uses: int
    last_use: int


def page_prints(tokens: bytes | bytearray, start: int, page_bytes: int) -> Prints:
    """A number for each page of tokens that lie from byte `start` of a path on; the sum of a path's names it.

    It is the sum of the page's words, each times the key of its place: other tokens add up to the same only by a very
    rare chance, and such sums a processor does for several words at once.
    """
    words = np.frombuffer(tokens, np.uint32).astype(np.uint64)
    places = np.arange(start // 4, start // 4 + len(words), dtype=np.uint64)
    keys = _KEYS[places % NUM_KEYS] * (_mixed(places // NUM_KEYS) | np.uint64(1))
    prints: Prints = (words * keys).reshape(-1, page_bytes // 4).sum(axis=1, dtype=np.uint64)
    return prints


def _sum(prints: Prints) -> int:
    return int(prints.sum(dtype=np.uint64))


def seed_of(namespace: Namespace) -> int:
    """The fingerprint of an empty path."""
    return int.from_bytes(namespace.digest()[:8], "little")


def _stay(rung: int) -> int:
    return 1 << (rung - 1) if rung else 0


class ReuseRecord:
    """Ranks the leaves of one tree, and is told of everything that happens to its nodes.

    Args:
        page_size: tokens a page.
        page_bytes: bytes of key a page.
    """

    def __init__(self, page_size: int, page_bytes: int) -> None:
        self.capacity = 0
        """Tokens that the cache holds when it has to evict; 0 before it ever had to."""
        self.rung = 0
        self.shift = MIN_SHIFT
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._item_bytes = page_bytes // page_size
        self._epoch = 0
        self._horizon = 0  # ticks before it are no longer in the table, whatever its epochs are now
        self._table = [[0] * NUM_EPOCHS for _ in range(NUM_CLASSES)]
        self._cuts = [0] * NUM_RUNGS
        self._held = [0] * NUM_RUNGS
        self._below = [0] * NUM_RUNGS  # tokens of the level below the cut, of which a part fits
        self._found = [0] * NUM_RUNGS  # tokens that each would have found, in parts, the late ones counting more
        self._leads = [0] * NUM_RUNGS  # over recency, at the last look
        self._gains = [0] * NUM_RUNGS  # on recency, in the stretch that is under way
        self._squares = [0] * NUM_RUNGS  # sum of the gains' squares, which decays as what was found does
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()
        self._ghost_tokens = 0
        self._lowered = 0  # the epoch in which the capacity last fell

    # ---- what a policy does ----

    @property
    def stay(self) -> int:
        """Ticks that each doubling of its uses earns a leaf."""
        return _stay(self.rung) << self.shift

    def rank(self, node: NodeStats, /) -> int:
        return 2 * node.last_access + self.stay * use_credit(use_class(node.uses))

    @staticmethod
    def state(node: NodeStats) -> tuple[int, int]:
        return use_class(node.uses), node.last_access

    # ---- what happens to nodes ----

    def note_capacity(self, num_tokens: int) -> None:
        """So many tokens are held as some have to go. What leases have taken for a moment is not gone for good."""
        if num_tokens >= self.capacity:
            self.capacity = num_tokens
        elif num_tokens and self._lowered != self._epoch:
            self._lowered = self._epoch
            self.capacity = max(num_tokens, self.capacity - (self.capacity + SLOWNESS - 1) // SLOWNESS)

    def hit(self, node: TreeNode, num_hits: int, tick: int) -> None:
        """A node's hit count is about to rise."""
        if not num_hits or node.detached or node.parent is None:
            return
        last_use, num_tokens = node.last_use, node.num_tokens
        before, after = use_class(node.uses), use_class(node.uses + num_hits)
        self._score(num_tokens, before, last_use)
        node.last_use = tick
        self._add(-num_tokens, before, last_use)
        self._add(num_tokens, after, tick)

    def merge(self, parent: TreeNode, child: TreeNode) -> None:
        """Two neighbours become one, which was last used when the later used of them was."""
        for one, other in ((parent, child), (child, parent)):
            if one.last_use < other.last_use:
                of_uses = use_class(one.uses)
                self._add(-one.num_tokens, of_uses, one.last_use)
                one.last_use = other.last_use
                self._add(one.num_tokens, of_uses, one.last_use)

    def welcome(self, leaf: TreeNode, tick: int) -> list[tuple[int, int]]:
        """A leaf was inserted; gives its runs as (tokens, uses known from before), from the left.

        The leaf is filed as the last run says; the caller splits the others off.
        """
        assert leaf.parent is not None
        leaf.last_access = leaf.last_use = tick
        begin = leaf.depth - len(leaf.tokens)
        sums = np.add.accumulate(page_prints(leaf.tokens, begin, self._page_bytes), dtype=np.uint64)
        base = leaf.parent.fingerprint
        leaf.fingerprint = (base + int(sums[-1])) & _PRINT
        num_tokens = leaf.num_tokens
        runs: list[tuple[int, int]] = []
        done = 0
        while done < num_tokens:
            ghost = self._ghosts.pop((base + int(sums[done // self._page_size])) & _PRINT, None)
            count, uses = num_tokens - done, 0
            if ghost is not None:
                self._forget(ghost)
                count, uses = min(count, ghost.num_tokens), ghost.uses
                self._score(count, use_class(uses), ghost.last_use)
            of_uses = use_class(leaf.uses + uses)
            self._add(count, of_uses, tick)
            if runs and use_class(leaf.uses + runs[-1][1]) == of_uses:  # what would be merged at once is not split
                runs[-1] = runs[-1][0] + count, min(runs[-1][1], uses)
            else:
                runs.append((count, uses))
            done += count
        return runs

    def leave(self, node: TreeNode, num_tokens: int) -> None:
        """The last `num_tokens` of a node are about to go, evicted."""
        size, page = num_tokens * self._item_bytes, self._page_size
        prints = page_prints(node.tokens[len(node.tokens) - size :], node.depth - size, self._page_bytes)
        left, chunk_pages = num_tokens // page, max(CHUNK_PAGES, CHUNK_TOKENS // page)
        while left:
            count = (left - 1) % chunk_pages + 1
            gone = prints[left - count : left]
            node.fingerprint = (node.fingerprint - _sum(gone)) & _PRINT
            key = (node.fingerprint + int(gone[0])) & _PRINT
            known = self._ghosts.pop(key, None)
            if known is not None:
                self._forget(known)
            self._ghosts[key] = Ghost(count * page, node.uses, node.last_use)
            self._ghost_tokens += count * page
            left -= count
        while self._ghost_tokens > MEMORY * self.capacity:
            self._forget(self._ghosts.popitem(last=False)[1])

    def drop(self, node: TreeNode) -> None:
        """A node is flushed."""
        if node.parent is not None:
            self._add(-node.num_tokens, use_class(node.uses), node.last_use)

    def split(self, head: TreeNode, tail: TreeNode) -> None:
        """A node was cut in two."""
        above = head.parent
        if above is not None and len(head.tokens) <= len(tail.tokens):
            prints = page_prints(head.tokens, above.depth, self._page_bytes)
            head.fingerprint = (above.fingerprint + _sum(prints)) & _PRINT
        else:
            prints = page_prints(tail.tokens, head.depth, self._page_bytes)
            head.fingerprint = (tail.fingerprint - _sum(prints)) & _PRINT

    def advance(self, tick: int) -> bool:
        """Time has come to a tick; whether leaves rank otherwise now, and must be filed again."""
        if tick >> self.shift == self._epoch:
            if self.capacity:
                for rung in range(NUM_RUNGS):
                    if self._held[rung] > self.capacity:
                        self._settle(rung)
            return False
        before = self.stay
        self._epoch = tick >> self.shift
        self._clear_oldest()
        self._note_gains()
        self._found = [found - (found >> DECAY) for found in self._found]
        if self.capacity:
            self._settle_all()
            age = self._epoch - self._cuts[0] // 2
            if age > OLD_EPOCHS:
                self._widen()
            elif age < YOUNG_EPOCHS and self.shift > MIN_SHIFT:
                self._narrow(tick)
            self._choose()
        elif self._epoch > NUM_EPOCHS // 2:
            self._widen()  # nothing went yet: all that there is stays in the table
        self._leads = [found - self._found[0] for found in self._found]
        return self.stay != before

    # ---- the table ----

    def _level(self, of_uses: int, epoch: int, rung: int) -> int:
        return 2 * epoch + _stay(rung) * use_credit(of_uses)

    def _add(self, num_tokens: int, of_uses: int, last_use: int) -> None:
        if last_use < self._horizon:
            return
        epoch = last_use >> self.shift
        self._table[of_uses][epoch % NUM_EPOCHS] += num_tokens
        for rung in range(NUM_RUNGS):
            if self._level(of_uses, epoch, rung) >= self._cuts[rung]:
                self._held[rung] += num_tokens

    def _forget(self, ghost: Ghost) -> None:
        self._ghost_tokens -= ghost.num_tokens
        self._add(-ghost.num_tokens, use_class(ghost.uses), ghost.last_use)

    def _tokens_at(self, level: int, rung: int) -> int:
        """Tokens of one level."""
        total = 0
        for of_uses in range(NUM_CLASSES):
            twice = level - _stay(rung) * use_credit(of_uses)
            if twice % 2 == 0 and self._epoch - NUM_EPOCHS < twice // 2 <= self._epoch:
                total += self._table[of_uses][twice // 2 % NUM_EPOCHS]
        return total

    def _clear_oldest(self) -> None:
        epoch = self._epoch - NUM_EPOCHS
        self._horizon = max(self._horizon, epoch + 1 << self.shift)
        for of_uses, counts in enumerate(self._table):
            num_tokens, counts[epoch % NUM_EPOCHS] = counts[epoch % NUM_EPOCHS], 0
            if num_tokens:
                for rung in range(NUM_RUNGS):
                    if self._level(of_uses, epoch, rung) >= self._cuts[rung]:
                        self._held[rung] -= num_tokens

    def _settle_all(self) -> None:
        for rung in range(NUM_RUNGS):
            self._settle(rung)

    def _settle(self, rung: int) -> None:
        """Raise a candidate's cut until no more is held above it than fits."""
        top = 2 * self._epoch + _stay(rung) * use_credit(NUM_CLASSES - 1)
        cut = max(self._cuts[rung], 2 * (self._epoch - NUM_EPOCHS + 1))
        while self._held[rung] > self.capacity and cut <= top:
            self._held[rung] -= self._tokens_at(cut, rung)
            cut += 1
        self._cuts[rung] = cut
        self._below[rung] = self._tokens_at(cut - 1, rung)

    def _part(self, rung: int) -> int:
        """How much of the level below its cut a candidate holds, of `_WHOLE`."""
        free, below = self.capacity - self._held[rung], self._below[rung]
        return min(_WHOLE, max(0, free) * _WHOLE // below) if below > 0 else 0

    def _recount(self) -> None:
        for rung in range(NUM_RUNGS):
            self._held[rung] = 0
        for of_uses, counts in enumerate(self._table):
            for epoch in range(self._epoch - NUM_EPOCHS + 1, self._epoch + 1):
                num_tokens = counts[epoch % NUM_EPOCHS]
                if num_tokens:
                    for rung in range(NUM_RUNGS):
                        if self._level(of_uses, epoch, rung) >= self._cuts[rung]:
                            self._held[rung] += num_tokens

    def _widen(self) -> None:
        """Make epochs twice as long."""
        for of_uses, counts in enumerate(self._table):
            wider = [0] * NUM_EPOCHS
            for epoch in range(self._epoch - NUM_EPOCHS + 1, self._epoch + 1):
                wider[(epoch >> 1) % NUM_EPOCHS] += counts[epoch % NUM_EPOCHS]
            self._table[of_uses] = wider
        self._epoch >>= 1
        self.shift += 1
        for of_rungs in (self._found, self._gains, self._squares, self._cuts):
            of_rungs[1 : NUM_RUNGS - 1] = of_rungs[2:NUM_RUNGS]
        self._cuts = [cut >> 1 for cut in self._cuts]
        self.rung -= self.rung > 1
        self._recount()
        if self.capacity:
            self._settle_all()

    def _narrow(self, tick: int) -> None:
        """Make epochs half as long; which half a token was used in is not known, so each has half of them."""
        wide_epoch = self._epoch
        self.shift -= 1
        self._epoch = tick >> self.shift
        self._horizon = max(self._horizon, self._epoch - NUM_EPOCHS + 1 << self.shift)
        for of_uses, counts in enumerate(self._table):
            narrow = [0] * NUM_EPOCHS
            for epoch in range(self._epoch - NUM_EPOCHS + 1, self._epoch + 1):
                if epoch >> 1 > wide_epoch - NUM_EPOCHS:
                    num_tokens = counts[(epoch >> 1) % NUM_EPOCHS]
                    narrow[epoch % NUM_EPOCHS] = num_tokens // 2 if epoch % 2 else num_tokens - num_tokens // 2
            self._table[of_uses] = narrow
        for of_rungs in (self._found, self._gains, self._squares, self._cuts):
            of_rungs[2:NUM_RUNGS] = of_rungs[1 : NUM_RUNGS - 1]
        self._cuts = [2 * cut for cut in self._cuts]
        self.rung += 0 < self.rung < NUM_RUNGS - 1
        self._recount()
        self._settle_all()

    # ---- candidates ----

    def _score(self, num_tokens: int, of_uses: int, last_use: int) -> None:
        """Tokens are used: a hit for each candidate that would hold them."""
        if last_use < self._horizon:
            return
        epoch = last_use >> self.shift
        for rung in range(NUM_RUNGS):
            level = self._level(of_uses, epoch, rung)
            if level >= self._cuts[rung]:
                part = _WHOLE
            elif level == self._cuts[rung] - 1:
                part = self._part(rung)
            else:
                continue
            self._found[rung] += num_tokens * part

    def _note_gains(self) -> None:
        """An epoch is over: what has each candidate gained on recency, and how much does that vary?"""
        for rung in range(1, NUM_RUNGS):
            self._gains[rung] += self._found[rung] - self._found[0] - self._leads[rung]
        if self.capacity and self._epoch % SAMPLE_EPOCHS == 0:
            for rung in range(1, NUM_RUNGS):
                self._squares[rung] -= self._squares[rung] * SAMPLE_EPOCHS >> DECAY
                self._squares[rung] += self._in_capacities(self._gains[rung]) ** 2
                self._gains[rung] = 0

    def _in_capacities(self, score: int) -> int:
        """A score in parts of the capacity, bounded, so that its square stays small."""
        return max(-_MOST, min(_MOST, score * _WHOLE // self.capacity))

    def _is_sure(self, rung: int) -> bool:
        """Whether a candidate's lead over recency is clear, or not small and more than the noise in it."""
        lead = self._found[rung] - self._found[0]
        if lead * SMALL <= self._found[0]:
            return False
        in_capacities = self._in_capacities(lead)
        return lead * CLEAR > self._found[0] or in_capacities * in_capacities > SURE * self._squares[rung]

    def _choose(self) -> None:
        """Go a rung towards the candidate that would have found the most.

        What is cached follows the stay only slowly, so there is nothing to win by jumps, and hits to lose if the
        best candidate is another one by then. From one rung to the next no proof is asked: those hold much the same.
        """
        best = 0
        for rung in range(1, NUM_RUNGS):
            if self._found[rung] > self._found[best] and (
                (self.rung and abs(rung - self.rung) <= 1) or self._is_sure(rung)
            ):
                best = rung
        self.rung += (best > self.rung) - (best < self.rung)
