"""`aradix inspect` and `aradix replay --inspect`: addresses, errors in one line, and a replay that is seen live."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aradix.cli import main
from aradix.observe import serve


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect"], "--attach"),
        (["inspect", "--attach", "http://x/", "--bind", "nowhere"], "expected PORT or HOST:PORT"),
        (["inspect", "--attach", "http://x/", "--bind", "70000"], "expected PORT or HOST:PORT"),
        (["replay", "--pace", "0"], "a pace is a number above 0"),
        (["replay", "--pace", "inf"], "a pace is a number above 0"),
    ],
)
def test_bad_arguments_are_said_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "--attach", "nowhere"], "is no http URL"),
        (["replay", "--inspect", "0", "--capacity", "1e4,2e4"], "give one policy and one capacity"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_port_that_is_taken_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["replay", "--inspect", str(port), "--limit", "3", "--no-stay"]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_a_replay_is_seen_live(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    serving = serve.serving

    @asynccontextmanager
    async def watched(app: Any, host: str, port: int) -> AsyncIterator[str]:
        async with serving(app, host, port) as url, anyio.create_task_group() as tasks:

            def look() -> None:
                with urllib.request.urlopen(f"{url}api/state") as answer:
                    seen.append(json.load(answer))

            tasks.start_soon(anyio.to_thread.run_sync, look)
            yield url

    monkeypatch.setattr(serve, "serving", watched)
    arguments = ["replay", "--inspect", "0", "--limit", "200", "--pace", "400", "--capacity", "20000", "--no-stay"]
    assert main([*arguments, "--json"]) == 0
    shown = capsys.readouterr()
    assert "the replay is shown at http://127.0.0.1:" in shown.err
    assert json.loads(shown.out)["requests"] == 200
    assert seen[0]["stats"]["num_slots"] == 20_000
    assert not seen[0]["closed"]
