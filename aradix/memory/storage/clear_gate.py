"""ClearGate: after a clear nothing is found that was put before it, whatever threads are on their way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

__all__ = ["ClearGate", "Ticket"]

_T = TypeVar("_T")


class Ticket:
    """A put on its way. `is_stale`: its prefix was cleared since, so it must not write any more."""

    __slots__ = ("__weakref__", "is_stale", "prefix")

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.is_stale = False


class ClearGate:
    """What every call of a store goes through in its worker thread.

    A prefix that was closed stays so until `clear` has run for it: the first call on it runs that, alone among the
    puts, so that a put that began before cannot end after. `ticket` and `close` come from the event loop and do not
    wait; `run` blocks.
    """

    def __init__(self, clear: Callable[[str], None]) -> None:
        self._clear = clear
        self._changed = threading.Condition()
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._due: set[str] = set()
        self._clearing = False
        self._num_writing = 0

    def ticket(self, prefix: str) -> Ticket:
        """Announces a put under `prefix`."""
        ticket = Ticket(prefix)
        with self._changed:
            self._tickets.add(ticket)
        return ticket

    def close(self, prefix: str) -> None:
        """Clears a prefix, as far as callers can see."""
        with self._changed:
            self._due.add(prefix)
            for ticket in self._tickets:
                if ticket.prefix.startswith(prefix):
                    ticket.is_stale = True

    def run(self, prefix: str, step: Callable[[], _T], ticket: Ticket | None = None) -> _T:
        """Runs `step`, a put where there is a `ticket`, once nothing under `prefix` waits to be cleared.

        What `clear` raises is raised here, and the prefix stays closed.
        """
        while due := self._enter(prefix, ticket is not None):
            try:
                for name in due:
                    self._clear(name)
                    with self._changed:
                        self._due.discard(name)
            finally:
                with self._changed:
                    self._clearing = False
                    self._changed.notify_all()
        try:
            return step()
        finally:
            if ticket is not None:
                with self._changed:
                    self._num_writing -= 1
                    self._changed.notify_all()

    def _enter(self, prefix: str, writes: bool) -> list[str]:
        """What has to be cleared first, by the caller and alone; nothing where it may go on."""
        with self._changed:
            self._changed.wait_for(lambda: not self._clearing)
            due = [name for name in self._due if prefix.startswith(name) or name.startswith(prefix)]
            if due:
                self._clearing = True
                self._changed.wait_for(lambda: not self._num_writing)
            elif writes:
                self._num_writing += 1
            return due
