"""The same calls on the real cache as on the model, for the scenarios that compare the two."""

from __future__ import annotations

from aradix import EvictParams, Lease, RadixCache
from aradix.errors import OutOfSlotsError, RequestTooLargeError, RetractError
from stress.harness.pages import Call, Result
from stress.harness.site import radix_key
from stress.harness.worlds import Act, World

__all__ = ["Caller"]


class Caller:
    """Turns the acts of one task into calls, makes them, and says what came of it.

    Args:
        world: knows the keys.
        cache: that is called.
        first_lease: the number of this task's first lease; the others follow.
        waits: whether growing waits for slots, or takes no for an answer.
    """

    def __init__(self, world: World, cache: RadixCache, first_lease: int, waits: bool) -> None:
        self._world = world
        self._cache = cache
        self._waits = waits
        self._next = first_lease
        self._leases: dict[int, tuple[Lease, tuple[int, ...]]] = {}

    def plan(self, act: Act) -> Call | None:
        """The call that an act means now; `None` where it means nothing."""
        first, second = (*act.args, 0, 0)[:2]
        namespace, tokens = self._world.keys[first % len(self._world.keys)]
        if act.name == "open":
            limit = len(tokens) - (second % 2)
            return Call("open", self._next, (namespace, tokens, limit))
        if act.name == "evict":
            return Call("evict", 0, (max(1, first),))
        if act.name == "flush":
            return Call("flush", 0, (None if first < 0 else first % len(self._world.namespaces),))
        if act.name == "peek":
            return Call("peek", 0, (namespace, tokens))
        if not self._leases:
            return None
        number = list(self._leases)[first % len(self._leases)]
        lease, tokens = self._leases[number]
        if act.name == "close":
            return Call("close", number, ())
        if act.name == "grow":
            num_tokens = min(max(1, second), len(tokens) - lease.num_tokens)
            return Call("grow", number, (num_tokens,)) if num_tokens > 0 else None
        if act.name == "commit":
            return Call("commit", number, (tokens[: lease.num_tokens],)) if lease.num_tokens else None
        raise ValueError(f"no act of this scenario: {act.name}")

    @property
    def open_leases(self) -> list[int]:
        """The numbers of those not closed yet."""
        return list(self._leases)

    async def make(self, call: Call) -> Result:
        """Makes a call. Waits where growing does."""
        cache = self._cache
        if call.name == "open":
            namespace, tokens, limit = call.args
            lease = cache.lease(radix_key(tokens, self._world.namespace(namespace)), leave_last=len(tokens) - limit)
            await lease.__aenter__()
            self._leases[call.lease] = (lease, tokens)
            self._next += 1
            return (lease.num_matched,)
        if call.name == "evict":
            return ((await cache.evict(EvictParams(*call.args))).num_freed_tokens,)
        if call.name == "flush":
            which = None if call.args[0] is None else self._world.namespace(call.args[0])
            flushed = await cache.flush(which)
            return (flushed.num_freed_tokens, flushed.num_held_tokens)
        if call.name == "peek":
            namespace, tokens = call.args
            return (cache.peek(radix_key(tokens, self._world.namespace(namespace))),)
        lease, tokens = self._leases[call.lease]
        if call.name == "close":
            del self._leases[call.lease]
            lease.release()
            return ()
        if call.name == "commit":
            done = lease.commit(radix_key(call.args[0], lease.key.namespace))
            return (done.prefix_len, lease.node.depth)
        return await self._grow(lease, call.args[0])

    async def _grow(self, lease: Lease, num_tokens: int) -> Result:
        try:
            if self._waits:
                await lease.allocate(num_tokens)
            else:
                lease.allocate_nowait(num_tokens)
        except RequestTooLargeError:
            return ("too large",)
        except OutOfSlotsError:
            return ("no room",)
        except RetractError:
            return ("gave up",)
        return ("grown",)
