"""What the options of a replay ask for, checked as far as can be before the first run."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence

from aradix.errors import ConfigError
from aradix.replay.arguments import BUILT_IN_REQUESTS
from aradix.replay.detect import open_trace
from aradix.replay.driver import ReplaySetup
from aradix.replay.lines import TraceFile
from aradix.replay.models import Worth, model_named
from aradix.replay.optimal import OPTIMAL
from aradix.replay.plot import check_plot
from aradix.replay.report_page import check_report
from aradix.replay.request import ReplayError, Trace
from aradix.replay.runs import BoundJob, Excerpt, Job, ReplayJob
from aradix.replay.survey import check_pool, endless_pages, pool_bytes, survey
from aradix.replay.workload import BuiltInWorkload
from aradix.tree import make_core, make_tiered_core

__all__ = ["Plan"]

_TOKEN_PAGE_SIZE = 16
_SHORT_REQUESTS = 20_000
_COMPARED = ("lru", "tenure")
_BYTES_PER_LOOKUP, _BYTES_PER_DISTINCT_PAGE = 12, 250


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace is None:
        if options.tokenizer is not None:
            raise ReplayError(f"--tokenizer {options.tokenizer}: for a trace of texts, and there is no trace")
        arrivals = None if options.arrivals is None else TraceFile(options.arrivals)
        return BuiltInWorkload(options.seed, arrivals)
    if options.arrivals is not None:
        raise ReplayError(f"--arrivals is for the built-in workload; leave it or {options.trace} out")
    return open_trace(options.trace, seed=options.seed, tokenizer=options.tokenizer)


def _page_size(trace: Trace, asked: int | None) -> int:
    if asked is None:
        return trace.block_size if trace.block_size > 1 else _TOKEN_PAGE_SIZE
    if trace.block_size > 1 and trace.block_size % asked:
        raise ReplayError(
            f"--page-size {asked}: {trace.name} has blocks of {trace.block_size} tokens, and a block is whole pages"
        )
    return asked


def _worth(options: argparse.Namespace) -> Worth:
    rate = options.prefill_tokens_per_s
    if options.model is None:
        if options.kv_dtype is not None:
            raise ReplayError(f"--kv-dtype {options.kv_dtype}: of a --model's KV, and no model is named")
        return Worth(options.kv_bytes_per_token, None, rate)
    try:
        name, shape = model_named(options.model)
    except ReplayError as error:
        raise ReplayError(f"--model: {error}") from None
    value_type = options.kv_dtype or "bf16"
    return Worth(shape.bytes_per_token(value_type), f"{name}, {value_type}", rate)


def _policies(options: argparse.Namespace) -> list[str]:
    # A program that reads our lines, and a page that shows one run, get what a cache does by itself.
    chosen = options.policy or (_COMPARED[:1] if options.json or options.inspect is not None else _COMPARED)
    if options.host_capacity is not None:
        if OPTIMAL in chosen:
            raise ReplayError(
                f"--policy {OPTIMAL} knows one tier, and not that of --host-capacity; leave one of them out"
            )
        return [*chosen]
    return [*chosen, OPTIMAL] if options.report is not None and OPTIMAL not in chosen else [*chosen]


class Plan:
    """The runs that the options ask for.

    Args:
        options: as parsed.

    Raises:
        ReplayError: they cannot be run, or what they make cannot be saved.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.trace = _trace(options)
        self.page_size = _page_size(self.trace, options.page_size)
        self.worth = _worth(options)
        self.policies = _policies(options)
        endless = options.trace is None and options.arrivals is None
        self.limit: int | None = options.limit or (BUILT_IN_REQUESTS if endless else None)
        self.outputs: bool = options.trace is None if options.outputs is None else options.outputs
        if self.outputs and not self.trace.has_outputs:
            raise ReplayError(f"--outputs: {self.trace.name} does not hold the ids of its outputs")
        if options.plot is not None:
            check_plot(options.plot)
        if options.report is not None:
            check_report(options.report)
        for capacity, tokens in options.capacity:
            if tokens < self.page_size:
                raise ReplayError(f"--capacity {capacity}: less than one page of {self.page_size} tokens")
        self._check_tiers()
        try:
            make = make_core if options.host_capacity is None else make_tiered_core
            make(options.core, policy="lru", page_size=self.page_size)
        except ConfigError as error:
            raise ReplayError(f"--core {options.core}: {error}") from error
        self._excerpt = Excerpt(self.trace, self.limit)
        self.found = survey(self._excerpt.requests(), self.page_size, outputs=self.outputs)
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

    @property
    def title(self) -> str:
        """The trace, and how much of it there is."""
        return f"{self.trace.name}: {self.found.num_requests:,} requests, {self.found.input_tokens:,} input tokens"

    def jobs(self) -> Iterator[Job]:
        """All there is to do, in the order in which it is shown: each policy, with each capacity.

        The bound is one job for all capacities, since it reads the trace but once.
        """
        setups = [(capacity, self._num_pages(tokens)) for capacity, tokens in self.options.capacity]
        if OPTIMAL not in self.policies and self.options.report is not None:
            yield self._bound(setups)
        for policy in self.policies:
            if policy == OPTIMAL:
                yield self._bound(setups)
                continue
            for capacity, num_pages in setups:
                yield ReplayJob(
                    excerpt=self._excerpt,
                    capacity=capacity,
                    setup=self._setup(policy, num_pages),
                    num_steps=self.found.num_requests,
                    num_bytes=sum(
                        pool_bytes(pages, self.page_size, most_pages=self._endless_pages)
                        for pages in (num_pages, self._num_host_pages)
                    ),
                )

    def _bound(self, setups: Sequence[tuple[str, int]]) -> BoundJob:
        lookups = self.found.input_tokens // self.page_size
        return BoundJob(
            excerpt=self._excerpt,
            setups=tuple((capacity, self._setup(OPTIMAL, num_pages)) for capacity, num_pages in setups),
            with_bound=OPTIMAL in self.policies,
            with_distances=self.options.report is not None,
            num_requests=self.found.num_requests,
            num_bytes=lookups * _BYTES_PER_LOOKUP + self.found.distinct_pages * _BYTES_PER_DISTINCT_PAGE,
        )

    def num_processes(self, num_jobs: int) -> int:
        """How many to run side by side; 1 is this process itself.

        A process takes seconds to start, so by default short runs stay here. Runs that share a folder run one after
        another, for each finds what the one before has stored.
        """
        if self.options.storage is not None:
            return 1
        asked: int | None = self.options.jobs
        if asked is None:
            short = num_jobs * self.found.num_requests < _SHORT_REQUESTS
            asked = 1 if short else len(os.sched_getaffinity(0))
        return min(asked, num_jobs)

    @property
    def _num_host_pages(self) -> int:
        return 0 if self.options.host_capacity is None else self._num_pages(self.options.host_capacity[0][1])

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
            num_host_pages=self._num_host_pages,
            write_policy=options.write_policy or "write_through_selective",
            storage=options.storage,
            join=options.join,
            pace=options.pace,
        )
