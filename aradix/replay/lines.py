"""A trace file line by line, plain or gzipped; that, too, is told by content."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import msgspec

from aradix.replay.request import ReplayError

__all__ = ["TraceFile"]

_GZIP_MAGIC = b"\x1f\x8b"
_Record = TypeVar("_Record")


class TraceFile:
    """A file of numbered lines. Opening is left to `lines()`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def error(self, number: int, problem: object) -> ReplayError:
        """What is wrong with a line (counted from 1), as an exception to raise."""
        return ReplayError(f"{self.path}:{number}: {problem}")

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Each line that is not blank, with its number from 1.

        Raises:
            ReplayError: no such file, a pipe, or a file that breaks off.
        """
        number = 0
        try:
            with open(self.path, "rb") as raw:
                if not raw.seekable():
                    raise ReplayError(f"{self.path}: a pipe, but a trace is read more than once; give a regular file")
                zipped = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
                raw.seek(0)
                with gzip.GzipFile(fileobj=raw) if zipped else nullcontext(raw) as text:
                    for number, line in enumerate(text, 1):
                        if stripped := line.strip():
                            yield number, stripped
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self.error(number + 1, f"the gzip data is broken: {error}") from error
        except OSError as error:
            raise ReplayError(f"{self.path}: {error.strerror or error}") from error

    def first_line(self) -> tuple[int, bytes]:
        """The first line that is not blank, and its number.

        Raises:
            ReplayError: there is none, or the file cannot be read.
        """
        for number, line in self.lines():
            return number, line
        raise ReplayError(f"{self.path}: holds no lines")

    def decode(self, number: int, line: bytes, decoder: msgspec.json.Decoder[_Record]) -> _Record:
        """The JSON record of a line.

        Raises:
            ReplayError: not JSON, or not such a record.
        """
        try:
            return decoder.decode(line)
        except msgspec.ValidationError as error:
            raise self.error(number, f"JSON, but not of this format: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.error(number, f"not JSON, which each line of a trace is: {error}") from error
