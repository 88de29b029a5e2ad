"""The bytes that travel: what consumers of vLLM and SGLang workers parse, in both formats."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aradix.errors import ConfigError
from aradix.keys import Namespace
from aradix.observe.wire import Cleared, Removed, Stored, WireEvent, batch_encoder, pack_hashes, wire_names

HASHES = [2**64 - 1, 7]
PACKED = pack_hashes(HASHES)
TOKENS = np.array([1, 2, 3, 4], np.int32).tobytes()


def wired(event: WireEvent, wire: Literal["map", "array"]) -> Any:
    seconds, events, dp_rank = msgspec.msgpack.decode(batch_encoder(wire, 2, 3)(1.5, [event]))
    assert (seconds, dp_rank) == (1.5, 3)
    (found,) = events
    return found


def test_a_map_names_every_field_and_only_what_is_set_of_the_last_ones() -> None:
    event = Stored(PACKED, 5, TOKENS, Namespace(), "GPU")
    assert wired(event, "map") == {
        "type": "BlockStored",
        "block_hashes": HASHES,
        "parent_block_hash": 5,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    salted = wired(event._replace(namespace=Namespace(lora="a", salt="s")), "map")
    assert (salted["lora_name"], salted["cache_salt"]) == ("a", "s")
    assert salted["extra_keys"] == [None, None]
    first = wired(event._replace(namespace=Namespace(salt="s"), parent=None), "map")
    assert (first["parent_block_hash"], first["extra_keys"]) == (None, [["s"], None])
    assert wired(Removed(PACKED, "CPU"), "map") == {"type": "BlockRemoved", "block_hashes": HASHES, "medium": "CPU"}
    assert wired(Cleared(), "map") == {"type": "AllBlocksCleared"}


def test_an_array_has_the_same_in_order() -> None:
    event = Stored(PACKED, None, TOKENS, Namespace(lora="a"), "GPU")
    assert wired(event, "array") == ["BlockStored", HASHES, None, [1, 2, 3, 4], 2, None, "GPU", "a"]
    salted = wired(event._replace(namespace=Namespace(salt="s")), "array")
    assert salted[8:] == [[["s", "dynamo-cache-salt:s"], None]]
    later = wired(event._replace(namespace=Namespace(salt="s"), parent=3), "array")
    assert later[8:] == [[["dynamo-cache-salt:s"], None]]
    assert wired(Removed(PACKED, "GPU"), "array") == ["BlockRemoved", HASHES, "GPU"]
    assert wired(Cleared(), "array") == ["AllBlocksCleared"]


def test_there_are_two_formats() -> None:
    with pytest.raises(ConfigError, match="'map' or 'array', got 'json'"):
        batch_encoder("json", 2, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("namespace", "names"),
    [
        (Namespace(), (None, None)),
        (Namespace(lora="a b"), ("a b", None)),
        (Namespace(salt="s"), (None, "s")),
        (Namespace(lora="a", salt="s"), ("a", "s")),
        (Namespace(lora=1), (None, 'aradix:{"lora":1}')),
        (Namespace(lora="a", salt=1), ("a", 'aradix:{"salt":1}')),
        (Namespace(extra="x", tenant="t", version=2), (None, 'aradix:{"extra":"x","tenant":"t","version":2}')),
        (Namespace(salt="aradix:{}"), (None, 'aradix:{"salt":"aradix:{}"}')),
        (Namespace(salt=""), (None, 'aradix:{"salt":""}')),
        (Namespace(lora="\ud800"), (None, 'aradix:{"lora":"\\ud800"}')),
    ],
)
def test_what_routers_call_a_namespace(namespace: Namespace, names: tuple[str | None, str | None]) -> None:
    assert wire_names(namespace) == names


values = st.one_of(st.none(), st.integers(0, 2), st.sampled_from(["", "0", "1", "a", "aradix:", 'aradix:{"salt":"a"}']))
namespaces = st.builds(Namespace, lora=values, salt=values, version=values, tenant=values, extra=values)


@given(namespaces, namespaces)
def test_different_namespaces_never_meet_on_the_wire(one: Namespace, two: Namespace) -> None:
    same = tuple(map(type, one)) == tuple(map(type, two)) and one == two
    assert (wire_names(one) == wire_names(two)) == same


@given(namespaces)
def test_names_can_be_sent(namespace: Namespace) -> None:
    for name in wire_names(namespace):
        assert name != ""
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(name)) == name
