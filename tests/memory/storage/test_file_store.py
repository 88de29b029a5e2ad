"""Pages in files: bounded, whole after a kill, quiet on a full disk, shared by processes."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest

from aradix.errors import ConfigError
from aradix.keys import Namespace
from aradix.memory.storage.file_store import FileStore, _FileBackend
from tests.memory.storage.processes import (
    FRAME_BYTES,
    PROCESSES,
    SPACE,
    found,
    hash_of,
    put,
    put_and_be_killed,
    put_for_ever,
    put_in,
    put_what_is_too_large,
    use_at_random,
)
from tests.memory.storage.small_disk import CountedDisk, mounted


def run(target: Callable[..., None], *arguments: object, code: int = 0) -> None:
    """Runs a function in another process."""
    process = PROCESSES.Process(target=target, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == code


def named(folder: Path, i: int) -> Path:
    """The file of a page."""
    (path,) = (path for path in folder.rglob("*") if path.name == hash_of(i).hex())
    return path


def fill(path: Path) -> None:
    """Fills the disk with one file."""
    with pytest.raises(OSError, match="No space left"), open(path, "wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "usage")


def counted(folder: Path) -> int:
    return int.from_bytes((folder / "usage").read_bytes(), "little")


def test_a_new_process_finds_what_an_old_one_stored(tmp_path: Path) -> None:
    run(put_in, tmp_path, 1, 2, 3)
    assert anyio.run(found, FileStore(tmp_path), 1, 2, 3, 4) == [1, 2, 3]


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["deleted", "cleared", "evicted"])
async def test_a_folder_goes_with_its_last_page(tmp_path: Path, way: str) -> None:
    spaces = [SPACE._replace(namespace=Namespace(salt=str(number))) for number in range(20)]
    store = FileStore(tmp_path, max_bytes=20 * FRAME_BYTES)
    for space in spaces:
        assert await put(store, 1, space=space) == [True]
    if way == "deleted":
        for space in spaces[1:]:
            await store.delete(space, [hash_of(1)])
    elif way == "cleared":
        for space in spaces[1:]:
            await store.clear(space)
    else:
        for number in range(2, 42):
            assert await put(store, number, space=spaces[0]) == [True]
    assert await found(store, 41 if way == "evicted" else 1, space=spaces[0])
    assert len(list((tmp_path / "pages").glob("*/*"))) == 1
    folders = [path for path in (tmp_path / "pages").rglob("*") if path.is_dir()]
    assert all(any(path.is_file() for path in folder.rglob("*")) for folder in folders)
    assert await put(store, 7, space=spaces[9]) == [True]
    assert await found(store, 7, space=spaces[9]) == [7]
    assert counted(tmp_path) == bytes_below(tmp_path)


@pytest.mark.anyio
async def test_the_files_never_take_more_than_they_may(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_bytes=10 * FRAME_BYTES)
    for i in range(0, 60, 3):
        assert await put(store, i, i + 1, i + 2) == [True] * 3
        assert bytes_below(tmp_path) <= 10 * FRAME_BYTES
        assert counted(tmp_path) == bytes_below(tmp_path)
        assert await found(store, i, i + 1, i + 2) == [i, i + 1, i + 2]
    assert len(await found(store, *range(60))) >= 8


class Interrupted(_FileBackend):
    """Something happens between a page's making of room and its writing."""

    then: Callable[[], object] | None = None

    def _reserve(self, file: int, num_bytes: int) -> bool:
        done = super()._reserve(file, num_bytes)
        then, self.then = self.then, None
        if then is not None:
            then()
        return done


def test_what_others_are_writing_counts_with_all_its_length(tmp_path: Path) -> None:
    slow, other = Interrupted(tmp_path, 4 * FRAME_BYTES), _FileBackend(tmp_path, 4 * FRAME_BYTES)
    frame = bytes(FRAME_BYTES)
    names = [f"00/11/{i}" for i in range(9)]
    slow.then = lambda: other.put(names[1:], [frame] * 8)
    assert slow.put(names[:1], [frame]) == [True]
    assert bytes_below(tmp_path) <= 4 * FRAME_BYTES
    assert counted(tmp_path) == bytes_below(tmp_path)


def test_the_count_belongs_to_one_at_a_time(tmp_path: Path) -> None:
    backend = _FileBackend(tmp_path, None)
    with open(tmp_path / "usage", "rb") as other:
        with backend._usage(), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.anyio
async def test_what_was_read_last_stays_and_of_one_batch_its_beginning(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_bytes=10 * FRAME_BYTES)
    await put(store, *range(5))
    await put(store, *range(5, 10))
    await found(store, *range(5))  # read again: from now on the younger ones
    await put(store, 10)
    left = await found(store, *range(11))
    assert left[-1] == 10
    assert set(range(5)) < set(left)
    assert 9 not in left
    beyond = [i for i in left if 5 <= i < 10]
    assert beyond == list(range(5, 5 + len(beyond)))


@pytest.mark.anyio
async def test_a_page_larger_than_the_store_is_refused_and_evicts_nobody(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_bytes=2 * FRAME_BYTES)
    await put(store, 1)
    assert await store.put(SPACE, [hash_of(2)], [bytes(3 * FRAME_BYTES)]) == [False]
    assert store.stats().refused == 1
    assert store.stats().is_reachable
    assert await found(store, 1, 2) == [1]
    assert counted(tmp_path) == FRAME_BYTES


@pytest.mark.anyio
async def test_deleting_and_clearing_give_the_room_back(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_bytes=20 * FRAME_BYTES)
    other = SPACE._replace(namespace=Namespace(lora="x"))
    await put(store, 1, 2, 3)
    await put(store, 1, 2, space=other)
    assert await store.delete(SPACE, [hash_of(1), hash_of(9)]) == [True, True]
    assert counted(tmp_path) == bytes_below(tmp_path) == 4 * FRAME_BYTES
    assert await store.clear(SPACE)
    assert counted(tmp_path) == bytes_below(tmp_path) == 2 * FRAME_BYTES
    assert await found(store, 1, 2, space=other) == [1, 2]


@pytest.mark.anyio
async def test_files_that_are_none_of_ours_are_left_alone_and_never_served(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    await put(store, 1, 2)
    path_1, path_2 = named(tmp_path, 1), named(tmp_path, 2)
    path_2.write_bytes(path_1.read_bytes())
    (tmp_path / "pages" / "notes.txt").write_text("mine")
    path_1.unlink()
    path_1.mkdir()
    assert await found(store, 1, 2) == []
    assert [fault.operation for fault in store.take_faults()].count("get") >= 1
    assert (tmp_path / "pages" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_a_process_killed_in_the_middle_of_a_put_leaves_only_whole_pages(tmp_path: Path, steps: int) -> None:
    """A page takes two looks at the count: before it is written, and when it is moved into place."""

    async def before() -> None:
        await put(FileStore(tmp_path), *range(5))

    async def after() -> None:
        store = FileStore(tmp_path, max_bytes=20 * FRAME_BYTES)
        assert list((tmp_path / "new").iterdir()) == []
        assert await found(store, *range(10)) == [*range(5), *range(5, 5 + steps // 2)]
        assert counted(tmp_path) == bytes_below(tmp_path)
        assert await put(store, *range(5, 10)) == [True] * 5
        assert await found(store, *range(10)) == list(range(10))

    anyio.run(before)
    run(put_and_be_killed, tmp_path, steps, *range(5, 10), code=-signal.SIGKILL)
    assert len(list((tmp_path / "new").iterdir())) == 1
    anyio.run(after)


def test_processes_killed_at_any_moment_leave_a_store_that_works(tmp_path: Path) -> None:
    for round_ in range(5):
        told, tell = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=put_for_ever, args=(tmp_path, round_ * 1000, tell))
        process.start()
        for _ in range(3 + 5 * round_):
            told.recv()
        process.kill()
        process.join()
        store = FileStore(tmp_path, max_bytes=40 * FRAME_BYTES)
        assert anyio.run(found, store, *range(5000))
        assert counted(tmp_path) == bytes_below(tmp_path) <= 40 * FRAME_BYTES
        assert store.stats().corrupt == 0


def test_two_processes_share_a_store(tmp_path: Path) -> None:
    FileStore(tmp_path)
    processes = [PROCESSES.Process(target=use_at_random, args=(tmp_path, seed)) for seed in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert bytes_below(tmp_path) <= counted(tmp_path) <= 20 * FRAME_BYTES
    FileStore(tmp_path)
    assert counted(tmp_path) == bytes_below(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder) as is_real:
        if not is_real:
            disk = CountedDisk(folder)
            monkeypatch.setattr("aradix.memory.storage.file_store.open", disk.open, raising=False)
            monkeypatch.setattr(sys.modules[__name__], "open", disk.open, raising=False)
        yield folder


@pytest.mark.anyio
async def test_on_a_full_disk_the_oldest_make_room(small_disk: Path) -> None:
    store = FileStore(small_disk)
    for i in range(40):
        assert await put(store, i) == [True]
        assert await found(store, i) == [i]
    assert store.stats().is_reachable
    assert list((small_disk / "new").iterdir()) == []


@pytest.mark.anyio
async def test_on_a_disk_that_others_filled_pages_are_refused_and_reading_goes_on(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(small_disk)
    await put(store, 1)
    hog = small_disk / "hog"
    fill(hog)
    os.link(named(small_disk, 1), small_disk / "kept")  # so that evicting it frees nothing
    for _ in range(5):
        assert await store.put(SPACE, [hash_of(2)], [bytes(9000)]) == [False]
    stats = store.stats()
    assert stats.refused == 5
    assert stats.is_reachable
    assert caplog.text.count("no room") == 1
    assert counted(small_disk) == bytes_below(small_disk / "pages")
    assert list((small_disk / "new").iterdir()) == []
    hog.unlink()
    assert await put(store, 2) == [True]
    assert await found(store, 2) == [2]


def test_a_page_that_may_not_be_so_large_is_refused(tmp_path: Path) -> None:
    run(put_what_is_too_large, tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize("in_its_place", ["a file", "an empty folder", "nothing"])
async def test_a_folder_that_went_away_is_a_store_that_does_not_answer(tmp_path: Path, in_its_place: str) -> None:
    store = FileStore(tmp_path / "store")
    await put(store, 1)
    (tmp_path / "store").rename(tmp_path / "gone")
    if in_its_place == "a file":
        (tmp_path / "store").write_text("a file in its place")
    elif in_its_place == "an empty folder":  # as where a disk was
        (tmp_path / "store").mkdir()
    # Whatever is asked: that nothing is found there is no answer.
    assert await store.exists(SPACE, [hash_of(1)]) == [False]
    assert await found(store, 1) == []
    for _ in range(2):
        assert await put(store, 2) == [False]
    stats = store.stats()
    assert (stats.is_reachable, stats.failed_calls, stats.skipped_calls) == (False, 3, 1)


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, True])
def test_a_size_that_cannot_be_is_refused(tmp_path: Path, max_bytes: int) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        FileStore(tmp_path, max_bytes=max_bytes)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no store in"):
        FileStore(tmp_path / "file" / "store")
