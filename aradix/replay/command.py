"""`aradix replay`: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import anyio

from aradix.errors import ConfigError
from aradix.policies import POLICIES
from aradix.replay.detect import open_trace
from aradix.replay.driver import Observed, ReplayResult, ReplaySetup, replay
from aradix.replay.lines import TraceFile
from aradix.replay.optimal import OPTIMAL, PagedTrace
from aradix.replay.plot import check_plot, save_plot
from aradix.replay.progress import progress_bar
from aradix.replay.report import as_json, print_table
from aradix.replay.request import ReplayError, Request, Trace
from aradix.replay.survey import check_pool, endless_pages, survey
from aradix.replay.workload import BuiltInWorkload
from aradix.tree import make_core, make_tiered_core

__all__ = ["add_arguments", "run"]

_TOKEN_PAGE_SIZE = 16
_BUILT_IN_REQUESTS = 4000

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


def _at_least(least: int, what: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{what} is a whole number of at least {least}, got {text!r}")
        return number

    return parse


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"a pace is a number above 0, got {text!r}")
    return number


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
        type=_at_least(1, "a page"),
        metavar="P",
        help="tokens a page (default: the trace's own block, or 16 where ids are tokens)",
    )
    parser.add_argument(
        "--policy",
        type=_policies,
        default="lru",
        metavar="NAME[,NAME...]",
        help=f"eviction policies, of {', '.join(POLICIES)}, or {OPTIMAL}, a clairvoyant's bound (default: lru)",
    )
    parser.add_argument(
        "--concurrency",
        type=_at_least(1, "the concurrency"),
        default=8,
        metavar="N",
        help="requests in flight (default: 8)",
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
        type=_at_least(1, "the limit"),
        metavar="N",
        help=f"the first N requests only (default: all; {_BUILT_IN_REQUESTS} of the built-in workload)",
    )
    parser.add_argument(
        "--seed",
        type=_at_least(0, "the seed"),
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
        type=_above_zero,
        metavar="N",
        help="requests begun a second at most (default: as many as there can be; 100 with --inspect)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each policy and capacity")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save hit ratio over capacity, as .svg or .png")


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace is None:
        arrivals = None if options.arrivals is None else TraceFile(options.arrivals)
        return BuiltInWorkload(options.seed, arrivals)
    if options.arrivals is not None:
        raise ReplayError(f"--arrivals is for the built-in workload; leave it or {options.trace} out")
    return open_trace(options.trace, seed=options.seed)


def _page_size(trace: Trace, asked: int | None) -> int:
    if asked is None:
        return trace.block_size if trace.block_size > 1 else _TOKEN_PAGE_SIZE
    if trace.block_size > 1 and trace.block_size % asked:
        raise ReplayError(
            f"--page-size {asked}: {trace.name} has blocks of {trace.block_size} tokens, and a block is whole pages"
        )
    return asked


class _Plan:
    """The runs that the options ask for, checked as far as can be before the first one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.trace = _trace(options)
        self.page_size = _page_size(self.trace, options.page_size)
        endless = options.trace is None and options.arrivals is None
        self.limit: int | None = options.limit or (_BUILT_IN_REQUESTS if endless else None)
        self.outputs: bool = options.trace is None if options.outputs is None else options.outputs
        if self.outputs and not self.trace.has_outputs:
            raise ReplayError(f"--outputs: {self.trace.name} does not hold the ids of its outputs")
        if options.plot is not None:
            check_plot(options.plot)
        for capacity, tokens in options.capacity:
            if tokens < self.page_size:
                raise ReplayError(f"--capacity {capacity}: less than one page of {self.page_size} tokens")
        self._check_tiers()
        try:
            make = make_core if options.host_capacity is None else make_tiered_core
            make(options.core, policy="lru", page_size=self.page_size)
        except ConfigError as error:
            raise ReplayError(f"--core {options.core}: {error}") from error
        self._paged: PagedTrace | None = None
        self.found = survey(self.requests(), self.page_size, outputs=self.outputs)
        self._endless_pages = endless_pages(
            self.found,
            self.page_size,
            concurrency=options.concurrency,
            high_watermark=options.watermarks[1],
        )
        for capacity, tokens in options.capacity:
            check_pool(self._num_pages(tokens), self.page_size, capacity=capacity, most_pages=self._endless_pages)
        for capacity, tokens in options.host_capacity or ():
            pages = self._num_pages(tokens)
            check_pool(
                pages, self.page_size, capacity=capacity, most_pages=self._endless_pages, option="--host-capacity"
            )

    def _check_tiers(self) -> None:
        options = self.options
        if options.host_capacity is None:
            for option, value in (("--write-policy", options.write_policy), ("--storage", options.storage)):
                if value is not None:
                    raise ReplayError(f"{option}: there is no host tier; give --host-capacity too")
            return
        if len(options.host_capacity) > 1:
            raise ReplayError("--host-capacity takes one number of tokens")
        capacity, tokens = options.host_capacity[0]
        if tokens < self.page_size:
            raise ReplayError(f"--host-capacity {capacity}: less than one page of {self.page_size} tokens")
        if options.storage is not None:
            try:
                options.storage.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ReplayError(f"--storage {options.storage}: {error.strerror}") from error

    def requests(self) -> Iterator[Request]:
        """The requests, from the first."""
        return islice(self.trace.requests(), self.limit)

    def optimal(self, setup: ReplaySetup, on_progress: Callable[[int], None] | None) -> ReplayResult:
        """The clairvoyant bound in place of a run."""
        if self._paged is None:
            self._paged = PagedTrace(self.requests(), self.page_size, outputs=self.outputs)
        return self._paged.result(setup, on_progress)

    def setups(self) -> Iterator[tuple[str, ReplaySetup]]:
        """Each policy with each capacity, the latter also as it was asked for."""
        for policy in self.options.policy:
            for capacity, tokens in self.options.capacity:
                yield capacity, self._setup(policy, self._num_pages(tokens))

    def _num_pages(self, tokens: float) -> int:
        return int(tokens) // self.page_size if math.isfinite(tokens) else self._endless_pages

    def _setup(self, policy: str, num_pages: int) -> ReplaySetup:
        options = self.options
        low, high = options.watermarks
        return ReplaySetup(
            policy=policy,
            num_pages=num_pages,
            page_size=self.page_size,
            concurrency=options.concurrency,
            low_watermark=low,
            high_watermark=high,
            core=options.core,
            outputs=self.outputs,
            num_host_pages=0 if options.host_capacity is None else self._num_pages(options.host_capacity[0][1]),
            write_policy=options.write_policy or "write_through_selective",
            storage=options.storage,
            pace=self.options.pace,
        )


def run(options: argparse.Namespace, observed: Observed | None = None) -> int:
    """Replay as the options say, and print what came of it; gives the exit status. Blocks until it is done.

    Args:
        options: as parsed.
        observed: opened around each run, with its cache.

    Raises:
        ReplayError: bad input.
        ConfigError: a value that the cache refuses.
        InvariantError: the cache was not whole after a run.
    """
    plan = _Plan(options)
    results: list[tuple[str, ReplayResult]] = []
    for capacity, setup in plan.setups():
        with progress_bar(f"{setup.policy} {capacity}", plan.found.num_requests, sys.stderr) as on_progress:
            try:
                if setup.policy == OPTIMAL:
                    result = plan.optimal(setup, on_progress)
                else:
                    result = anyio.run(replay, plan.requests(), setup, on_progress, observed)
            except MemoryError as error:
                # What a process may take can be less than what the machine has.
                raise ReplayError(f"--capacity {capacity}: out of memory; give fewer tokens, or a --limit") from error
        results.append((capacity, result))
        if options.json:
            print(as_json(result, trace=plan.trace.name, capacity=capacity), flush=True)
    title = f"{plan.trace.name}: {plan.found.num_requests:,} requests, {plan.found.input_tokens:,} input tokens"
    if not options.json:
        details = f"pages of {plan.page_size}, {options.concurrency} in flight"
        print_table(results, title=f"{title}, {details}", file=sys.stdout)
    if options.plot is not None:
        save_plot(options.plot, [result for _, result in results], title=title)
    return 0
