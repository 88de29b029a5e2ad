"""A scenario as plain data: what is built, and what each task does. It can be kept in a file and cut down.

A task is a list of acts. An act is a name, some numbers and perhaps acts inside it; every act can be left out without
making the rest meaningless, which is what shrinking needs. `stress/README.md` lists them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple, cast, get_args

from aradix import Namespace

__all__ = ["Act", "Fault", "Kind", "World", "WritePolicy"]

Kind = Literal["shared", "sequential", "linear", "keeping"]
Fault = Literal["", "record", "policy", "copy", "sink"]
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]


class Act(NamedTuple):
    """One thing that a task does: its name, its numbers, and what it does meanwhile."""

    name: str
    args: tuple[int, ...] = ()
    steps: tuple[Act, ...] = ()

    def to_plain(self) -> list[Any]:
        """For JSON."""
        return [self.name, list(self.args), [step.to_plain() for step in self.steps]]

    @classmethod
    def from_plain(cls, plain: Any) -> Act:
        """What `to_plain` gave. ValueError if it is of another form."""
        if not isinstance(plain, list) or len(plain) != 3 or not isinstance(plain[0], str):
            raise ValueError(f"an act is [name, [numbers], [acts]], not {plain!r}")
        name, args, steps = plain
        if not isinstance(args, list) or not all(type(arg) is int for arg in args) or not isinstance(steps, list):
            raise ValueError(f"an act is [name, [numbers], [acts]], not {plain!r}")
        return cls(name, tuple(args), tuple(map(cls.from_plain, steps)))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One scenario.

    Args:
        seed: it was made from; also of the virtual device.
        kind: `"shared"`: tasks of an engine over one cache; `"sequential"`: one task, against a brute-force model;
            `"linear"`: a few operations of three tasks, which must be explainable in some order; `"keeping"`: tenants
            with quotas, and pins.
        backend: `"asyncio"` or `"trio"`.
        page_size: tokens a page.
        num_pages: of the pool.
        low_watermark: as `CacheInitParams` has it; likewise those down to `waiters_keep_pins`.
        num_streams: configured streams of the virtual device; 0 computes on the host.
        extra_stream: whether leases also use one that is not configured.
        slow: how long the slowest kernels take, in device seconds; the device advances about one a millisecond.
        num_host_pages: of the host tier; 0 for none.
        write_policy: as `CacheInitParams` has it; likewise `load_back_threshold`.
        has_store: whether there is a page store behind the host.
        copy_faults: one in so many copies, and calls of the store, fails; 0 for none.
        events: whether the cache tells of what it keeps, and a mirror of it is compared.
        fault: `"record"`: recording an event fails; `"policy"`: ranking raises; `"copy"`: nobody can say whether a copy
            has ended; `"sink"`: an event sink raises; the run must end with just that.
        fault_at: which call fails.
        check_every: acts between two full audits.
        namespaces: fields of each namespace.
        quotas: tenants and their shares of the pool.
        keys: the prompts: namespace, tokens.
        tasks: what each task does.
    """

    seed: int
    kind: Kind = "shared"
    backend: Literal["asyncio", "trio"] = "asyncio"
    page_size: int = 1
    num_pages: int = 16
    low_watermark: float = 0.0
    high_watermark: float = 0.0
    policy: str = "lru"
    evict_unit: Literal["page", "node"] = "page"
    waiters_keep_pins: bool = True
    num_streams: int = 1
    extra_stream: bool = False
    slow: int = 3
    events: bool = False
    num_host_pages: int = 0
    write_policy: WritePolicy = "write_through"
    load_back_threshold: int = 1
    has_store: bool = False
    copy_faults: int = 0
    fault: Fault = ""
    fault_at: int = 0
    check_every: int = 12
    namespaces: tuple[tuple[str | int | None, ...], ...] = ((),)
    quotas: tuple[tuple[str | int, float], ...] = ()
    keys: tuple[tuple[int, tuple[int, ...]], ...] = ()
    tasks: tuple[tuple[Act, ...], ...] = ()

    def namespace(self, index: int) -> Namespace:
        """The namespace of that number."""
        return Namespace(*self.namespaces[index % len(self.namespaces)])

    def key(self, index: int) -> tuple[Namespace, tuple[int, ...]]:
        """The prompt of that number."""
        namespace, tokens = self.keys[index % len(self.keys)]
        return self.namespace(namespace), tokens

    @property
    def num_acts(self) -> int:
        """Acts in all, counting those inside others."""
        stack = [act for task in self.tasks for act in task]
        count = 0
        while stack:
            act = stack.pop()
            count += 1
            stack.extend(act.steps)
        return count

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        plain = asdict(self)
        plain["tasks"] = [[act.to_plain() for act in task] for task in self.tasks]
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> World:
        """What `to_plain` gave, after JSON or not. ValueError if it is of another form."""
        known = {field.name for field in fields(cls)}
        if not isinstance(plain, dict) or not set(plain) <= known or "seed" not in plain:
            raise ValueError(f"a world is an object with seed and some of {', '.join(sorted(known))}")
        for name, choices in (
            ("kind", get_args(Kind)),
            ("backend", ("asyncio", "trio")),
            ("evict_unit", ("page", "node")),
            ("write_policy", get_args(WritePolicy)),
            ("fault", get_args(Fault)),
        ):
            if plain.get(name, choices[0]) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {plain[name]!r}")
        try:
            made = dict(plain)
            made["namespaces"] = tuple(tuple(fields) for fields in plain.get("namespaces", [[]]))
            made["quotas"] = tuple((tenant, float(share)) for tenant, share in plain.get("quotas", []))
            made["keys"] = tuple((int(index), tuple(map(int, tokens))) for index, tokens in plain.get("keys", []))
            made["tasks"] = tuple(tuple(map(Act.from_plain, task)) for task in plain.get("tasks", []))
        except TypeError as error:
            raise ValueError(f"a world of another form: {error}") from error
        return cls(**cast(Any, made))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_plain())
