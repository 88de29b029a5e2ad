"""What a task does with the tiers below the device: looks without loading, idles until copies end, keeps for a time.

What is looked up and not loaded must leave no hold. Copies that end with no call after them must be heard of by the
eviction that comes next. The end of a time frees what is idle, never what a copy is at.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from aradix import EvictParams
from stress.harness.request import RequestRunner
from stress.harness.site import Site, radix_key
from stress.harness.worlds import Act

__all__ = ["tier_errands"]


def tier_errands(site: Site, task: str) -> dict[str, Callable[..., Awaitable[None]]]:
    """What a task does with tiers, by name."""
    return {"glance": partial(_glance, site, task), "sweep": partial(_sweep, site, task), "keep": partial(_keep, site)}


async def _glance(site: Site, task: str, key: int = 0, num_times: int = 1, again: int = 0) -> None:
    """`glance(key, times, again)`: look-ups that load nothing; each is closed, and then so many times again."""
    namespace, tokens = site.key(key)
    for _ in range(num_times):
        record, since = site.book.new("lease", namespace), site.book.since(namespace, tokens)
        with site.operation(task, f"lease(key {key}, load_back=False) {record}", waits=True) as noted:
            lease = site.cache.lease(radix_key(tokens, namespace), load_back=False)
            await lease.__aenter__()
            shown: list[int] = lease.slots.tolist()
            noted.result = f"{shown}"
        try:
            site.book.matched(record, since, tokens, shown, len(tokens))
        finally:
            with site.operation(task, f"release {record}") as noted:
                site.book.released(record)
                for _ in range(1 + again):
                    lease.release()
                noted.result = "done"


async def _sweep(site: Site, task: str, key: int = 0) -> None:
    """`sweep(key)`: a request, whose copies end while nobody calls the cache, and then all is to be evicted."""
    num_tokens = len(site.key(key)[1])
    await RequestRunner(site, task).run(Act("request", (key,), (Act("grow", (num_tokens,)), Act("commit"))))
    site.kernels.finish()
    num_slots = site.allocator.num_slots
    with site.operation(task, f"evict({num_slots}), copies having ended") as noted:
        freed = (await site.cache.evict(EvictParams(num_slots))).num_freed_tokens
        noted.result = f"{freed} freed"
    # Who waits may have let go of pins meanwhile; a write-back has to wait, while others publish; and as copies end
    # others begin, so that nothing of it is evicted, and may have failed by now.
    if site.is_struck or site.book.num_in_flight or site.world.write_policy == "write_back" or site.world.copy_faults:
        return
    stats = site.cache.stats()
    if stats.evictable:
        raise site.book.fail("sum", f"everything was to be evicted, {freed} tokens were, and {stats.evictable} can be")


async def _keep(site: Site, key: int = 0, seconds: int = 0, pause: int = 0) -> None:
    """`keep(key, seconds, pause)`: a pin, for so many device seconds or (0) without an end; released after a pause."""
    namespace, tokens = site.key(key)
    epoch, began = site.book.epoch(namespace), site.kernels.device.clock.time()
    pin = site.cache.pin(radix_key(tokens, namespace), ttl=seconds or None)
    kept = tokens[: pin.num_tokens]
    site.num_keeping += 1
    try:
        for _ in range(1 + pause):
            await site.pause(1)
            if not kept or site.book.epoch(namespace) != epoch or pin.ended in ("flushed", "closed"):
                return
            now = site.kernels.device.clock.time()
            is_over = (now >= began + seconds) if seconds else pin.ended == "taken back"
            if not is_over and (found := site.cache.peek(radix_key(kept, namespace))) != len(kept):
                raise site.book.fail("kept", f"{pin!r} must keep {len(kept)} tokens, {found} are found")
    finally:
        site.num_keeping -= 1
        pin.release()
