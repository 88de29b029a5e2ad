"""`GGUFFile`: what a GGUF file says of itself, parsed once for all who read from it. Needs the extra `engine`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from aradix.errors import ConfigError

__all__ = ["GGUFFile"]


class GGUFFile:
    """A GGUF file: its fields and its tensors, which stay on the disk until somebody reads them.

    Opening blocks: the words of a vocabulary are parsed one by one, in Python, which takes seconds.

    Args:
        path: of the file.

    Raises:
        ConfigError: no such file, or not GGUF; the package `gguf` is missing.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            gguf = importlib.import_module("gguf")
        except ImportError as error:
            raise ConfigError("reading a GGUF file needs gguf: pip install 'aradix[engine]'") from error
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f"no such file: {path}")
        try:
            self._reader = gguf.GGUFReader(self.path)
        except (ValueError, IndexError, KeyError) as error:  # of another kind, or cut short
            raise ConfigError(f"{path} is no GGUF file, or cut short: {error}") from error
        self.tensors: list[Any] = self._reader.tensors
        self._dequantize = gguf.dequantize

    def field(self, name: str, otherwise: Any = None) -> Any:
        """What a field says, or `otherwise` where there is none. Does not wait, and may take its time."""
        found = self._reader.fields.get(name)
        return otherwise if found is None else found.contents()

    def count(self, name: str) -> int | None:
        """The length of a field that is a list, or `None` where there is none. Does not wait."""
        found = self._reader.fields.get(name)
        return None if found is None else len(found.data)

    def values(self, tensor: Any) -> Any:
        """One of `tensors` as a numpy array of floats; perhaps a view of the file, which must not be written to."""
        return self._dequantize(tensor.data, tensor.tensor_type)
