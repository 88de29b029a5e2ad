"""`aradix replay`: what it does with its arguments."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from aradix.replay.arguments import add_arguments
from aradix.replay.driver import Observed, ReplayResult
from aradix.replay.plan import Plan
from aradix.replay.plot import save_plot
from aradix.replay.progress import progress_bar
from aradix.replay.report import as_json, print_table
from aradix.replay.report_page import save_report
from aradix.replay.reuse import ReuseDistances
from aradix.replay.runs import Outcome, ReplayJob, run_jobs

__all__ = ["add_arguments", "run"]


def run(options: argparse.Namespace, observed: Observed | None = None) -> int:
    """Replay as the options say, and print what came of it; gives the exit status. Blocks until it is done.

    Args:
        options: as parsed.
        observed: opened around a run, with its cache; runs that are observed stay in this process.

    Raises:
        ReplayError: bad input.
        ConfigError: a value that the cache refuses.
        InvariantError: the cache was not whole after a run.
    """
    plan = Plan(options)
    jobs = list(plan.jobs())
    num_processes = plan.num_processes(len(jobs))
    if observed is not None:
        num_processes = 1
        jobs = [replace(job, observed=observed) if isinstance(job, ReplayJob) else job for job in jobs]
    results: list[tuple[str, ReplayResult]] = []
    distances: ReuseDistances | None = None
    early: dict[int, Outcome] = {}
    next_number = 0
    lines: list[str] = []
    title = jobs[0].name if len(jobs) == 1 else f"{len(jobs)} runs"
    with progress_bar(title, sum(job.num_steps for job in jobs), sys.stderr) as on_progress:
        for number, outcome in run_jobs(jobs, num_processes=num_processes, on_progress=on_progress):
            early[number] = outcome
            # Shown in the order of the plan, whoever is done first.
            while next_number in early:
                done = early.pop(next_number)
                next_number += 1
                results += done.results
                distances = done.distances or distances
                if options.json:
                    for capacity, result in done.results:
                        lines.append(as_json(result, trace=plan.trace.name, capacity=capacity, worth=plan.worth))
            # A program wants each line at once; on a terminal it would land in the middle of the bar.
            if not sys.stdout.isatty():
                _print(lines)
    _print(lines)
    if not options.json:
        details = f"pages of {plan.page_size}, {options.concurrency} in flight" + (", joined" if options.join else "")
        print_table(results, title=f"{plan.title}, {details}", file=sys.stdout, worth=plan.worth)
    if options.plot is not None:
        save_plot(options.plot, [result for _, result in results], title=plan.title)
    if options.report is not None:
        save_report(options.report, results, trace=plan.trace.name, worth=plan.worth, distances=distances)
    return 0


def _print(lines: list[str]) -> None:
    for line in lines:
        print(line, flush=True)
    lines.clear()
