"""What the tasks of a run share: the cache, the oracles, and the bookkeeping of who can be cancelled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from aradix import Namespace, RadixCache, RadixKey, SlotAllocator
from aradix.errors import InvariantError
from stress.harness.book import Book, Record
from stress.harness.kernels import Kernels
from stress.harness.worlds import World

__all__ = ["Fault", "Operation", "Site", "is_lease", "radix_key"]

_PAUSE_SECONDS = 0.0005


class Fault(Protocol):
    """Something that breaks on purpose, and says whether it has."""

    raised: bool


class Operation:
    """One call of the cache, between its two marks."""

    __slots__ = ("begin", "end", "result", "task", "what")

    def __init__(self, task: str, what: str, begin: int) -> None:
        self.task = task
        self.what = what
        self.begin = begin
        self.end = 0
        self.result = "did not return"

    def __str__(self) -> str:
        return f"{self.begin:4d}..{self.end or '':<4} {self.task:<8} {self.what}: {self.result}"


class Site:
    """One run's shared state.

    Args:
        world: the scenario.
        book: the history oracle.
        kernels: the device.
        allocator: the pool.
        cache: the cache under test, open.
        children: where tasks that a task starts run.
        fault: what the world plans to break, if anything.
        warned: the warnings that were given so far.
    """

    def __init__(
        self,
        world: World,
        book: Book,
        kernels: Kernels,
        allocator: SlotAllocator,
        cache: RadixCache,
        children: TaskGroup,
        fault: Fault | None,
        warned: Sized,
    ) -> None:
        self.world = world
        self.book = book
        self.kernels = kernels
        self.allocator = allocator
        self.cache = cache
        self.children = children
        self.warned = warned
        self._fault = fault
        self.scopes: dict[str, anyio.CancelScope] = {}
        self._waiting: dict[str, None] = {}
        self.history: list[Operation] = []
        self.num_dropped = 0
        self.num_acts = 0
        self._mark = 0
        self._versions: dict[int, int] = {}

    # ---- what is asked for

    def namespace(self, index: int) -> Namespace:
        """The namespace of that number, in its version of now."""
        index %= len(self.world.namespaces)
        namespace = self.world.namespace(index)
        if isinstance(namespace.version, int):
            fields = namespace._asdict() | {"version": namespace.version + self._versions.get(index, 0)}
            return Namespace(**fields)
        return namespace

    def key(self, index: int) -> tuple[Namespace, tuple[int, ...]]:
        """The prompt of that number."""
        namespace, tokens = self.world.keys[index % len(self.world.keys)]
        return self.namespace(namespace), tokens

    def move_version(self, index: int) -> Namespace:
        """Has a namespace go on under its next version; gives the old one."""
        index %= len(self.world.namespaces)
        old = self.namespace(index)
        self._versions[index] = self._versions.get(index, 0) + 1
        return old

    # ---- what is noted

    @contextmanager
    def operation(self, task: str, what: str, waits: bool = False) -> Iterator[Operation]:
        """Notes a call of the cache; while one that waits has not returned, some sums are not certain."""
        self._mark += 1
        noted = Operation(task, what, self._mark)
        self.history.append(noted)
        self.book.num_in_flight += waits
        if waits:
            self._waiting[task] = None
        try:
            yield noted
        except BaseException as error:
            noted.result = type(error).__name__
            raise
        finally:
            self.book.num_in_flight -= waits
            self._waiting.pop(task, None)
            self._mark += 1
            noted.end = self._mark

    # ---- what must hold between any two acts

    def after_act(self) -> None:
        """The cheap checks, and every so often the full audit."""
        self.num_acts += 1
        self.kernels.look()
        if self.is_struck:
            return
        self.check_sums()
        if self.num_acts % self.world.check_every == 0:
            self.audit()

    def audit(self) -> None:
        """The cache's own recount."""
        try:
            self.cache.check()
        except InvariantError as error:
            raise self.book.fail("audit", str(error)) from error

    @property
    def is_struck(self) -> bool:
        """Whether the planned fault has come: the cache is ending, and what its error refers to is kept."""
        return self._fault is not None and self._fault.raised

    def check_sums(self) -> None:
        """Every slot is in one place, and what the book knows of is among what the cache counts."""
        stats = self.cache.stats()
        places = (
            stats.free,
            stats.fenced,
            stats.evictable,
            stats.protected,
            stats.leased,
            stats.outside,
            stats.quarantined,
        )
        if sum(places) != stats.num_slots or min(places) < 0:
            raise self.book.fail("sum", f"the places make {sum(places)} of {stats.num_slots} slots: {stats}")
        book = self.book
        known = {
            "leased": book.own_slots(self.world.page_size),
            "protected and detached": book.num_stood,
            "num_leases": book.num_records(is_lease),
        }
        counted = {
            "leased": stats.leased - stats.detached - stats.loading,
            "protected and detached": stats.protected + stats.detached,
            "num_leases": stats.num_leases,
        }
        for name, least in known.items():
            certain = book.num_in_flight == 0 and (book.num_gates == 0 or name == "num_leases")
            # A copy pins what it reads, and what stands above what it writes.
            certain = certain and not (name == "protected and detached" and stats.storing + stats.loading)
            if counted[name] < least or (certain and counted[name] != least):
                raise book.fail("sum", f"stats() counts {counted[name]} {name}, the harness knows of {least}")

    # ---- what tasks do to each other

    @contextmanager
    def cancellable(self, task: str) -> Iterator[anyio.CancelScope]:
        """What a task does inside can be cancelled by another one; the task goes on after it."""
        with anyio.CancelScope() as scope:
            self.scopes[task] = scope
            try:
                yield scope
            finally:
                if self.scopes.get(task) is scope:
                    del self.scopes[task]

    def targets(self) -> list[anyio.CancelScope]:
        """Whom a cancel may mean: those that wait, the longest first; or else all that do something."""
        waiting = [self.scopes[name] for name in self._waiting if name in self.scopes]
        return waiting or list(self.scopes.values())

    def cancel(self, number: int) -> None:
        """Cancels one of `targets`."""
        targets = self.targets()
        if targets:
            targets[number % len(targets)].cancel()

    async def pause(self, length: int) -> None:
        """Lets others run; from 1 on it also takes time."""
        if length <= 0:
            await anyio.lowlevel.checkpoint()
        else:
            await anyio.sleep(length * _PAUSE_SECONDS)


def is_lease(record: Record) -> bool:
    """Whether a record is of a lease."""
    return record.name == "lease"


def radix_key(tokens: Sequence[int], namespace: Namespace) -> RadixKey:
    """A key of the cache."""
    key: Any = list(tokens)
    return RadixKey(key, namespace)
