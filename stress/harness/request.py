"""A request as an engine runs one: a lease, chunks of prefill, decode, forks, drafts, and every way to end."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Awaitable, Callable, Sequence

import anyio

from aradix import Lease, RadixKey
from aradix.errors import OutOfSlotsError, RequestTooLargeError, RetractError
from stress.device import VirtualStream
from stress.harness.book import Record
from stress.harness.copies import SlotCopy, close_after, copy_out, written
from stress.harness.site import Site, radix_key
from stress.harness.worlds import Act

__all__ = ["RequestRunner"]

NO_STORE, LEAVE_LAST, NARROW, LONG, JOIN = 1, 2, 4, 8, 16
_MAX_TRIES = 3


class RequestRunner:
    """One lease from its opening to its end, or the twin of one.

    Args:
        site: what all tasks share.
        name: of the task, for the record and for whoever cancels it.
    """

    def __init__(self, site: Site, name: str) -> None:
        self._site = site
        self._name = name
        self._lease: Lease | None = None
        self._record: Record | None = None
        self._tokens: list[int] = []
        self._key: RadixKey
        self._stream: VirtualStream | None = None
        self._narrow = False
        self._long = False
        self._committed = 0
        self._used: dict[VirtualStream, None] = {}
        self._num_children = 0
        self._copies: list[SlotCopy] = []
        self._steps: dict[str, Callable[..., Awaitable[None]]] = {
            "grow": self._grow,
            "commit": self._commit,
            "decode": self._decode,
            "read": self._read,
            "truncate": self._truncate,
            "pause": self._pause,
            "tick": self._tick,
            "cancel": self._cancel,
            "copy": self._copy,
            "release": self._release,
            "drop": self._drop,
            "orphan": self._orphan,
            "nest": self._nest,
        }

    async def run(self, act: Act) -> None:
        """`request(key, flags, stream, reserve, priority)`: runs it, again where it has to give way."""
        site = self._site
        for attempt in range(_MAX_TRIES):
            with site.cancellable(self._name) as scope:
                try:
                    await self._serve(act, resume=attempt > 0)
                    return
                except RequestTooLargeError:
                    return
                except RetractError:
                    await site.pause(attempt)
            if scope.cancelled_caught:
                return

    async def _serve(self, act: Act, resume: bool) -> None:
        site = self._site
        key_index, flags, stream_index, reserve, priority = (*act.args, 0, 0, 0, 0, 0)[:5]
        namespace, tokens = site.key(key_index)
        limit = len(tokens) - 1 if flags & LEAVE_LAST else len(tokens)
        wanted = None if reserve <= 0 else max(1, len(tokens) * min(reserve, 4) // 4 + reserve // 5)
        self._tokens = list(tokens)
        self._committed = 0
        self._stream = site.kernels.stream(stream_index)
        self._narrow, self._long = bool(flags & NARROW), bool(flags & LONG)
        waits = not site.book.is_holding(self._name)
        record = self._record = site.book.new("lease", namespace, store=not flags & NO_STORE)
        record.task = self._name
        since = site.book.since(namespace, tokens)
        what = f"lease(key {key_index}, reserve={wanted}) {record}"
        joins = bool(flags & JOIN)
        turn = None if wanted is None else site.turns.begin(what, record, reserve=True, joins=joins)
        with site.operation(self._name, what, waits=True) as noted:
            self._key = radix_key(tokens, namespace)
            lease = site.cache.lease(
                self._key,
                reserve=wanted,
                leave_last=1 if flags & LEAVE_LAST else 0,
                priority=priority,
                store=not flags & NO_STORE,
                resume=resume,
                stream=self._stream,
                join=joins,
            )
            try:
                await lease.__aenter__()
            finally:
                if turn is not None:
                    site.turns.end(turn)
        self._lease = lease
        del lease
        try:
            shown = self._shown()
            num_matched = self._lease.num_matched
            noted.result = f"{num_matched} matched, {shown}"
            site.book.matched(record, since, tokens, shown[:num_matched], limit)
            if joins:
                site.flights.entered(record, waits, tokens, limit)
            if site.book.grew(record, shown, max(0, (wanted or 0) - num_matched)) and turn is not None:
                site.turns.served(turn)
            self._read_matched()
            await self._take_steps(act.steps)
        finally:
            await self._end()

    async def run_twin(self, lease: Lease, record: Record, tokens: list[int], act: Act) -> None:
        """Goes on with the twin of a lease, in a task of its own."""
        self._lease, self._record, self._tokens = lease, record, tokens
        self._key = radix_key(tokens, record.namespace)
        del lease
        with self._site.cancellable(self._name):
            try:
                await self._lease.__aenter__()
                record.task = self._name
                self._read_matched()
                await self._take_steps(act.steps)
            except (RetractError, RequestTooLargeError):
                return
            finally:
                await self._end()

    async def _take_steps(self, steps: Sequence[Act]) -> None:
        for act in steps:
            if self._lease is None:
                return
            if act.name == "fork":
                await self._fork(act)
            else:
                await self._steps[act.name](*act.args)
            self._site.after_act(act)

    async def _end(self) -> None:
        lease, self._lease = self._lease, None
        if lease is None or self._record is None:
            return
        if not all(copy.done() for copy in self._copies):
            self._leave_to_heir(lease, self._record)
            return
        with self._site.operation(self._name, f"release {self._record}") as noted:
            self._site.book.released(self._record)
            await lease.__aexit__(*sys.exc_info())
            noted.result = "done"

    # ---- what it looks at

    def _held(self) -> tuple[Lease, Record]:
        assert self._lease is not None
        assert self._record is not None
        return self._lease, self._record

    def _shown(self) -> list[int]:
        assert self._lease is not None
        shown: list[int] = self._lease.slots.tolist()
        return shown

    def _using(self, stream: VirtualStream | None) -> VirtualStream | None:
        """A stream to launch on: made known to the lease, and ordered after what the lease's own stream did."""
        lease, _ = self._held()
        kernels = self._site.kernels
        if not self._narrow and stream is not self._stream and stream not in kernels.streams:
            stream = self._stream
        if stream is not None and self._narrow:
            lease.used_on(stream)
        kernels.order(self._stream, stream)
        if stream is not None:
            self._used[stream] = None
        return stream

    def _read_matched(self) -> None:
        _, record = self._held()
        if record.published:
            self._site.kernels.read(
                self._using(self._stream),
                record.slots[: record.published],
                record.contents[: record.published],
                repr(record),
                self._long,
            )

    def _compute(self, num_tokens: int) -> None:
        """Computes the next tokens, which have slots."""
        _, record = self._held()
        begin = len(record.contents)
        end = min(begin + num_tokens, len(record.slots), len(self._tokens))
        if end <= begin:
            return
        contents = self._site.book.contents
        if begin:
            fresh = contents.after(record.contents[-1], self._tokens[begin:end])
        else:
            fresh = contents.of(record.namespace, record.epoch, self._tokens[:end])
        kernels = self._site.kernels
        kernels.write(
            self._using(self._stream),
            record.slots[:begin],
            record.contents,
            record.slots[begin:end],
            fresh,
            repr(record),
            self._long,
        )
        self._site.book.computed(record, record.contents + fresh)

    # ---- the steps

    async def _allocate(self, num_tokens: int, patience: int) -> bool:
        """More slots; with little patience perhaps none. Whatever happens, what it had stays as it was."""
        lease, record = self._held()
        what = f"allocate({num_tokens}) {record}"
        num_pages = self._num_pages(record)
        turn = self._site.turns.begin(what, record, reserve=False)
        with self._site.operation(self._name, what, waits=True) as noted:
            try:
                if patience > 0:
                    with anyio.move_on_after(patience * 0.0005) as scope:
                        await lease.allocate(num_tokens)
                    if scope.cancelled_caught:
                        noted.result = "timed out"
                        self._site.book.unchanged(record, self._shown())
                        return False
                elif patience < 0:
                    try:
                        lease.allocate_nowait(num_tokens)
                    except OutOfSlotsError:
                        noted.result = "no room"
                        self._site.book.unchanged(record, self._shown())
                        return False
                else:
                    await lease.allocate(num_tokens)
            except BaseException:
                if not self._site.world.fault:
                    self._site.book.unchanged(record, self._shown())
                raise
            finally:
                self._site.turns.end(turn)
            shown = self._shown()
            fresh = self._site.book.grew(record, shown, num_tokens)
            noted.result = f"{fresh}"
            if self._num_pages(record) > num_pages:
                self._site.turns.served(turn)
        return True

    def _num_pages(self, record: Record) -> int:
        return -(-len(record.slots) // self._site.world.page_size)

    async def _grow(self, num_tokens: int = 1, patience: int = 0) -> None:
        """`grow(tokens, patience)`: slots for the next tokens of the prompt, and computing them."""
        _, record = self._held()
        num_spare = len(record.slots) - len(record.contents)
        missing = min(num_tokens, len(self._tokens) - len(record.contents)) - num_spare
        if missing <= 0 or await self._allocate(missing, patience):
            self._compute(num_tokens)

    async def _commit(self, num_back: int = 0) -> None:
        """`commit(back)`: publishes all that is computed but the last tokens."""
        lease, record = self._held()
        num_tokens = len(record.contents) - num_back
        if num_tokens < max(1, record.published, self._committed):
            return
        with self._site.operation(self._name, f"commit({num_tokens}) {record}") as noted:
            before = record.published
            if num_tokens > len(self._key):
                self._key = radix_key(self._tokens[:num_tokens], record.namespace)
            done = lease.commit(self._key[:num_tokens])
            published = lease.node.depth
            noted.result = f"{before} | {done.prefix_len} held | {published} published"
            freed = self._site.book.published(
                record, num_tokens, published, done.prefix_len, self._shown(), done.num_adopted
            )
            if freed != done.duplicates.tolist() or done.repointed != (before, before + len(freed)):
                raise self._site.book.fail(
                    "owner",
                    f"{record}: commit names the duplicates {done.duplicates.tolist()} and re-points {done.repointed}; "
                    f"it should be {freed} from {before} on",
                )
        self._committed = num_tokens
        if freed:
            self._read_matched()

    async def _decode(self, num_tokens: int = 1, token: int = 0, patience: int = 0) -> None:
        """`decode(tokens, first token, patience)`: token by token, committing each."""
        _, record = self._held()
        if len(record.contents) < len(self._tokens):
            return
        for step in range(num_tokens):
            if len(record.slots) <= len(record.contents) and not await self._allocate(1, patience):
                return
            self._tokens.append((token + step) % 3)
            self._compute(1)
            await self._commit()

    async def _read(self, stream: int = 0, long: int = 0) -> None:
        """`read(stream, long)`: attention over all that is computed, on some stream."""
        _, record = self._held()
        if not record.contents:
            return
        self._site.kernels.read(
            self._using(self._site.kernels.stream(stream)),
            record.slots[: len(record.contents)],
            record.contents,
            repr(record),
            bool(long),
        )

    async def _truncate(self, num_back: int = 1) -> None:
        """`truncate(back)`: gives the last slots back."""
        lease, record = self._held()
        keep = max(record.published, len(record.slots) - num_back)
        if keep % self._site.world.page_size:
            # The rest of the last page stays the lease's, and so does the care for what still runs on it.
            for stream in self._used:
                self._site.kernels.order(stream, self._stream)
        with self._site.operation(self._name, f"truncate({keep}) {record}") as noted:
            self._site.book.truncated(record, keep)
            self._committed = min(self._committed, keep)
            lease.truncate(keep)
            self._site.book.unchanged(record, self._shown())
            noted.result = "done"

    async def _fork(self, act: Act) -> None:
        """`fork()`: a twin on what is published, in a task of its own."""
        site = self._site
        lease, record = self._held()
        with site.operation(self._name, f"fork {record}") as noted:
            twin = lease.fork()
            copy = site.book.new("lease", record.namespace, record.store)
            copy.task = self._name
            site.book.forked(record, copy, twin.slots.tolist())
            noted.result = repr(copy)
        self._num_children += 1
        name = f"{self._name}.{self._num_children}"
        runner = RequestRunner(site, name)
        runner._stream, runner._narrow, runner._long = self._stream, self._narrow, self._long
        # What the first has computed beyond its last page the twin computes again.
        site.children.start_soon(runner.run_twin, twin, copy, self._tokens.copy(), act, name=name)

    async def _nest(self, key: int = 0, joins: int = 1) -> None:
        """`nest(key, joins)`: this task enters another lease beside the one it has, reads it, and releases it."""
        site = self._site
        namespace, tokens = site.key(key)
        record, since = site.book.new("lease", namespace), site.book.since(namespace, tokens)
        record.task = self._name
        with site.operation(self._name, f"lease(key {key}) {record} beside {self._record}", waits=True) as noted:
            lease = site.cache.lease(radix_key(tokens, namespace), join=bool(joins))
            await lease.__aenter__()
            shown: list[int] = lease.slots.tolist()
            noted.result = f"{shown}"
        try:
            site.book.matched(record, since, tokens, shown, len(tokens))
            if joins:
                site.flights.entered(record, False, tokens, len(tokens))
        finally:
            with site.operation(self._name, f"release {record}") as noted:
                site.book.released(record)
                lease.release()
                noted.result = "done"

    async def _pause(self, length: int = 0) -> None:
        await self._site.pause(length)

    async def _tick(self, seconds: int = 1) -> None:
        self._site.kernels.advance(seconds)

    async def _cancel(self, task: int = 0) -> None:
        self._site.cancel(task)

    async def _release(self, cancel: int = 0) -> None:
        """`release(cancel)`: ends it, and in the same step, after or (below 0) before, cancels so many who wait."""
        targets = self._site.targets()[: abs(cancel)]
        if cancel > 0:
            await self._end()
        for target in targets:
            target.cancel()
        await self._end()

    async def _drop(self) -> None:
        """`drop()`: forgets the lease; its finaliser has to give it back."""
        _, record = self._held()
        del _
        if self._copies:
            await self._end()
            return
        with self._site.operation(self._name, f"drop {record}") as noted:
            self._site.book.released(record)
            num_warned = len(self._site.warned)
            known: weakref.ref[Lease] = weakref.ref(self._held()[0])
            self._lease = None
            kept = known()
            if kept is None or len(self._site.warned) > num_warned:
                self._site.num_dropped += 1
                noted.result = "dropped"
            else:
                # An exception that was caught still holds a frame of ours, which refers to the lease.
                kept.release()
                noted.result = "released after all"

    async def _orphan(self, length: int = 1) -> None:
        """`orphan(length)`: this task ends without the lease; another one closes it later."""
        lease, record = self._held()
        self._lease = None
        self._leave_to_heir(lease, record, length)

    async def _copy(self, fate: int = 0) -> None:
        """`copy(fate)`: copies what is cached away; the lease is held until that has ended, even badly."""
        _, record = self._held()
        if record.published:
            await written(self._site, self._using(self._stream))
            slots, contents = record.slots[: record.published], record.contents[: record.published]
            self._copies.append(copy_out(self._site, slots, contents, fate, repr(record), held=True))

    def _leave_to_heir(self, lease: Lease, record: Record, pause: int = -1) -> None:
        args = (self._site, lease, record, tuple(self._copies), pause)
        self._site.children.start_soon(close_after, *args, name=f"{self._name}.heir")
