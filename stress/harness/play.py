"""Plays a world: builds the cache over the virtual device, runs the tasks, and looks at what is left."""

from __future__ import annotations

import gc
import logging
import warnings
import zlib
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager

import anyio

from aradix import CacheInitParams, HostKVPool, RadixCache, SlotAllocator
from aradix.errors import TransferError
from stress.device import VirtualEvent
from stress.harness.book import Book
from stress.harness.builder import Builder
from stress.harness.compare import play_compared
from stress.harness.errands import Worker
from stress.harness.faults import PLANNED, BreakingCopies, BreakingEvents, BreakingSink, BrokenPolicy, LostCopyError
from stress.harness.keeping import play_keeping
from stress.harness.kernels import Kernels
from stress.harness.mirror import Mirror
from stress.harness.outcome import Failure, Outcome, judge
from stress.harness.site import Fault, Site, radix_key
from stress.harness.tiers import make_tiers
from stress.harness.worlds import World
from stress.schedules import Chooser, Seeded, attempt

__all__ = ["play", "play_shared"]

_MAX_STEPS = 60_000
_MAX_ROUNDS = 30


def play(world: World, *, chooser: Chooser | None = None, builder: Builder | None = None) -> Outcome:
    """Runs a world of any kind, and says what was wrong. Takes no real time to wait.

    Args:
        world: the scenario.
        chooser: of the schedule; drawn from the world's seed by default.
        builder: of the cache.
    """
    chooser = Seeded(world.seed) if chooser is None else chooser
    builder = builder or Builder()
    if world.kind == "shared":
        return play_shared(world, chooser, builder)
    if world.kind == "keeping":
        return play_keeping(world, chooser, builder)
    return play_compared(world, chooser, builder)


def play_shared(world: World, chooser: Chooser, builder: Builder) -> Outcome:
    """Runs a world of the kind `"shared"`."""
    with warnings.catch_warnings(record=True) as warned, _listening() as logged:
        warnings.simplefilter("always")
        run = _Run(world, builder, warned)
        done = attempt(run.main, backend=world.backend, chooser=chooser, max_steps=_MAX_STEPS)
        choices, num_steps = done.choices, done.num_steps
        failure = run.judge(done.error, logged, sum(issubclass(each.category, ResourceWarning) for each in warned))
        if failure is not None or (world.fault and run.num_dropped):
            del done
            gc.collect()  # leases that only the error's frames still hold, whose warnings belong to this run
    history = tuple(map(str, run.site.history)) if run.site is not None else ()
    num_acts = run.site.num_acts if run.site is not None else 0
    return Outcome(failure, choices, num_steps, num_acts, zlib.crc32("\n".join(history).encode()), history)


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.found.append(record.getMessage() if error is None else f"{record.getMessage()}: {error!r}")


@contextmanager
def _listening() -> Iterator[list[str]]:
    """What the library logs instead of raising: nobody would have heard of it."""
    listener, logger = _Listener(), logging.getLogger("aradix")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(listener)
    try:
        yield listener.found
    finally:
        logger.removeHandler(listener)
        logger.propagate = propagates


class _Run:
    def __init__(self, world: World, builder: Builder, warned: Sized) -> None:
        self.world = world
        self.site: Site | None = None
        self.book = Book(world.num_pages * world.page_size, world.page_size)
        self._builder = builder
        self._warned = warned
        self._fault: Fault | None = None
        self._mirror: Mirror | None = None
        self._was_late = False

    @property
    def num_dropped(self) -> int:
        return self.site.num_dropped if self.site is not None else 0

    async def main(self) -> None:
        world = self.world
        kernels = Kernels(world, self.book)
        make_event: Callable[[], VirtualEvent] | None = kernels.event_factory()
        if make_event is not None and world.fault == "record":
            # The cache tries each stream once as it is built.
            make_event = self._fault = BreakingEvents(make_event, world.fault_at + world.num_streams)
        allocator = self._builder.allocator(world, kernels.device, make_event)
        policy: object = world.policy
        if world.fault == "policy":
            policy = self._fault = BrokenPolicy(world.policy, world.fault_at)
        elif world.fault == "copy":
            self._fault = BreakingCopies(world.fault_at)
        tiers = make_tiers(world, kernels, self.book)
        cache = self._builder.cache(
            CacheInitParams(
                allocator=allocator,
                page_size=world.page_size,
                eviction_policy=policy,
                evict_unit=world.evict_unit,
                low_watermark=world.low_watermark,
                high_watermark=world.high_watermark,
                streams=tuple(kernels.streams),
                waiters_keep_pins=world.waiters_keep_pins,
                enable_kv_cache_events=world.events,
                clock=kernels.device.clock.time,
                **({} if tiers is None else tiers.params(world)),
            )
        )
        try:
            async with cache:
                if world.events:
                    self._listen(cache)
                async with anyio.create_task_group() as around:
                    around.start_soon(kernels.run_clock, name="device clock")
                    async with anyio.create_task_group() as tasks:
                        site = self.site = Site(
                            world, self.book, kernels, allocator, cache, tasks, self._fault, self._warned
                        )
                        for number, acts in enumerate(world.tasks):
                            worker = Worker(site, number)
                            tasks.start_soon(worker.run, acts, name=f"task {number}")
                    if tiers is None:
                        kernels.stop_clock()
                    if not world.fault:
                        await self._look_at_rest(site)
                    around.cancel_scope.cancel()
        finally:
            if self.book.violation is None and self.site is not None:
                self._look_after_close(kernels, allocator)
                if tiers is not None:
                    self._look_at_host(tiers.host)

    def _listen(self, cache: RadixCache) -> None:
        self._mirror = sink = Mirror(self.book, cache, lambda: self._fault is not None and self._fault.raised)
        if self.world.fault == "sink":
            self._fault = breaking = BreakingSink(sink, self.world.fault_at)
            cache.add_event_sink(breaking)
        else:
            cache.add_event_sink(sink)

    async def _look_at_rest(self, site: Site) -> None:
        """All is released: every slot is free or cached, what is cached is right, and no gate stands."""
        book, cache, allocator = self.book, site.cache, site.allocator
        await self._come_to_rest(site)
        allocator.reclaim()
        site.audit()
        site.check_sums()
        if self._mirror is not None:
            self._mirror.look()
        stats = cache.stats()
        if stats.evictable and stats.free + stats.fenced < int(self.world.low_watermark * stats.num_slots):
            raise book.fail("evictor", f"the pool is below its low watermark, and stays there: {stats}")
        if stats.free + stats.evictable != stats.num_slots or stats.num_slot_waiters or stats.num_leases:
            raise book.fail("leak", f"all is released, but {stats}")
        keys = dict.fromkeys(map(site.key, range(len(self.world.keys))))
        for namespace in dict.fromkeys(namespace for namespace, _ in keys):
            async with cache.exclusive(radix_key((), namespace)):
                pass
        for namespace, tokens in keys:
            record, since = book.new("lease", namespace), book.since(namespace, tokens)
            async with cache.lease(radix_key(tokens, namespace)) as lease:
                slots: list[int] = lease.slots.tolist()
                book.matched(record, since, tokens, slots, len(tokens))
                site.kernels.read(site.kernels.stream(0), slots, record.contents, f"{record} at the end")
                book.released(record)
        await self._come_to_rest(site)
        left = cache.stats().evictable
        freed = (await cache.flush()).num_freed_tokens
        allocator.reclaim()
        everything = allocator.alloc(allocator.num_slots)
        if everything is None or freed != left:
            raise book.fail("leak", f"{freed} of {left} evictable tokens came back with a flush: {cache.stats()}")
        allocator.free(everything)
        site.audit()

    async def _come_to_rest(self, site: Site) -> None:
        """Wait for what the cache does by itself: evicting, and copies that begin further ones as they end."""
        num_quiet, before = 0, None
        for _ in range(_MAX_ROUNDS):
            await site.pause(2)
            site.kernels.finish()
            stats = site.cache.stats()
            is_busy = stats.storing + stats.loading + stats.protected > 0
            # What ended just now may have woken the evictor, and the sinks have not been told of it.
            num_quiet = 0 if is_busy or stats != before else num_quiet + 1
            before = stats
            if num_quiet == 2:
                return
        raise self.book.fail("leak", f"nothing is asked for, but the cache does not come to rest: {site.cache.stats()}")

    def _look_at_host(self, host: HostKVPool) -> None:
        host.allocator.reclaim()
        host.allocator.check()
        if host.available_size() != host.num_slots:
            raise self.book.fail("leak", f"the cache is closed, but the host has {host.available_size()} of {host}")

    def _look_after_close(self, kernels: Kernels, allocator: SlotAllocator) -> None:
        kernels.finish()
        # An event that could not be recorded, or a copy that is lost, quarantines its slots: for good, but only these.
        was_struck = self._fault is not None and self._fault.raised
        try:
            allocator.reclaim()
        except TransferError as error:
            if was_struck or not isinstance(error.__cause__, LostCopyError):
                raise
            self._was_late = True
        allocator.check()
        lost = allocator.quarantined_size()
        if self._fault is not None and self._fault.raised and self.num_dropped:
            return  # the error's frames may still hold a lease that was dropped
        if allocator.available_size() + lost != allocator.num_slots or (
            lost and self.world.fault not in ("record", "copy")
        ):
            raise self.book.fail("leak", f"the cache is closed, but {allocator!r} has {lost} in quarantine")

    def judge(self, error: BaseException | None, logged: list[str], num_warnings: int) -> Failure | None:
        """What a run's end says."""
        found = self.book.violation
        if found is not None:
            return Failure(found.oracle, found.message)
        if logged and error is None:  # what is raised as well is judged as that
            return Failure("logged", logged[0])
        failure = judge(error, PLANNED if self.world.fault else ())
        if failure is not None:
            return failure
        if self._fault is not None and self._fault.raised and error is None and not self._was_late:
            return Failure("error", f"a fault ({self.world.fault}) struck, but the run ended as if it had not")
        if num_warnings != self.num_dropped and not self.world.fault:
            return Failure("leak", f"{self.num_dropped} leases were dropped, and {num_warnings} ResourceWarnings given")
        return None
