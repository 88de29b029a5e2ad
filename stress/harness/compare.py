"""Two scenarios against the brute-force model: call by call in one task, and in some order where three tasks call."""

from __future__ import annotations

import gc
import random
import warnings
import zlib
from dataclasses import dataclass

import anyio
import anyio.lowlevel

from aradix import CacheInitParams, RadixCache
from aradix.errors import InvariantError
from stress.device import VirtualDevice
from stress.harness.builder import Builder
from stress.harness.calls import Caller
from stress.harness.outcome import Outcome, Violation, judge
from stress.harness.pages import Call, PageModel, Result
from stress.harness.site import radix_key
from stress.harness.worlds import Act, World
from stress.schedules import Chooser, attempt

__all__ = ["Noted", "explain", "make_linear", "make_sequential", "play_compared"]

_MAX_STEPS = 20_000
_POLICIES = ("lru", "mru", "fifo", "filo")


@dataclass(slots=True)
class Noted:
    """A call with its two marks: it took effect at some moment between them."""

    task: int
    call: Call
    begin: int
    end: int = 0
    result: Result = ()

    def __str__(self) -> str:
        what = f"{self.call.name} {self.call.lease or ''} {self.call.args}"
        return f"{self.begin:4d}..{self.end or '':<4} task {self.task}   {what}: {self.result}"


def play_compared(world: World, chooser: Chooser, builder: Builder) -> Outcome:
    """Runs a world of the kind `"sequential"` or `"linear"`."""
    history: list[Noted] = []

    async def main() -> None:
        allocator = builder.allocator(world, VirtualDevice(world.seed), None)
        params = CacheInitParams(
            allocator=allocator,
            page_size=world.page_size,
            eviction_policy=world.policy,
            low_watermark=0.0,
            high_watermark=0.0,
        )
        async with builder.cache(params) as cache:
            await (_run_sequential if world.kind == "sequential" else _run_linear)(world, cache, history)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the leases that a failure leaves open
        done = attempt(main, backend=world.backend, chooser=chooser, max_steps=_MAX_STEPS)
        failure, choices, num_steps = judge(done.error), done.choices, done.num_steps
        if failure is not None:
            del done
            gc.collect()
    lines = tuple(map(str, history))
    digest = zlib.crc32("\n".join(lines).encode())
    return Outcome(failure, choices, num_steps, len(history), digest, lines)


def _audit(cache: RadixCache) -> None:
    try:
        cache.check()
    except InvariantError as error:
        raise Violation("audit", str(error)) from error


async def _run_sequential(world: World, cache: RadixCache, history: list[Noted]) -> None:
    """One task, many leases: every answer and every counter is the model's. Raises `Violation`."""
    model = PageModel(world.num_pages, world.page_size, world.policy)
    caller = Caller(world, cache, 1, waits=False)
    acts = list(world.tasks[0]) if world.tasks else []
    while acts or caller.open_leases:
        call = caller.plan(acts.pop(0) if acts else Act("close", (0,)))
        if call is None:
            continue
        noted = Noted(0, call, 2 * len(history) + 1)
        history.append(noted)
        noted.result = await caller.make(call)
        noted.end = noted.begin + 1
        answer = model.apply(call)
        expected = ("no room",) if answer is None else answer
        if noted.result != expected:
            raise Violation("model", f"{call.name}{call.args} gave {noted.result}, the model {expected}")
        stats, counts = cache.stats(), model.counts()
        counted = {name: getattr(stats, name) for name in counts}
        if counted != counts:
            raise Violation("model", f"after {call.name}{call.args} stats() has {counted}, the model {counts}")
        for namespace, tokens in world.keys:
            seen = cache.peek(radix_key(tokens, world.namespace(namespace)))
            known = model.apply(Call("peek", 0, (namespace, tokens)))
            if (seen,) != known:
                raise Violation(
                    "model", f"after {call.name}{call.args} {seen} of {tokens} are cached, the model has {known}"
                )
        if len(history) % 16 == 0:
            _audit(cache)
    _audit(cache)


async def _run_linear(world: World, cache: RadixCache, history: list[Noted]) -> None:
    """A few tasks, each with a lease at most; there must be an order that explains all answers. Raises `Violation`."""
    mark = 0

    async def work(task: int, acts: tuple[Act, ...]) -> None:
        nonlocal mark
        caller = Caller(world, cache, 100 * task, waits=True)
        left = list(acts)
        while left or caller.open_leases:
            act = left.pop(0) if left else Act("close")
            if act.name == "pause":
                await anyio.lowlevel.checkpoint()
                continue
            if act.name == "open" and caller.open_leases:
                continue
            call = caller.plan(act)
            if call is None:
                continue
            mark += 1
            noted = Noted(task, call, mark)
            history.append(noted)
            noted.result = await caller.make(call)
            mark += 1
            noted.end = mark
            if noted.result == ("gave up",):
                noted.call = Call("give_up", call.lease, ())

    async with anyio.create_task_group() as tasks:
        for task, acts in enumerate(world.tasks):
            tasks.start_soon(work, task, acts, name=f"task {task}")
    _audit(cache)
    if explain(history, PageModel(world.num_pages, world.page_size, world.policy)) is None:
        raise Violation("linear", "no order of the calls explains their answers:\n" + "\n".join(map(str, history)))


def explain(history: list[Noted], model: PageModel) -> list[Noted] | None:
    """An order of the calls that agrees with their marks and gives their answers, or `None` if there is none.

    Searched as Wing and Gong do (1993): of the calls that began before any other ended, one takes effect next. What was
    tried already, as (calls done, state), is not tried again (Lowe, 2017).
    """
    tried: set[tuple[int, object]] = set()
    stack: list[tuple[int, PageModel, list[Noted]]] = [(0, model, [])]
    everything = (1 << len(history)) - 1
    while stack:
        done, state, order = stack.pop()
        if done == everything:
            return order
        left = [index for index in range(len(history)) if not done >> index & 1]
        first_end = min(history[index].end for index in left)
        for index in left:
            noted = history[index]
            if noted.begin > first_end:
                continue
            after = state.copy()
            if after.apply(noted.call) != noted.result:
                continue
            now = done | 1 << index
            key = (now, after.state())
            if key not in tried:
                tried.add(key)
                stack.append((now, after, [*order, noted]))
    return None


def _make_keys(rng: random.Random, namespaces: int, most: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    trunk = [rng.randrange(2) for _ in range(most)]
    keys = []
    for _ in range(rng.randint(4, 8)):
        cut = rng.randint(0, most) if rng.random() < 0.3 else rng.randint(0, most // 2)
        tail = [rng.randrange(3) for _ in range(rng.randint(min(1, most - cut), most - cut))]
        keys.append((rng.randrange(namespaces), tuple([*trunk[:cut], *tail] or [0])))
    return tuple(keys)


def make_sequential(seed: int) -> World:
    """A world of the kind `"sequential"`. Pure."""
    rng = random.Random(f"{seed} sequential")
    page_size, num_pages = rng.choice((1, 1, 2, 4)), rng.randint(6, 20)
    names = ("open", "grow", "commit", "close", "evict", "flush", "peek")
    weights = (5, 8, 8, 5, 1.5, 0.05, 0.3)
    acts = []
    for name in rng.choices(names, weights, k=rng.randint(60, 140)):
        first = rng.choice((1, 1, 2, 5)) if name == "evict" else rng.randint(-1 if name == "flush" else 0, 9)
        acts.append(Act(name, (first, rng.choice((2, 20, 20)))))
    return World(
        seed=seed,
        kind="sequential",
        page_size=page_size,
        num_pages=num_pages,
        policy=rng.choice(_POLICIES),
        num_streams=0,
        namespaces=((), ("x",)),
        keys=_make_keys(rng, 2, max(2, int(num_pages * page_size * rng.uniform(0.2, 0.7)))),
        tasks=(tuple(acts),),
    )


def make_linear(seed: int) -> World:
    """A world of the kind `"linear"`: three tasks, a dozen calls, a pool that is too small. Pure."""
    rng = random.Random(f"{seed} linear")
    page_size, num_pages = rng.choice((1, 1, 2)), rng.randint(2, 5)
    tasks = []
    for _ in range(3):
        acts: list[Act] = []
        if rng.random() < 0.7:
            acts.append(Act("open", (rng.randrange(8), rng.randrange(2))))
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.6:
                acts.append(Act("pause"))
            name = rng.choices(("grow", "commit", "open", "close", "evict", "flush", "peek"), (8, 5, 2, 2, 1, 0.5, 1))[
                0
            ]
            acts.append(Act(name, (rng.randint(-1 if name == "flush" else 0, 7), rng.randint(1, 5))))
        tasks.append(tuple(acts))
    return World(
        seed=seed,
        kind="linear",
        backend="trio" if seed % 8 == 7 else "asyncio",
        page_size=page_size,
        num_pages=num_pages,
        policy=rng.choice(_POLICIES),
        num_streams=0,
        namespaces=((), ("x",)),
        keys=_make_keys(rng, 2, num_pages * page_size),
        tasks=tuple(tasks),
    )
