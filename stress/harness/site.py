"""What the tasks of a run share: the cache, the oracles, and the bookkeeping of who can be cancelled."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from types import TracebackType
from typing import Any, Protocol, Self

import anyio
from anyio.abc import TaskGroup

from aradix import Namespace, RadixCache, RadixKey, SlotAllocator
from aradix.errors import InvariantError
from stress.harness.book import Book
from stress.harness.flights import Flights
from stress.harness.kernels import Kernels
from stress.harness.turns import Turns
from stress.harness.worlds import Act, World

__all__ = ["Fault", "Operation", "Site", "radix_key"]

_PAUSE_SECONDS = 0.0005
_IDLE = frozenset(("pause", "tick", "cancel"))
"""Acts that call nothing: what others did meanwhile they looked at themselves."""


class Fault(Protocol):
    """Something that breaks on purpose, and says whether it has."""

    raised: bool


class Operation:
    """One call of the cache, between its two marks; while one that waits has not returned, some sums are uncertain."""

    __slots__ = ("_site", "_waits", "begin", "end", "result", "task", "what")

    def __init__(self, site: Site, task: str, what: str, waits: bool) -> None:
        self._site = site
        self._waits = waits
        self.task = task
        self.what = what
        self.begin = site.next_mark()
        self.end = 0
        self.result = "did not return"

    def __enter__(self) -> Self:
        self._site.history.append(self)
        if self._waits:
            self._site.began_to_wait(self.task)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.result = kind.__name__
        if self._waits:
            self._site.waited(self.task)
        self.end = self._site.next_mark()

    def __str__(self) -> str:
        return f"{self.begin:4d}..{self.end or '':<4} {self.task:<8} {self.what}: {self.result}"


class _Cancellable:
    """A cancel scope that others find under its task's name."""

    __slots__ = ("_scope", "_scopes", "_task")

    def __init__(self, scopes: dict[str, anyio.CancelScope], task: str) -> None:
        self._scopes = scopes
        self._task = task
        self._scope = anyio.CancelScope()

    def __enter__(self) -> anyio.CancelScope:
        self._scopes[self._task] = self._scope
        return self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._scopes.get(self._task) is self._scope:
            del self._scopes[self._task]
        return self._scope.__exit__(kind, error, trace)


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
        self.fault = fault
        # Loads from a host wait in the same line, and the harness does not know which of the waiters they are.
        knows_line = not world.num_host_pages
        self.turns = Turns(book, lambda: cache.stats().num_slot_waiters if knows_line else -1)
        self.flights = Flights(book)
        self.scopes: dict[str, anyio.CancelScope] = {}
        self._waiting: dict[str, None] = {}
        self.history: list[Operation] = []
        self.num_dropped = 0
        self.num_keeping = 0
        """Acts that may have a prefix pinned."""
        self.num_acts = 0
        self._mark = 0
        self._namespaces = [world.namespace(index) for index in range(len(world.namespaces))]

    # ---- what is asked for

    def namespace(self, index: int) -> Namespace:
        """The namespace of that number, in its version of now."""
        return self._namespaces[index % len(self._namespaces)]

    def key(self, index: int) -> tuple[Namespace, tuple[int, ...]]:
        """The prompt of that number."""
        namespace, tokens = self.world.keys[index % len(self.world.keys)]
        return self.namespace(namespace), tokens

    def move_version(self, index: int) -> Namespace:
        """Has a namespace go on under its next version; gives the old one."""
        old = self.namespace(index)
        if isinstance(old.version, int):
            self._namespaces[index % len(self._namespaces)] = old._replace(version=old.version + 1)
        return old

    # ---- what is noted

    def operation(self, task: str, what: str, waits: bool = False) -> Operation:
        """Notes a call of the cache, around which it is entered."""
        return Operation(self, task, what, waits)

    def next_mark(self) -> int:
        """A moment later than all before it."""
        self._mark += 1
        return self._mark

    def began_to_wait(self, task: str) -> None:
        """A task is in a call that may have been given something already."""
        self.book.num_in_flight += 1
        self._waiting[task] = None

    def waited(self, task: str) -> None:
        """It is out of it."""
        self.book.num_in_flight -= 1
        self._waiting.pop(task, None)

    # ---- what must hold between any two acts

    def after_act(self, act: Act) -> None:
        """The cheap checks, and every so often the full audit."""
        self.num_acts += 1
        if act.name in _IDLE:
            return
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
        return self.fault is not None and self.fault.raised

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
        num_leases, own = book.count()
        certain = not book.num_in_flight
        alone = certain and not book.num_gates  # a gate holds what is below it
        # A copy pins what it reads, and what stands above what it writes; and so does who keeps a prefix.
        still = alone and not stats.storing + stats.loading + self.num_keeping
        for name, counted, least, exact in (
            ("leased", stats.leased - stats.detached - stats.loading, own, alone),
            ("protected and detached", stats.protected + stats.detached, book.num_stood, still),
            ("num_leases", stats.num_leases, num_leases, certain),
        ):
            if counted < least or (exact and counted != least):
                raise book.fail("sum", f"stats() counts {counted} {name}, the harness knows of {least}")

    # ---- what tasks do to each other

    def cancellable(self, task: str) -> _Cancellable:
        """What a task does inside can be cancelled by another one; the task goes on after it."""
        return _Cancellable(self.scopes, task)

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


def radix_key(tokens: Sequence[int], namespace: Namespace) -> RadixKey:
    """A key of the cache."""
    key: Any = list(tokens)
    return RadixKey(key, namespace)
