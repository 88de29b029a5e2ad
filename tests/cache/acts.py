"""What the tests of the cache do over and over: keys, leases in hand, acts that run beside the test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from aradix import Lease, Namespace, RadixCache, RadixKey

__all__ = ["Act", "begin", "entered", "filled", "join", "joiner", "key", "leader", "settled"]

ROUNDS = 40
"""Turns of the loop after which whatever can run has run: no chain of wake-ups here is half as long."""


def key(*parts: int | Iterable[int], namespace: str | Namespace | None = None) -> RadixKey:
    """The key of some ids and ranges of ids, one after the other."""
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else part
    return RadixKey(ids, namespace)


async def settled() -> None:
    """Let every task run until it waits for something."""
    for _ in range(ROUNDS):
        await checkpoint()


async def entered(cache: RadixCache, opened_with: RadixKey, num_fresh: int = 0, **options: Any) -> Lease:
    """A lease in hand, holding so many fresh tokens; the caller releases it."""
    lease = cache.lease(opened_with, **options)
    await lease.__aenter__()
    if num_fresh:
        lease.allocate_nowait(num_fresh)
    return lease


async def filled(cache: RadixCache, *keys: RadixKey, **options: Any) -> None:
    """Cache some keys as requests would, in this order; nobody pins them afterwards."""
    for each in keys:
        async with cache.lease(each, **options) as lease:
            view = each.maybe_to_bigram_view(cache._params.is_eagle)
            lease.allocate_nowait(len(view) - lease.num_matched)
            lease.commit(each)


class Act:
    """A call that runs beside the test: how it stands, how it ended, and the scope that cancels it."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.value: Any = None
        self.error: Exception | None = None
        self.returned = False

    @property
    def waits(self) -> bool:
        return not (self.returned or self.error is not None or self.scope.cancelled_caught)

    async def run(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        with self.scope:
            try:
                self.value = await function(*args)
            except Exception as error:
                self.error = error
            else:
                self.returned = True


async def begin(tasks: TaskGroup, function: Callable[..., Awaitable[Any]], *args: Any) -> Act:
    """Start a call in a task of its own, and let it run until it waits."""
    act = Act()
    tasks.start_soon(act.run, function, *args)
    await settled()
    return act


async def join(cache: RadixCache, wanted: RadixKey, **options: Any) -> Lease:
    """A lease in hand that has waited for others; the caller releases it."""
    lease = cache.lease(wanted, join=True, **options)
    await lease.__aenter__()
    return lease


async def leader(tasks: TaskGroup, cache: RadixCache, wanted: RadixKey, num_fresh: int = 0, **options: Any) -> Lease:
    """As `join`, entered in a task of its own that is over by now, and holding so many fresh tokens."""
    act = await joiner(tasks, cache, wanted, **options)
    lease: Lease = act.value
    if num_fresh:
        lease.allocate_nowait(num_fresh)
    return lease


async def joiner(tasks: TaskGroup, cache: RadixCache, wanted: RadixKey, **options: Any) -> Act:
    """A task that enters a lease, perhaps after others."""
    return await begin(tasks, lambda: join(cache, wanted, **options))
