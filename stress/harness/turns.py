"""The order of service: growth before admission, first come first served within each, and nobody past who waits.

It says something only where it is certain: who is passed over was in line before the other one began, and still is;
and all the while somebody held slots without waiting, so that nobody had to be served out of turn. Whether a call that
has not returned is still in line the harness knows only where the cache counts as many waiters as there are calls.
"""

from __future__ import annotations

from collections.abc import Callable

from stress.harness.book import Book, Record

__all__ = ["Turn", "Turns"]


class Turn:
    """One call that may wait for slots, from its beginning on."""

    __slots__ = ("before", "gates", "holders", "joins", "record", "reserve", "what")

    def __init__(
        self,
        what: str,
        record: Record,
        reserve: bool,
        joins: bool,
        before: list[Turn],
        holders: dict[int, int],
        gates: int,
    ) -> None:
        self.what = what
        self.record = record
        self.reserve = reserve
        self.joins = joins
        """It may wait for what another one computes, and is passed meanwhile."""
        self.before = before
        self.holders = holders
        self.gates = gates


class Turns:
    """Who is in line, as far as it is known.

    Args:
        book: knows who holds what.
        num_waiters: asks the cache how many wait for slots; -1 where that may be others than the calls known here.
    """

    def __init__(self, book: Book, num_waiters: Callable[[], int]) -> None:
        self._book = book
        self._num_waiters = num_waiters
        self._line: dict[Turn, None] = {}
        self._num_waits: dict[int, int] = {}

    def begin(self, what: str, record: Record, *, reserve: bool, joins: bool = False) -> Turn:
        """A call begins."""
        turn = Turn(what, record, reserve, joins, [], {}, self._book.num_gates_ever)
        if self._line and not self._book.num_gates and self._num_waiters() == len(self._line):
            turn.before = list(self._line)
            turn.holders = self._holders(record)
        self._line[turn] = None
        self._num_waits[record.number] = self._num_waits.get(record.number, 0) + 1
        return turn

    def end(self, turn: Turn) -> None:
        """It has returned or raised."""
        self._line.pop(turn, None)

    def served(self, turn: Turn) -> None:
        """It has returned with slots of which at least one page is new."""
        self._line.pop(turn, None)
        passed = [
            other
            for other in turn.before
            if other in self._line and not other.joins and (not other.reserve or turn.reserve)
        ]
        if not passed or turn.gates != self._book.num_gates_ever or self._num_waiters() != len(self._line):
            return
        holders = self._holders(turn.record)
        calm = [number for number, num_waits in turn.holders.items() if holders.get(number) == num_waits]
        if calm:
            raise self._book.fail(
                "turn",
                f"{turn.what} was served while {passed[0].what}, which came first, waits; "
                f"{self._book.records[calm[0]]} could still give something back",
            )

    def _holders(self, record: Record) -> dict[int, int]:
        """Who has slots and does not wait, and how often each has waited so far."""
        waiting = {turn.record.number for turn in self._line}
        return {
            number: self._num_waits.get(number, 0)
            for number, other in self._book.records.items()
            if other is not record and other.slots and number not in waiting
        }
