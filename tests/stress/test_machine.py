"""The cache under hypothesis: tasks that lease, wait, fail and are cancelled, one ready handle of the loop at a time.

Unlike in a seeded schedule every decision is a rule of its own, and the cache is audited after each of them.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from aradix import CacheInitParams, EvictParams, Lease, RadixCache, RadixKey, SlotAllocator
from aradix.errors import CacheClosedError, RetractError
from tests.support.caches import idle_sum
from tests.support.stepped import SteppedLoop

Tokens = tuple[int, ...]
Name = str | None

# Hot prefixes that most requests share, and tails that part at every depth; the longest fits the smallest pool.
KEYS = st.builds(
    lambda head, tail: (*head, *tail),
    st.sampled_from([(0, 0), (0, 0, 1, 1), (0, 0, 1, 1, 0), (1,), ()]),
    st.lists(st.integers(0, 2), min_size=2, max_size=3).map(tuple),
)
NAMES: st.SearchStrategy[Name] = st.sampled_from([None, None, "x"])
WHICH = st.integers(0, 11)
DELAYS = st.sampled_from([math.inf, math.inf, 1.0, 2.0])
Request = tuple[Tokens, Name, bool, int, float]
REQUESTS: st.SearchStrategy[Request] = st.tuples(KEYS, NAMES, st.booleans(), st.integers(0, 8), DELAYS)


@dataclass
class Job:
    """A task of the machine, and what it holds."""

    tokens: Tokens = ()
    name: Name = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    epoch: int = 0
    num_published: int | None = None  # while it holds a lease
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> RadixKey:
        return RadixKey(self.tokens, self.name)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = SteppedLoop()
        self.jobs: list[Job] = []
        self.sound = True
        self.closing = asyncio.Event()
        # All that was published since the last flush; the tree never holds more, and may hold less.
        self.published: dict[Name, set[Tokens]] = {None: set(), "x": set()}
        self.num_flushes: Counter[Name] = Counter()
        self.memory: dict[int, tuple[Name, Tokens]] = {}

    @initialize(
        num_slots=st.sampled_from([8, 8, 8, 12, 24]),
        page_size=st.sampled_from([1, 2]),
        keeps_pins=st.booleans(),
        watermark=st.sampled_from([0.0, 0.25]),
    )
    def open(self, num_slots: int, page_size: int, keeps_pins: bool, watermark: float) -> None:
        self.page_size = page_size
        self.allocator = SlotAllocator(num_slots, page_size)
        params = CacheInitParams(
            allocator=self.allocator,
            page_size=page_size,
            low_watermark=watermark,
            high_watermark=2 * watermark,
            waiters_keep_pins=keeps_pins,
        )
        self.cache = RadixCache(params)
        self.host = self.loop.create_task(self._keep_open())
        self.loop.settle()

    async def _keep_open(self) -> None:
        async with self.cache:
            await self.closing.wait()
        self._note_flush(self.published)

    # ---- what the tasks do ----

    def _start(self, job: Job, act: Callable[[], Awaitable[object]]) -> None:
        async def run() -> None:
            with suppress(RetractError, CacheClosedError):  # told to give way, or too late: both are answers
                await act()

        job.task = self.loop.create_task(run())
        self.jobs.append(job)

    async def _lease(self, job: Job, num_reserved: int | None, num_committed: int, delay: float) -> None:
        with anyio.move_on_after(delay):
            job.epoch = self.num_flushes[job.name]
            async with self.cache.lease(job.key, reserve=num_reserved) as lease:
                try:
                    job.num_published = lease.num_matched
                    self._read(job, lease, lease.num_matched)
                    self._write(job, lease)
                    while (missing := len(job.tokens) - lease.num_tokens) > 0:
                        await lease.allocate(-(-missing // 2))  # so a waiter may hold some slots already
                        self._write(job, lease)
                    self._commit(job, lease, max(lease.num_matched, num_committed))
                    await job.released.wait()
                    self._commit(job, lease, len(job.tokens))
                    self._read(job, lease, len(job.tokens))
                finally:
                    job.num_published = None

    def _commit(self, job: Job, lease: Lease, num_tokens: int) -> None:
        done = lease.commit(job.key[:num_tokens])
        end = done.prefix_len + done.num_adopted
        job.num_published = end
        if done.num_adopted:
            self.published[job.name].add(job.tokens[:end])
        self._read(job, lease, num_tokens)

    def _write(self, job: Job, lease: Lease) -> None:
        """Fill the slots of the lease alone, as a kernel would."""
        for index, slot in enumerate(lease.slots.tolist()):
            if index >= lease.num_matched:
                self.memory[slot] = (job.name, job.tokens[: index + 1])

    def _read(self, job: Job, lease: Lease, num_tokens: int) -> None:
        """Every slot still holds what stands for its prefix: nobody else was given it."""
        for index, slot in enumerate(lease.slots[:num_tokens].tolist()):
            assert self.memory[slot] == (job.name, job.tokens[: index + 1])

    async def _own(self, job: Job, evicts: bool, delay: float) -> None:
        with anyio.move_on_after(delay):
            job.epoch = self.num_flushes[job.name]
            async with self.cache.exclusive(job.key) as mine:
                if evicts:
                    mine.evict()
                    if job.epoch == self.num_flushes[job.name]:  # a flush takes the path as well
                        assert self.cache.peek(job.key) == mine.num_matched
                await job.released.wait()

    async def _flush(self, name: Name) -> None:
        await self.cache.flush(name)
        self._note_flush(self.published if name is None else [name])

    def _note_flush(self, names: Iterable[Name]) -> None:
        for name in names:
            self.published[name].clear()
            self.num_flushes[name] += 1

    # ---- rules ----

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=3))
    def spawn(self, requests: list[Request]) -> None:
        for tokens, name, reserves, num_committed, delay in requests:
            self._spawn(Job(tokens, name), len(tokens) if reserves else None, min(num_committed, len(tokens)), delay)

    def _spawn(self, job: Job, num_reserved: int | None, num_committed: int, delay: float) -> None:
        self._start(job, lambda: self._lease(job, num_reserved, num_committed, delay))

    @rule(tokens=KEYS, name=NAMES, evicts=st.booleans(), delay=DELAYS)
    def exclusive(self, tokens: Tokens, name: Name, evicts: bool, delay: float) -> None:
        job = Job(tokens, name)
        self._start(job, lambda: self._own(job, evicts, delay))

    @rule(errand=st.sampled_from(["peek", "evict", "flush"]), tokens=KEYS, name=NAMES, num_tokens=st.integers(0, 8))
    def errand(self, errand: str, tokens: Tokens, name: Name, num_tokens: int) -> None:
        if errand == "peek":
            self._check_peek(tokens, name)
        elif errand == "evict":
            self._start(Job(), lambda: self.cache.evict(EvictParams(num_tokens)))
        else:
            self._start(Job(), lambda: self._flush(name))

    @precondition(lambda self: self.loop.num_ready)
    @rule(choices=st.lists(WHICH, min_size=1, max_size=16))
    def step(self, choices: list[int]) -> None:
        self._step(choices)

    def _step(self, choices: Iterable[int]) -> None:
        for choice in choices:
            if self.loop.num_ready:
                self.loop.step(choice)
                self._audit()

    @precondition(lambda self: self.loop.num_ready)
    @rule(num_steps=st.integers(4, 24), stride=WHICH)
    def run_on(self, num_steps: int, stride: int) -> None:
        """Many steps for one decision, so that tasks get far enough to be in each other's way."""
        self._step(range(0, num_steps * stride + num_steps, stride + 1))

    @precondition(lambda self: self.loop.num_timers)
    @rule()
    def timer(self) -> None:
        self.loop.advance()
        self._audit()

    @precondition(lambda self: self.live)
    @rule(which=WHICH, woken=st.sampled_from([True, True, False]))
    def cancel(self, which: int, woken: bool) -> None:
        """Cancel a task; best in the narrow moment when it was given what it waited for, and does not know yet."""
        among = (woken and self.woken) or self.live
        self._cancel(among[which % len(among)])

    def _cancel(self, job: Job) -> None:
        assert job.task is not None
        job.cancelled = True
        self.loop.call(job.task.cancel)
        self._audit()

    @precondition(lambda self: any(not job.released.is_set() for job in self.live))
    @rule(which=WHICH)
    def release(self, which: int) -> None:
        held = [job for job in self.live if not job.released.is_set()]
        self.loop.call(held[which % len(held)].released.set)
        self._audit()

    @precondition(lambda self: len(self.jobs) > 20 and not self.closing.is_set())
    @rule(sure=st.integers(0, 3))
    def close(self, sure: int) -> None:
        if sure == 3:
            self.loop.call(self.closing.set)

    # ---- what holds after every step ----

    @property
    def live(self) -> list[Job]:
        return [job for job in self.jobs if job.task is not None and not job.task.done()]

    @property
    def woken(self) -> list[Job]:
        tasks = self.loop.woken()
        return [job for job in self.live if job.task in tasks]

    def _audit(self) -> None:
        self.sound = False
        assert not self.loop.failures
        for job in self.jobs:
            if job.task is not None and job.task.done() and not (job.cancelled and job.task.cancelled()):
                job.task.result()
        if self.host.done():
            self.host.result()
        self.loop.call(self.cache.check)
        assert self.loop.call(lambda: idle_sum(self.cache)) == self.allocator.num_slots
        for job in self.live:
            num_cached = self._check_peek(job.tokens, job.name)
            if job.num_published is not None and job.epoch == self.num_flushes[job.name] and not self.closing.is_set():
                assert num_cached >= job.num_published  # what a lease stands on stays
        self.sound = True

    def _check_peek(self, tokens: Tokens, name: Name) -> int:
        num_cached = self.loop.call(lambda: self.cache.peek(RadixKey(tokens, name)))
        most = max((_num_shared(tokens, other) for other in self.published[name]), default=0)
        assert num_cached % self.page_size == 0
        assert num_cached <= most
        return num_cached

    def teardown(self) -> None:
        try:
            if self.sound and hasattr(self, "host"):
                self._end()
        finally:
            for task in asyncio.all_tasks(self.loop):
                self.loop.call(task.cancel)
            self.loop.settle()
            self.loop.close()

    def _end(self) -> None:
        for job in self.jobs:
            self.loop.call(job.released.set)
        self.loop.settle()
        self._audit()
        assert not self.live  # with every holder gone, nobody waits for ever
        stats = self.loop.call(self.cache.stats)
        assert (stats.protected, stats.leased, stats.num_leases, stats.num_slot_waiters) == (0, 0, 0, 0)
        self.loop.call(self.closing.set)
        self.loop.settle()
        self.host.result()
        self._audit()
        assert not asyncio.all_tasks(self.loop)
        self.allocator.check()
        assert self.allocator.available_size() == self.allocator.num_slots


def _num_shared(one: Tokens, other: Tokens) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


# Shrinking takes hypothesis up to five minutes here, and by then a test counts as hanging and is ended unreported. To
# get a short story out of a failure, add Phase.shrink.
CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
TestCacheMachine = CacheMachine.TestCase
