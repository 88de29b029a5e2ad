"""What a task does besides requests: flush, evict, look, take a subtree, and the low-level calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aradix import EvictParams, InsertParams, MatchPrefixParams, Namespace
from aradix.cache.locks import Exclusive
from aradix.errors import UsageError
from stress.harness.copies import copy_errands
from stress.harness.request import RequestRunner
from stress.harness.site import Site, radix_key
from stress.harness.tier_errands import tier_errands
from stress.harness.worlds import Act

__all__ = ["Worker"]

_MORE: tuple[Callable[[Site, str], dict[str, Callable[..., Awaitable[None]]]], ...] = (copy_errands, tier_errands)
"""Errands that have files of their own: each gives acts by name, for a task of that name."""


class Worker:
    """One task: its acts, one after the other.

    Args:
        site: what all tasks share.
        number: of the task.
    """

    def __init__(self, site: Site, number: int) -> None:
        self._site = site
        self._name = f"task {number}"
        self._acts: dict[str, Callable[..., Awaitable[None]]] = {
            "flush": self._flush,
            "reload": self._reload,
            "evict": self._evict,
            "peek": self._peek,
            "pinned": self._pinned,
            "insert": self._insert,
            "pause": self._pause,
            "tick": self._tick,
            "cancel": self._cancel,
        }
        for more in _MORE:
            self._acts |= more(site, self._name)

    async def run(self, acts: tuple[Act, ...]) -> None:
        """Takes the acts; each may be cancelled, and the next goes on."""
        site = self._site
        for act in acts:
            if act.name == "request":
                await RequestRunner(site, self._name).run(act)
            else:
                with site.cancellable(self._name):
                    if act.name == "exclusive":
                        await self._exclusive(act)
                    else:
                        await self._acts[act.name](*act.args)
            site.after_act(act)

    async def _pause(self, length: int = 0) -> None:
        await self._site.pause(length)

    async def _tick(self, seconds: int = 1) -> None:
        self._site.kernels.advance(seconds)

    async def _cancel(self, task: int = 0) -> None:
        self._site.cancel(task)

    async def _flush(self, namespace: int = -1) -> None:
        """`flush(namespace)`: one namespace, or all of them below 0."""
        site = self._site
        which = None if namespace < 0 else site.namespace(namespace)
        with site.operation(self._name, f"flush({'all' if which is None else namespace})") as noted:
            done = await site.cache.flush(which)
            noted.result = f"{done.num_freed_tokens} freed, {done.num_held_tokens} held"
        if not site.world.has_store:  # else its clearing has told
            site.book.flushed(which)

    async def _reload(self, namespace: int = 0) -> None:
        """`reload(namespace)`: new requests use its next version; the old one is flushed."""
        site = self._site
        old = site.move_version(namespace)
        with site.operation(self._name, f"reload {namespace}") as noted:
            done = await site.cache.flush(old)
            noted.result = f"{done.num_freed_tokens} freed, {done.num_held_tokens} held"
        if not site.world.has_store:
            site.book.flushed(old)

    async def _evict(self, num_tokens: int = 1) -> None:
        """`evict(tokens)`."""
        site = self._site
        page_size = site.world.page_size
        lost_before = site.cache.stats().quarantined
        with site.operation(self._name, f"evict({num_tokens})") as noted:
            freed = (await site.cache.evict(EvictParams(num_tokens))).num_freed_tokens
            noted.result = f"{freed} freed"
        if site.is_struck:
            return
        wanted, left = -(-num_tokens // page_size) * page_size, site.cache.evictable_size()
        # What went into quarantine was evicted, but did not come back.
        gone = freed + site.cache.stats().quarantined - lost_before
        # Who waits may have let go of pins meanwhile, so that something is evictable again.
        # A write-back has to wait, and others evict and publish meanwhile.
        is_single = not site.world.num_host_pages or site.world.write_policy != "write_back"
        if (gone < wanted and left and not site.book.num_in_flight and is_single) or (
            gone > wanted and site.world.evict_unit == "page"
        ):
            raise site.book.fail("sum", f"evict({num_tokens}) freed {freed} tokens, and {left} are evictable after it")

    async def _peek(self, key: int = 0) -> None:
        """`peek(key)`."""
        site = self._site
        namespace, tokens = site.key(key)
        with site.operation(self._name, f"peek(key {key})") as noted:
            num = site.cache.peek(radix_key(tokens, namespace))
            noted.result = f"{num}"
        site.book.peeked(namespace, site.book.since(namespace, tokens), tokens, num)

    async def _exclusive(self, act: Act) -> None:
        """`exclusive(key, length, pause, evict)`: a subtree for itself, for a while."""
        site = self._site
        key, length, pause, evict = (*act.args, 0, 0, 0, 0)[:4]
        namespace, tokens = site.key(key)
        tokens = tokens[: length % (len(tokens) + 1)]
        site.book.gate_asked()
        try:
            with site.operation(self._name, f"exclusive(key {key}[:{len(tokens)}])", waits=True) as noted:
                since = site.book.since(namespace, tokens)
                handle = site.cache.exclusive(radix_key(tokens, namespace))
                await handle.__aenter__()
                noted.result = f"granted at {handle.num_matched}"
            try:
                # A flush meanwhile leaves the gate on what is detached, where nobody can come any more.
                if site.book.epoch(namespace) == since.epoch:
                    await self._alone(namespace, tokens, handle, pause, evict)
                else:
                    await site.pause(pause)
            finally:
                with site.operation(self._name, "open the gate") as noted:
                    await handle.__aexit__(None, None, None)
                    noted.result = "done"
        finally:
            site.book.num_gates -= 1

    async def _alone(
        self, namespace: Namespace, tokens: tuple[int, ...], handle: Exclusive, pause: int, evict: int
    ) -> None:
        site = self._site
        depth = handle.num_matched
        gate = site.book.gate_granted(namespace, tokens[:depth])
        try:
            if evict:
                epoch = site.book.epoch(namespace)
                with site.operation(self._name, "evict below the gate") as noted:
                    noted.result = f"{handle.evict()} freed"
                if (
                    site.book.epoch(namespace) == epoch
                    and (left := site.cache.peek(radix_key(tokens, namespace))) > depth
                ):
                    raise site.book.fail("exclusive", f"{left} tokens are cached after all below {depth} was evicted")
            await site.pause(pause)
            site.book.gate_is_alone(gate)
        finally:
            site.book.gate_opened(gate)

    async def _pinned(self, key: int = 0, pause: int = 0, late: int = 0, stream: int = 0) -> None:
        """`pinned(key, pause, late, stream)`: match and pin, with a pause between the two where late."""
        site = self._site
        namespace, tokens = site.key(key)
        record = site.book.new("pin", namespace)
        since = site.book.since(namespace, tokens)
        with site.operation(self._name, f"match_prefix(key {key}) {record}", waits=True) as noted:
            found = await site.cache.match_prefix(MatchPrefixParams(radix_key(tokens, namespace)))
            slots: list[int] = found.device_indices.tolist()
            noted.result = f"{slots}"
        if late:
            await site.pause(late - 1)
        try:
            with site.operation(self._name, f"inc_lock_ref {record}") as noted:
                site.cache.inc_lock_ref(found.last_device_node)
                noted.result = "pinned"
        except UsageError as error:
            if not late:
                raise site.book.fail("history", f"{record}: pinned at once, it is refused: {error}") from error
            return
        try:
            if late:
                # What it matched must still be what it was, or the pin had been refused.
                since = since._replace(floors=[])
            site.book.matched(record, since, tokens, slots, len(tokens))
            streams = site.kernels.streams
            site.kernels.read(streams[stream % len(streams)] if streams else None, slots, record.contents, repr(record))
            await site.pause(pause)
        finally:
            with site.operation(self._name, f"dec_lock_ref {record}") as noted:
                site.book.released(record)
                site.cache.dec_lock_ref(found.last_device_node)
                noted.result = "done"

    async def _insert(self, key: int = 0, length: int = 0, stream: int = 0, pause: int = 0) -> None:
        """`insert(key, length, stream, pause)`: slots of its own, computed and published by the low-level call."""
        site, book = self._site, self._site.book
        namespace, tokens = site.key(key)
        tokens = tokens[: 1 + length % len(tokens)]
        page_size = site.world.page_size
        streams = site.kernels.streams
        using = streams[stream % len(streams)] if streams else None
        record = book.new("caller", namespace)
        num_slots = -(-len(tokens) // page_size) * page_size
        with site.operation(self._name, f"alloc({num_slots}) {record}") as noted:
            taken = site.allocator.alloc(num_slots, using)
            if taken is None:
                noted.result = "no room"
                return
            book.took(record, taken.tolist())
            noted.result = f"{taken.tolist()}"
        try:
            contents = book.of(namespace, tokens)
            site.kernels.write(using, (), (), record.slots[: len(tokens)], contents, repr(record))
            await site.pause(pause)
            with site.operation(self._name, f"insert(key {key}[:{len(tokens)}]) {record}", waits=True) as noted:
                done = await site.cache.insert(InsertParams(radix_key(tokens, namespace), taken))
                noted.result = f"prefix {done.prefix_len}, {done.num_adopted} adopted"
            # A flush may have come while it waited: it is the caller who says what these slots hold.
            contents = book.of(namespace, tokens)
            site.kernels.relabel(record.slots[: len(tokens)], contents)
            book.computed(record, contents)
            book.adopted(record, len(tokens), done.prefix_len, done.duplicates.tolist())
        finally:
            left = record.slots
            book.released(record)
            with site.operation(self._name, f"free {record}") as noted:
                site.allocator.free(left, () if using is None else (using,))
                noted.result = f"{left}"
