"""A world from a seed: small, crowded and unkind.

The pool is too small for what is asked, prompts share prefixes that end in the middle of pages and of each other, and a
few are asked for again and again. `emphases.py` says what there is more of.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

from stress.harness.copies import FATES
from stress.harness.emphases import EMPHASES, Emphasis
from stress.harness.keeping import make_keeping
from stress.harness.request import JOIN, LEAVE_LAST, LONG, NARROW, NO_STORE
from stress.harness.worlds import Act, World

__all__ = ["make_world"]

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


_FAULT_AT = {"record": (3, 50), "policy": (3, 50), "copy": (1, 3), "sink": (1, 5)}
"""Among the first how many calls the one is that fails."""
_POLICIES = ("lru", "lru", "lfu", "slru", "fifo", "mru", "filo", "priority")


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
            write_policy=rng.choice(stress.write_policies),
            load_back_threshold=rng.choice((1, 1, 1, 3)),
            has_store=rng.random() < 0.3,
            copy_faults=rng.choice(stress.copy_faults),
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
    elif name in ("peek", "sweep"):
        args = (key,)
    elif name == "glance":
        args = (key, rng.randint(1, 4), rng.randrange(3))
    elif name == "keep":
        args = (key, rng.choice((0, 1, 3, 6, 12)), rng.randint(0, 5))
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
    steps = _make_steps(rng, stress, world, num_tasks, len(world.keys[key][1]), depth=0)
    return Act("request", (key, flags, rng.randrange(3), reserve, rng.randint(0, 2)), steps)


def _make_steps(
    rng: random.Random, stress: Emphasis, world: World, num_tasks: int, num_tokens: int, depth: int
) -> tuple[Act, ...]:
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
        elif name == "nest":
            steps.append(Act(name, (_key(rng, world), int(rng.random() < 0.8))))
        elif name == "fork":
            if depth < 2:
                steps.append(Act(name, (), _make_steps(rng, stress, world, num_tasks, num_tokens, depth + 1)))
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
