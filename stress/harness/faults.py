"""Faults that a world plans: an event that cannot be recorded, a policy that raises. The run must end with that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aradix.policies import EvictionPolicy, NodeStats, policy_named
from stress.device import VirtualEvent, VirtualStream

__all__ = ["BreakingEvents", "BrokenDeviceError", "BrokenPolicy", "BrokenPolicyError"]


class BrokenDeviceError(RuntimeError):
    """What the device raises where a world plans it."""


class BrokenPolicyError(RuntimeError):
    """What a policy raises where a world plans it."""


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
