"""Copies that no stream orders, by a thread or a network card: slow, stuck or failed as the world plans it.

What a copy touches must stay what it is until the copy has ended, well or badly: a failed one has let go of its slots
all the same, and one that cannot even be asked any more never does. So slots that are given back while a copy runs go
behind a fence of it, and a lease whose slots are copied is held until then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio

from aradix import InsertParams, Lease
from aradix.memory.fences import FutureFence
from stress.device import VirtualCopy, VirtualStream
from stress.harness.book import Record
from stress.harness.faults import BreakingCopies
from stress.harness.site import Site, radix_key

__all__ = ["FATES", "SlotCopy", "close_after", "copy_errands", "copy_in", "copy_out", "written"]

FATES = ("ends", "fails", "is slow", "is stuck")
_SECONDS = {"is slow": (8.0, 20.0), "is stuck": (40.0, 80.0)}


class SlotCopy:
    """One running copy, in the shape of a future.

    Args:
        copy: of the device.
        fails: whether it ends with an error instead of a result; it stops touching the slots either way.
        lost: what makes it unanswerable, if anything does.
    """

    def __init__(self, copy: VirtualCopy, fails: bool, lost: BreakingCopies | None) -> None:
        self._copy = copy
        self._fails = fails
        self._lost = lost

    def done(self) -> bool:
        """Whether it has ended. Raises where the device that ran it is lost."""
        if self._lost is not None:
            self._lost.may_ask()
        return self._copy.done()

    def exception(self) -> Exception | None:
        """Why it failed, once it is done."""
        return OSError("the copy failed") if self._fails else None

    def add_done_callback(self, callback: Callable[[object], object]) -> None:
        """Calls back as it ends; never where the device is lost."""
        if self._lost is None:
            self._copy.add_done_callback(callback)

    async def wait(self) -> bool:
        """Waits for the end; whether it ended well. Raises where nobody can say."""
        if self._lost is not None:
            self._lost.give_up()
        ended = anyio.Event()
        self.add_done_callback(lambda _: ended.set())
        await ended.wait()
        self.done()
        return not self._fails


def copy_out(
    site: Site, slots: Sequence[int], contents: Sequence[int], fate: int, who: str, *, held: bool = False
) -> SlotCopy:
    """Starts a copy out of slots that the host knows to be written; `fate` is a number in `FATES`.

    Where the slots are `held` until its end, and not fenced, it is not the one whose device the world plans to lose.
    """
    fate_name = FATES[fate % len(FATES)]
    copy = site.kernels.copy_out(slots, contents, f"copy of {who}", _SECONDS.get(fate_name))
    return SlotCopy(copy, fate_name == "fails", None if held else _lost(site))


def copy_in(site: Site, slots: Sequence[int], contents: Sequence[int], fate: int) -> SlotCopy:
    """Starts a copy into slots that nothing else uses, as far as the host knows. One that fails leaves nothing."""
    fate_name, lost = FATES[fate % len(FATES)], _lost(site)
    fails = fate_name == "fails"
    copy = site.kernels.copy_in(slots, () if fails or lost else contents, _SECONDS.get(fate_name))
    return SlotCopy(copy, fails, lost)


def _lost(site: Site) -> BreakingCopies | None:
    return site.fault if isinstance(site.fault, BreakingCopies) and site.fault.is_next() else None


async def written(site: Site, stream: VirtualStream | None) -> None:
    """Waits until the host knows that all which a stream was given is done: a copy is ordered by nothing else."""
    if stream is not None:
        event = stream.record_event()
        while not event.query():
            await site.pause(2)


async def close_after(site: Site, lease: Lease, record: Record, copies: Sequence[SlotCopy], pause: int = -1) -> None:
    """Releases a lease when no copy touches its slots any more; in a task of its own."""
    try:
        if pause >= 0:
            await site.pause(pause)
        for copy in copies:
            await copy.wait()
    finally:
        if not all(copy.done() for copy in copies):
            site.kernels.finish()  # the run is ending: wait as a dying engine does
            assert all(copy.done() for copy in copies)
        with site.operation("heir", f"release {record}") as noted:
            site.book.released(record)
            lease.release()
            noted.result = "done"


def copy_errands(site: Site, task: str) -> dict[str, Callable[..., Awaitable[None]]]:
    """What a task does with copies, by name."""
    return {"save": partial(_save, site, task), "load": partial(_load, site, task)}


async def _save(site: Site, task: str, key: int = 0, length: int = 0, fate: int = 0, stream: int = 0) -> None:
    """`save(key, length, fate, stream)`: computes into slots of its own, copies them away, frees them meanwhile."""
    book = site.book
    namespace, tokens = site.key(key)
    tokens = tokens[: 1 + length % len(tokens)]
    using = site.kernels.stream(stream)
    record = book.new("caller", namespace)
    if not _take(site, task, record, len(tokens), using, host_visible=False):
        return
    fence: FutureFence | None = None
    try:
        contents = book.of(namespace, tokens)
        slots = record.slots[: len(tokens)]
        site.kernels.write(using, (), (), slots, contents, repr(record))
        await written(site, using)
        fence = FutureFence(copy_out(site, slots, contents, fate, repr(record)))
    finally:
        _give_back(site, task, record, using, fence)


async def _load(site: Site, task: str, key: int = 0, length: int = 0, fate: int = 0, stream: int = 0) -> None:
    """`load(key, length, fate, stream)`: copies what was kept elsewhere into new slots, and publishes it."""
    book = site.book
    namespace, tokens = site.key(key)
    tokens = tokens[: 1 + length % len(tokens)]
    record = book.new("caller", namespace)
    if not _take(site, task, record, len(tokens), site.kernels.stream(stream), host_visible=True):
        return
    copy: SlotCopy | None = None
    try:
        slots = record.slots[: len(tokens)]
        contents, epoch = book.of(namespace, tokens), book.epoch(namespace)
        copy = copy_in(site, slots, contents, fate)
        good = await copy.wait()
        copy = None
        if not good or book.epoch(namespace) != epoch:
            return
        with site.operation(task, f"insert(key {key}[:{len(tokens)}]) {record}", waits=True) as noted:
            taken = InsertParams(radix_key(tokens, namespace), record.slots)
            done = await site.cache.insert(taken)
            noted.result = f"prefix {done.prefix_len}, {done.num_adopted} adopted"
        contents = book.of(namespace, tokens)
        site.kernels.relabel(slots, contents)
        book.computed(record, contents)
        book.adopted(record, len(tokens), done.prefix_len, done.duplicates.tolist())
    finally:
        _give_back(site, task, record, None, None if copy is None else FutureFence(copy))


def _take(
    site: Site, task: str, record: Record, num_tokens: int, stream: VirtualStream | None, *, host_visible: bool
) -> bool:
    page_size = site.world.page_size
    num_slots = -(-num_tokens // page_size) * page_size
    with site.operation(task, f"alloc({num_slots}, host_visible={host_visible}) {record}") as noted:
        taken = site.allocator.alloc(num_slots, stream, host_visible)
        if taken is None:
            noted.result = "no room"
            return False
        site.book.took(record, taken.tolist())
        noted.result = f"{taken.tolist()}"
    return True


def _give_back(site: Site, task: str, record: Record, stream: VirtualStream | None, fence: FutureFence | None) -> None:
    left = record.slots
    site.book.released(record)
    with site.operation(task, f"free {record}" + (" behind its copy" if fence else "")) as noted:
        # What waited for the copy before it began need not be named: the host saw the end of it.
        site.allocator.free(left, () if stream is None else (stream,), fence=fence)
        noted.result = f"{left}"
