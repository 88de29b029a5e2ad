"""What a run came to, and what an oracle says when it finds something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aradix.errors import InvariantError
from stress.schedules import StuckError

__all__ = ["Failure", "Outcome", "Violation", "judge"]


class Violation(Exception):
    """An oracle's finding.

    Args:
        oracle: which one, in a word.
        message: what differs, with its numbers.
    """

    def __init__(self, oracle: str, message: str) -> None:
        super().__init__(oracle, message)
        self.oracle = oracle
        self.message = message

    def __str__(self) -> str:
        return f"{self.oracle}: {self.message}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run failed: the oracle that said so, and what it said. Two failures are alike if their oracles are."""

    oracle: str
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that ended.

    Args:
        failure: `None` where nothing was wrong.
        choices: the schedule it took.
        num_steps: of the loop.
        num_acts: operations that began.
        digest: of everything that was observed; the same for the same run.
        history: the operations, a line each, in the order in which they began.
    """

    failure: Failure | None
    choices: tuple[int, ...]
    num_steps: int
    num_acts: int
    digest: int
    history: tuple[str, ...]


def judge(error: BaseException | None, planned: tuple[type[BaseException], ...] = ()) -> Failure | None:
    """What the end of a run says: the first finding among its errors, or the first that comes of nothing planned."""
    if isinstance(error, StuckError):
        return Failure("deadlock" if "deadlock" in error.reason else "livelock", str(error))
    leaves = list(_leaves(error)) if error is not None else []
    for leaf in leaves:
        if isinstance(leaf, Violation):
            return Failure(leaf.oracle, leaf.message)
        if isinstance(leaf, InvariantError):
            return Failure("audit", str(leaf))
    strange = [leaf for leaf in leaves if not _comes_of(leaf, planned)]
    return Failure("error", f"{type(strange[0]).__name__}: {strange[0]}{_where(strange[0])}") if strange else None


def _comes_of(error: BaseException, planned: tuple[type[BaseException], ...]) -> bool:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, planned):
        cause = cause.__cause__
    return cause is not None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _where(error: BaseException) -> str:
    trace, lines = error.__traceback__, []
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return " (" + " > ".join(lines[-4:]) + ")" if lines else ""
