"""How KV events travel: msgpack maps as vLLM and SGLang send them since mid-2026, or the older tagged arrays.

A batch is the array `[ts, [event, ...], dp_rank]`. Block hashes are unsigned 64-bit integers.
Source of the shapes: the event streams of vLLM and SGLang, and what NVIDIA Dynamo's indexer made of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from aradix.errors import ConfigError
from aradix.keys import Namespace

try:
    from aradix._native import msgpack_hashes, msgpack_ids
except ImportError:  # not compiled, or it does not load; `aradix.tree` says so

    def msgpack_hashes(hashes: bytes) -> bytes:
        return msgspec.msgpack.encode(unpack_hashes(hashes))

    def msgpack_ids(tokens: bytes) -> bytes:
        return msgspec.msgpack.encode(np.frombuffer(tokens, np.int32).tolist())


__all__ = [
    "HASH_BYTES",
    "Cleared",
    "Removed",
    "Stored",
    "Wire",
    "WireEvent",
    "batch_encoder",
    "pack_hashes",
    "unpack_hashes",
    "wire_names",
]

HASH_BYTES = 8

Wire = Literal["map", "array"]

_NO_NAMES = Namespace()
_OWN_SALT = "aradix:"
_ARRAY_SALT = "dynamo-cache-salt:"
"""An array has no field for the salt. Dynamo's indexer finds it in `extra_keys` if it is marked so, and else not."""


def pack_hashes(hashes: list[int]) -> bytes:
    """Hashes as events have them: 8 bytes each, the highest first."""
    return np.array(hashes, ">u8").tobytes()


def unpack_hashes(hashes: bytes) -> list[int]:
    """What `pack_hashes` was given."""
    unpacked: list[int] = np.frombuffer(hashes, ">u8").tolist()
    return unpacked


class Stored(NamedTuple):
    """Blocks in a chain that a medium holds from now on. Nothing is unpacked on its way: that is most of the work.

    Args:
        hashes: of the blocks, packed.
        parent: the hash of the block before them, `None` at a root.
        tokens: the ids of all of them as int32.
        namespace: they were cached in.
        medium: that holds them.
    """

    hashes: bytes
    parent: int | None
    tokens: bytes
    namespace: Namespace
    medium: str


class Removed(NamedTuple):
    """Blocks that a medium holds no more; `hashes` as in `Stored`."""

    hashes: bytes
    medium: str


class Cleared(NamedTuple):
    """No medium holds anything any more."""


WireEvent = Stored | Removed | Cleared


class _StoredMap(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True):
    block_hashes: msgspec.Raw
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    cache_salt: str | None = None


class _RemovedMap(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: msgspec.Raw
    medium: str


class _ClearedMap(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


def _travels(text: object) -> bool:
    """Whether a value can be sent as it is: consumers know strings only, and take an empty one for none."""
    return isinstance(text, str) and text != "" and text.isprintable()


def wire_names(namespace: Namespace) -> tuple[str | None, str | None]:
    """(`lora_name`, `cache_salt`) by which routers know a namespace; different namespaces never have the same.

    `lora` and `salt` travel as they are. What consumers have no field for (version, tenant, extra, and values that are
    no plain strings) goes into the salt as well, which is then `aradix:` and a JSON object: a router that asks about
    such a namespace has to ask with what this function gives. Does not wait.
    """
    if namespace == _NO_NAMES:
        return None, None
    lora = str(namespace.lora) if _travels(namespace.lora) else None
    rest = {name: value for name, value in namespace._asdict().items() if value is not None}
    if lora is not None:
        del rest["lora"]
    salt = rest.get("salt")
    if not rest:
        return lora, None
    if len(rest) == 1 and isinstance(salt, str) and _travels(salt) and not salt.startswith(_OWN_SALT):
        return lora, salt
    return lora, _OWN_SALT + json.dumps(rest, sort_keys=True, separators=(",", ":"))


def _hashes(event: Stored | Removed) -> msgspec.Raw:
    return msgspec.Raw(msgpack_hashes(event.hashes))


def _ids(event: Stored) -> msgspec.Raw:
    return msgspec.Raw(msgpack_ids(event.tokens))


def _keys_of_all(event: Stored, first: list[str] | None) -> list[list[str] | None]:
    """The extra keys of the first block, and none of those behind it."""
    return [first, *[None] * (len(event.hashes) // HASH_BYTES - 1)]


def _stored_map(event: Stored, block_size: int) -> _StoredMap:
    lora, salt = wire_names(event.namespace)
    wired = _StoredMap(_hashes(event), event.parent, _ids(event), block_size, None, event.medium, lora)
    if salt is not None:
        wired.cache_salt = salt
        # As vLLM has it: the block hashes are a chain, so that only the first block of a prompt names the salt.
        wired.extra_keys = _keys_of_all(event, [salt] if event.parent is None else None)
    return wired


def _as_map(event: WireEvent, block_size: int) -> Any:
    if isinstance(event, Stored):
        return _stored_map(event, block_size)
    if isinstance(event, Removed):
        return _RemovedMap(_hashes(event), event.medium)
    return _ClearedMap()


def _as_array(event: WireEvent, block_size: int) -> Any:
    if isinstance(event, Stored):
        lora, salt = wire_names(event.namespace)
        array: list[Any] = [
            "BlockStored",
            _hashes(event),
            event.parent,
            _ids(event),
            block_size,
            None,
            event.medium,
            lora,
        ]
        if salt is not None:
            mark = _ARRAY_SALT + salt
            array.append(_keys_of_all(event, [salt, mark] if event.parent is None else [mark]))
        return array
    if isinstance(event, Removed):
        return ["BlockRemoved", _hashes(event), event.medium]
    return ["AllBlocksCleared"]


def batch_encoder(wire: Wire, block_size: int, dp_rank: int) -> Callable[[float, Sequence[WireEvent]], bytes]:
    """What makes a payload of a time in seconds and some events.

    Raises:
        ConfigError: no such wire format.
    """
    if wire not in ("map", "array"):
        raise ConfigError(f"wire must be 'map' or 'array', got {wire!r}")
    shape = _as_map if wire == "map" else _as_array
    encode = msgspec.msgpack.Encoder().encode

    def encode_batch(seconds: float, events: Sequence[WireEvent]) -> bytes:
        return encode([seconds, [shape(event, block_size) for event in events], dp_rank])

    return encode_batch
