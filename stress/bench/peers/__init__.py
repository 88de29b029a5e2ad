"""What the figures compare with, where it is installed; nothing here is needed to run the rest."""

from __future__ import annotations

__all__ = ["PeerMissing"]


class PeerMissing(Exception):
    """A peer cannot be measured here; the message is the line to say so with."""
