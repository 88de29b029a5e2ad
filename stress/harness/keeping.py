"""Worlds of tenants with quotas, and of pins: a few tasks over a pool that is too small, on a clock of their own."""

from __future__ import annotations

import gc
import random
import warnings
import zlib
from collections.abc import Awaitable, Callable

import anyio

from aradix import CacheInitParams, EvictParams, Lease, Namespace, RadixCache
from aradix.errors import CapacityError, InvariantError
from stress.harness.builder import Builder
from stress.harness.claims import Claims, Kept, Standing, WatchedAllocator
from stress.harness.outcome import Outcome, Violation, judge
from stress.harness.site import radix_key
from stress.harness.worlds import Act, World
from stress.schedules import Chooser, attempt

__all__ = ["make_keeping", "play_keeping"]

_MAX_STEPS = 60_000
_POLICIES = ("lru", "lru", "slru", "lfu", "fifo", "priority")
_TICK_SECONDS = 0.001


def make_keeping(seed: int) -> World:
    """A world of the kind `"keeping"`. Pure."""
    rng = random.Random(f"{seed} keeping")
    page_size, num_pages = rng.choice((1, 1, 2, 4)), rng.randint(8, 24)
    pool = page_size * num_pages
    low = rng.choice((0.0, 0.0, 0.2, 0.4))
    names: tuple[str | int, ...] = ("a", "b", 7)
    tenants = rng.sample(names, rng.randint(2, 3))
    fields: list[tuple[str | int | None, ...]] = [
        (None, salt, None, tenant) for tenant in (*tenants, None) for salt in (None, "x")[: rng.randint(1, 2)]
    ]
    cuts = sorted(rng.uniform(0.1, 1.0) for _ in tenants)
    quotas = [(tenant, round(cut - before, 3)) for tenant, before, cut in zip(tenants, [0, *cuts], cuts, strict=False)]
    keys = []
    for index in range(len(fields)):
        trunk = [rng.randrange(3) for _ in range(pool)]
        for _ in range(rng.randint(1, 3)):
            cut, length = rng.randrange(pool), rng.randint(1, max(1, pool * 2 // 3))
            keys.append((index, (*trunk[: min(cut, length)], *(rng.randrange(3) for _ in range(length - cut)))))
    tasks = []
    for _ in range(rng.randint(3, 6)):
        acts = []
        for _ in range(rng.randint(5, 12)):
            name = rng.choices(("request", "keep", "evict", "flush", "pause"), (10, 4, 1, 0.3, 1))[0]
            key = rng.randrange(2) if rng.random() < 0.4 else rng.randrange(len(keys))
            numbers = (key, rng.randint(0, 8), rng.randint(0, 4), rng.randint(1, 8))
            acts.append(Act(name, numbers))
        tasks.append(tuple(acts))
    return World(
        seed=seed,
        kind="keeping",
        backend="trio" if seed % 8 == 7 else "asyncio",
        page_size=page_size,
        num_pages=num_pages,
        low_watermark=low,
        high_watermark=min(1.0, low + 0.1) if low else 0.0,
        policy=rng.choice(_POLICIES),
        waiters_keep_pins=rng.random() < 0.6,
        num_streams=0,
        namespaces=tuple(fields),
        quotas=tuple((tenant, share) for tenant, share in quotas if int(share * pool) >= page_size),
        keys=tuple(keys),
        tasks=tuple(tasks),
    )


def play_keeping(world: World, chooser: Chooser, builder: Builder) -> Outcome:
    """Runs a world of the kind `"keeping"`. Takes no real time to wait."""
    run = _Run(world, builder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the leases that a failure leaves open
        done = attempt(run.main, backend=world.backend, chooser=chooser, max_steps=_MAX_STEPS)
        failure, choices, num_steps = judge(run.claims.violation or done.error), done.choices, done.num_steps
        if failure is not None:
            del done
            gc.collect()
    digest = zlib.crc32("\n".join(run.history).encode())
    return Outcome(failure, choices, num_steps, len(run.history), digest, tuple(run.history))


class _Run:
    def __init__(self, world: World, builder: Builder) -> None:
        self.world = world
        self.now = 1.0
        self.history: list[str] = []
        pool = world.page_size * world.num_pages
        shares: dict[str | int | None, int] = {
            tenant: int(share * pool + 1e-6) // world.page_size * world.page_size for tenant, share in world.quotas
        }
        self.claims = Claims({**shares, None: pool - sum(shares.values())}, lambda: self.now, world.page_size)
        self._builder = builder
        self._cache: RadixCache
        self._num_acts = 0
        self._acts: dict[str, Callable[..., Awaitable[None]]] = {
            "request": self._request,
            "keep": self._keep,
            "evict": self._evict,
            "flush": self._flush,
            "pause": self._pause,
        }

    async def main(self) -> None:
        world = self.world
        allocator = WatchedAllocator(world.num_pages * world.page_size, world.page_size)
        allocator.claims = self.claims
        self._cache = self._builder.cache(
            CacheInitParams(
                allocator=allocator,
                page_size=world.page_size,
                eviction_policy=world.policy,
                low_watermark=world.low_watermark,
                high_watermark=world.high_watermark,
                waiters_keep_pins=world.waiters_keep_pins,
                quotas=dict(world.quotas),
                clock=lambda: self.now,
            )
        )
        async with self._cache:
            async with anyio.create_task_group() as around:
                around.start_soon(self._run_clock, name="clock")
                async with anyio.create_task_group() as tasks:
                    for number, acts in enumerate(world.tasks):
                        tasks.start_soon(self._work, number, acts, name=f"task {number}")
                around.cancel_scope.cancel()
            await self._look_at_rest()

    async def _run_clock(self) -> None:
        while True:
            await anyio.sleep(_TICK_SECONDS)
            self.now += 1

    async def _work(self, number: int, acts: tuple[Act, ...]) -> None:
        for act in acts:
            self.history.append(f"{self.now:5.0f} task {number}: {act.name}{act.args}")
            await self._acts[act.name](*(*act.args, 0, 0, 0, 0)[:4])
            self._look()

    def _key(self, index: int) -> tuple[Namespace, tuple[int, ...]]:
        return self.world.key(index)

    # ---- what tasks do ----

    async def _pause(self, key: int, length: int, *_: int) -> None:
        await anyio.sleep(length * _TICK_SECONDS)

    async def _request(self, key: int, hold: int, how: int, chunk: int) -> None:
        """A request that grows in chunks; `how` is 0 where it waits for all its slots first, 1 where it loses
        patience."""
        namespace, tokens = self._key(key)
        claims, reserve = self.claims, len(tokens) if how == 0 else None
        lease = self._cache.lease(radix_key(tokens, namespace), reserve=reserve, priority=chunk % 3)
        try:
            with anyio.move_on_after(_TICK_SECONDS * (2 if how == 1 else 100)):
                with claims.asks(namespace, reserve or 0, len(tokens)):
                    await lease.__aenter__()
                    standing = Standing(namespace, lease.slots.tolist(), lease.num_matched)
                    claims.standing.append(standing)
                    claims.shown(standing, lease.slots.tolist(), lease.num_matched)
                try:
                    await self._grow(lease, standing, tokens, chunk * self.world.page_size)
                    await anyio.sleep(hold * _TICK_SECONDS)
                finally:
                    claims.ended(standing)
                    lease.release()
        except CapacityError as error:
            self.history.append(f"{self.now:5.0f} {type(error).__name__}")
            lease.release()

    async def _grow(self, lease: Lease, standing: Standing, tokens: tuple[int, ...], chunk: int) -> None:
        claims, namespace = self.claims, standing.namespace
        while True:
            more = min(chunk, len(tokens) - lease.num_tokens)
            if more > 0:
                with claims.asks(namespace, more, 0):
                    await lease.allocate(more)
                    claims.shown(standing, lease.slots.tolist(), standing.published)
            # A commit serves who waits in its own step, and by then may stand on what others had published.
            with claims.asks(namespace, 0, lease.num_tokens):
                lease.commit(radix_key(tokens[: lease.num_tokens], namespace))
                claims.shown(standing, lease.slots.tolist(), lease.node.depth)
            self._look()
            if more <= 0:
                return
            await anyio.lowlevel.checkpoint()

    async def _keep(self, key: int, ttl: int, budget: int, pause: int) -> None:
        """Keeps what is cached of a prompt: for a time, or (0) until it is released."""
        namespace, tokens = self._key(key)
        pin = self._cache.pin(
            radix_key(tokens, namespace),
            ttl=ttl or None,
            budget=budget * len(tokens) // 3 if budget < 3 else None,
        )
        num_tokens = pin.num_tokens
        if not num_tokens:
            return
        kept = Kept(pin, namespace, tokens[:num_tokens], [], self.now + ttl if ttl else float("inf"))
        self.claims.kept.append(kept)
        async with self._cache.lease(radix_key(kept.tokens, namespace)) as lease:
            kept.slots = lease.slots.tolist()
        if kept in self.claims.kept and len(kept.slots) != num_tokens and kept.must_hold(self.now):
            raise self.claims.fail("kept", f"{pin!r} keeps {num_tokens} tokens, {len(kept.slots)} are found at once")
        await anyio.sleep(pause * _TICK_SECONDS)
        self._look()
        if budget % 2 or not ttl:  # else it lasts until its time is over
            if kept in self.claims.kept:
                self.claims.kept.remove(kept)
            pin.release()

    async def _evict(self, key: int, num_pages: int, *_: int) -> None:
        await self._cache.evict(EvictParams(num_pages * self.world.page_size))

    async def _flush(self, key: int, *_: int) -> None:
        """Flushes a namespace, or all that have its salt."""
        namespace, _tokens = self._key(key)
        concerned = [namespace]
        self.claims.is_flushing = True
        try:
            if key % 2:
                every = map(self.world.namespace, range(len(self.world.namespaces)))
                concerned = [known for known in every if known.salt == namespace.salt]
                await self._cache.flush(salt=namespace.salt)
            else:
                await self._cache.flush(namespace)
        finally:
            self.claims.is_flushing = False
        self.claims.flushed(concerned)

    # ---- what must hold ----

    def _look(self) -> None:
        if self.claims.violation is not None:
            raise self.claims.violation
        self._num_acts += 1
        for kept in self.claims.kept:
            if kept.must_hold(self.now):
                found = self._cache.peek(radix_key(kept.tokens, kept.namespace))
                if found != len(kept.tokens) or kept.pin.ended is not None:
                    raise self.claims.fail(
                        "kept",
                        f"{kept.pin!r} must keep {len(kept.tokens)} tokens until {kept.until}, {found} are found",
                    )
        if self._num_acts % 8 == 0:
            self._audit()

    def _audit(self) -> None:
        try:
            self._cache.check()
        except InvariantError as error:
            raise self.claims.fail("audit", str(error)) from error

    async def _look_at_rest(self) -> None:
        """All is released and every time is over: nothing is pinned, and every slot can be had."""
        cache, pool = self._cache, self.world.page_size * self.world.num_pages
        self._look()
        self.claims.kept.clear()
        self.now += 1000
        self.claims.is_flushing = True
        freed = (await cache.evict(EvictParams(pool))).num_freed_tokens
        self._audit()
        stats, tenants = cache.stats(), cache.tenant_stats()
        left = {tenant: (each.cached, each.leased) for tenant, each in tenants.items() if each.cached or each.leased}
        if stats.free != pool or stats.num_pins or stats.num_namespaces or left:
            raise self.claims.fail("leak", f"all is over and {freed} tokens were evicted, but {stats}, {left}")
        evicted = sum(each.evicted for each in tenants.values())
        if tenants and evicted != stats.evicted:
            raise Violation("sum", f"tenants lost {evicted} tokens, {stats.evicted} were evicted")
