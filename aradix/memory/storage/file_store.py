"""FileStore: pages as files, for one machine or a shared file system."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from aradix.errors import ConfigError, TierError
from aradix.memory.storage.store import BackedStore

__all__ = ["FileStore"]

_T = TypeVar("_T")

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SLACK = 0.1
"""The share of its size that an eviction frees beyond what is needed, since it has to look at every file."""


class FileStore(BackedStore):
    """A `PageStore` in a folder, which several processes may use at a time.

    A page is a file, which appears under its name whole or not at all. Nothing is flushed to the disk: what a power
    cut leaves half written is found by its checksum. The least recently read pages go when there is no room; of pages
    read in one batch the last, so that what stays is a prefix. A folder goes with its last page. To make room all files
    are looked at, for a tenth of the size at a time: with 200,000 of them that takes some two seconds, and a page that
    would be late for it is not stored.

    Args:
        path: of the folder; made if it is not there.
        max_bytes: of all files together; None for as many as the disk takes.

    Raises:
        ConfigError: the folder cannot be made or written, or the size is not above 0.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        timeout_s: float = 2.0,
        num_threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1):
            raise ConfigError(f"max_bytes must be an int of at least 1 or None, got {max_bytes!r}")
        folder = Path(path)
        try:
            backend = _FileBackend(folder, max_bytes)
        except OSError as error:
            raise ConfigError(f"no store in {str(folder)!r}: {error}") from error
        super().__init__(f"files in {folder}", backend, timeout_s=timeout_s, num_threads=num_threads, clock=clock)


class _FileBackend:
    """`pages/` holds the pages under their names, `new/` those being written, `old/` what is being deleted.

    `usage` is locked while room is made or counted, and holds the bytes that are taken. It may say too much after a
    process was killed, never too little; each eviction recounts it.
    """

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._pages, self._new, self._old = (folder / name for name in ("pages", "new", "old"))
        for part in (self._pages, self._new, self._old):
            part.mkdir(parents=True, exist_ok=True)
        self._usage_path = folder / "usage"
        self._lock = threading.Lock()
        self._number = 0
        with self._usage() as usage:
            self._sweep()
            usage.bytes = self._count()

    # ---- what the shell calls

    def exists(self, names: Sequence[str]) -> list[bool]:
        with _translated(self._pages):
            return self._if_there([_size(self._pages / name) is not None for name in names])

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        frames: list[bytes | None] = []
        now = time.time_ns()
        with _translated(self._pages):
            for i, name in enumerate(names):
                path = self._pages / name
                try:
                    frames.append(path.read_bytes())
                    # The order of eviction. A full or read-only disk may refuse it, and nothing is lost.
                    with suppress(OSError):
                        os.utime(path, ns=(now - i, now - i))
                except FileNotFoundError:
                    frames.append(None)
            return self._if_there(frames)

    def _if_there(self, found: list[_T]) -> list[_T]:
        """What was found, if that is anything or the folder is there: one that went away is no answer."""
        if not any(found):
            os.stat(self._pages)
        return found

    def put(self, names: Sequence[str], frames: Sequence[bytes]) -> list[bool]:
        now = time.time_ns()
        with _translated(self._pages):
            return [self._put(name, frame, now - i) for i, (name, frame) in enumerate(zip(names, frames, strict=True))]

    def delete(self, names: Sequence[str], *, force: bool = False) -> list[bool]:
        with _translated(self._pages), self._usage() as usage:
            paths = [self._pages / name for name in names]
            usage.bytes -= sum(map(_unlink, paths))
            self._remove_empty({path.parent for path in paths})
        return [True] * len(names)

    def clear(self, prefix: str) -> None:
        with _translated(self._pages):
            with self._usage(), suppress(FileNotFoundError):
                # One rename, so that nothing is found from then on, however long the deleting takes.
                os.rename(self._pages / prefix, self._old / self._unique())
                self._remove_empty({(self._pages / prefix).parent})
            self._sweep()
            with self._usage() as usage:
                usage.bytes = self._count()

    def close(self) -> None:
        """Nothing is held."""

    # ---- writing

    def _put(self, name: str, frame: bytes, when_ns: int) -> bool:
        path = self._pages / name
        if _size(path) == len(frame):
            with suppress(FileNotFoundError):  # another process took it away just now
                os.utime(path, ns=(when_ns, when_ns))
                return True
        for last in (False, True):
            try:
                return self._write(path, frame, when_ns)
            except FileNotFoundError:
                if last:  # once it is another process that swept before the lock was there
                    raise
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                if last or error.errno == errno.EFBIG or not self._evict(len(frame)):
                    return False
        return False

    def _write(self, path: Path, frame: bytes, when_ns: int) -> bool:
        """Writes a frame beside and moves it into place; False where there is no room for it."""
        new = self._new / self._unique()
        with open(new, "xb", buffering=0) as file:
            # As long as this holds, nobody takes the file for one that a killed process left.
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                if not self._reserve(file.fileno(), len(frame)):
                    new.unlink()
                    return False
                view = memoryview(frame)
                while view:
                    view = view[file.write(view) :]
                os.utime(file.fileno(), ns=(when_ns, when_ns))
                with self._usage() as usage:
                    path.parent.mkdir(parents=True, exist_ok=True)  # under the lock, or it may go away again
                    usage.bytes -= _size(path) or 0
                    os.replace(new, path)
                return True
            except BaseException:
                with suppress(OSError), self._usage() as usage:
                    usage.bytes -= _unlink(new)
                raise

    def _unique(self) -> str:
        with self._lock:
            self._number += 1
            return f"{os.getpid()}-{self._number}-{os.urandom(4).hex()}"

    # ---- room

    def _reserve(self, file: int, num_bytes: int) -> bool:
        """Gives a file that is about to be written its length, so that whoever counts counts it; evicts for it."""
        with self._usage() as usage:
            if self._max_bytes is not None and usage.bytes + num_bytes > self._max_bytes:
                if num_bytes > self._max_bytes:
                    return False
                usage.bytes = self._evict_to(self._max_bytes - num_bytes)
                if usage.bytes + num_bytes > self._max_bytes:
                    return False  # others are writing all of it right now
            os.truncate(file, num_bytes)
            usage.bytes += num_bytes
            return True

    def _evict(self, num_bytes: int) -> bool:
        """Makes room for so many bytes on a full disk; False where nothing could go."""
        with self._usage() as usage:
            before = self._count()
            usage.bytes = self._evict_to(max(0, before - num_bytes))
            return usage.bytes < before

    def _evict_to(self, most_bytes: int) -> int:
        """Deletes until at most so many bytes are left, and some more; what is left, files being written included."""
        self._sweep()
        files = sorted(_files(self._pages))
        left = sum(size for _, _, size in _files(self._new)) + sum(size for _, _, size in files)
        if left > most_bytes:
            goal = most_bytes - int(most_bytes * _SLACK)
            folders = set()
            for _, name, _ in files:
                if left <= goal:
                    break
                path = Path(name)
                left -= _unlink(path)
                folders.add(path.parent)
            self._remove_empty(folders)
        return left

    def _remove_empty(self, folders: set[Path]) -> None:
        """Removes those folders of pages that are empty, and what they leave empty.

        With the count locked, since whoever stores a page makes its folder under that lock too.
        """
        for folder in folders:
            with suppress(OSError):  # it is not empty, or gone
                while folder != self._pages:
                    folder.rmdir()
                    folder = folder.parent

    def _count(self) -> int:
        return sum(size for part in (self._pages, self._new) for _, _, size in _files(part))

    def _sweep(self) -> None:
        """Deletes what killed processes left half written or half deleted."""
        for entry in os.scandir(self._new):
            with suppress(OSError), open(entry.path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
        for entry in os.scandir(self._old):
            shutil.rmtree(entry.path, ignore_errors=True)

    @contextmanager
    def _usage(self) -> Iterator[_Usage]:
        """The count of bytes, alone among threads and processes."""
        descriptor = os.open(self._usage_path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            text = os.pread(descriptor, 8, 0)
            usage = _Usage(int.from_bytes(text, "little") if len(text) == 8 else self._count())
            try:
                yield usage
            finally:
                with suppress(OSError):  # no room even for this: the next eviction counts again
                    os.pwrite(descriptor, max(0, usage.bytes).to_bytes(8, "little"), 0)
        finally:
            os.close(descriptor)


class _Usage:
    """Bytes of all files, while the count is locked."""

    __slots__ = ("bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.bytes = num_bytes


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierError(f"{folder}: {error}") from error


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def _unlink(path: Path) -> int:
    """Deletes a file; its bytes, 0 where there was none."""
    size = _size(path)
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    return size or 0


def _files(folder: Path) -> Iterator[tuple[int, str, int]]:
    """(time of last use in ns, path, bytes) of all files below a folder; those that vanish meanwhile left out."""
    folders = [str(folder)]
    while folders:
        with suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        stat = entry.stat(follow_symlinks=False)
                        yield stat.st_mtime_ns, entry.path, stat.st_size
