"""Faults that a world plans: an event that cannot be recorded, a policy or an event sink that raises, a copy of which
nobody can say whether it has ended. The run must end with that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aradix.events import KVCacheEvent
from aradix.policies import EvictionPolicy, NodeStats, policy_named
from stress.device import VirtualEvent, VirtualStream

__all__ = [
    "PLANNED",
    "BreakingCopies",
    "BreakingEvents",
    "BreakingSink",
    "BrokenDeviceError",
    "BrokenPolicy",
    "BrokenPolicyError",
    "BrokenSinkError",
    "LostCopyError",
]


class BrokenDeviceError(RuntimeError):
    """What the device raises where a world plans it."""


class BrokenPolicyError(RuntimeError):
    """What a policy raises where a world plans it."""


class BrokenSinkError(RuntimeError):
    """What an event sink raises where a world plans it."""


class LostCopyError(RuntimeError):
    """What a copy answers where a world plans that its device is lost: it may go on for ever."""


PLANNED = (BrokenDeviceError, BrokenPolicyError, BrokenSinkError, LostCopyError)


class _BreakingEvent(VirtualEvent):
    def __init__(self, event: VirtualEvent, events: BreakingEvents) -> None:
        super().__init__(event._device)
        self._events = events

    def record(self, stream: VirtualStream | None = None) -> None:
        self._events.may_record()
        super().record(stream)


class BreakingEvents:
    """An event factory of which the record of one number fails, once.

    Args:
        make_event: makes the events as they should be.
        fail_at: counted from 1.
    """

    def __init__(self, make_event: Callable[[], VirtualEvent], fail_at: int) -> None:
        self._make_event = make_event
        self._left = fail_at
        self.raised = False

    def __call__(self) -> VirtualEvent:
        return _BreakingEvent(self._make_event(), self)

    def may_record(self) -> None:
        """Raises BrokenDeviceError where it is time."""
        self._left -= 1
        if self._left == 0:
            self.raised = True
            raise BrokenDeviceError("the device is lost")


class BrokenPolicy:
    """A policy of which the rank of that number fails, and every one after it.

    Args:
        name: of the policy it follows until then.
        fail_at: counted from 1.
    """

    def __init__(self, name: str, fail_at: int) -> None:
        self._policy: EvictionPolicy = policy_named(name)
        self._left = fail_at
        self.raised = False

    def rank(self, node: NodeStats) -> Any:
        self._left -= 1
        if self._left <= 0:
            self.raised = True
            raise BrokenPolicyError("no rank today")
        return self._policy.rank(node)


class BreakingCopies:
    """Copies of which one is lost: asked once it says that it runs, and after that nothing any more.

    Args:
        lost: which one, counted from 1.
    """

    def __init__(self, lost: int) -> None:
        self._left = lost
        self._num_asked = 0
        self.raised = False

    def is_next(self) -> bool:
        """Whether the copy that starts now is the one."""
        self._left -= 1
        return self._left == 0

    def may_ask(self) -> None:
        """Raises LostCopyError from the second time on."""
        self._num_asked += 1
        if self._num_asked > 1:
            self.give_up()

    def give_up(self) -> None:
        """Raises LostCopyError."""
        self.raised = True
        raise LostCopyError("nobody knows whether the copy has ended")


class BreakingSink:
    """An event sink that fails, once.

    Args:
        sink: what it does until then.
        fail_at: the list of events that it fails on, counted from 1.
    """

    def __init__(self, sink: Callable[[Sequence[KVCacheEvent]], None], fail_at: int) -> None:
        self._sink = sink
        self._left = fail_at
        self.raised = False

    def __call__(self, events: Sequence[KVCacheEvent]) -> None:
        self._left -= 1
        if self._left == 0:
            self.raised = True
            raise BrokenSinkError("the sink is blocked")
        self._sink(events)
