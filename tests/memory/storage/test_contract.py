"""What every store must do, whatever stands behind it."""

from __future__ import annotations

import random
from collections.abc import Callable

import anyio
import pytest

from aradix.errors import StorageCorruptError, UsageError
from aradix.keys import Namespace, RadixKey
from aradix.memory.storage.frame import HEADER_BYTES, pack
from aradix.memory.storage.protocol import PageSpace, PageStore
from aradix.memory.storage.store import BackedStore

pytestmark = pytest.mark.anyio

PAGE = 4


def hashes_of(num_pages: int, first: int = 0, namespace: Namespace | None = None) -> list[bytes]:
    return RadixKey(range(first, first + num_pages * PAGE), namespace).hash_chain(PAGE)


def pages_of(num_pages: int, seed: int = 0, size: int = 300) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(size) for _ in range(num_pages)]


async def test_pages_come_back_as_they_were_put(store: BackedStore, space: PageSpace) -> None:
    assert isinstance(store, PageStore)
    hashes, pages = hashes_of(5), pages_of(5)
    before = store.stats()
    assert await store.exists(space, hashes) == [False] * 5
    assert await store.get(space, hashes) == [None] * 5
    assert await store.put(space, hashes[:3], pages[:3]) == [True] * 3
    assert await store.exists(space, hashes) == [True] * 3 + [False] * 2
    assert await store.get(space, [*reversed(hashes)]) == [None, None, *reversed(pages[:3])]
    after = store.stats()
    assert after.hits - before.hits == 3
    assert after.misses - before.misses == 7
    assert after.stored - before.stored == 3
    assert after.bytes_read - before.bytes_read == after.bytes_written - before.bytes_written == 900
    assert after.is_reachable
    assert store.take_faults() == []


async def test_a_batch_of_nothing_is_nothing(store: BackedStore, space: PageSpace) -> None:
    assert await store.exists(space, []) == []
    assert await store.get(space, []) == []
    assert await store.put(space, [], []) == []
    assert await store.delete(space, []) == []


async def test_empty_and_large_pages_and_many_of_them(store: BackedStore, space: PageSpace) -> None:
    hashes = hashes_of(203)
    pages = [b"", *pages_of(2, size=3 << 20), *pages_of(200, seed=1)]
    assert await store.put(space, hashes, pages) == [True] * 203
    assert await store.get(space, hashes) == pages


async def test_a_page_put_again_is_there_once_more(store: BackedStore, space: PageSpace) -> None:
    hashes, pages = hashes_of(1), pages_of(1)
    for _ in range(3):
        assert await store.put(space, hashes, pages) == [True]
        assert await store.get(space, hashes) == pages


async def test_models_formats_and_namespaces_never_meet(store: BackedStore, space: PageSpace) -> None:
    hash_, page = hashes_of(1), pages_of(1)
    spaces = [
        space,
        space._replace(model_id=space.model_id + "-2"),
        space._replace(format_id="format-2"),
        # The two texts must not run into each other.
        PageSpace(space.model_id + "format", "-1"),
        space._replace(namespace=Namespace(lora="x")),
        space._replace(namespace=Namespace(salt="x")),
        space._replace(namespace=Namespace(version=1)),
        space._replace(namespace=Namespace(version="1")),
    ]
    assert len({each.prefix() for each in spaces}) == len(spaces)
    for i, each in enumerate(spaces):
        assert await store.get(each, hash_) == [None]
        assert await store.put(each, hash_, pages_of(1, seed=i)) == [True]
    for i, each in enumerate(spaces):
        assert await store.get(each, hash_) == pages_of(1, seed=i)
    assert page == pages_of(1, seed=0)


async def test_clearing_a_namespace_leaves_the_others(store: BackedStore, space: PageSpace) -> None:
    hashes = hashes_of(3)
    spaces = [space._replace(namespace=Namespace(lora=lora)) for lora in ("a", "b")]
    for each in spaces:
        await store.put(each, hashes, pages_of(3))
        await store.get(each, hashes)  # whoever reads, a clear does not wait for it
    assert await store.clear(spaces[0])
    assert await store.exists(spaces[0], hashes) == [False] * 3
    assert await store.get(spaces[0], hashes) == [None] * 3
    assert await store.get(spaces[1], hashes) == pages_of(3)
    assert await store.put(spaces[0], hashes, pages_of(3, seed=1)) == [True] * 3
    assert await store.get(spaces[0], hashes) == pages_of(3, seed=1)


async def test_clearing_all_namespaces_leaves_other_models(store: BackedStore, space: PageSpace) -> None:
    hashes = hashes_of(2)
    other = space._replace(model_id=space.model_id + "-other")
    mine = [space, space._replace(namespace=Namespace(lora="a"))]
    for each in (*mine, other):
        await store.put(each, hashes, pages_of(2))
    assert await store.clear(space._replace(namespace=None))
    for each in mine:
        assert await store.get(each, hashes) == [None] * 2
    assert await store.get(other, hashes) == pages_of(2)
    assert await store.clear(space._replace(namespace=None))


async def test_deleted_pages_are_gone_and_the_others_are_not(store: BackedStore, space: PageSpace) -> None:
    hashes = hashes_of(4)
    await store.put(space, hashes[:3], pages_of(3))
    # Nobody read them: no store has a reason to refuse.
    assert await store.delete(space, [hashes[0], hashes[3], hashes[2]]) == [True] * 3
    assert await store.get(space, hashes) == [None, pages_of(3)[1], None, None]


CORRUPTIONS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda frame: b"",
    "cut in the header": lambda frame: frame[: HEADER_BYTES - 1],
    "cut in the page": lambda frame: frame[:-1],
    "longer": lambda frame: frame + b"x",
    "a bit of the page": lambda frame: frame[:-20] + bytes([frame[-20] ^ 4]) + frame[-19:],
    "a bit of the name": lambda frame: frame[:10] + bytes([frame[10] ^ 1]) + frame[11:],
    "a bit of the length": lambda frame: frame[:40] + bytes([frame[40] ^ 1]) + frame[41:],
    "a bit of the digest": lambda frame: frame[:50] + bytes([frame[50] ^ 128]) + frame[51:],
    "another format": lambda frame: b"PK\x03\x04" + frame[4:],
    "another page": lambda frame: pack("00/11/22", frame[HEADER_BYTES:]),
    "zeros": lambda frame: bytes(len(frame)),
}


@pytest.mark.parametrize("how", CORRUPTIONS)
async def test_what_is_not_the_page_is_a_miss_and_a_fault_never_wrong_kv(
    store: BackedStore, space: PageSpace, how: str
) -> None:
    hashes, pages = hashes_of(3), pages_of(3)
    name = space.prefix() + hashes[1].hex()
    corrupt = CORRUPTIONS[how](pack(name, pages[1]))
    await store.put(space, [hashes[0], hashes[2]], [pages[0], pages[2]])
    await anyio.to_thread.run_sync(store._backend.put, [name], [corrupt])
    before = store.stats()
    assert await store.get(space, hashes) == [pages[0], None, pages[2]]
    # To some stores an empty value is none at all: then it was a plain miss.
    if how != "empty" or store.stats().corrupt != before.corrupt:
        assert store.stats().corrupt == before.corrupt + 1
        (fault,) = store.take_faults()
        assert fault.operation == "get"
        assert isinstance(fault.error, StorageCorruptError)
        assert fault.hashes == (hashes[1],)
    assert store.stats().is_reachable
    # It does not stand in the way of the right one.
    assert await store.put(space, [hashes[1]], [pages[1]]) == [True]
    assert await store.get(space, hashes) == pages


async def test_a_call_that_is_cancelled_leaves_pages_whole_or_absent(store: BackedStore, space: PageSpace) -> None:
    hashes, pages = hashes_of(20), pages_of(20)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await store.put(space, hashes, pages)
    assert scope.cancelled_caught
    for found, page in zip(await store.get(space, hashes), pages, strict=True):
        assert found in (None, page)
    assert await store.put(space, hashes, pages) == [True] * 20
    with anyio.CancelScope() as scope:
        scope.cancel()
        await store.get(space, hashes)
    assert await store.get(space, hashes) == pages
    assert store.stats().is_reachable


async def test_many_tasks_at_once(store: BackedStore, space: PageSpace) -> None:
    async def one(i: int) -> None:
        each = space._replace(namespace=Namespace(lora=i % 3))
        hashes, pages = hashes_of(4, first=i), pages_of(4, seed=i)
        assert await store.put(each, hashes, pages) == [True] * 4
        assert await store.get(each, hashes) == pages

    async with anyio.create_task_group() as tasks:
        for i in range(30):
            tasks.start_soon(one, i)


async def test_misuse_is_refused(store: BackedStore, space: PageSpace) -> None:
    hashes = hashes_of(2)
    with pytest.raises(UsageError, match="1 pages for 2 hashes"):
        await store.put(space, hashes, pages_of(1))
    with pytest.raises(UsageError, match="bytes"):
        await store.put(space, hashes[:1], [bytearray(b"x")])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="one namespace"):
        await store.get(space._replace(namespace=None), hashes)
