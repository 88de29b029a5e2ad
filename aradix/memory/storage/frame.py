"""Frames: a page with what proves that it is the page asked for."""

from __future__ import annotations

import hashlib
import struct

from aradix.errors import StorageCorruptError

__all__ = ["HEADER_BYTES", "pack", "unpack"]

_MAGIC = b"aradixP1"
_HEADER = struct.Struct("<8s32sQ32s")
HEADER_BYTES = _HEADER.size


def pack(name: str, page: bytes) -> bytes:
    """The page behind a header: what this is, the name it was stored under, its length, and a digest of all that."""
    name_digest = hashlib.sha256(name.encode()).digest()
    return _HEADER.pack(_MAGIC, name_digest, len(page), _digest(name_digest, page)) + page


def unpack(name: str, frame: bytes) -> bytes:
    """The page in a frame stored under `name`. `StorageCorruptError` for anything else."""
    if len(frame) < HEADER_BYTES:
        raise StorageCorruptError(f"{name}: {len(frame)} bytes, fewer than the header's {HEADER_BYTES}")
    magic, name_digest, length, digest = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise StorageCorruptError(f"{name}: starts with {magic!r}, so it is no page of this format")
    if name_digest != hashlib.sha256(name.encode()).digest():
        raise StorageCorruptError(f"{name}: holds the page of another name")
    page = frame[HEADER_BYTES:]
    if len(page) != length:
        raise StorageCorruptError(f"{name}: {len(page)} bytes of a page of {length}")
    if digest != _digest(name_digest, page):
        raise StorageCorruptError(f"{name}: the bytes do not match their checksum")
    return page


def _digest(name_digest: bytes, page: bytes) -> bytes:
    hasher = hashlib.sha256(_MAGIC + name_digest + len(page).to_bytes(8, "little"))
    hasher.update(page)
    return hasher.digest()
