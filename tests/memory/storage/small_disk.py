"""A file system that is soon full: a real one where it may be mounted, else one whose writes count."""

from __future__ import annotations

import builtins
import errno
import io
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["CountedDisk", "mounted"]

SIZE = 64 << 10
_BLOCK = 4096


@contextmanager
def mounted(folder: Path) -> Iterator[bool]:
    """A file system of `SIZE` bytes on a folder, if this process has the right to; whether it had."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:  # there is no such program
        done = False
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", str(folder)], check=True)


class CountedDisk:
    """Files below a folder that get `SIZE` bytes together, in whole blocks. Its `open` stands in for Python's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.written: dict[int, int] = {}

    def open(self, file: Any, mode: str = "r", buffering: int = -1) -> Any:
        """As Python's, but that what writes bytes is not buffered and may find the disk full."""
        if mode in ("xb", "wb"):
            return _Writer(self, file, mode)
        return builtins.open(file, mode, buffering)

    def take(self, inode: int, num_bytes: int) -> None:
        """Give a file so many more bytes. OSError where they are not there."""
        there = {path.stat().st_ino for path in self._folder.rglob("*") if path.is_file()}
        self.written = {each: size for each, size in self.written.items() if each in there}
        wanted = {**self.written, inode: self.written.get(inode, 0) + num_bytes}
        if sum(-(-size // _BLOCK) * _BLOCK for size in wanted.values()) > SIZE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.written = wanted


class _Writer(io.FileIO):
    def __init__(self, disk: CountedDisk, file: Any, mode: str) -> None:
        super().__init__(file, mode)
        self._disk = disk
        self._inode = os.fstat(self.fileno()).st_ino
        disk.written[self._inode] = 0  # whoever had this number before is gone

    def write(self, data: Any) -> int:
        self._disk.take(self._inode, len(data))
        return super().write(data)
