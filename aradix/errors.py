"""Every error that aradix raises, shaped by cause.

Three questions decide the class: did the caller break a rule (`UsageError`), is there simply no room
(`CapacityError`), or are we at fault (`InvariantError`)? Messages carry the numbers and a hint.
"""

from __future__ import annotations

__all__ = [
    "AradixError",
    "CacheClosedError",
    "CapacityError",
    "ConfigError",
    "DoubleFreeError",
    "InvalidKeyError",
    "InvariantError",
    "LeaseReleasedError",
    "OutOfSlotsError",
    "RequestTooLargeError",
    "RetractError",
    "StorageCorruptError",
    "TierError",
    "TransferError",
    "UsageError",
    "WrongLoopError",
]


class AradixError(Exception):
    """The base of every error of this library."""


class UsageError(AradixError):
    """The caller broke a rule; nothing was changed and nothing was lost."""


class ConfigError(UsageError, ValueError):
    """A value given at construction cannot work."""


class InvalidKeyError(UsageError, ValueError):
    """Token ids, or a namespace, that cannot make a key."""


class LeaseReleasedError(UsageError):
    """A lease was used outside the time between entering and release."""


class DoubleFreeError(UsageError):
    """A slot was freed a second time."""


class WrongLoopError(UsageError):
    """A call came from another event loop or thread than the one that opened the cache."""


class CapacityError(AradixError):
    """There is no room; the subclass says what would help."""


class RequestTooLargeError(CapacityError):
    """The request can never fit in this pool, however long it waits."""


class OutOfSlotsError(CapacityError):
    """A `_nowait` call would have had to wait for slots."""


class RetractError(CapacityError):
    """Every protected slot belongs to someone who also waits: this waiter must give way.

    The lease stays valid; release it (or truncate it) and try again later.
    """


class CacheClosedError(AradixError):
    """The cache is closed, or was closed while the call waited."""


class TierError(AradixError):
    """A tier below the device failed."""


class TransferError(TierError):
    """A copy between tiers failed, or a fence could not be recorded."""


class StorageCorruptError(TierError):
    """A stored page does not match its checksum, its key or the size of a page."""


class InvariantError(AradixError):
    """A bug of ours: an invariant does not hold. The cache refuses further work."""
