"""How soon tokens are used again, counted in tokens: how large an LRU had to be to still have them.

The distance of a page is the number of distinct pages used since its own last use, itself included: the stack distance
of Mattson et al., "Evaluation techniques for storage hierarchies" (1970), so that a block LRU of C tokens finds exactly
what returns within C. A request uses its pages at once, the deepest first. A page was last used no earlier than what
follows it, so along a path the pages last used by one request are a run, and the distances in a run are consecutive:
one sum over requests for each run is all there is to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aradix.replay.optimal import PagedTrace

__all__ = ["LookedUpTrace", "Lookup", "ReuseDistances", "reuse_distances"]


class Lookup(NamedTuple):
    """One request as pages.

    Args:
        pages: numbers of the pages of its prompt and then of its output. Shape `[n]`, int32.
        num_prompt: how many of them are looked up.
        input_tokens: the real length of the prompt.
    """

    pages: npt.NDArray[np.int32]
    num_prompt: int
    input_tokens: int


class LookedUpTrace(PagedTrace):
    """A trace as pages that also tells which of them each request looks up."""

    def lookups(self) -> Iterator[Lookup]:
        """The requests, in order."""
        return map(Lookup, self._paths, self._num_prompt, self.input_tokens)


class ReuseDistances(NamedTuple):
    """Where the input tokens come from. Counts are in tokens.

    Args:
        input_tokens: all.
        bins: tokens by distance: (from above, up to, tokens), distances in tokens that double from bin to bin.
        within: for each capacity asked for, the tokens that return within it.
    """

    input_tokens: int
    bins: tuple[tuple[int, int, int], ...]
    within: tuple[tuple[int, int], ...]

    @property
    def reused_tokens(self) -> int:
        """Input tokens that were there before: what an endless cache finds."""
        return sum(tokens for _, _, tokens in self.bins)


class _Recent:
    """How many pages have their last use at each request, and how many at a later one: a Fenwick tree."""

    def __init__(self, num_requests: int) -> None:
        self._sums = [0] * (num_requests + 1)
        self._total = 0

    def add(self, request: int, pages: int) -> None:
        self._total += pages
        sums, place = self._sums, request + 1
        while place < len(sums):
            sums[place] += pages
            place += place & -place

    def after(self, request: int) -> int:
        """Pages last used after this request."""
        sums, place, found = self._sums, request + 1, self._total
        while place:
            found -= sums[place]
            place &= place - 1
        return found


def reuse_distances(
    lookups: Iterable[Lookup],
    page_size: int,
    *,
    num_requests: int,
    num_pages: int,
    capacities: Sequence[int] = (),
    on_progress: Callable[[int], None] | None = None,
) -> ReuseDistances:
    """Count the input tokens of requests by the distance of their reuse. Does not wait; blocks until it is done.

    Args:
        lookups: the requests, in order.
        page_size: in tokens.
        num_requests: how many there are at most.
        num_pages: above the number of every page.
        capacities: in tokens, to count what returns within each.
        on_progress: told how many requests are done, after each.
    """
    last_use = np.full(num_pages, -1, np.int32)
    recent = _Recent(num_requests)
    num_bins = max(1, num_pages).bit_length() + 1
    counts = [0] * num_bins
    limits = [tokens // page_size for tokens in capacities]
    within = [0] * len(limits)
    input_tokens = 0
    for number, (pages, num_prompt, num_input) in enumerate(lookups):
        input_tokens += num_input
        uses = last_use[pages]
        starts = np.flatnonzero(np.diff(uses, prepend=-2))
        ends = np.append(starts, len(pages))[1:]
        for start, end, use in zip(starts.tolist(), ends.tolist(), uses[starts].tolist(), strict=True):
            if use < 0:
                break
            # What comes before on the path was used since, and is counted off already.
            nearer = recent.after(use) + start
            seen = min(end, num_prompt) - start
            if seen > 0:
                # Of the last page of a prompt, maybe only a part.
                padding = max(0, (start + seen) * page_size - num_input) if start + seen == num_prompt else 0
                first, last = nearer + 1, nearer + seen
                counts[(last - 1).bit_length()] -= padding
                while first <= last:
                    which = (first - 1).bit_length()
                    upto = min(last, 1 << which)
                    counts[which] += (upto - first + 1) * page_size
                    first = upto + 1
                for place, limit in enumerate(limits):
                    fitting = min(seen, max(0, limit - nearer))
                    within[place] += fitting * page_size - (padding if fitting == seen else 0)
            recent.add(use, start - end)
        recent.add(number, len(pages))
        last_use[pages] = number
        if on_progress is not None:
            on_progress(number + 1)
    bins = tuple(
        ((1 << which >> 1) * page_size, (1 << which) * page_size, tokens) for which, tokens in enumerate(counts)
    )
    return ReuseDistances(input_tokens, bins, tuple(zip(capacities, within, strict=True)))
