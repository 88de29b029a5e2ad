"""ValkeyStore: pages in a Valkey or Redis server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aradix.errors import ConfigError, TierError
from aradix.memory.storage.store import BackedStore

__all__ = ["ValkeyStore"]

_BATCH = 64
_SCAN = 1000


class ValkeyStore(BackedStore):
    """A `PageStore` in a Valkey or Redis server, shared by whoever uses the same server and model.

    Nothing is asked of the server before the first call. How much it keeps, and what it evicts, is the server's own
    setting (`maxmemory`, `maxmemory-policy`). Needs the extra `valkey`.

    Args:
        url: as `valkey://host:port/db`; `redis://`, `rediss://` and `unix://` as well.
        prefix: of the keys.
        timeout_s: of a call, and of connecting.

    Raises:
        ConfigError: the client is not installed, or cannot read the url.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "aradix:",
        timeout_s: float = 2.0,
        num_threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        backend = _ValkeyBackend(url, prefix, timeout_s)
        super().__init__(backend.name, backend, timeout_s=timeout_s, num_threads=num_threads, clock=clock)


class _ValkeyBackend:
    def __init__(self, url: str, prefix: str, timeout_s: float) -> None:
        try:
            import valkey
        except ImportError as error:
            raise ConfigError("ValkeyStore needs the client (hint: pip install 'aradix[valkey]')") from error
        try:
            self._client: Any = valkey.Valkey.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, health_check_interval=0
            )
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"no Valkey at {url!r}: {error}") from error
        self._error: type[Exception] = valkey.ValkeyError
        self._refusal: type[Exception] = valkey.ResponseError
        where = self._client.connection_pool.connection_kwargs
        # Never the url itself, which may hold a password.
        self.name = f"valkey at {where.get('path') or '{}:{}'.format(where.get('host'), where.get('port'))}"
        self._prefix = prefix

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [bool(count) for count in self._each("exists", [(name,) for name in names])]

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        frames: list[bytes | None] = []
        with self._translated():
            for begin in range(0, len(names), _BATCH):
                frames += self._client.mget([self._prefix + name for name in names[begin : begin + _BATCH]])
        return frames

    def put(self, names: Sequence[str], frames: Sequence[bytes]) -> list[bool]:
        return [reply is True for reply in self._each("set", list(zip(names, frames, strict=True)))]

    def delete(self, names: Sequence[str], *, force: bool = False) -> list[bool]:
        return [isinstance(reply, int) for reply in self._each("unlink", [(name,) for name in names])]

    def clear(self, prefix: str) -> None:
        with self._translated():
            found: list[Any] = []
            for key in self._client.scan_iter(match=f"{_escaped(self._prefix)}{prefix}*", count=_SCAN):
                found.append(key)
                if len(found) == _SCAN:
                    self._client.unlink(*found)
                    found = []
            if found:
                self._client.unlink(*found)

    def close(self) -> None:
        with self._translated():
            self._client.close()

    def _each(self, command: str, calls: list[tuple[Any, ...]]) -> list[Any]:
        """One command for each call, sent together; a reply that refuses it (out of memory, say) is None."""
        replies: list[Any] = []
        with self._translated():
            for begin in range(0, len(calls), _BATCH):
                pipeline = self._client.pipeline(transaction=False)
                for name, *values in calls[begin : begin + _BATCH]:
                    getattr(pipeline, command)(self._prefix + name, *values)
                replies += pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, self._refusal):
                raise TierError(f"{self.name}: {reply}") from reply
        return [None if isinstance(reply, Exception) else reply for reply in replies]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (self._error, OSError) as error:
            raise TierError(f"{self.name}: {error}") from error


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in "*?[]^\\" else char for char in text)
