"""`Gates`: exclusive access to a subtree.

A lease is the lock: it raises `lock_ref` on its path, so a subtree is busy exactly while its top has a `lock_ref`.
Whoever wants a subtree alone closes a gate at its top; walkers that meet it wait, holding nothing, and walk again from
the root. The gate is granted once no pin but its own is left there and no earlier gate stands above or below.

A gate that is not granted yet can be part of a cycle: a lease below it waits for slots, which another lease holds,
whose task wants to walk through the gate. So while a lease below waits for slots the gate lets walkers pass; and pins
of leases that only wait to be entered are revoked below it.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from aradix.errors import UsageError
from aradix.keys import RadixKey
from aradix.params import NodeRef
from aradix.tree.protocol import Freed, Gate, TreeCore

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from aradix.cache.pins import Pins
    from aradix.cache.pressure import Pressure
    from aradix.cache.radix_cache import RadixCache
    from aradix.cache.watch import Watcher

__all__ = ["Exclusive", "Gates", "StandingGate"]


class StandingGate:
    """A gate at a node: pending until `granted`. It pins its node, and once granted every leaf below."""

    __slots__ = ("depth", "error", "event", "granted", "leaves", "node_id", "task_id")

    def __init__(self, node_id: int, depth: int, task_id: int) -> None:
        self.node_id = node_id
        self.depth = depth
        self.task_id = task_id
        self.granted = False
        self.leaves: list[int] = []
        self.error: BaseException | None = None
        self.event = anyio.Event()


class _Walker:
    """A call that met a gate: the step it wants to take."""

    __slots__ = ("error", "event", "step")

    def __init__(self, step: Callable[[], bool]) -> None:
        self.step = step
        self.error: BaseException | None = None
        self.event = anyio.Event()


class Gates:
    """The gates of a cache, in the order in which they were closed, and the walkers that wait at them."""

    def __init__(
        self,
        core: TreeCore,
        pressure: Pressure,
        give_back: Callable[[list[Freed]], Any],
        changed: Callable[[], None],
        clock: Callable[[], float],
        pins: Pins,
    ) -> None:
        self.watch: Watcher | None = None
        self._clock = clock
        self.standing: list[StandingGate] = []
        self.num_waits = 0
        self._walkers: list[_Walker] = []
        self._serving = False
        self._serve_again = False
        self._core = core
        self._pressure = pressure
        self._give_back = give_back
        self._changed = changed
        self._pins = pins

    def __bool__(self) -> bool:
        return bool(self.standing)

    @property
    def num_walkers(self) -> int:
        """Calls that wait at some gate."""
        return len(self._walkers)

    def forbid_waiting(self, for_what: str) -> None:
        """Nothing may wait while it holds a subtree. Does not wait.

        Raises:
            UsageError: this task holds one.
        """
        if self.standing and self.is_held_by_this_task():
            raise UsageError(
                f"this task holds a subtree exclusively and would have to wait for {for_what}, which may never come; "
                "leave the `async with cache.exclusive(...)` block first"
            )

    def is_held_by_this_task(self) -> bool:
        """Whether the running task holds a subtree, or waits for one. Does not wait."""
        return any(gate.task_id == anyio.get_current_task().id for gate in self.standing)

    async def wait_in_line(self, step: Callable[[], bool], undo: Callable[[], None]) -> None:
        """Wait until a step that met a gate was taken: by whoever opens it, before this task wakes. Waits.

        So nobody barges in, and who waits is served first come, first served, on every event loop.

        Args:
            step: takes the step, and tells whether it could; it is called again when a gate opens.
            undo: called if this call is cancelled in the moment in which its step was taken.

        Raises:
            UsageError: this task holds a subtree.
            CacheClosedError: the cache was closed meanwhile.
        """
        self.forbid_waiting("a gate")
        walker = _Walker(step)
        self._walkers.append(walker)
        self.num_waits += 1
        began = self._clock()
        try:
            await walker.event.wait()
        except BaseException:
            if walker in self._walkers:
                self._walkers.remove(walker)
            elif walker.error is None:
                undo()
            raise
        finally:
            if self.watch is not None:
                self.watch.waited_at_gate(began)
        if walker.error is not None:
            raise walker.error

    def serve_walkers(self) -> None:
        """Let every waiting walker try again, first come first served. Does not wait."""
        self._serve_again = True
        if self._serving:
            return
        self._serving = True
        try:
            while self._serve_again:
                self._serve_again = False
                for walker in list(self._walkers):
                    if walker.step():
                        self._walkers.remove(walker)
                        walker.event.set()
        finally:
            self._serving = False

    def close_down(self, make_error: Callable[[], BaseException]) -> None:
        """End every wait with an error. Does not wait."""
        walkers, self._walkers = self._walkers, []
        pending = [gate for gate in self.standing if not gate.granted]
        ends: list[_Walker | StandingGate] = [*walkers, *pending]
        for waiting in ends:
            waiting.error = make_error()
            waiting.event.set()

    async def close(self, key: RadixKey) -> StandingGate:
        """Close a gate where the match of a key ends, and wait until it is granted; cancelled, it opens again."""
        task_id = anyio.get_current_task().id
        placed: list[StandingGate] = []

        def step() -> bool:
            closed = self._core.close_gate(key)
            if not closed.met:
                placed.append(StandingGate(closed.node_id, closed.num_matched, task_id))
                self.standing.append(placed[0])
            return not closed.met

        if not step():
            await self.wait_in_line(step, lambda: self.open(placed[0]))
        gate = placed[0]
        self._pressure.changed()
        if not gate.granted:
            try:
                await gate.event.wait()
                if gate.error is not None:
                    raise gate.error
            except BaseException:
                self.open(gate)
                raise
        return gate

    def open(self, gate: StandingGate) -> None:
        """Open a gate, granted or not, and serve whoever waited. Does not wait."""
        if gate not in self.standing:
            return
        self.standing.remove(gate)
        self.unpin_leaves(gate)
        self._give_back(self._core.open_gate(gate.node_id))
        self._pressure.admission_unblocked()
        self.serve_walkers()
        self._changed()

    def pin_leaves(self, gate: StandingGate) -> None:
        """Pin all below a granted gate, so that nothing of it is evicted."""
        gate.leaves = self._core.pin_below(gate.node_id)

    def unpin_leaves(self, gate: StandingGate) -> None:
        """The reverse."""
        leaves, gate.leaves = gate.leaves, []
        for leaf in leaves:
            self._give_back(self._core.unpin(leaf, touch=False))

    def behind_granted(self, node_id: int) -> bool:
        """Whether a node lies in a subtree that somebody has for himself."""
        return any(gate.granted and self._core.is_below(node_id, gate.node_id) for gate in self.standing)

    def advance(self) -> None:
        """Decide anew for each gate whether it is granted, and whether walkers may pass. Does not wait."""
        for gate in list(self.standing):
            self._revoke_below(gate)
            if gate.granted:
                continue
            # An idle prefix that is only kept is nobody's: it holds up no gate.
            num_idle = len(self._pins.below(gate.node_id)) if self._pins else 0
            if self._core.lock_ref(gate.node_id) == 1 + num_idle and not self._has_earlier(gate):
                self._core.set_gate(gate.node_id, Gate.GRANTED)
                gate.granted = True
                self.pin_leaves(gate)
                gate.event.set()
            elif self._must_let_pass(gate):
                self._core.set_gate(gate.node_id, Gate.PASSING)
                self._pressure.admission_unblocked()
                self.serve_walkers()
            else:
                self._core.set_gate(gate.node_id, Gate.PENDING)

    def _revoke_below(self, gate: StandingGate) -> None:
        while self._pressure.revoke_pins(lambda hold: self._core.is_below(hold.node_id, gate.node_id)):
            pass

    def _has_earlier(self, gate: StandingGate) -> bool:
        for earlier in self.standing:
            if earlier is gate:
                return False
            if self._core.is_below(earlier.node_id, gate.node_id) or self._core.is_below(gate.node_id, earlier.node_id):
                return True
        return False

    def _must_let_pass(self, gate: StandingGate) -> bool:
        return any(self._core.is_below(waiter.hold.node_id, gate.node_id) for waiter in self._pressure.growth)


class Exclusive:
    """`async with cache.exclusive(key)`: a subtree of one's own. Made by the cache.

    Meanwhile nobody matches, publishes or evicts below; leases that stood there have ended. Do not wait for a lease,
    slots or another subtree inside: that raises `UsageError`.
    """

    __slots__ = ("_cache", "_gate", "_key")

    def __init__(self, cache: RadixCache, key: RadixKey) -> None:
        self._cache = cache
        self._key = key
        self._gate: StandingGate | None = None

    async def __aenter__(self) -> Self:
        """Close the gate and wait until the leases below have ended. Waits; safe to cancel."""
        if self._gate is not None:
            raise UsageError("this exclusive() was entered already; call cache.exclusive(key) again")
        self._gate = await self._cache._close_gate(self._key)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gate is not None:
            self._cache._open_gate(self._gate)

    def _standing(self) -> StandingGate:
        self._cache._calls.begin()
        gate = self._gate
        if gate is None or gate not in self._cache._gates.standing:
            raise UsageError("this subtree is not held: use it inside `async with cache.exclusive(key)`")
        return gate

    @property
    def num_matched(self) -> int:
        """Tokens of the key that end at the gate: the whole key, or as much of it as was cached. Does not wait."""
        return self._standing().depth

    @property
    def slots(self) -> torch.Tensor:
        """The slots of the path down to the gate: int64, shape `[num_matched]`, a copy. Does not wait."""
        gate = self._standing()
        return self._cache._slots_tensor(NodeRef(gate.node_id, gate.depth))

    def evict(self) -> int:
        """Free everything below the gate (the path down to it stays); the number of tokens. Does not wait."""
        return self._cache._evict_below(self._standing())
