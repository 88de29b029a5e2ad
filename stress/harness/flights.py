"""The oracle of single flight: of leases that join, no two compute the same.

Of two that are held and lack the same page, the later one should have waited for the earlier. Which of them the cache
let in first the harness cannot know, so it speaks where neither order would do; and says nothing of one that was
entered by a task that held another, since such a task waits for nobody.
"""

from __future__ import annotations

from typing import NamedTuple

from stress.harness.book import Book, Record

__all__ = ["Flights"]


class _Flight(NamedTuple):
    """A lease that joins: whether it could have waited, the contents of its whole key, what it had found, and the most
    that it could have found."""

    record: Record
    waits: bool
    contents: list[int]
    start: int
    limit: int


class Flights:
    """The leases of one run that join, and publish.

    Args:
        book: knows which of them are held, and of which epoch they are.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._flights: list[_Flight] = []

    def entered(self, record: Record, waits: bool, tokens: tuple[int, ...], limit: int) -> None:
        """A lease that joins was entered, and the book has its match.

        Args:
            record: of the lease.
            waits: whether its task held nothing else as it began.
            tokens: of its key.
            limit: of its match.
        """
        self._flights = [flight for flight in self._flights if flight.record.live]
        if record.stale or not record.store:
            return
        contents = self._book.contents.of(record.namespace, record.epoch, tokens)
        flight = _Flight(record, waits, contents, record.published, self._whole_pages(limit))
        for other in self._flights:
            if not (flight.waits and other.waits):
                continue
            num_shared = self._whole_pages(_num_shared(contents, other.contents))
            if all(each.start < min(num_shared, each.limit) for each in (flight, other)):
                raise self._book.fail(
                    "flight",
                    f"{record} computes tokens {flight.start} to {num_shared} of what {other.record} has begun to "
                    f"compute from {other.start} on",
                )
        self._flights.append(flight)

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._book.page_size


def _num_shared(one: list[int], other: list[int]) -> int:
    # Each content says all that comes before it.
    count = min(len(one), len(other))
    while count and one[count - 1] != other[count - 1]:
        count -= 1
    return count
