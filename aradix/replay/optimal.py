"""The clairvoyant bound: what a cache would find that knew every request to come.

Belady's rule, on pages of a prefix tree: what has to go is the page whose next use lies furthest away, the deepest of
those that are equal. A page is used no later than what follows it, so this never leaves a hole in a prefix. As in the
cache, a request's own pages must all be there while it runs, as far as the pool goes, and what it then leaves behind
may go at once.

What it bounds: hits in pages, of any policy, where requests run one after another in the order of the trace, nothing
is kept free by watermarks, and eviction goes page by page. What it does not: with requests in flight side by side their
order is another one, and a cache may find a little more in it. In tokens it is exact but for pages that are counted in
part (the last block of a prompt that is padded), and with outputs, which take room and are no look-ups, it is a rule of
thumb.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (1966).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from aradix.replay.driver import ReplayResult, ReplaySetup
from aradix.replay.request import Request
from aradix.replay.reuse import Lookup

__all__ = ["OPTIMAL", "PagedTrace", "optimal_hit_tokens"]

OPTIMAL = "optimal"
"""What `--policy` calls the bound."""

_Ids = npt.NDArray[np.int32]
_NEVER = np.int32(2**31 - 1)


class _Numbering:
    """A number for each page of a prefix tree, in the order of first sight."""

    def __init__(self, page_size: int) -> None:
        self.parents: list[int] = []
        self._page_size = page_size
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._roots: dict[Hashable, int] = {}
        self._last: dict[Hashable, tuple[npt.NDArray[Any], _Ids]] = {}

    def path(self, request: Request, with_output: bool) -> _Ids:
        """The pages of a prompt, and of its output if asked; what is no whole page is none."""
        ids = np.asarray(request.ids)
        if with_output and len(request.output):
            ids = np.concatenate((ids, request.output))
        if request.block_size > 1:
            rows = np.repeat(ids, request.block_size // self._page_size).reshape(-1, 1)
        else:
            rows = ids[: len(ids) // self._page_size * self._page_size].reshape(-1, self._page_size)
        rows = np.ascontiguousarray(rows)
        # The first number of a namespace is below 0, as no page's is.
        node = self._roots.setdefault(request.extra_key, -1 - len(self._roots))
        known, numbers = self._last.get((request.session, request.extra_key), (rows[:0], np.empty(0, np.int32)))
        size = min(len(rows), len(known))
        differ = (rows[:size] != known[:size]).any(axis=1)
        same = int(differ.argmax()) if differ.any() else size
        path = np.empty(len(rows), np.int32)
        path[:same] = numbers[:same]
        if same:
            node = int(path[same - 1])
        for place in range(same, len(rows)):
            # Pages of one block differ only in their place.
            key = node, rows[place].tobytes()
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self.parents)
                self.parents.append(node)
            path[place] = node = number
        self._last[request.session, request.extra_key] = rows, path
        return path


class PagedTrace:
    """A trace as pages, with the next use of each: made once, and asked for any capacity. Blocks while it reads.

    Memory is 4 bytes for every page of every prompt: 0.4 GB for a trace of a hundred million pages.

    Args:
        requests: in order.
        page_size: in tokens; blocks are whole pages.
        outputs: whether outputs are cached too.

    Raises:
        ReplayError: the trace broke off.
    """

    def __init__(self, requests: Iterable[Request], page_size: int, *, outputs: bool = False) -> None:
        self.page_size = page_size
        self.input_tokens: list[int] = []
        self._paths: list[_Ids] = []
        self._num_prompt: list[int] = []
        self._output_tokens = 0
        numbering = _Numbering(page_size)
        for request in requests:
            self._paths.append(numbering.path(request, outputs))
            self._num_prompt.append(request.num_tokens // page_size)
            self.input_tokens.append(request.input_tokens)
            self._output_tokens += len(request.output) if outputs else 0
        self._parents = np.array(numbering.parents, np.int32)
        self._next_uses = self._find_next_uses()

    @property
    def num_pages(self) -> int:
        """Distinct pages: with so many in the pool nothing is ever evicted."""
        return len(self._parents)

    def lookups(self) -> Iterator[Lookup]:
        """The requests as pages, in order."""
        return map(Lookup, self._paths, self._num_prompt, self.input_tokens)

    def _find_next_uses(self) -> list[tuple[_Ids, _Ids]]:
        """For each request when its pages are looked up next: where along the path that changes, and to what."""
        upcoming = np.full(len(self._parents), _NEVER, np.int32)
        found = []
        for number in range(len(self._paths) - 1, -1, -1):
            path = self._paths[number]
            uses = upcoming[path]
            starts = np.flatnonzero(np.diff(uses, prepend=-1)).astype(np.int32)
            found.append((starts, uses[starts]))
            upcoming[path[: self._num_prompt[number]]] = number
        return found[::-1]

    def hit_tokens(self, num_pages: int, on_progress: Callable[[int], None] | None = None) -> tuple[int, int]:
        """Tokens found, and tokens evicted, with a pool of so many pages. Blocks until it is done."""
        parents = self._parents
        cached = np.zeros(len(parents), np.bool_)
        pinned = np.zeros(len(parents), np.bool_)
        num_below = np.zeros(len(parents), np.int32)
        next_use = np.full(len(parents), _NEVER, np.int32)
        leaves: list[tuple[int, int, int]] = []
        free, hit_tokens, num_evicted = num_pages, 0, 0

        def file(page: int, depth: int) -> None:
            heapq.heappush(leaves, (-int(next_use[page]), -depth, page))

        for number, whole in enumerate(self._paths):
            path = whole[:num_pages]
            held = cached[path]
            num_held = len(path) if held.all() else int(held.argmin())
            num_prompt = min(self._num_prompt[number], len(path))
            hit_tokens += min(min(num_held, num_prompt) * self.page_size, self.input_tokens[number])
            pinned[path] = True
            while free < len(path) - num_held:
                use, depth, page = heapq.heappop(leaves)
                if not cached[page] or pinned[page] or num_below[page] or -use != next_use[page]:
                    continue
                cached[page] = False
                free += 1
                num_evicted += 1
                parent = int(parents[page])
                if parent >= 0:
                    num_below[parent] -= 1
                    if not num_below[parent] and not pinned[parent]:
                        file(parent, -depth - 1)
            new = path[num_held:]
            if len(new):
                cached[new] = True
                free -= len(new)
                above = parents[new]
                np.add.at(num_below, above[above >= 0], 1)
            starts, uses = self._next_uses[number]
            next_use[path] = np.repeat(uses, np.diff(starts, append=len(whole)))[: len(path)]
            pinned[path] = False
            if len(path) and not num_below[path[-1]]:
                file(int(path[-1]), len(path))
            if on_progress is not None:
                on_progress(number + 1)
        return hit_tokens, num_evicted * self.page_size

    def result(self, setup: ReplaySetup, on_progress: Callable[[int], None] | None = None) -> ReplayResult:
        """The bound in the form of a run. Its times are of the computation: no lease was taken."""
        begun = perf_counter()
        hit_tokens, evicted_tokens = self.hit_tokens(setup.num_pages, on_progress)
        return ReplayResult(
            setup=setup,
            num_requests=len(self._paths),
            input_tokens=sum(self.input_tokens),
            hit_tokens=hit_tokens,
            output_tokens=self._output_tokens,
            evicted_tokens=evicted_tokens,
            num_waits=0,
            num_retracts=0,
            lease_p50_us=0.0,
            lease_p99_us=0.0,
            seconds=perf_counter() - begun,
        )


def optimal_hit_tokens(requests: Iterable[Request], num_pages: int, page_size: int, *, outputs: bool = False) -> int:
    """Tokens that a clairvoyant cache of so many pages finds; `PagedTrace` answers for several sizes.

    Does not wait; blocks until it is done.

    Raises:
        ReplayError: the trace broke off.
    """
    return PagedTrace(requests, page_size, outputs=outputs).hit_tokens(num_pages)[0]
