"""A virtual accelerator: in-order streams on a virtual clock, and an oracle that finds races which timing hides."""

from stress.device.clock import VirtualClock
from stress.device.copier import HOST_SLOTS, VirtualCopier
from stress.device.oracle import Access, Oracle, Race
from stress.device.streams import Kernel, VirtualCopy, VirtualEvent, VirtualStream
from stress.device.virtual import VirtualDevice

__all__ = [
    "HOST_SLOTS",
    "Access",
    "Kernel",
    "Oracle",
    "Race",
    "VirtualClock",
    "VirtualCopier",
    "VirtualCopy",
    "VirtualDevice",
    "VirtualEvent",
    "VirtualStream",
]
