"""Servers of the stores under test, on loopback, started once a session."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

import pytest

__all__ = ["free_port", "mooncake_master", "needs_mooncake", "needs_mooncake_master", "needs_valkey", "valkey_server"]


def _has_mooncake() -> bool:
    try:
        import_module("mooncake.store")
    except ImportError:  # not installed, or a library that it loads is not there
        return False
    return True


_VALKEY = shutil.which("valkey-server") or shutil.which("redis-server")
_MASTER = shutil.which("mooncake_master", path=sysconfig.get_path("scripts"))
needs_valkey = pytest.mark.skipif(_VALKEY is None, reason="needs redis-server")
needs_mooncake = pytest.mark.skipif(not _has_mooncake(), reason="needs the extra mooncake and libibverbs1")
needs_mooncake_master = pytest.mark.skipif(
    _MASTER is None or not _has_mooncake(), reason="needs the extra mooncake, with its master, and libibverbs1"
)


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def valkey_server(folder: Path, *options: str, port: int | None = None) -> Iterator[str]:
    """A server that keeps nothing on disk; its url."""
    assert _VALKEY is not None
    port = free_port() if port is None else port
    command = [_VALKEY, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    with _running(command, "Ready to accept connections"):
        yield f"valkey://127.0.0.1:{port}/0"


@contextmanager
def mooncake_master(*options: str, port: int | None = None) -> Iterator[str]:
    """A master; its address."""
    assert _MASTER is not None
    port = free_port() if port is None else port
    command = [
        _MASTER,
        f"--rpc_port={port}",
        f"--metrics_port={free_port()}",
        "--rpc_address=127.0.0.1",
        "--metrics_host=127.0.0.1",
        "--enable_metric_reporting=false",
        "--logtostderr=true",
        *options,
    ]
    with _running(command, "Master admin server started"):
        # It says so a moment before it listens.
        while True:
            with suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            os.sched_yield()
        yield f"127.0.0.1:{port}"


@contextmanager
def _running(command: list[str], ready: str) -> Iterator[None]:
    """A process from the line on which it says that it is ready."""
    said: list[str] = []
    environment = {**os.environ, "GLOG_minloglevel": "0"}  # or a master would not say so
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if ready in line:
                    break
            else:
                pytest.fail(f"{command[0]} ended at once:\n{''.join(said)}")
            yield
        finally:
            process.kill()
