"""How KV events travel: msgpack maps as vLLM and SGLang send them since mid-2026, or the older tagged arrays.

A batch is the array `[ts, [event, ...], dp_rank]`. Block hashes are unsigned 64-bit integers.
Source of the shapes: the event streams of vLLM and SGLang, and what NVIDIA Dynamo's indexer made of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from aradix.errors import ConfigError
from aradix.keys import Namespace

__all__ = ["Cleared", "Removed", "Stored", "Wire", "WireEvent", "batch_encoder", "wire_names"]

Wire = Literal["map", "array"]

_OWN_SALT = "aradix:"
_ARRAY_SALT = "dynamo-cache-salt:"
"""An array has no field for the salt. Dynamo's indexer finds it in `extra_keys` if it is marked so, and else not."""


class Stored(NamedTuple):
    """Blocks in a chain that a medium holds from now on; `token_ids` of all of them, flat."""

    hashes: list[int]
    parent: int | None
    token_ids: list[int]
    namespace: Namespace
    medium: str


class Removed(NamedTuple):
    """Blocks that a medium holds no more."""

    hashes: list[int]
    medium: str


class Cleared(NamedTuple):
    """No medium holds anything any more."""


WireEvent = Stored | Removed | Cleared


class _StoredMap(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    cache_salt: str | None = None


class _RemovedMap(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int]
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


def _stored_map(event: Stored, block_size: int) -> _StoredMap:
    lora, salt = wire_names(event.namespace)
    wired = _StoredMap(event.hashes, event.parent, event.token_ids, block_size, None, event.medium, lora)
    if salt is not None:
        wired.cache_salt = salt
        # As vLLM has it: the block hashes are a chain, so that only the first block of a prompt names the salt.
        first = [salt] if event.parent is None else None
        wired.extra_keys = [first, *[None] * (len(event.hashes) - 1)]
    return wired


def _as_map(event: WireEvent, block_size: int) -> Any:
    if isinstance(event, Stored):
        return _stored_map(event, block_size)
    if isinstance(event, Removed):
        return _RemovedMap(event.hashes, event.medium)
    return _ClearedMap()


def _as_array(event: WireEvent, block_size: int) -> Any:
    if isinstance(event, Stored):
        lora, salt = wire_names(event.namespace)
        array: list[Any] = [
            "BlockStored",
            event.hashes,
            event.parent,
            event.token_ids,
            block_size,
            None,
            event.medium,
            lora,
        ]
        if salt is not None:
            first = [salt, _ARRAY_SALT + salt] if event.parent is None else [_ARRAY_SALT + salt]
            array.append([first, *[None] * (len(event.hashes) - 1)])
        return array
    if isinstance(event, Removed):
        return ["BlockRemoved", event.hashes, event.medium]
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
