"""MooncakeStore: pages in a Mooncake Store, the memory of many machines behind one master."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aradix.errors import ConfigError, TierError
from aradix.memory.storage.store import BackedStore

__all__ = ["MooncakeStore"]

# Answers of the client, as its headers number them.
_NO_ROOM = {-10, -200, -600}  # in the buffer, in all segments, for so large an object
_NOT_FOUND = -704
_LEASED = -706


class MooncakeStore(BackedStore):
    """A `PageStore` in a Mooncake Store.

    This process joins at the first call and lends `segment_bytes` of its memory: pages live in the memory of those who
    joined, and leave with it. Joining and leaving hold Python up for a moment, since the client keeps the GIL there.
    An object that was just read is leased to its reader, so that `delete` is refused (False) while the lease runs;
    `clear` and corrupt pages do not wait for it. Needs the extra `mooncake`.

    Args:
        master: `host:port` of the `mooncake_master`.
        local_hostname: under which the others reach this process.
        segment_bytes: of memory lent; 0 to use only that of others.
        buffer_bytes: of memory through which pages pass; a page that does not fit is not stored.
        metadata_server: as Mooncake's own setting; peers find each other without one.
        protocol: `"tcp"` or `"rdma"`, for that with the `devices`.

    Raises:
        ConfigError: the client is not installed, or the master's address has no port.
    """

    def __init__(
        self,
        master: str = "127.0.0.1:50051",
        *,
        local_hostname: str = "127.0.0.1",
        segment_bytes: int = 1 << 30,
        buffer_bytes: int = 128 << 20,
        metadata_server: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        timeout_s: float = 2.0,
        num_threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        setup = (local_hostname, metadata_server, segment_bytes, buffer_bytes, protocol, devices, master)
        backend = _MooncakeBackend(setup, master, timeout_s)
        super().__init__(f"mooncake at {master}", backend, timeout_s=timeout_s, num_threads=num_threads, clock=clock)


class _MooncakeBackend:
    def __init__(self, setup: tuple[Any, ...], master: str, timeout_s: float) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"MooncakeStore needs its client: {error} (hint: pip install 'aradix[mooncake]', and libibverbs1)"
            ) from error
        host, _, port = master.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"master must be 'host:port', got {master!r}")
        self._make = MooncakeDistributedStore
        self._setup = setup
        self._master = (host.strip("[]"), int(port))
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._joined: Any = None
        self._num_users = 0
        self._closed = False

    def exists(self, names: Sequence[str]) -> list[bool]:
        with self._client() as client:
            return [self._known(code, "exists") == 1 for code in client.batch_is_exist(list(names))]

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        # What cannot be read comes as no bytes, from a master that is gone as well: ask about that first.
        present = self.exists(names)
        with self._client() as client:
            frames = [client.get(name) if there else b"" for name, there in zip(names, present, strict=True)]
        return [frame or None for frame in frames]

    def put(self, names: Sequence[str], frames: Sequence[bytes]) -> list[bool]:
        with self._client() as client:
            return [self._stored(client.put(name, frame)) for name, frame in zip(names, frames, strict=True)]

    def delete(self, names: Sequence[str], *, force: bool = False) -> list[bool]:
        with self._client() as client:
            codes = client.batch_remove(list(names), force)
        return [self._known(code, "delete", _NOT_FOUND, _LEASED) != _LEASED for code in codes]

    def clear(self, prefix: str) -> None:
        with self._client() as client:
            self._known(client.remove_by_regex(f"^{prefix}.*", force=True), "clear", _NOT_FOUND)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._num_users)
            client, self._joined = self._joined, None
        if client is None:
            return
        if self._reachable():
            client.close()
        else:
            # Leaving a master that is gone holds all of Python up for seconds, and so does dropping the client. It is
            # kept instead, a few threads and the memory lent, until the process ends (which then takes its time).
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))

    @contextmanager
    def _client(self) -> Iterator[Any]:
        """The client, which joins for the first of them; nobody closes it meanwhile."""
        with self._changed:
            if self._closed:
                raise TierError("this Mooncake store is closed")
            if self._joined is None:
                if not self._reachable():
                    raise TierError(f"no mooncake_master answers at {self._master[0]}:{self._master[1]}")
                client = self._make()
                self._known(client.setup(*self._setup), "setup")
                self._joined = client
            client = self._joined
            self._num_users += 1
        try:
            yield client
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    def _reachable(self) -> bool:
        try:
            socket.create_connection(self._master, self._timeout_s).close()
        except OSError:
            return False
        return True

    def _stored(self, code: int) -> bool:
        return code not in _NO_ROOM and self._known(code, "put") == 0

    def _known(self, code: int, operation: str, *expected: int) -> int:
        if code < 0 and code not in expected:
            raise TierError(f"mooncake answered {operation} with code {code}")
        return code
