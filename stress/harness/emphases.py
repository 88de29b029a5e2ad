"""What worlds are made more of: the weights of what tasks do, and the settings that go with them.

An emphasis shifts the weights; the rest stays, so that any world can show anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stress.harness.worlds import Fault, WritePolicy

__all__ = ["EMPHASES", "Emphasis"]

_WRITE_POLICIES: tuple[WritePolicy, ...] = (
    "write_through",
    "write_through",
    "write_through_selective",
    "write_back",
    "write_back",
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
        copy_faults: one in so many copies fails, one of these; 0 for none.
        write_policies: when tokens are copied to the host, one of these.
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
    copy_faults: tuple[int, ...] = (0, 2, 2, 2, 2, 2)
    write_policies: tuple[WritePolicy, ...] = _WRITE_POLICIES
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

_BUSY: Mapping[str, float] = {"request": 10, "pause": 1, "evict": 0.5}

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
            name="nested joins",
            acts={"request": 10, "pause": 1, "cancel": 0.3, "evict": 0.5},
            steps={"grow": 8, "commit": 5, "pause": 2, "nest": 7, "fork": 0.3},
            reserve=0.1,
            namespaces=1,
            pages=(3, 7),
            holding=0.6,
            prompts=(2, 3),
            tasks=(4, 6),
            length=(3, 5),
            joins=0.8,
        ),
        Emphasis(
            name="tiers",
            acts={**_ACTS, "evict": 14, "request": 16, "cancel": 4, "pause": 2, "glance": 2, "sweep": 1},
            steps=_STEPS,
            tiers=True,
            pages=(6, 12),
            holding=0.2,
            prompts=(2, 3),
            length=(10, 18),
        ),
        Emphasis(
            name="crowded tiers",
            acts={
                "request": 12,
                "pause": 1,
                "evict": 8,
                "cancel": 5,
                "flush": 0.5,
                "exclusive": 1,
                "tick": 1,
                "glance": 1,
            },
            steps={**_STEPS, "grow": 9, "cancel": 2, "pause": 4},
            tiers=True,
            reserve=0.5,
            pages=(4, 9),
            holding=0.8,
            abrupt=1.0,
            prompts=(3, 5),
            length=(6, 12),
        ),
        Emphasis(
            name="quiet tiers",
            acts={"request": 12, "glance": 5, "sweep": 7, "keep": 6, "evict": 3, "pause": 4, "flush": 0.3, "cancel": 2},
            steps={**_STEPS, "commit": 6},
            tiers=True,
            copy_faults=(0, 0, 0, 0, 2),
            write_policies=("write_through", "write_through", "write_through_selective", "write_back"),
            reserve=0.1,
            pages=(4, 8),
            holding=0.1,
            prompts=(2, 3),
            tasks=(1, 3),
            length=(8, 14),
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
