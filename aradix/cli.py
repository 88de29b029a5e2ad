"""The `aradix` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from aradix.errors import ConfigError, InvariantError
from aradix.observe import command as inspect_command
from aradix.replay import command as replay_command
from aradix.replay.request import ReplayError
from aradix.serve import command as serve_command

__all__ = ["main"]

_OK = 0
_BROKEN_INVARIANT = 1
_BAD_INPUT = 2
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_INPUT, f"{self.prog}: {message}\n")


def _version() -> str:
    try:
        return version("aradix")
    except PackageNotFoundError:
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="aradix", description="An async-safe radix prefix cache: command line tools.")
    parser.add_argument("--version", action="version", version=f"aradix {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    replay = commands.add_parser(
        "replay",
        help="drive the cache over a request trace",
        description="Drive the real cache over a request trace, and report how much of it was found in the cache.",
    )
    replay_command.add_arguments(replay)
    inspect_command.add_replay_arguments(replay)
    replay.set_defaults(run=lambda options: replay_command.run(options, inspect_command.shown(options)))
    inspect = commands.add_parser(
        "inspect",
        help="show a live cache on a page",
        description="Show the live cache of an engine that has mounted an inspector, on a page of this machine.",
    )
    inspect_command.add_arguments(inspect)
    inspect.set_defaults(run=inspect_command.run)
    serve = commands.add_parser(
        "serve",
        help="serve a model, with the cache, to OpenAI's clients",
        description="Serve a model over HTTP as OpenAI's clients expect it: completions, chats, streams of both.",
    )
    serve_command.add_arguments(serve)
    serve.set_defaults(run=serve_command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit status: 0, 1 for a fault of ours, 2 for bad input, 130 if interrupted.

    Bad arguments exit at once, as argparse does.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except (ReplayError, ConfigError) as error:
        return _say(error, _BAD_INPUT)
    except InvariantError as error:
        return _say(error, _BROKEN_INVARIANT)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has had enough; the interpreter's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _OK


def _say(error: Exception, status: int) -> int:
    print(f"aradix: {' '.join(str(error).split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
