"""The history oracle: who has which slot, what was published where, and what a match may therefore give.

It knows only what the harness asked for and what it was answered. Nothing here is shared with the cache.

A slot is in one of three places, as far as the book knows: a record's *own*, *cached* (published, and perhaps evicted
since: the cache need not tell), or unknown. Records that stand on a cached slot keep it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from aradix import Namespace
from stress.harness.contents import Contents
from stress.harness.outcome import Violation

__all__ = ["Book", "Record", "Since"]


class Record:
    """What one lease, low-level pin or caller's allocation holds, in token order; the first `published` are cached."""

    __slots__ = (
        "contents",
        "epoch",
        "live",
        "name",
        "namespace",
        "number",
        "published",
        "slots",
        "stale",
        "store",
        "task",
    )

    def __init__(self, number: int, name: str, namespace: Namespace, store: bool) -> None:
        self.number = number
        self.name = name
        self.namespace = namespace
        self.store = store
        self.epoch = 0
        self.stale = False
        """It stands on nothing, and a flush came before it was entered: `epoch` may be later than the tree's own."""
        self.live = True
        self.task = ""
        """That entered it, where somebody asks."""
        self.published = 0
        self.slots: list[int] = []
        self.contents: list[int] = []

    def __repr__(self) -> str:
        return f"{self.name} #{self.number}"


class Since(NamedTuple):
    """What was known as an operation began: the epoch, and what had to be found from then on while its holder lived."""

    epoch: int
    floors: list[tuple[Record, int]]


class _Gate(NamedTuple):
    namespace: Namespace
    epoch: int
    contents: list[int]


class Book:
    """The records of one run. Every method raises `Violation` for what must not be.

    Args:
        num_slots: of the pool.
        page_size: tokens a page.
    """

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.contents = Contents()
        self.num_slots = num_slots
        self.page_size = page_size
        self.records: dict[int, Record] = {}
        self.num_gates = 0
        """Gates that stand, or may."""
        self.num_gates_ever = 0
        """Those that stood, or might have, up to now."""
        self.num_in_flight = 0
        """Calls that began and have not ended, and may have been given something already."""
        self.violation: Violation | None = None
        self._numbers = count(1)
        self._epochs: dict[Namespace, int] = {}
        self._own: dict[int, Record] = {}
        self._stood: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._published: set[int] = set()
        self._granted: list[_Gate] = []

    def fail(self, oracle: str, message: str) -> Violation:
        """The first finding of a run, kept."""
        found = Violation(oracle, message)
        if self.violation is None:
            self.violation = found
        return found

    # ---- what was asked

    def epoch(self, namespace: Namespace) -> int:
        """How often this namespace was flushed."""
        return self._epochs.get(namespace, 0)

    def was_published(self, content: int) -> bool:
        """Whether somebody published what has this content."""
        return content in self._published

    def of(self, namespace: Namespace, tokens: Sequence[int]) -> list[int]:
        """The contents of a key as they would be computed now."""
        return self.contents.of(namespace, self.epoch(namespace), tokens)

    def since(self, namespace: Namespace, tokens: Sequence[int]) -> Since:
        """To be called as a look-up begins."""
        epoch = self._epochs.setdefault(namespace, 0)
        floors = []
        mine: list[int] | None = None
        for record in self.records.values():
            if not record.published or record.namespace != namespace or record.epoch != epoch:
                continue
            if mine is None:
                mine = self.contents.of(namespace, epoch, tokens)
            num = min(record.published, len(mine))
            while num and mine[num - 1] != record.contents[num - 1]:
                num -= 1
            if num:
                floors.append((record, num))
        return Since(epoch, floors)

    def new(self, name: str, namespace: Namespace, store: bool = True) -> Record:
        """A record of what will be held; it is not live before `matched` or `took`."""
        return Record(next(self._numbers), name, namespace, store)

    def is_holding(self, task: str) -> bool:
        """Whether something is held that this task has entered, though perhaps another one has it now."""
        return any(record.task == task for record in self.records.values())

    # ---- what was answered

    def matched(self, record: Record, since: Since, tokens: Sequence[int], slots: Sequence[int], limit: int) -> None:
        """A look-up ended with these slots, and they are pinned: from now on they may not change."""
        namespace, now = record.namespace, self.epoch(record.namespace)
        num = len(slots)
        if num > min(limit, len(tokens)) or num % self.page_size:
            raise self.fail(
                "history",
                f"{record} matched {num} of {len(tokens)} tokens, at most {limit}, in pages of {self.page_size}",
            )
        record.epoch = now
        flushed = now != since.epoch
        record.stale = flushed and not num
        if flushed and num:
            found = self.contents.epoch_of(self._cached.get(slots[0], 0))
            record.epoch = now if found is None else min(max(found, since.epoch), now)
        record.contents = self.contents.of(namespace, record.epoch, tokens[:num])
        self._must_be_cached(record, slots, record.contents, "matched")
        if not flushed:
            self._must_reach(record, since, num, limit)
        self._must_be_outside_gates(record, record.contents)
        record.slots = list(slots)
        record.published = num
        self._stand(slots)
        self.records[record.number] = record

    def peeked(self, namespace: Namespace, since: Since, tokens: Sequence[int], num: int) -> None:
        """A dry run found so many tokens."""
        if num > len(tokens) or num % self.page_size:
            raise self.fail("history", f"peek gave {num} of {len(tokens)} tokens, in pages of {self.page_size}")
        if num:
            content = self.contents.of(namespace, since.epoch, tokens[:num])[-1]
            if content not in self._published:
                raise self.fail(
                    "history", f"peek gave {num} tokens, but nobody published {self.contents.name(content)}"
                )
        self._must_reach(None, since, num, len(tokens))

    def grew(self, record: Record, slots: Sequence[int], num_tokens: int) -> list[int]:
        """A record was to grow by so many tokens and shows these slots now; gives the new ones."""
        known = len(record.slots)
        if len(slots) != known + num_tokens:
            raise self.fail("owner", f"{record} held {known} slots, asked for {num_tokens} and has {len(slots)}")
        self.unchanged(record, slots[:known])
        fresh = list(slots[known:])
        for slot in fresh:
            self._take(record, slot)
        record.slots = list(slots)
        return fresh

    def unchanged(self, record: Record, slots: Sequence[int]) -> None:
        """A record shows these slots, and nothing should have changed."""
        if list(slots) != record.slots:
            raise self.fail("owner", f"{record} shows the slots {list(slots)}; what it was given is {record.slots}")

    def computed(self, record: Record, contents: list[int]) -> None:
        """What its slots hold, or will hold when the kernels that were launched are done."""
        record.contents = contents

    def published(
        self, record: Record, num_tokens: int, published: int, prefix_len: int, slots: Sequence[int], num_adopted: int
    ) -> list[int]:
        """A commit of `num_tokens` ended at `published`; the slots that were its own and were given back."""
        before, old = record.published, record.slots
        whole = num_tokens // self.page_size * self.page_size
        current = self.epoch(record.namespace) == record.epoch
        if published < before or published > whole:
            raise self.fail(
                "history", f"{record} committed {num_tokens} tokens; {before} were published, {published} are"
            )
        if published > before and not (record.store and current):
            raise self.fail(
                "history", f"{record} published {published} tokens, which it must not: flushed, or not stored"
            )
        if record.store and current and not record.stale and not self.num_gates and published != whole:
            raise self.fail(
                "lost", f"{record} committed {num_tokens} tokens, but only {published} of {whole} were published"
            )
        if published == before:
            self.unchanged(record, slots)
            return []
        if not before <= prefix_len <= published or num_adopted != published - prefix_len:
            raise self.fail(
                "history",
                f"{record}: {prefix_len} held, {num_adopted} adopted, {before} to {published} published",
            )
        duplicates = old[before:prefix_len]
        self._must_be_cached(record, slots[before:prefix_len], record.contents[before:prefix_len], "was re-pointed to")
        for slot in old[before:published]:
            self._own.pop(slot, None)
        for slot, content in zip(old[prefix_len:published], record.contents[prefix_len:published], strict=True):
            self._cached[slot] = content
        self._published.update(record.contents[before:published])
        record.slots = [*old[:before], *slots[before:prefix_len], *old[prefix_len:]]
        self.unchanged(record, slots)
        record.published = published
        self._stand(record.slots[before:published])
        return duplicates

    def adopted(self, record: Record, num_tokens: int, prefix_len: int, duplicates: Sequence[int]) -> list[int]:
        """A low-level insert of a caller's slots, whose contents are those of now; gives those that are his to free."""
        whole = num_tokens // self.page_size * self.page_size
        if prefix_len and record.contents[prefix_len - 1] not in self._published:
            name = self.contents.name(record.contents[prefix_len - 1])
            raise self.fail("history", f"{record}: insert found {prefix_len} tokens, but nobody published {name}")
        expected = record.slots[:prefix_len] + record.slots[whole:]
        if list(duplicates) != expected:
            raise self.fail("owner", f"{record}: insert names the duplicates {list(duplicates)}, not {expected}")
        for slot in record.slots[prefix_len:whole]:
            self._own.pop(slot, None)
        for slot, content in zip(record.slots[prefix_len:whole], record.contents[prefix_len:whole], strict=True):
            self._cached[slot] = content
        self._published.update(record.contents[:whole])
        record.slots = expected
        return expected

    def loaded(self, slot: int, content: int) -> None:
        """A copy from another tier left something in a slot, which must be nobody's."""
        owner = self._own.get(slot)
        if owner is not None or slot in self._stood:
            raise self.fail(
                "owner",
                f"a copy brought {self.contents.name(content)} into slot {slot}, which {owner or 'a lease'} has",
            )
        self._cached[slot] = content

    def truncated(self, record: Record, num_tokens: int) -> None:
        """A record gives back all beyond so many tokens."""
        for slot in record.slots[num_tokens:]:
            self._own.pop(slot, None)
        del record.slots[num_tokens:], record.contents[num_tokens:]

    def forked(self, record: Record, twin: Record, slots: Sequence[int]) -> None:
        """A second record on what the first has published."""
        num = record.published
        if list(slots) != record.slots[:num]:
            raise self.fail("owner", f"{twin} is a fork of {record} and shows {list(slots)}, not {record.slots[:num]}")
        twin.epoch, twin.stale, twin.published = record.epoch, record.stale, num
        twin.slots, twin.contents = record.slots[:num], record.contents[:num]
        self._stand(twin.slots)
        self.records[twin.number] = twin

    def took(self, record: Record, slots: Sequence[int]) -> None:
        """A caller was handed slots by the allocator itself."""
        for slot in slots:
            self._take(record, slot)
        record.epoch = self.epoch(record.namespace)
        record.slots = list(slots)
        self.records[record.number] = record

    def released(self, record: Record) -> None:
        """A record ends: nothing is its own any more, and it stands on nothing."""
        if not record.live:
            return
        record.live = False
        self.records.pop(record.number, None)
        for slot in record.slots[: record.published]:
            self._stood[slot] -= 1
            if not self._stood[slot]:
                del self._stood[slot]
        for slot in record.slots[record.published :]:
            self._own.pop(slot, None)

    def flushed(self, namespace: Namespace | None) -> None:
        """A namespace, or all of them, begins a new epoch."""
        for known in list(self._epochs) if namespace is None else [namespace]:
            self._epochs[known] = self.epoch(known) + 1

    # ---- exclusive access

    def gate_asked(self) -> None:
        """Somebody asks for a subtree; from now on it may be closed."""
        self.num_gates += 1
        self.num_gates_ever += 1

    def gate_granted(self, namespace: Namespace, tokens: Sequence[int]) -> object:
        """Somebody has all that begins with these tokens for himself; gives what ends it."""
        gate = _Gate(namespace, self.epoch(namespace), self.of(namespace, tokens))
        self._granted.append(gate)
        self.gate_is_alone(gate)
        return gate

    def gate_is_alone(self, gate: object) -> None:
        """Nobody stands in a subtree that somebody has for himself."""
        assert isinstance(gate, _Gate)
        for record in self.records.values():
            if record.namespace == gate.namespace and record.epoch == gate.epoch and not record.stale:
                self._compare_with_gate(record, record.contents[: record.published], gate)

    def gate_opened(self, gate: object) -> None:
        """The subtree is everybody's again."""
        self._granted = [other for other in self._granted if other is not gate]

    def _must_be_outside_gates(self, record: Record, contents: list[int]) -> None:
        for gate in self._granted:
            if record.namespace == gate.namespace and record.epoch == gate.epoch and not record.stale:
                self._compare_with_gate(record, contents, gate)

    def _compare_with_gate(self, record: Record, contents: list[int], gate: _Gate) -> None:
        depth = len(gate.contents)
        if (
            record.name == "caller"
            or (record.name == "pin" and not contents)
            or len(contents) < depth
            or contents[:depth] != gate.contents
        ):
            return
        raise self.fail(
            "exclusive", f"{record} stands on {len(contents)} tokens below {depth} that somebody has exclusively"
        )

    # ---- sums

    def count(self) -> tuple[int, int]:
        """Leases, and the slots, in whole pages, that they hold apart from the tree."""
        num_leases = num_slots = 0
        page_size = self.page_size
        for record in self.records.values():
            if record.name == "lease":
                num_leases += 1
                num_slots -= (record.published - len(record.slots)) // page_size * page_size
        return num_leases, num_slots

    @property
    def num_stood(self) -> int:
        """Cached slots that somebody stands on."""
        return len(self._stood)

    # ---- parts

    def _take(self, record: Record, slot: int) -> None:
        if not self.page_size <= slot < self.num_slots + self.page_size:
            raise self.fail("owner", f"{record} was handed slot {slot}, which the pool does not have")
        other = self._own.get(slot)
        if other is not None:
            raise self.fail("owner", f"{record} was handed slot {slot}, which belongs to {other}")
        if slot in self._stood:
            standing = [each for each in self.records.values() if slot in each.slots[: each.published]]
            raise self.fail(
                "owner",
                f"{record} was handed slot {slot}, which is cached ({self.contents.name(self._cached.get(slot))}) and "
                f"pinned by {standing}",
            )
        self._cached.pop(slot, None)
        self._own[slot] = record

    def _stand(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._stood[slot] = self._stood.get(slot, 0) + 1

    def _must_be_cached(self, record: Record, slots: Sequence[int], contents: Sequence[int], what: str) -> None:
        for place, (slot, content) in enumerate(zip(slots, contents, strict=True)):
            found = self._cached.get(slot)
            if found == content:
                continue
            owner = self._own.get(slot)
            holds = f"belongs to {owner}" if owner is not None else f"holds {self.contents.name(found)}"
            raise self.fail(
                "history", f"{record} {what} slot {slot} for {self.contents.name(content)} (token {place}); it {holds}"
            )

    def _must_reach(self, record: Record | None, since: Since, num: int, limit: int) -> None:
        for holder, floor in since.floors:
            if not holder.live or holder.epoch != since.epoch:
                continue
            least = min(floor, limit) // self.page_size * self.page_size
            if num < least:
                raise self.fail(
                    "lost", f"{record or 'peek'} found {num} tokens; {holder} holds {least} of the same in the tree"
                )
