"""`python -m stress`: run seeds, replay a failure, survey the planted faults, draw the figures."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from stress.bench import BENCHMARKS
from stress.harness.campaign import Campaign, Found, run_campaign
from stress.harness.outcome import Outcome
from stress.harness.play import play
from stress.harness.reduce import reduce_failure
from stress.harness.script import FailureScript
from stress.harness.seeds import world_of
from stress.planted.survey import CLEAN, Tally, survey
from stress.schedules import Backend, Scripted

__all__ = ["main"]

_SHOWN_OPERATIONS = 25
_LEAST_SHARE = 0.7


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


class _Status:
    """A line that is written over, where there is a terminal to do so."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self._shows:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        self.show("")


def _at_least(least: float, convert: type[Any]) -> Any:
    def parse(text: str) -> Any:
        value = convert(text)
        if not value >= least or value == float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    parse.__name__ = convert.__name__
    return parse


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m stress", description="Find out what goes wrong in a prefix cache, and show how.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    run = commands.add_parser("run", help="run seeds until one fails")
    run.add_argument(
        "--seconds", type=_at_least(0, float), help="real time to take (default 10, if no --seeds is given)"
    )
    run.add_argument("--seed", type=_at_least(0, int), help="the first one (default: drawn)")
    run.add_argument("--seeds", type=_at_least(1, int), help="how many")
    run.add_argument("--jobs", type=_at_least(1, int), default=1, help="processes")
    run.add_argument("--backend", choices=("asyncio", "trio"), help="instead of each world's own")
    run.add_argument("--keep", type=Path, metavar="FILE", help="where to write a failure (default: stress-SEED.json)")
    run.add_argument("--json", action="store_true", help="one object at the end")
    replay = commands.add_parser("replay", help="take the way of a failure again")
    replay.add_argument("file", type=Path)
    replay.add_argument("--json", action="store_true")
    planted = commands.add_parser("planted", help="in how many seeds is each planted fault found?")
    planted.add_argument("--seeds", type=_at_least(1, int), default=100)
    planted.add_argument(
        "--jobs", type=_at_least(1, int), default=min(8, os.cpu_count() or 1), help="processes (default: one a core)"
    )
    planted.add_argument("--json", action="store_true", help="nothing but the last line")
    bench = commands.add_parser("bench", help="measure, each figure against its rivals in the same run")
    bench.add_argument("name", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)} (default: all)")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw the one figure named, as .svg or .png")
    bench.add_argument("--long", action="store_true", help="all sizes and counts, where that takes minutes")
    bench.add_argument("--profile", action="store_true", help="instead, where the time of ours goes (turns)")
    bench.add_argument("--json", action="store_true", help="an object a line")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; gives the exit status: 0 where all is well, 1 where not, 2 for bad input, 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    if args.command == "run":
        return _run(args)
    if args.command == "replay":
        return _replay(args)
    if args.command == "bench":
        return _bench(args)
    return _planted(args)


# ---- run


def _run(args: argparse.Namespace) -> int:
    seed: int = secrets.randbelow(2**31) if args.seed is None else args.seed
    seconds = 10.0 if args.seconds is None and args.seeds is None else args.seconds
    backend: Backend | None = args.backend
    if not args.json:
        print(f"seed {seed}", flush=True)
    status = _Status()

    def on_progress(campaign: Campaign) -> None:
        status.show(f"{campaign.num_seeds} seeds, {campaign.ms_per_seed:.1f} ms each, {len(campaign.found)} failed")

    done = run_campaign(seed, args.seeds, seconds, num_jobs=args.jobs, backend=backend, on_progress=on_progress)
    status.clear()
    report: dict[str, Any] = {
        "seed": seed,
        "seeds": done.num_seeds,
        "seconds": round(done.seconds, 3),
        "ms_per_seed": round(done.ms_per_seed, 3),
        "acts": done.num_acts,
        "steps": done.num_steps,
        "failed": len(done.found),
        "interrupted": done.interrupted,
        "failures": [],
    }
    if not args.json:
        print(
            f"{done.num_seeds} seeds from {seed} on, {done.num_acts} acts, {done.seconds:.1f} s "
            f"({done.ms_per_seed:.1f} ms a seed): {len(done.found)} failed{', interrupted' * done.interrupted}"
        )
    for found in done.found[:1]:
        status.show(f"seed {found.seed} failed ({found.failure.oracle}); making it smaller")
        script = reduce_failure(world_of(found.seed, backend), found.failure)
        status.clear()
        path: Path = args.keep or Path(f"stress-{found.seed}.json")
        path.write_text(script.to_json())
        report["failures"].append(_describe(found, script, path, args))
    if args.json:
        print(json.dumps(report))
    if done.found:
        return 1
    return 130 if done.interrupted else 0  # what a shell says of a command that Ctrl-C ended


def _describe(found: Found, script: FailureScript, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    backend = f" --backend {args.backend}" if args.backend else ""
    again = f"python -m stress run --seed {found.seed} --seeds 1{backend}"
    small = play(script.world, chooser=Scripted(script.choices))
    if not args.json:
        print(f"\nseed {found.seed}: {found.failure.oracle}: {found.failure.message}")
        print(
            f"smaller: {len(script.world.tasks)} tasks, {script.world.num_acts} acts, "
            f"schedule {list(script.choices)}: {script.about}"
        )
        print("\n".join(small.history[-_SHOWN_OPERATIONS:]))
        print(f"\nagain:   {again}\nsmaller: python -m stress replay {path}")
    return {
        "seed": found.seed,
        "oracle": found.failure.oracle,
        "message": found.failure.message,
        "again": again,
        "script": str(path),
        "choices": list(script.choices),
        "tasks": len(script.world.tasks),
        "acts": script.world.num_acts,
    }


# ---- replay


def _replay(args: argparse.Namespace) -> int:
    try:
        script = FailureScript.from_json(args.file.read_text())
    except (OSError, ValueError) as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 2
    done: Outcome = play(script.world, chooser=Scripted(script.choices))
    if args.json:
        failure = None if done.failure is None else {"oracle": done.failure.oracle, "message": done.failure.message}
        print(json.dumps({"file": str(args.file), "failure": failure, "history": list(done.history)}))
    else:
        print("\n".join(done.history))
        print("nothing is wrong" if done.failure is None else f"{done.failure.oracle}: {done.failure.message}")
    return 0 if done.failure is None else 1


# ---- planted


def _planted(args: argparse.Namespace) -> int:
    status = _Status()
    tallies = survey(
        args.seeds, num_jobs=args.jobs, on_progress=lambda done, total: status.show(f"{done} of {total} runs")
    )
    status.clear()
    if not args.json:
        width = max(map(len, tallies))
        print(f"{'':{width}}  found / seeds   seeds   acts  by")
        for name, tally in tallies.items():
            print(_row(name, tally, width))
        print("seeds: tried, by the median, until one finds it; acts: begun in that seed by then")
    counts = {name: {"found": len(tally.found), "seeds": tally.seeds} for name, tally in tallies.items()}
    clean = counts.pop(CLEAN)
    print(json.dumps({"bugs": counts, "clean": clean}))
    missed = [name for name, count in counts.items() if count["found"] < _LEAST_SHARE * count["seeds"]]
    return 1 if missed or clean["found"] else 0


# ---- bench


def _bench(args: argparse.Namespace) -> int:
    names: list[str] = args.name or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    plot: Path | None = args.plot
    if unknown or (plot is not None and (len(names) != 1 or plot.suffix not in (".svg", ".png"))):
        wrong = f"no figure {unknown[0]!r}" if unknown else f"--plot {plot} takes one figure, and a .svg or .png"
        print(f"python -m stress bench: {wrong}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    if args.profile:
        return _profile(names)
    for name in names:
        benchmark = BENCHMARKS[name]
        found = ((args.long and benchmark.measure_long) or benchmark.measure)()
        print(json.dumps(found) if args.json else f"{name}: {benchmark.about}\n{benchmark.table(found)}\n", flush=True)
        if plot is not None:
            benchmark.draw(found, plot)
    return 0


def _profile(names: list[str]) -> int:
    for name in names:
        profile = BENCHMARKS[name].profile
        if profile is None:
            print(f"python -m stress bench: {name} has no --profile; turns has one", file=sys.stderr)
            return 2
        print(profile(), flush=True)
    return 0


def _row(name: str, tally: Tally, width: int) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:g}"

    oracles = ", ".join(f"{oracle} {count}" for oracle, count in tally.oracles.most_common())
    return (
        f"{name:{width}}  {len(tally.found):5d} / {tally.seeds:<5d} {number(tally.median_seeds):>7} "
        f"{number(tally.median_acts):>6}  {oracles}"
    )
