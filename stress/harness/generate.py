"""A world from a seed: small, crowded and unkind.

The pool is too small for what is asked, prompts share prefixes that end in the middle of pages and of each other, and a
few are asked for again and again. An emphasis shifts the weights; the rest stays, so that any world can show anything.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stress.harness.copies import FATES
from stress.harness.keeping import make_keeping
from stress.harness.request import JOIN, LEAVE_LAST, LONG, NARROW, NO_STORE
from stress.harness.worlds import Act, Fault, World, WritePolicy

__all__ = ["EMPHASES", "Emphasis", "make_world"]

_FIELDS: tuple[tuple[str | int | None, ...], ...] = (
    (),
    ("x",),
    (None, "x"),
    ("ab", "c"),
    ("a", "bc"),
    (None, None, 1),
    (None, None, "1"),
    ("x", None, 7),
    (None, None, None, None, "x"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emphasis:
    """What a world has more of. Weights are relative; `acts` and `steps` change single ones.

    Args:
        name: of the emphasis.
        acts: weights of what tasks do.
        steps: weights of what requests do.
        reserve: how often a request waits to be entered with all its slots.
        impatient: how often an allocation is bounded in time.
        namespaces: how many there are at most; at least half as many.
        streams: the numbers of streams to choose from.
        long: how often the kernels of a request take long.
        pages: the smallest and the largest pool.
        holding: how often a request lets others run before its next step, while it holds what it has.
        abrupt: how often a release comes in one step with the cancellation of somebody who waits.
        keeps_pins: how often the cache lets those that wait to be entered keep their pins.
        prompts: the fewest and the most.
        tasks: the fewest and the most.
        length: the fewest and the most acts of a task.
        churn: whether eviction goes against what is used, so that what was just found is soon gone.
        events: how often the cache tells of what it keeps.
        faults: what is planned to break, one of these; "" is nothing.
        tiers: whether there is a host tier, and perhaps a page store.
        joins: how often a request waits for what another one computes.
    """

    name: str
    acts: Mapping[str, float]
    steps: Mapping[str, float]
    reserve: float = 0.35
    impatient: float = 0.2
    namespaces: int = 2
    streams: tuple[int, ...] = (0, 1, 1, 2, 2)
    long: float = 0.1
    pages: tuple[int, int] = (3, 12)
    holding: float = 0.4
    abrupt: float = 0.5
    keeps_pins: float = 0.6
    prompts: tuple[int, int] = (3, 7)
    tasks: tuple[int, int] = (3, 5)
    length: tuple[int, int] = (1, 3)
    churn: bool = False
    events: float = 0.25
    faults: tuple[Fault, ...] = ("",)
    tiers: bool = False
    joins: float = 0.0


_ACTS: Mapping[str, float] = {
    "request": 10,
    "flush": 0.5,
    "reload": 0.3,
    "evict": 1.2,
    "peek": 0.8,
    "exclusive": 0.8,
    "pinned": 1,
    "insert": 1.2,
    "save": 0.5,
    "load": 0.5,
    "pause": 1,
    "tick": 0.4,
    "cancel": 0.8,
}
_STEPS: Mapping[str, float] = {
    "grow": 6,
    "commit": 4,
    "decode": 2,
    "read": 1.2,
    "truncate": 0.6,
    "fork": 0.5,
    "copy": 0.3,
    "pause": 2.5,
    "tick": 0.6,
    "cancel": 0.5,
}

_FAULT_AT = {"record": (3, 50), "policy": (3, 50), "copy": (1, 3), "sink": (1, 5)}
"""Among the first how many calls the one is that fails."""
_POLICIES = ("lru", "lru", "lfu", "slru", "fifo", "mru", "filo", "priority")

_BUSY: Mapping[str, float] = {"request": 10, "pause": 1, "evict": 0.5}

_WRITE_POLICIES: tuple[WritePolicy, ...] = (
    "write_through",
    "write_through",
    "write_through_selective",
    "write_back",
    "write_back",
)

EMPHASES: dict[str, Emphasis] = {
    each.name: each
    for each in (
        Emphasis(name="plain", acts=_ACTS, steps=_STEPS),
        Emphasis(
            name="faults",
            acts={**_ACTS, "save": 1.5, "load": 1.5},
            steps=_STEPS,
            events=0.5,
            faults=("record", "policy", "copy", "sink"),
        ),
        Emphasis(
            name="waiting",
            acts={**_BUSY, "cancel": 1, "exclusive": 0.3, "flush": 0.2},
            steps={**_STEPS, "grow": 9, "decode": 3, "pause": 4, "fork": 0.2, "read": 0.3, "truncate": 0.3},
            reserve=0.05,
            impatient=0.05,
            pages=(3, 6),
            holding=0.8,
            abrupt=1.0,
            length=(2, 4),
        ),
        Emphasis(
            name="line",
            acts={**_BUSY, "cancel": 0.3},
            steps={"grow": 9, "commit": 2, "decode": 3, "pause": 3},
            reserve=0.1,
            impatient=0.0,
            pages=(3, 6),
            holding=0.8,
            abrupt=0.1,
            tasks=(5, 7),
            length=(1, 2),
        ),
        Emphasis(
            name="admission",
            acts={**_BUSY, "cancel": 3, "exclusive": 0.3},
            steps={"grow": 3, "commit": 4, "cancel": 3, "pause": 3},
            reserve=0.9,
            pages=(3, 6),
            holding=0.8,
            abrupt=1.0,
            keeps_pins=0.95,
            prompts=(2, 3),
            tasks=(4, 6),
            length=(2, 3),
        ),
        Emphasis(
            name="retract",
            acts={**_BUSY, "flush": 0.2, "cancel": 0.2},
            steps={**_STEPS, "grow": 10, "decode": 6, "cancel": 0.1},
            reserve=0.1,
            impatient=0.05,
            pages=(3, 6),
            holding=0.8,
        ),
        Emphasis(
            name="gates",
            acts={"request": 10, "exclusive": 11, "cancel": 9, "evict": 0.5, "flush": 0.3, "pinned": 0.5},
            steps={**_STEPS, "cancel": 1.5, "pause": 4},
            holding=0.7,
            prompts=(1, 3),
            tasks=(5, 7),
        ),
        Emphasis(
            name="low level",
            acts={**_ACTS, "insert": 9, "evict": 6, "flush": 1.5, "pinned": 2, "request": 5},
            steps=_STEPS,
            churn=True,
            length=(2, 5),
        ),
        Emphasis(
            name="churn",
            acts={"request": 10, "evict": 7, "flush": 2, "pause": 2, "insert": 2, "pinned": 2},
            steps=_STEPS,
            reserve=0.05,
            churn=True,
            length=(2, 4),
        ),
        Emphasis(
            name="branches",
            acts={"request": 8, "evict": 6, "insert": 8},
            steps={"grow": 4, "commit": 6, "decode": 2, "fork": 1},
            reserve=0.05,
            pages=(8, 18),
            holding=0.2,
            prompts=(4, 7),
            tasks=(2, 3),
            length=(4, 6),
        ),
        Emphasis(
            name="crowd",
            acts={"request": 10, "evict": 1, "peek": 0.2},
            steps={**_STEPS, "grow": 8, "commit": 6},
            reserve=0.1,
            pages=(5, 14),
            holding=0.8,
            prompts=(2, 4),
            tasks=(3, 5),
            length=(2, 3),
        ),
        Emphasis(
            name="namespaces", acts={**_ACTS, "reload": 1}, steps=_STEPS, namespaces=9, prompts=(1, 2), length=(2, 3)
        ),
        Emphasis(
            name="streams",
            acts={"request": 10, "evict": 3, "insert": 1.5, "flush": 0.2, "pinned": 0.5},
            steps={**_STEPS, "read": 7, "truncate": 1, "pause": 1},
            streams=(2,),
            long=0.6,
            pages=(3, 6),
            holding=0.3,
            tasks=(3, 5),
            length=(2, 3),
        ),
        Emphasis(
            name="copies",
            acts={"request": 8, "save": 5, "load": 9, "insert": 2, "evict": 5, "cancel": 1.5, "flush": 0.3},
            steps={"grow": 6, "commit": 4, "read": 4, "copy": 3, "pause": 1, "tick": 0.3},
            streams=(1, 2, 2),
            long=0.4,
            pages=(3, 6),
            length=(3, 5),
        ),
        Emphasis(
            name="sinks",
            acts={"request": 10, "evict": 6, "flush": 0.7, "reload": 0.7, "insert": 3, "pause": 1},
            steps={**_STEPS, "commit": 6},
            pages=(3, 8),
            events=1.0,
            length=(2, 4),
        ),
        Emphasis(
            name="joins",
            acts={"request": 10, "pause": 1, "cancel": 2, "evict": 0.5, "flush": 0.2},
            steps={"grow": 9, "commit": 9, "pause": 3, "cancel": 0.5, "truncate": 0.2, "fork": 0.2},
            reserve=0.15,
            namespaces=1,
            pages=(8, 16),
            holding=0.8,
            prompts=(1, 2),
            tasks=(5, 7),
            length=(2, 3),
            joins=1.0,
        ),
        Emphasis(
            name="tiers",
            acts={**_ACTS, "evict": 14, "request": 16, "cancel": 4, "pause": 2},
            steps=_STEPS,
            tiers=True,
            pages=(6, 12),
            holding=0.2,
            prompts=(2, 3),
            length=(10, 18),
        ),
        Emphasis(
            name="crowded tiers",
            acts={"request": 12, "pause": 1, "evict": 8, "cancel": 5, "flush": 0.5, "exclusive": 1, "tick": 1},
            steps={**_STEPS, "grow": 9, "cancel": 2, "pause": 4},
            tiers=True,
            reserve=0.5,
            pages=(4, 9),
            holding=0.8,
            abrupt=1.0,
            prompts=(3, 5),
            length=(6, 12),
        ),
    )
}
EMPHASES |= {
    "lost copies": replace(
        EMPHASES["copies"],
        name="lost copies",
        acts={"request": 8, "save": 10, "insert": 2, "evict": 3, "tick": 1},
        faults=("copy",),
    ),
    "broken sinks": replace(EMPHASES["sinks"], name="broken sinks", faults=("sink",)),
    **{
        f"joins, {name}": replace(EMPHASES[name], name=f"joins, {name}", joins=0.6)
        for name in ("faults", "admission", "retract", "gates", "low level", "crowded tiers")
    },
}


def make_world(seed: int, emphasis: str = "plain") -> World:
    """The world of that seed. Pure: the same seed and emphasis give the same world.

    Raises:
        KeyError: no such emphasis.
    """
    if emphasis == "keeping":
        return make_keeping(seed)
    stress = EMPHASES[emphasis]
    rng = random.Random(f"{seed} {emphasis}")
    page_size = rng.choice((1, 1, 2, 4))
    num_tasks = rng.randint(*stress.tasks)
    num_pages = rng.randint(*stress.pages) * (2 if page_size == 1 else 1)
    low = rng.choice((0.0, 0.3, 0.5) if stress.churn else (0.0, 0.0, 0.05, 0.2))
    fields = list(_FIELDS)
    rng.shuffle(fields)
    num_streams = rng.choice(stress.streams)
    world = World(
        seed=seed,
        backend="trio" if seed % 8 == 7 else "asyncio",
        page_size=page_size,
        num_pages=num_pages,
        low_watermark=low,
        high_watermark=0.0 if low == 0 else min(1.0, low + rng.choice((0.0, 0.1, 0.3))),
        policy=rng.choice(("mru", "filo") if stress.churn else _POLICIES),
        evict_unit="node" if rng.random() < 0.25 else "page",
        waiters_keep_pins=rng.random() < stress.keeps_pins,
        num_streams=num_streams,
        extra_stream=num_streams > 0 and rng.random() < 0.4,
        slow=rng.choice((1, 3, 8)),
        check_every=rng.choice((10, 40, 40)),
        namespaces=tuple(fields[: rng.randint((stress.namespaces + 1) // 2, stress.namespaces)]),
    )
    world = replace(world, keys=_make_keys(rng, world, rng.randint(*stress.prompts)))
    if stress.tiers:
        world = replace(
            world,
            num_host_pages=rng.randint(num_pages // 2, num_pages * 3),
            write_policy=rng.choice(_WRITE_POLICIES),
            load_back_threshold=rng.choice((1, 1, 1, 3)),
            has_store=rng.random() < 0.3,
            copy_faults=rng.choice((0, 2, 2, 2, 2, 2)),
        )
    fault = rng.choice(stress.faults)
    if fault:
        if fault == "record" and not num_streams:
            fault = "policy"
        world = replace(world, fault=fault, fault_at=rng.randint(*_FAULT_AT[fault]))
    world = replace(world, events=rng.random() < stress.events or fault == "sink")
    return replace(world, tasks=tuple(_make_task(rng, stress, world, num_tasks) for _ in range(num_tasks)))


def _make_keys(rng: random.Random, world: World, num_prompts: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Prompts over few tokens: shared prefixes, cuts at every place of a page, forks just before and after them."""
    page_size, pool = world.page_size, world.num_pages * world.page_size
    most = max(2, min(32, int(pool * rng.uniform(0.3, 0.9))))
    trunks = [[rng.randrange(3) for _ in range(most)] for _ in range(2)]
    keys = []
    for _ in range(num_prompts):
        trunk = rng.choice(trunks)
        cut = rng.randint(0, most)
        if rng.random() < 0.5:
            cut = cut // page_size * page_size
        tail = [rng.randrange(4) for _ in range(rng.randint(0, max(1, most - cut)))]
        tokens = [*trunk[:cut], *tail][:most] or [0]
        keys.append((rng.randrange(len(world.namespaces)), tuple(tokens)))
    if rng.random() < 0.1:
        keys.append((0, tuple(rng.randrange(3) for _ in range(pool + page_size))))
    # Every namespace has one prompt in common: what must never meet would meet here.
    shared = keys[0][1]
    keys.extend((index, shared) for index in range(len(world.namespaces)))
    return tuple(keys)


class _Wheel:
    """Names, each drawn as often as it weighs."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._names = tuple(weights)
        self._sums = tuple(itertools.accumulate(weights.values()))

    def spin(self, rng: random.Random) -> str:
        return self._names[bisect.bisect(self._sums, rng.random() * self._sums[-1], 0, len(self._names) - 1)]


@functools.cache
def _wheels(name: str) -> tuple[_Wheel, _Wheel]:
    """What the tasks and the requests of an emphasis do."""
    return _Wheel(EMPHASES[name].acts), _Wheel(EMPHASES[name].steps)


def _key(rng: random.Random, world: World) -> int:
    """A prompt; the first two are hot."""
    return rng.randrange(2) if rng.random() < 0.4 else rng.randrange(len(world.keys))


def _fate(rng: random.Random) -> int:
    """How a copy goes on, as `copies.FATES` has it."""
    return rng.choices(range(len(FATES)), (4, 3, 2, 1))[0]


def _make_task(rng: random.Random, stress: Emphasis, world: World, num_tasks: int) -> tuple[Act, ...]:
    acts = []
    if rng.random() < 0.5:
        acts.append(Act("pause", (rng.randint(0, 3),)))
    acts.extend(_make_act(rng, stress, world, num_tasks) for _ in range(rng.randint(*stress.length)))
    return tuple(acts)


def _make_act(rng: random.Random, stress: Emphasis, world: World, num_tasks: int) -> Act:
    name = _wheels(stress.name)[0].spin(rng)
    key = _key(rng, world)
    if name == "request":
        return _make_request(rng, stress, world, num_tasks, key)
    args: tuple[int, ...]
    if name in ("flush", "reload"):
        args = (rng.randint(-1 if name == "flush" else 0, len(world.namespaces) - 1),)
    elif name == "evict":
        args = (rng.choice((1, 2, world.page_size, rng.randint(1, world.num_pages * world.page_size))),)
    elif name == "exclusive":
        args = (key, rng.randrange(64) if rng.random() < 0.6 else 0, rng.randint(0, 2), rng.randrange(2))
    elif name == "pinned":
        args = (key, rng.randint(0, 2), rng.choice((0, 0, 1, 2)), rng.randrange(2))
    elif name == "insert":
        args = (key, rng.randrange(64), rng.randrange(2), rng.randint(0, 1))
    elif name in ("save", "load"):
        args = (key, rng.randrange(64), _fate(rng), rng.randrange(3))
    elif name == "peek":
        args = (key,)
    elif name == "cancel":
        args = (rng.choice((0, 0, 1, rng.randrange(num_tasks))),)
    else:
        args = (rng.randint(0, 3),)
    return Act(name, args)


def _make_request(rng: random.Random, stress: Emphasis, world: World, num_tasks: int, key: int) -> Act:
    flags = 0
    for flag, chance in ((NO_STORE, 0.08), (LEAVE_LAST, 0.2), (NARROW, 0.3), (LONG, stress.long)):
        flags |= flag if rng.random() < chance else 0
    if stress.joins and rng.random() < stress.joins:
        flags |= JOIN
    reserve = rng.randint(1, 9) if rng.random() < stress.reserve else 0
    steps = _make_steps(rng, stress, num_tasks, len(world.keys[key][1]), depth=0)
    return Act("request", (key, flags, rng.randrange(3), reserve, rng.randint(0, 2)), steps)


def _make_steps(rng: random.Random, stress: Emphasis, num_tasks: int, num_tokens: int, depth: int) -> tuple[Act, ...]:
    steps = []
    wheel = _wheels(stress.name)[1]
    if rng.random() < 0.5:  # in one go, so that decoding is reached
        steps += [Act("grow", (num_tokens, 0)), Act("pause", (rng.randint(0, 2),)), Act("commit", (0,))]
    for _ in range(rng.randint(1, 4)):
        if rng.random() < stress.holding:
            steps.append(Act("pause", (rng.choice((0, 1, 1, 2)),)))
        name = wheel.spin(rng)
        impatient = 0
        if rng.random() < stress.impatient:
            impatient = rng.choice((-1, 1, 2, 6))
        if name == "grow":
            steps.append(Act(name, (rng.randint(1, max(1, num_tokens)), impatient)))
        elif name == "commit":
            steps.append(Act(name, (rng.choice((0, 0, 1, 2)),)))
        elif name == "decode":
            steps.append(Act(name, (rng.randint(1, 4), rng.randrange(3), impatient)))
        elif name == "read":
            steps.append(Act(name, (rng.randrange(3), int(rng.random() < stress.long))))
        elif name == "copy":
            steps.append(Act(name, (_fate(rng),)))
        elif name == "truncate":
            steps.append(Act(name, (rng.randint(1, 5),)))
        elif name == "fork":
            if depth < 2:
                steps.append(Act(name, (), _make_steps(rng, stress, num_tasks, num_tokens, depth + 1)))
        elif name == "cancel":
            steps.append(Act(name, (rng.choice((0, 0, 1, rng.randrange(num_tasks))),)))
        else:
            steps.append(Act(name, (rng.randint(0, 3),)))
    end = rng.random()
    if end < 0.06:
        steps.append(Act("drop"))
    elif end < 0.16:
        steps.append(Act("orphan", (rng.randint(0, 4),)))
    elif rng.random() < stress.abrupt:
        steps.append(Act("release", (rng.choice((1, -1)) * rng.choice((1, 1, 2, 3)),)))
    return tuple(steps)
