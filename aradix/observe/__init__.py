"""What others see of a cache: KV events on the wire, metrics, a page to look at. Each needs an extra of its own.

`KVEventPublisher` needs `aradix[zmq]`, `CacheMetrics` needs `aradix[metrics]`, `inspector` needs `aradix[inspect]`.
They are imported when they are first asked for, so one does not need what another stands on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aradix.observe.inspection import inspector
    from aradix.observe.metrics import CacheMetrics
    from aradix.observe.publisher import KVEventPublisher

__all__ = ["CacheMetrics", "KVEventPublisher", "inspector"]

_OWNERS = {"CacheMetrics": "metrics", "KVEventPublisher": "publisher", "inspector": "inspection"}


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_OWNERS[name]}"), name)
