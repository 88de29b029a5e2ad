"""What only the compiled core can get wrong: memory, references, and calls that come at the wrong moment."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from aradix.keys import Namespace, RadixKey
from aradix.params import NodeRef
from aradix.policies import NodeStats
from aradix.tree import cpp_core_error, make_core
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import Ready, TreeCore

pytestmark = pytest.mark.skipif(cpp_core_error() is not None, reason="the core was not compiled")

ROOT = Path(__file__).parents[2]


def made(**settings: Any) -> TreeCore:
    return make_core("cpp", **{"policy": "lru", **settings})


class Meddler:
    """A policy that calls the tree it ranks for."""

    core: TreeCore

    def rank(self, node: NodeStats) -> int:
        return self.core.peek(RadixKey([1]))


def test_a_call_in_the_middle_of_a_step_is_refused() -> None:
    policy = Meddler()
    core = policy.core = made(policy=policy)
    core.insert(RadixKey([1, 2]), np.arange(2))
    assert isinstance(core.failure, RuntimeError)
    assert "middle of a step" in str(core.failure)
    assert core.peek(RadixKey([1, 2])) == 2
    assert audit_tree(core, {}).problems == []


class Keeper(Meddler):
    def rank(self, node: NodeStats) -> int:
        return node.last_access


def test_a_long_compare_lets_other_threads_run_but_not_into_the_tree() -> None:
    tokens, page_size = np.arange(1 << 23, dtype=np.int32), 1 << 20
    key, core = RadixKey(tokens), made(page_size=page_size)
    core.insert(key, np.arange(len(tokens)))
    meanwhile: list[str] = []
    is_free = threading.Lock()

    def other() -> None:
        with is_free:  # waited for without the GIL; what comes next is done with it
            try:
                core.peek(key)
            except RuntimeError as error:
                meanwhile.append(str(error))
            else:
                meanwhile.append("came between two steps")

    is_free.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)  # nobody is made to let go of the GIL
    try:
        is_free.release()
        for _ in range(500):  # it has to be given to the thread by the machine, too
            if meanwhile:
                break
            assert core.peek(key) == len(tokens)
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert "in the middle of a step" in meanwhile[0]
    assert audit_tree(core, {}).problems == []


# The interpreter ends while a thread hashes what was recorded, or compares a prompt again and again.
ENDS_MEANWHILE = """
import sys, threading
import numpy as np
from aradix.keys import RadixKey
from aradix.tree import make_core
tokens = np.arange(1 << 23, dtype=np.int32)
core = make_core("cpp", policy="lru", page_size=int(sys.argv[2]), record_events=True)
core.insert(RadixKey(tokens), np.arange(len(tokens)))
recorded, key, begun = core.take_recorded(), RadixKey(tokens), threading.Event()
def hash_pages():
    begun.set()
    list(recorded)
def compare():
    while True:
        core.peek(key)
        begun.set()
threading.Thread(target=globals()[sys.argv[1]], daemon=True).start()
begun.wait()
"""


@pytest.mark.parametrize(("busy_with", "page_size"), [("hash_pages", 8), ("compare", 1 << 20)])
def test_an_interpreter_that_ends_while_a_thread_works_without_it_just_ends(busy_with: str, page_size: int) -> None:
    command = [sys.executable, "-c", ENDS_MEANWHILE, busy_with, str(page_size)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


class Event:
    """May know a tree."""

    core: TreeCore


def a_policy_that_knows_it(core: TreeCore) -> object:
    policy = Keeper()
    policy.core = make_core("cpp", policy=policy)
    return policy


def an_event_that_knows_it(core: TreeCore) -> object:
    event = Event()
    event.core = core
    core.insert(RadixKey([1, 2]), np.arange(2), ready=(Ready("stream", event, 1),))
    return event


def a_stream_that_knows_it(core: TreeCore) -> object:
    stream = Event()
    stream.core = core
    core.insert(RadixKey([1, 2]), np.arange(2))
    core.mark_streams(core.match(RadixKey([1, 2]), pin=True).node_id, frozenset({stream}))
    return stream


def a_failure_that_knows_it(core: TreeCore) -> object:
    policy = Meddler()
    policy.core = make_core("cpp", policy=policy)
    policy.core.insert(RadixKey([1, 2]), np.arange(2))
    failure = policy.core.failure
    assert isinstance(failure, RuntimeError)
    failure.core = policy.core  # type: ignore[attr-defined]
    return policy


@pytest.mark.parametrize(
    "knows", [a_policy_that_knows_it, an_event_that_knows_it, a_stream_that_knows_it, a_failure_that_knows_it]
)
def test_a_tree_that_is_part_of_a_cycle_is_collected(knows: Callable[[TreeCore], object]) -> None:
    known = weakref.ref(knows(made()))
    gc.collect()
    assert known() is None


def test_what_a_node_referred_to_is_let_go_with_it() -> None:
    core = made()
    event, stream, namespace = Event(), Event(), Namespace(salt="x")
    held = (event, stream, namespace)
    before = [sys.getrefcount(one) for one in held]
    key = RadixKey(range(64), namespace)
    core.insert(key, np.arange(64), ready=(Ready(stream, event, 1),))
    for size in (16, 32, 48):
        pinned = core.match(key, limit=size, pin=True).node_id
        core.mark_streams(pinned, frozenset({stream}))
        core.insert(
            RadixKey([*range(size), 99], namespace), np.arange(100, 101 + size), ready=(Ready(stream, event, 2),)
        )
        core.unpin(pinned)
    assert sys.getrefcount(event) > before[0]
    core.evict(1000)
    assert core.num_namespaces == 0
    del key
    assert [sys.getrefcount(one) for one in held] == before


def lying_key(**parts: Any) -> Any:
    key = RadixKey(range(4))
    return SimpleNamespace(
        **{name: getattr(key, name) for name in ("data", "start", "stop", "item_bytes", "namespace")} | parts
    )


@pytest.mark.parametrize(
    "parts",
    [
        {"stop": 20},
        {"start": -4},
        {"start": 12, "stop": 4},
        {"item_bytes": 0},
        {"item_bytes": 1},
        {"data": [1, 2, 3, 4]},
    ],
    ids=str,
)
def test_a_key_that_reaches_beyond_its_bytes_is_refused(parts: dict[str, Any]) -> None:
    core = made()
    with pytest.raises((ValueError, TypeError)):
        core.insert(lying_key(**parts), np.arange(64))
    with pytest.raises((ValueError, TypeError)):
        core.match(lying_key(**parts), pin=True)
    assert (core.num_nodes, core.num_namespaces) == (0, 0)


@pytest.mark.parametrize("slots", [np.arange(3), np.zeros((4, 4), np.int64), "slots", np.array(["x"] * 4)], ids=repr)
def test_slots_that_are_not_one_for_each_token_are_refused(slots: Any) -> None:
    core = made()
    with pytest.raises((ValueError, TypeError)):
        core.insert(RadixKey(range(4)), slots)
    core.insert(RadixKey(range(2)), np.arange(2))
    pinned = core.match(RadixKey(range(2)), pin=True).node_id
    with pytest.raises((ValueError, TypeError)):
        core.extend(pinned, RadixKey(range(6)), slots)
    assert audit_tree(core, {pinned: 1}).problems == []
    assert core.num_nodes == 1


@pytest.mark.parametrize("ready", [[], (1,), ((1, 2),), None])
def test_marks_that_are_none_are_refused(ready: Any) -> None:
    core = made()
    with pytest.raises(TypeError):
        core.insert(RadixKey(range(4)), np.arange(4), ready=ready)
    assert core.num_nodes == 0


@pytest.mark.parametrize("ref", [NodeRef(1, 4), NodeRef(2, 5), NodeRef(2, -1), NodeRef(10**15, 4)])
def test_a_place_that_is_nowhere_is_a_key_error(ref: NodeRef) -> None:
    core = made()
    core.insert(RadixKey(range(4)), np.arange(4))
    for call in (core.pin, core.slots_of):
        with pytest.raises(KeyError):
            call(ref)


def test_numbers_beyond_64_bits_count_as_the_nearest() -> None:
    core = made(policy="priority")
    core.insert(RadixKey([1]), np.arange(1), priority=2**80)
    core.insert(RadixKey([2]), np.arange(1), priority=-(2**80))
    core.insert(RadixKey([3]), np.arange(1))
    assert [view.priority for view in core.walk()][1:] == [2**63 - 1, -(2**63), 0]
    assert len(core.evict(2**80)) == 3


@pytest.mark.parametrize("slots", [np.arange(8), np.arange(8)[::2], np.arange(8, dtype=np.int32)], ids=str)
def test_slots_may_lie_anyhow_in_memory(slots: Any) -> None:
    core = made()
    core.insert(RadixKey(range(len(slots))), slots)
    assert core.slots_of(core.match(RadixKey(range(8))).last).tolist() == slots.tolist()


def test_what_is_handed_out_is_a_copy() -> None:
    core = made(page_size=4)
    core.insert(RadixKey(range(8)), np.arange(8))
    last = core.match(RadixKey(range(8))).last
    core.slots_of(last)[:] = -1
    assert core.slots_of(last).tolist() == list(range(8))


@pytest.mark.parametrize("size", [4, 36, 52, 56, 60, 64, 88, 128, 256])
def test_hashes_of_pages_of_every_length(size: int) -> None:
    core = made(page_size=size // 4, record_events=True)
    key = RadixKey(np.random.default_rng(size).integers(0, 2**31, 3 * size // 4))
    core.insert(key, np.arange(len(key)))
    (stored,) = core.take_events()
    assert list(stored.block_hashes) == key.hash_chain(size // 4)  # type: ignore[union-attr]


@pytest.mark.parametrize("portably", [True, False])
def test_sha256_is_what_hashlib_says(portably: bool) -> None:
    from aradix._native import sha256

    data = np.random.default_rng(1).bytes(400)
    for size in range(len(data)):
        assert sha256(data[:size], portably=portably) == hashlib.sha256(data[:size]).digest()


@pytest.mark.parametrize("portably", [True, False])
def test_a_chain_of_pages_is_what_hashlib_says(portably: bool) -> None:
    from aradix._native import sha256_chain

    before = np.random.default_rng(1).bytes(32)
    for page_bytes in range(1, 200):
        pages = np.random.default_rng(page_bytes).bytes(3 * page_bytes)
        digests, last = [], before
        for begin in range(0, len(pages), page_bytes):
            last = hashlib.sha256(last + pages[begin : begin + page_bytes]).digest()
            digests.append(last)
        assert sha256_chain(before, pages, page_bytes, portably=portably) == b"".join(digests)
    assert sha256_chain(before, b"", 4, portably=portably) == b""


def test_ints_are_packed_as_msgspec_packs_them() -> None:
    from aradix._native import msgpack_hashes, msgpack_ids

    edges = [0, *(edge + by for edge in (1 << 7, 1 << 8, 1 << 16, 1 << 32, 1 << 63) for by in (-1, 0)), (1 << 64) - 1]
    hashes = np.array(edges, ">u8")
    assert msgpack_hashes(hashes.tobytes()) == msgspec.msgpack.encode(edges)
    ids = [edge for edge in edges if edge < 1 << 31]
    assert msgpack_ids(np.array(ids, np.int32).tobytes()) == msgspec.msgpack.encode(ids)
    for count in (0, 1, 15, 16, (1 << 16) - 1, 1 << 16):
        assert msgpack_ids(bytes(4 * count)) == msgspec.msgpack.encode([0] * count)
    with pytest.raises(ValueError, match="whole numbers"):
        msgpack_hashes(b"1234")
