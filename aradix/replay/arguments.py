"""The arguments of `aradix replay`, and what their text stands for."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from aradix.arguments import above_zero, at_least
from aradix.policies import POLICIES
from aradix.replay.models import MODELS, VALUE_BYTES
from aradix.replay.optimal import OPTIMAL

__all__ = ["BUILT_IN_REQUESTS", "add_arguments"]

BUILT_IN_REQUESTS = 4000
"""Requests of the built-in workload, which has no end."""

_Capacity = tuple[str, float]


def _capacities(text: str) -> list[_Capacity]:
    capacities: dict[float, str] = {}
    for part in text.split(","):
        try:
            tokens = float(part)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is not a number of tokens, such as 65536, 1e6 or inf") from None
        if math.isnan(tokens) or tokens <= 0:
            raise argparse.ArgumentTypeError(f"a capacity is above 0, got {part!r}")
        # By its value: 1e6 and 1000000 are one run, and 1e400 and infinity are both inf.
        capacities.setdefault(tokens, part.strip().lower() if math.isfinite(tokens) else "inf")
    return [(name, tokens) for tokens, name in capacities.items()]


def _policies(text: str) -> list[str]:
    policies = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for policy in policies:
        if policy not in POLICIES and policy != OPTIMAL:
            raise argparse.ArgumentTypeError(f"{policy!r} is none of {', '.join(POLICIES)}, {OPTIMAL}")
    return policies


def _watermarks(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected LOW:HIGH, such as 0.05:0.1, got {text!r}") from None
    if not 0 <= low <= high < 1:
        raise argparse.ArgumentTypeError(f"0 <= LOW <= HIGH < 1 must hold, got {text!r}")
    return low, high


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `aradix replay`."""
    parser.add_argument(
        "trace",
        nargs="?",
        type=Path,
        metavar="TRACE",
        help="a trace file, plain or gzipped, its format told by content; without one, a built-in seeded workload",
    )
    parser.add_argument(
        "--capacity",
        type=_capacities,
        default="1e6",
        metavar="N[,N...]",
        help="slots of the pool in tokens, such as 65536, 1e6 or inf; rounded down to pages (default: 1e6)",
    )
    parser.add_argument(
        "--page-size",
        type=at_least(1, "a page"),
        metavar="P",
        help="tokens a page (default: the trace's own block, or 16 where ids are tokens)",
    )
    parser.add_argument(
        "--policy",
        type=_policies,
        metavar="NAME[,NAME...]",
        help=f"eviction policies, of {', '.join(POLICIES)}, or {OPTIMAL}: what one finds that knows the future, and so "
        "the most that any can (default: lru and tenure, to compare; lru alone with --json or --inspect)",
    )
    parser.add_argument(
        "--concurrency",
        type=at_least(1, "the concurrency"),
        default=8,
        metavar="N",
        help="requests in flight (default: 8)",
    )
    parser.add_argument(
        "--join",
        action="store_true",
        help="requests wait for what another one in flight computes, instead of computing the same",
    )
    parser.add_argument(
        "--watermarks",
        type=_watermarks,
        default="0.05:0.1",
        metavar="LOW:HIGH",
        help="fractions of the pool that the background evictor keeps free; 0:0 switches it off (default: 0.05:0.1)",
    )
    parser.add_argument(
        "--core", choices=("auto", "python", "cpp"), default="auto", help="the tree's implementation (default: auto)"
    )
    parser.add_argument(
        "--host-capacity",
        type=_capacities,
        metavar="N",
        help="tokens of a host tier behind the pool, which only keeps books; inf for as many as the trace has",
    )
    parser.add_argument(
        "--write-policy",
        choices=("write_through", "write_through_selective", "write_back"),
        help="when tokens are copied to the host (default: write_through_selective)",
    )
    parser.add_argument(
        "--storage", type=Path, metavar="DIR", help="a folder behind the host, which a later replay finds again"
    )
    parser.add_argument(
        "--limit",
        type=at_least(1, "the limit"),
        metavar="N",
        help=f"the first N requests only (default: all; {BUILT_IN_REQUESTS} of the built-in workload)",
    )
    parser.add_argument(
        "--seed",
        type=at_least(0, "the seed"),
        default=0,
        metavar="N",
        help="of the built-in workload, and of when sessions begin that do not say it (default: 0)",
    )
    parser.add_argument(
        "--outputs",
        action=argparse.BooleanOptionalAction,
        help="insert the outputs too (default: of the built-in workload, but not of a trace)",
    )
    parser.add_argument(
        "--arrivals",
        type=Path,
        metavar="FILE",
        help="arrivals and lengths for the built-in workload (TIMESTAMP,ContextTokens,GeneratedTokens)",
    )
    parser.add_argument(
        "--pace",
        type=above_zero("a pace"),
        metavar="N",
        help="requests begun a second at most (default: as many as there can be; 100 with --inspect)",
    )
    parser.add_argument(
        "--jobs",
        type=at_least(1, "the number of jobs"),
        metavar="N",
        help="runs side by side, each in a process of its own (default: as there are cores, or 1 if runs are short)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json, for a trace of texts (needs aradix[tokenizers])",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each policy and capacity")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save hit ratio over capacity, as .svg or .png")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help=f"save a page of all this, with {OPTIMAL}, tenants and reuse distances, as .html that loads nothing",
    )
    worth = parser.add_argument_group("what hits are worth")
    shape = worth.add_mutually_exclusive_group()
    shape.add_argument(
        "--model", metavar="NAME", help=f"show capacities in bytes of this model's KV, of {', '.join(MODELS)}"
    )
    shape.add_argument(
        "--kv-bytes-per-token",
        type=above_zero("KV bytes per token"),
        metavar="N",
        help="show capacities in bytes, of a model whose KV takes N a token",
    )
    worth.add_argument(
        "--kv-dtype", choices=tuple(VALUE_BYTES), help="type of the values of a --model's KV (default: bf16)"
    )
    worth.add_argument(
        "--prefill-tokens-per-s",
        type=above_zero("a rate of prefill"),
        metavar="N",
        help="show the seconds of prefill that hits spare an engine that computes N tokens a second",
    )
