"""For somebody else's cache or scheduler: a protocol of a few methods, and a driver that puts tasks on it.

The oracles are those of the harness: no slot with two owners, no match beyond what was published, nothing garbled,
nothing lost at the end, no deadlock. They are told nothing but what these methods answer.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import anyio
import anyio.lowlevel

from aradix import Namespace
from stress.harness.book import Book, Record
from stress.harness.outcome import Outcome, Violation, judge
from stress.schedules import Backend, Chooser, Seeded, attempt

__all__ = ["Held", "NoRoomError", "Subject", "drive"]

_MAX_STEPS = 50_000


class NoRoomError(Exception):
    """What a subject raises where a request has to give way: it is ended, and the task goes on with its next one."""


class Held(Protocol):
    """One request's hold on a prefix and on slots."""

    def slots(self) -> Sequence[int]:
        """The slots of its tokens, in token order: first those found in the cache, then those it was given."""

    async def grow(self, num_tokens: int) -> None:
        """Slots for so many more tokens. May wait; may be cancelled; may raise `NoRoomError`. All or nothing."""

    def publish(self, tokens: Sequence[int]) -> int:
        """Put what is computed of these tokens into the cache; how many of them are in the cache now, from the first.

        Where the cache had some of them already, `slots()` names the cache's slots from now on.
        """


class Subject(Protocol):
    """A cache with its pool: slots `page_size` .. `num_slots + page_size - 1`, the page before them being padding."""

    num_slots: int
    page_size: int

    def open(self) -> AbstractAsyncContextManager[object]:
        """What has to be running meanwhile."""

    def hold(self, namespace: str, tokens: Sequence[int]) -> AbstractAsyncContextManager[Held]:
        """Look a prompt up, and hold what was found; leaving gives back what was not published."""

    async def flush(self, namespace: str) -> None:
        """Nothing that was published in this namespace is ever found again."""

    async def evict(self, num_tokens: int) -> None:
        """Free so many tokens that nobody holds, or as many as there are."""

    def places(self) -> Mapping[str, int]:
        """Where the slots are: counts by place, `free` and `cached` among them, that make `num_slots`."""


def drive(
    make: Callable[[], Subject],
    seed: int,
    *,
    backend: Backend = "asyncio",
    chooser: Chooser | None = None,
    num_tasks: int = 6,
    namespaces: Sequence[str] = ("", "a"),
) -> Outcome:
    """Runs one seed of requests, cancellations, flushes and evictions over a new subject. Takes no real time to wait.

    Args:
        make: builds the subject; called inside the running loop.
        seed: of the scenario, and of the schedule unless there is a `chooser`.
        backend: `"asyncio"` or `"trio"`.
        chooser: of the schedule, as `stress.schedules` has them.
        num_tasks: that run at once.
        namespaces: to choose from.
    """
    run = _Drive(make, random.Random(seed), num_tasks, namespaces)
    done = attempt(
        run.main, backend=backend, chooser=Seeded(seed) if chooser is None else chooser, max_steps=_MAX_STEPS
    )
    failure = judge(run.violation or done.error)
    digest = zlib.crc32("\n".join(run.history).encode())
    return Outcome(failure, done.choices, done.num_steps, len(run.history), digest, tuple(run.history))


class _Drive:
    def __init__(
        self, make: Callable[[], Subject], rng: random.Random, num_tasks: int, namespaces: Sequence[str]
    ) -> None:
        self.history: list[str] = []
        self._make = make
        self._rng = rng
        self._num_tasks = num_tasks
        self._namespaces = namespaces
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._memory: dict[int, int] = {}
        self._subject: Subject
        self._book: Book
        trunk = [rng.randrange(3) for _ in range(24)]
        cuts = [rng.randint(1, 24) for _ in range(6)]
        self._keys = [[*trunk[:cut], *(rng.randrange(3) for _ in range(rng.randint(0, 4)))] for cut in cuts]

    @property
    def violation(self) -> Violation | None:
        """The first finding."""
        return self._book.violation if hasattr(self, "_book") else None

    async def main(self) -> None:
        subject = self._subject = self._make()
        book = self._book = Book(subject.num_slots, subject.page_size)
        book.num_gates = 1  # a subject may publish less than was asked for
        async with subject.open():
            async with anyio.create_task_group() as tasks:
                for number in range(self._num_tasks):
                    tasks.start_soon(self._work, number, name=f"task {number}")
            places = dict(subject.places())
            if places.get("free", 0) + places.get("cached", 0) != subject.num_slots:
                raise book.fail("leak", f"all is released, but the {subject.num_slots} slots are {places}")
            for key in self._keys:
                for namespace in self._namespaces:
                    async with subject.hold(namespace, key) as held:
                        epoch = book.epoch(_namespace(namespace))
                        book.released(self._matched(namespace, key, held.slots(), epoch))

    async def _work(self, number: int) -> None:
        rng, subject = self._rng, self._subject
        for _ in range(4):
            with anyio.CancelScope() as scope:
                self._scopes[number] = scope
                try:
                    await self._request(number)
                except NoRoomError:
                    self.history.append(f"task {number}: no room")
            namespace = rng.choice(self._namespaces)
            if rng.random() < 0.15:
                self.history.append(f"task {number}: flush {namespace!r}")
                await subject.flush(namespace)
                self._book.flushed(_namespace(namespace))
            if rng.random() < 0.3:
                await subject.evict(rng.randint(1, 8))
            if rng.random() < 0.3:
                rng.choice(list(self._scopes.values())).cancel()
            self._check_sum()

    async def _request(self, number: int) -> None:
        rng, book = self._rng, self._book
        namespace, tokens = rng.choice(self._namespaces), rng.choice(self._keys)
        epoch = book.epoch(_namespace(namespace))
        async with self._subject.hold(namespace, tokens) as held:
            record = self._matched(namespace, tokens, held.slots(), epoch)
            try:
                while len(record.slots) < len(tokens):
                    await anyio.lowlevel.checkpoint()
                    num_tokens = min(rng.randint(1, 8), len(tokens) - len(record.slots))
                    try:
                        await held.grow(num_tokens)
                    except BaseException:
                        book.unchanged(record, held.slots())
                        raise
                    fresh = book.grew(record, held.slots(), num_tokens)
                    contents = book.contents.of(record.namespace, record.epoch, tokens[: len(record.slots)])
                    self._memory.update(zip(fresh, contents[-num_tokens:], strict=True))
                    book.computed(record, contents)
                    self.history.append(f"task {number}: {record} {record.slots}")
                    if rng.random() < 0.7:
                        self._publish(record, held, tokens[: len(record.slots)])
                await anyio.sleep(rng.randint(0, 2) / 1000)
                self._read(record)
            finally:
                book.released(record)

    def _matched(self, namespace: str, tokens: Sequence[int], slots: Sequence[int], epoch: int) -> Record:
        book = self._book
        record = book.new("hold", _namespace(namespace))
        since = book.since(record.namespace, tokens)._replace(floors=[], epoch=epoch)
        book.matched(record, since, tokens, slots, len(tokens))
        self.history.append(f"{record} matched {list(slots)} of {namespace!r} {tokens}")
        self._read(record)
        return record

    def _publish(self, record: Record, held: Held, tokens: Sequence[int]) -> None:
        before = record.published
        published = held.publish(tokens)
        slots = list(held.slots())
        changed = [place for place in range(before, published) if slots[place] != record.slots[place]]
        prefix_len = changed[-1] + 1 if changed else before
        self._book.published(record, len(tokens), published, prefix_len, slots, published - prefix_len)
        self.history.append(f"{record} published {published} of {len(tokens)}")
        self._read(record)

    def _read(self, record: Record) -> None:
        for slot, content in zip(record.slots, record.contents, strict=False):
            found = self._memory.get(slot)
            if found != content:
                name = self._book.contents.name
                raise self._book.fail("garbled", f"{record} read {name(found)} from slot {slot}, not {name(content)}")

    def _check_sum(self) -> None:
        places = dict(self._subject.places())
        if sum(places.values()) != self._subject.num_slots or min(places.values()) < 0:
            raise self._book.fail("sum", f"{places} makes {sum(places.values())} of {self._subject.num_slots} slots")


def _namespace(name: str) -> Namespace:
    return Namespace(extra=name)
