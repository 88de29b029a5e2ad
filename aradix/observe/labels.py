"""Names for people: what a namespace is called in a label and on the page."""

from __future__ import annotations

from aradix.keys import Namespace

__all__ = ["namespace_label"]


def namespace_label(namespace: Namespace) -> str:
    """A namespace in a label. Of a salt, which may be a secret, it has the digest's first digits only."""
    parts = []
    for name, value in namespace._asdict().items():
        if name == "salt" and value is not None:
            parts.append(f"salt=#{Namespace(salt=value).digest().hex()[:8]}")
        elif value is not None:
            parts.append(f"{name}={value}")
    return ",".join(parts) or "default"
