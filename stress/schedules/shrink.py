"""Make a failing schedule short and plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

__all__ = ["shrink"]


def _trimmed(choices: Sequence[int]) -> list[int]:
    end = len(choices)
    while end and choices[end - 1] == 0:
        end -= 1
    return list(choices[:end])


def _candidates(choices: list[int]) -> Iterator[list[int]]:
    """Schedules shorter or plainer than `choices`, boldest first. All are smaller as (length, sum)."""
    n = len(choices)
    size = n
    while size:  # drop the end
        yield choices[: n - size]
        size //= 2
    size = n // 2
    while size:
        for start in range(0, n, size):
            before, after = choices[:start], choices[start + size :]
            if any(choices[start : start + size]):
                yield before + [0] * min(size, n - start) + after
            yield before + after
        size //= 2
    for place, choice in enumerate(choices):
        for lower in sorted({1, choice // 2, choice - 1}):
            if 0 < lower < choice:
                yield [*choices[:place], lower, *choices[place + 1 :]]


def shrink(choices: Sequence[int], fails: Callable[[list[int]], bool], *, max_runs: int = 2_000) -> list[int]:
    """A schedule that still fails, of which no simple change makes a shorter or plainer one that does.

    Tries to drop the end, to turn stretches into zeros (the plain order), to leave stretches out, and to lower single
    choices, over again until nothing helps: delta debugging (Zeller and Hildebrandt, 2002).

    Args:
        choices: a schedule that fails.
        fails: runs one and says whether it fails; it must answer the same each time.
        max_runs: of `fails`; at the limit the best schedule so far is returned.

    Returns:
        the choices, without trailing zeros, which change nothing.

    Raises:
        ValueError: `choices` does not fail, so there is nothing to shrink.
    """
    best = _trimmed(choices)
    if not fails(list(best)):
        raise ValueError("the schedule to shrink does not fail")
    tried = {tuple(best)}
    better = True
    while better:
        better = False
        for candidate in _candidates(best):
            candidate = _trimmed(candidate)
            if tuple(candidate) in tried:
                continue
            if len(tried) >= max_runs:
                return best
            tried.add(tuple(candidate))
            if fails(list(candidate)):
                best, better = candidate, True
                break
    return best
