"""The cache under hypothesis: tasks that lease, wait, fail and are cancelled, one ready handle of the loop at a time.

Unlike in a seeded schedule every decision is a rule of its own, and the cache is audited after each of them.
"""

from __future__ import annotations

import asyncio
import faulthandler
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import anyio
from hypothesis import settings
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
KEEPS = math.nan  # no delay at all: it goes on when it is cancelled
Request = tuple[Tokens, Name, bool, int, float, bool]
REQUESTS: st.SearchStrategy[Request] = st.tuples(
    KEYS, NAMES, st.booleans(), st.integers(0, 8), DELAYS | st.just(KEEPS), st.booleans()
)


@dataclass
class Job:
    """A task of the machine, and what it holds."""

    tokens: Tokens = ()
    name: Name = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    epoch: int = 0
    num_published: int | None = None  # while it holds a lease
    num_tokens: int = 0  # with a slot, while it holds a lease
    num_wanted: int = 0  # slots that it asks for
    order: int | None = None  # in which it got into line
    met_gate: bool = False  # perhaps, while it waited
    joins: bool = False  # it waits for what another one computes
    num_found: int = 0  # as it was let in
    asked_in: int = 0  # the epoch in which it asked to be
    keeps: bool = False  # its lease, when it is cancelled as it waits for more
    granted_in: int | None = None  # the epoch in which it was given what it waited for, before it woke
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
        # Who asked for slots, or to be let in, and has not been answered.
        self.growing: list[Job] = []
        self.entering: list[Job] = []
        self.owners: list[Job] = []
        self.calm: list[Job] = []
        self.num_in_line = 0
        self.num_audits = 0

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

    async def _lease(self, job: Job, num_reserved: int | None, num_committed: int, delay: float, keeps: bool) -> None:
        with anyio.move_on_after(delay):
            lease = self.cache.lease(job.key, reserve=num_reserved, join=job.joins)
            job.epoch = job.asked_in = self.num_flushes[job.name]
            with self._asking(job, self.entering, self._slots_for(num_reserved or 0)):
                await lease.__aenter__()
            try:
                self._note_entry(job, lease)
                self._read(job, lease, lease.num_matched)
                self._write(job, lease)
                while (missing := len(job.tokens) - lease.num_tokens) > 0:
                    # Some by halves, so that a waiter may hold some slots already, and some all at once.
                    if not await self._grow(job, lease, missing if num_committed % 2 else -(-missing // 2), keeps):
                        await job.released.wait()
                        return
                self._commit(job, lease, max(lease.num_matched, num_committed))
                await job.released.wait()
                self._commit(job, lease, len(job.tokens))
                self._read(job, lease, len(job.tokens))
            finally:
                job.num_published, job.num_tokens = None, 0
                lease.release()

    def _note_entry(self, job: Job, lease: Lease) -> None:
        """It stands on nothing that was flushed before it was let in."""
        now = self.num_flushes[job.name]
        if job.granted_in is not None:
            job.epoch = job.granted_in
        job.num_published, job.num_tokens = lease.num_matched, lease.num_tokens
        job.num_found = lease.num_matched
        if job.epoch == now:
            assert lease.num_matched <= self._most_cached(job.tokens, job.name)
        for other in self._leading(job) if job.joins and job.asked_in == now else []:
            # One of the two was let in while the other one was computing that. Nobody waits for what was flushed.
            assert other.asked_in < now or max(job.num_found, other.num_found) >= self._num_joint(job, other)

    def _leading(self, job: Job) -> list[Job]:
        """Who holds a lease that others may wait for, in the namespace of a job."""
        others = [other for other in self.live if other is not job and other.name == job.name]
        return [other for other in others if other.joins and other.num_published is not None]

    def _num_joint(self, job: Job, other: Job) -> int:
        """Tokens that two have in common, in whole pages."""
        return _num_shared(job.tokens, other.tokens) // self.page_size * self.page_size

    async def _grow(self, job: Job, lease: Lease, num_tokens: int, keeps: bool) -> bool:
        """More slots. Who `keeps` his lease when he is cancelled then has what he had before, and no more."""
        before = lease.slots.tolist()
        num_slots = self._slots_for(lease.num_tokens + num_tokens) - self._slots_for(lease.num_tokens)
        try:
            with self._asking(job, self.growing, num_slots):
                await lease.allocate(num_tokens)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not keeps or task is None:
                raise
            task.uncancel()
            assert lease.slots.tolist() == before
            return False
        job.num_tokens = lease.num_tokens
        self._write(job, lease)
        return True

    def _slots_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

    @contextmanager
    def _asking(self, job: Job, line: list[Job], num_wanted: int) -> Iterator[None]:
        """Around a call that may wait."""
        job.num_wanted, job.order, job.granted_in = num_wanted, None, None
        job.met_gate = job.joins and line is self.entering  # who waits for another one is passed as if there was a gate
        line.append(job)
        began = self.num_audits
        try:
            yield
            if began == self.num_audits and num_wanted:  # it did not even yield
                self._check_turn(job, line is self.growing, [other for other in self.calm if other is not job])
        finally:
            line.remove(job)

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
        for tokens, name, reserves, num_committed, delay, joins in requests:
            num_reserved = len(tokens) if reserves else None
            self._spawn(Job(tokens, name, joins=joins), num_reserved, min(num_committed, len(tokens)), delay)

    def _spawn(self, job: Job, num_reserved: int | None, num_committed: int, delay: float) -> None:
        keeps = job.keeps = math.isnan(delay)
        delay = math.inf if keeps else delay
        self._start(job, lambda: self._lease(job, num_reserved, num_committed, delay, keeps))

    @rule(tokens=KEYS, name=NAMES, evicts=st.booleans(), delay=DELAYS)
    def exclusive(self, tokens: Tokens, name: Name, evicts: bool, delay: float) -> None:
        job = Job(tokens, name)
        self.owners.append(job)
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

    @precondition(lambda self: self.waiting)
    @rule(which=WHICH, flushes=st.booleans())
    def pass_by_waiter(self, which: int, flushes: bool) -> None:
        """Who is in line is cancelled, so that others may be served; or what was found for it is flushed."""
        among = [job for job in self.waiting if (self._check_peek(job.tokens, job.name) if flushes else job.keeps)]
        among = among or self.waiting
        job = among[which % len(among)]
        if flushes:
            self._start(Job(), lambda: self._flush(job.name))
        else:
            self._cancel(job)
        for turn in range(40):  # and all comes to rest
            self._step([turn])

    @precondition(lambda self: self.loop.num_ready and self.waiting)
    @rule(stride=WHICH, cancels=st.booleans())
    def run_until_granted(self, stride: int, cancels: bool) -> None:
        """Until somebody is given what he waited for; perhaps he is cancelled before he knows."""
        waiting = self.waiting
        for turn in range(24):
            self._step([turn * (stride + 1)])
            granted = [job for job in waiting if job.granted_in is not None and job in self.live]
            if granted:
                if cancels:
                    self._cancel(granted[0])
                return

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
        self.num_audits += 1
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
        self._check_line()
        self.sound = True

    def _check_line(self) -> None:
        """Growth before admission, first come first served within each; and nobody waits for what is there."""
        granted = []
        for job in (*self.growing, *self.entering):
            answer = self.loop.waits_for(job.task)
            if answer is None:
                continue
            if not answer.done():
                job.granted_in = None
                job.met_gate = job.met_gate or self.has_gates
                if job.order is None:
                    self.num_in_line += 1
                    job.order = self.num_in_line
            elif not answer.cancelled() and job.granted_in is None:
                job.granted_in = self.num_flushes[job.name]
                granted.append(job)
        asking = [*self.growing, *self.entering]
        calm = [job for job in self.live if job.num_tokens and job not in asking]
        for job in granted:
            if job.num_wanted and not (job.met_gate and job in self.entering):  # or it may be a gate that it passed
                self._check_turn(job, job in self.growing, [other for other in calm if other in self.calm])
        self.calm = calm
        if not self.has_gates and not self.closing.is_set() and len(self._in_line(self.entering)) == len(self.entering):
            # What was flushed is held by who was let in before, and by nobody who still waits for that.
            stale = [job for job in self.live if job.num_published and job.epoch != self.num_flushes[job.name]]
            assert self.loop.call(self.cache.stats).detached <= sum(job.num_published or 0 for job in stale)
        if not self.loop.num_ready and not self.closing.is_set():
            self._check_nobody_waits_in_vain()

    def _in_line(self, jobs: Iterable[Job]) -> list[Job]:
        """Those that wait for slots and have not been woken, be it in this very step; who came first stands first."""
        waiting = []
        for job in jobs:
            answer = self.loop.waits_for(job.task)
            if job.order is not None and job.num_wanted and answer is not None and not answer.done():
                waiting.append(job)
        return sorted(waiting, key=lambda job: job.order or 0)

    @property
    def waiting(self) -> list[Job]:
        return [*self._in_line(self.growing), *self._in_line(self.entering)]

    @property
    def has_gates(self) -> bool:
        return any(job in self.live for job in self.owners)

    def _check_turn(self, job: Job, grows: bool, calm: list[Job]) -> None:
        """Nobody who came first still waits, where somebody else could give slots back: else it is out of turn."""
        before = self._in_line(self.growing)
        if not grows and not self.has_gates:
            before += [other for other in self._in_line(self.entering) if not other.met_gate]
        if calm and not self.closing.is_set():
            assert not [other for other in before if job.order is None or (other.order or 0) < job.order]

    def _check_nobody_waits_in_vain(self) -> None:
        stats = self.loop.call(self.cache.stats)
        growing, entering = self._in_line(self.growing), self._in_line(self.entering)
        if growing:
            assert growing[0].num_wanted > stats.free + stats.evictable
        elif entering and not any(job.met_gate for job in entering) and not self.has_gates:
            num_cached = self._check_peek(entering[0].tokens, entering[0].name)
            assert entering[0].num_wanted - num_cached > stats.free
        for job in [job for job in self.entering if not (job.num_wanted or self.has_gates)]:
            num_cached = self._check_peek(job.tokens, job.name)
            assert any(self._num_joint(job, other) > num_cached for other in self._leading(job))

    def _check_peek(self, tokens: Tokens, name: Name) -> int:
        num_cached = self.loop.call(lambda: self.cache.peek(RadixKey(tokens, name)))
        assert num_cached % self.page_size == 0
        assert num_cached <= self._most_cached(tokens, name)
        return num_cached

    def _most_cached(self, tokens: Tokens, name: Name) -> int:
        return max((_num_shared(tokens, other) for other in self.published[name]), default=0)

    def teardown(self) -> None:
        try:
            if self.sound and hasattr(self, "host"):
                self.sound = False
                self._end()
                self.sound = True
        finally:
            if not self.sound:
                # Hypothesis takes up to five minutes to make a failure small. By then pytest would count the test as
                # hanging, and end it unreported.
                faulthandler.dump_traceback_later(900, exit=True, file=sys.__stderr__ or 2)
            for task in asyncio.all_tasks(self.loop):
                self.loop.call(task.cancel)
            self.loop.settle()
            self.loop.close()

    def _end(self) -> None:
        for job in self.jobs:
            self.loop.call(job.released.set)
        for _ in range(10_000):
            if self.loop.num_ready:
                self.loop.step()
                self.num_audits += 1
                self._check_line()
            elif not self.loop.advance():
                break
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


CacheMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
