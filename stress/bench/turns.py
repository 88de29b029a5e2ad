"""Whole turns of chats, with steady eviction: through leases here, through their own calls at the others'.

The load is that of `chats.py`, at page sizes 1 and 16. A turn of ours is `lease`, `allocate`, `commit`, release,
awaited on asyncio; a turn of SGLang's caches is match, lock, evict if short, alloc, insert, free the duplicates,
unlock, called directly. What each side is given:

- the same tokens in the container it likes best, made beforehand: an int32 array here, `array("q")` there;
- keys are made inside the turn on every side, one for the prompt and one for the whole;
- pools of the same size, allocators of their own, and whole leaves as the unit of eviction, so that all of them find
  and evict the same tokens to the last one; `cpp, pages` is our default unit, which evicts no more than is needed;
- nobody asks for the slots of the cached prefix, which is lazy here. In `with slots` everybody does, as engines would.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import anyio

from aradix import CacheInitParams, RadixCache, RadixKey, SlotAllocator
from aradix.tree import core_name
from stress.bench.chats import EVICTED_TOKENS, HIT_TOKENS, NUM_SLOTS, PROMPT_TOKENS, Turn, chat_turns
from stress.bench.pairs import median_ratio, quiet
from stress.bench.peers import PeerMissing
from stress.bench.peers.sglang_release import SGLangCache, load_sglang
from stress.bench.plots import pyplot, save

__all__ = ["ABOUT", "draw", "measure", "profile", "table"]

ABOUT = "whole turns of chats in a pool for half of them"

PAGE_SIZES = (1, 16)
STRETCH = 100
PROMISED = (("aradix cpp", "SGLang rust", 10), ("aradix python", "SGLang python", 1))
PHASES = ("key", "lease", "allocate", "commit", "release")

Core = Literal["python", "cpp"]
Unit = Literal["page", "node"]


def _params(core: Core, unit: Unit, page_size: int) -> CacheInitParams:
    allocator = SlotAllocator(NUM_SLOTS, page_size)
    return CacheInitParams(allocator, page_size, low_watermark=0, high_watermark=0, evict_unit=unit, tree_core=core)


def _check(name: str, hit_tokens: int, evicted_tokens: int) -> None:
    if (hit_tokens, evicted_tokens) != (HIT_TOKENS, EVICTED_TOKENS):
        raise AssertionError(
            f"{name} found {hit_tokens} tokens and evicted {evicted_tokens}; "
            f"LRU over whole leaves finds {HIT_TOKENS} and evicts {EVICTED_TOKENS}"
        )


# ---- the sides


class _Ours:
    """A cache of ours, open on the running loop, and its part of the load."""

    def __init__(self, core: Core, unit: Unit, page_size: int, reads_slots: bool) -> None:
        self._name = f"the {core} core"
        self._exact = unit == "node"
        self._reads_slots = reads_slots
        self._cache = RadixCache(_params(core, unit, page_size))

    async def open(self, turns: list[Turn], exits: AsyncExitStack) -> None:
        self._turns = turns
        await exits.enter_async_context(self._cache)

    async def play(self, begin: int, end: int) -> None:
        cache, reads_slots = self._cache, self._reads_slots
        for turn in self._turns[begin:end]:
            tokens = turn.tokens
            async with cache.lease(RadixKey(tokens[: turn.num_prompt])) as lease:
                await lease.allocate(len(tokens) - lease.num_matched)
                if reads_slots:
                    _ = lease.slots
                lease.commit(RadixKey(tokens))

    def check(self) -> None:
        stats = self._cache.stats()
        if self._exact:
            _check(self._name, stats.hit_tokens, stats.evicted)
        self._cache.check()


class _Theirs:
    """A cache of SGLang's, and its part of the load."""

    def __init__(self, sglang: Any, core: Literal["rust", "python"], page_size: int, reads_slots: bool) -> None:
        self._name = f"SGLang's {core} core"
        self._reads_slots = reads_slots
        self._cache = SGLangCache(sglang, core, page_size, NUM_SLOTS)

    async def open(self, turns: list[Turn], exits: AsyncExitStack) -> None:
        self._given = [(SGLangCache.tokens_of(turn), turn.num_prompt) for turn in turns]

    async def play(self, begin: int, end: int) -> None:
        cache, reads_slots = self._cache, self._reads_slots
        for tokens, num_prompt in self._given[begin:end]:
            cache.turn(tokens, num_prompt, reads_slots)

    def check(self) -> None:
        _check(self._name, self._cache.hit_tokens, self._cache.evicted_tokens)


def _sides(sglang: Any, page_size: int, reads_slots: bool) -> dict[str, _Ours | _Theirs]:
    sides: dict[str, _Ours | _Theirs] = {}
    if core_name() == "cpp":
        sides["aradix cpp"] = _Ours("cpp", "node", page_size, reads_slots)
        sides["aradix cpp, pages"] = _Ours("cpp", "page", page_size, reads_slots)
    sides["aradix python"] = _Ours("python", "node", page_size, reads_slots)
    if sglang is not None:
        sides["SGLang rust"] = _Theirs(sglang, "rust", page_size, reads_slots)
        sides["SGLang python"] = _Theirs(sglang, "python", page_size, reads_slots)
    return sides


# ---- the figure


async def _play(turns: list[Turn], sglang: Any, page_size: int, reads_slots: bool) -> dict[str, list[float]]:
    """The load once on every side, some turns of each side at a time: seconds of each such stretch."""
    sides = _sides(sglang, page_size, reads_slots)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    async with AsyncExitStack() as exits:
        for side in sides.values():
            await side.open(turns, exits)
        for number, begin in enumerate(range(0, len(turns), STRETCH)):
            for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                began = time.process_time()
                await sides[name].play(begin, begin + STRETCH)
                taken[name].append(time.process_time() - began)
        for side in sides.values():
            side.check()
    return taken


def measure() -> dict[str, Any]:
    """Turns per second of processor time, and the two ratios that are promised; takes some ten seconds."""
    skipped = []
    sglang = None
    try:
        sglang = load_sglang()
    except PeerMissing as missing:
        skipped.append(str(missing))
    turns = chat_turns()
    rows, ratios = [], []
    with quiet():
        for page_size in PAGE_SIZES:
            for reads_slots in (False, True):
                case = {"page_size": page_size, "with_slots": reads_slots}
                taken = anyio.run(_play, turns, sglang, page_size, reads_slots)
                for name, stretches in taken.items():
                    seconds = sum(stretches)
                    row = {"turns_per_s": len(turns) / seconds, "turn_us": seconds / len(turns) * 1e6}
                    rows.append({"side": name, **case, **row})
                ratios += [
                    {
                        "ratio": f"{ours} / {theirs}",
                        **case,
                        "value": median_ratio(taken[theirs], taken[ours]),
                        "at_least": least,
                    }
                    for ours, theirs, least in PROMISED
                    if ours in taken and theirs in taken
                ]
    return {
        "bench": "turns",
        "turns": len(turns),
        "stretch": STRETCH,
        "num_slots": NUM_SLOTS,
        "hit_ratio": HIT_TOKENS / PROMPT_TOKENS,
        "evicted_tokens": EVICTED_TOKENS,
        "sglang": None if sglang is None else sglang.version,
        "rows": rows,
        "ratios": ratios,
        "skipped": skipped,
    }


def _case(row: dict[str, Any]) -> str:
    return f"page {row['page_size']}" + (", with slots" if row["with_slots"] else "")


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    cases = list(dict.fromkeys(map(_case, found["rows"])))
    names = list(dict.fromkeys(row["side"] for row in found["rows"]))
    cells = {(row["side"], _case(row)): row for row in found["rows"]}
    lines = [f"{'turns/s, us a turn':<20}" + "".join(f"{case:>22}" for case in cases)]
    for name in names:
        texts = [f"{cells[name, case]['turns_per_s']:,.0f} {cells[name, case]['turn_us']:>7.1f}" for case in cases]
        lines.append(f"{name:<20}" + "".join(f"{text:>22}" for text in texts))
    for ratio in dict.fromkeys(row["ratio"] for row in found["ratios"]):
        mine = [row for row in found["ratios"] if row["ratio"] == ratio]
        texts = [f"{row['value']:.2f}" for row in mine]
        lines.append(f"{ratio}, at least {mine[0]['at_least']}: " + ", ".join(texts))
    lines.append(
        f"each side finds {found['hit_ratio']:.3f} of the prompts and evicts {found['evicted_tokens']:,} tokens "
        "(but for `pages`)"
    )
    lines.append(f"processor time; ratios are medians over stretches of {found['stretch']} turns, played in turn")
    return "\n".join([*lines, *found["skipped"]])


def draw(found: dict[str, Any], path: Path) -> None:
    """Turns per second of each side at each page size, nobody asking for slots. Needs matplotlib."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(PAGE_SIZES), figsize=(9, 2.4), layout="constrained", sharey=True)
    for axis, page_size in zip(axes, PAGE_SIZES, strict=True):
        rows = [row for row in found["rows"] if row["page_size"] == page_size and not row["with_slots"]]
        colours = ["#2463eb" if row["side"].startswith("aradix") else "#8a909c" for row in rows]
        bars = axis.barh([row["side"] for row in rows], [row["turns_per_s"] for row in rows], color=colours)
        axis.bar_label(bars, [f"{row['turns_per_s']:,.0f}" for row in rows], padding=4, fontsize=9)
        axis.set_title(f"turns/s, page size {page_size}", fontsize=10, loc="left")
        axis.margins(x=0.2)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(axis="x", bottom=False, labelbottom=False)
        axis.tick_params(axis="y", length=0)
    axes[0].invert_yaxis()
    save(figure, path)


# ---- where the time goes


async def _by_phase(turns: list[Turn], core: Core, page_size: int) -> dict[str, list[int]]:
    """Nanoseconds of each phase of each turn, by the clock: medians leave out who was interrupted."""
    taken: dict[str, list[int]] = {phase: [] for phase in PHASES}
    now = time.perf_counter_ns
    async with RadixCache(_params(core, "node", page_size)) as cache:
        for turn in turns:
            tokens = turn.tokens
            at = now()
            prompt, whole = RadixKey(tokens[: turn.num_prompt]), RadixKey(tokens)
            at_lease = now()
            lease = cache.lease(prompt)
            await lease.__aenter__()
            at_allocate = now()
            await lease.allocate(len(tokens) - lease.num_matched)
            at_commit = now()
            lease.commit(whole)
            at_release = now()
            await lease.__aexit__(None, None, None)
            end = now()
            steps = (at, at_lease, at_allocate, at_commit, at_release, end)
            for phase, begin, stop in zip(PHASES, steps, steps[1:], strict=False):
                taken[phase].append(stop - begin)
    return taken


def _profiled(turns: list[Turn], core: Core, page_size: int) -> str:
    async def play() -> cProfile.Profile:
        profiler = cProfile.Profile()
        async with RadixCache(_params(core, "node", page_size)) as cache:
            profiler.enable()
            for turn in turns:
                tokens = turn.tokens
                async with cache.lease(RadixKey(tokens[: turn.num_prompt])) as lease:
                    await lease.allocate(len(tokens) - lease.num_matched)
                    lease.commit(RadixKey(tokens))
            profiler.disable()
        return profiler

    out = io.StringIO()
    pstats.Stats(anyio.run(play), stream=out).strip_dirs().sort_stats("tottime").print_stats(28)
    rows = [line for line in out.getvalue().splitlines() if line.strip()]
    return "\n".join(rows[rows.index(next(row for row in rows if "ncalls" in row)) :])


def profile() -> str:
    """Where the time of our turns goes: medians of each phase, and the functions that take most; takes seconds."""
    turns = chat_turns()
    lines = [f"{'median us of a turn':<24}" + "".join(f"{phase:>10}" for phase in (*PHASES, "sum"))]
    cores: list[Core] = ["cpp", "python"] if core_name() == "cpp" else ["python"]
    for core in cores:
        for page_size in PAGE_SIZES:
            runs = [anyio.run(_by_phase, turns, core, page_size) for _ in range(3)]
            each = [min(statistics.median(run[phase]) for run in runs) / 1000 for phase in PHASES]
            lines.append(
                f"{core + ' core, page ' + str(page_size):<24}" + "".join(f"{us:>10.2f}" for us in (*each, sum(each)))
            )
    for page_size in PAGE_SIZES:
        lines.append(f"\n{cores[0]} core, page {page_size}, {len(turns)} turns under cProfile, which slows calls down:")
        lines.append(_profiled(turns, cores[0], page_size))
    return "\n".join(lines)
