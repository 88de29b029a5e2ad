"""The report: one page of HTML that loads nothing, for people who decide about memory and policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

from aradix.replay.driver import ReplayResult
from aradix.replay.figures import Curve, distance_figure, hit_ratio_figure, percent, tokens_text
from aradix.replay.models import Worth
from aradix.replay.optimal import OPTIMAL
from aradix.replay.report import bytes_text, seconds_text
from aradix.replay.request import ReplayError
from aradix.replay.reuse import ReuseDistances

__all__ = ["check_report", "save_report"]

_SUFFIXES = (".html", ".htm")
_NUM_COLOURS = 8
_MOST_TENANTS = 12
_NO_TENANT = "(none named)"


def check_report(path: Path) -> None:
    """See that a report can be saved there, before the runs that it would show.

    Raises:
        ReplayError: another suffix than .html, or no such folder.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ReplayError(f"--report {path}: the name must end in .html")
    if not path.parent.is_dir():
        raise ReplayError(f"--report {path}: there is no folder {path.parent}")


def save_report(
    path: Path,
    results: Sequence[tuple[str, ReplayResult]],
    *,
    trace: str,
    worth: Worth,
    distances: ReuseDistances | None,
) -> None:
    """Write the page. Does not wait; blocks while it writes.

    Args:
        path: of the file.
        results: the capacity each was asked for, and the run; each policy with the same capacities.
        trace: its name.
        worth: what tokens are worth.
        distances: of reuse in the trace, if they were counted.

    Raises:
        ReplayError: the file cannot be written.
    """
    try:
        path.write_text(_Page(results, trace, worth, distances).html(), encoding="utf-8")
    except OSError as error:
        raise ReplayError(f"--report {path}: {error.strerror or error}") from error


class _Capacity(NamedTuple):
    name: str
    tokens: int
    endless: bool


def _cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{text}</td>' if kind else f"<td>{text}</td>"


def _row(cells: Iterable[str], kind: str = "") -> str:
    return f'<tr class="{kind}">{"".join(cells)}</tr>' if kind else f"<tr>{''.join(cells)}</tr>"


def _table(heads: Iterable[str], rows: Iterable[str], above: str = "") -> str:
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = "\n".join(rows)
    return f'<div class="wide"><table><thead>{above}<tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _section(title: str, lead: str, body: str, note: str = "") -> str:
    after = f'\n<p class="note">{note}</p>' if note else ""
    return f"<section>\n<h2>{title}</h2>\n<p>{lead}</p>\n{body}{after}\n</section>"


class _Page:
    """The findings, and how each part of the page is made of them."""

    def __init__(
        self,
        results: Sequence[tuple[str, ReplayResult]],
        trace: str,
        worth: Worth,
        distances: ReuseDistances | None,
    ) -> None:
        self._trace, self._worth, self._distances = trace, worth, distances
        self._first = results[0][1]
        self._policies = list(dict.fromkeys(result.setup.policy for _, result in results))
        self._real = [policy for policy in self._policies if policy != OPTIMAL]
        self._runs: dict[tuple[str, int], ReplayResult] = {}
        capacities: dict[int, _Capacity] = {}
        for asked, result in results:
            tokens = result.setup.num_pages * result.setup.page_size
            endless = asked == "inf"
            capacities.setdefault(tokens, _Capacity("endless" if endless else tokens_text(tokens), tokens, endless))
            self._runs[result.setup.policy, tokens] = result
        self._capacities = [capacities[tokens] for tokens in sorted(capacities)]

    def html(self) -> str:
        """The page."""
        template = Template(files("aradix.replay").joinpath("report.html").read_text(encoding="utf-8"))
        sections = [self._ratios(), self._figures()]
        if self._distances is not None and self._distances.reused_tokens:
            sections.append(self._reuse(self._distances))
        sections.append(self._tenants())
        try:
            of = version("aradix")
        except PackageNotFoundError:
            of = "(not installed)"
        return template.substitute(
            title=escape(f"{self._trace}: aradix replay"),
            trace=escape(self._trace),
            facts=self._facts(),
            tiles="".join(f'<div class="tile"><b>{big}</b><span>{small}</span></div>' for big, small in self._tiles()),
            sections="\n".join(section for section in sections if section),
            terms="\n".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in self._terms()),
            version=escape(of),
        )

    def _facts(self) -> str:
        first, setup = self._first, self._first.setup
        facts = [
            f"{first.num_requests:,} requests",
            f"{first.input_tokens:,} input tokens",
            f"pages of {setup.page_size}",
            f"{setup.concurrency} in flight" + (", which join" if setup.join else ""),
        ]
        if setup.high_watermark:
            facts.append(f"{100 * setup.low_watermark:.3g} to {100 * setup.high_watermark:.3g} % kept free")
        if setup.num_host_pages:
            facts.append(f"{tokens_text(setup.num_host_pages * setup.page_size)} tokens of host behind the pool")
        if setup.outputs:
            facts.append("outputs cached too")
        if self._worth.kv_bytes_per_token is not None:
            of = f" ({escape(self._worth.model)})" if self._worth.model else ""
            facts.append(f"{self._worth.kv_bytes_per_token:,.6g} B of KV a token{of}")
        if self._worth.prefill_tokens_per_s is not None:
            facts.append(f"prefill at {self._worth.prefill_tokens_per_s:,.6g} tokens/s")
        return "".join(f"<span>{fact}</span>" for fact in facts)

    def _best(self, tokens: int) -> ReplayResult | None:
        """The run of the policy that finds most there; the first of equals."""
        runs = [self._runs[policy, tokens] for policy in self._real]
        return max(runs, key=lambda run: run.hit_tokens, default=None)

    def _tiles(self) -> Iterable[tuple[str, str]]:
        if self._distances is not None:
            ratio = self._distances.reused_tokens / max(1, self._distances.input_tokens)
            yield percent(ratio), "of input tokens came before: no cache finds more"
        for capacity in dict.fromkeys((self._capacities[0], self._capacities[-1])):
            if (best := self._best(capacity.tokens)) is not None:
                size = "an endless pool" if capacity.endless else f"{capacity.name} tokens"
                kv = self._worth.kv_bytes(capacity.tokens)
                in_bytes = "" if kv is None or capacity.endless else f", {bytes_text(kv)}"
                by = f", by {escape(best.setup.policy)}" if self._differ(capacity.tokens) else ""
                yield percent(best.hit_ratio), f"found with {size}{in_bytes}{by}"
        if (best := self._best(self._capacities[-1].tokens)) is not None:
            saved = self._worth.seconds_saved(best.hit_tokens)
            if saved is not None:
                all_of_it = self._worth.seconds_saved(best.input_tokens) or 0.0
                yield seconds_text(saved), f"of {seconds_text(all_of_it)} of prefill saved there"

    def _colour(self, policy: str) -> str:
        # The first is what the others are compared with, and drawn the most quietly.
        return f"var(--c{self._real.index(policy) % _NUM_COLOURS})" if policy in self._real else "var(--soft)"

    def _name(self, policy: str) -> str:
        dot = '<i class="bound"></i>' if policy == OPTIMAL else f'<i style="--of:{self._colour(policy)}"></i>'
        return f'<span class="name">{dot}{escape(policy)}</span>'

    def _ratios(self) -> str:
        curves = [
            Curve(
                policy,
                self._colour(policy),
                policy == OPTIMAL,
                tuple((each.tokens, self._runs[policy, each.tokens].hit_ratio) for each in self._capacities),
            )
            for policy in self._policies
        ]
        endless = {each.tokens for each in self._capacities if each.endless}

        def below(tokens: int) -> str | None:
            kv = self._worth.kv_bytes(tokens)
            return None if kv is None or tokens in endless else bytes_text(kv)

        drawn = hit_ratio_figure(curves, [(each.name, each.tokens) for each in self._capacities], below)
        lead = "Input tokens found in the cache, of all input tokens, by the capacity of the pool in tokens"
        lead += " and in bytes of KV." if self._worth.kv_bytes_per_token is not None else "."
        if OPTIMAL in self._policies and self._real:
            base = escape(self._real[0])
            lead += f" The dotted line is the clairvoyant bound; the shaded gap is what {base} leaves to it."
        return _section("Hit ratio over capacity", lead, f'<div class="wide">{drawn}</div>')

    def _figures(self) -> str:
        with_bytes = self._worth.kv_bytes_per_token is not None
        with_seconds = self._worth.prefill_tokens_per_s is not None
        most = max(run.hit_ratio for run in self._runs.values()) or 1.0
        compared = OPTIMAL in self._policies and len(self._real) > 1
        heads = ["Capacity", "Policy", *(["KV"] if with_bytes else []), "Hit ratio"]
        heads += ["To the bound"] if compared else []
        heads += ["Tokens found", *(["Prefill saved"] if with_seconds else []), "Tokens evicted"]
        rows: list[str] = []
        for capacity in self._capacities:
            best = self._best(capacity.tokens)
            for place, policy in enumerate(self._policies):
                run = self._runs[policy, capacity.tokens]
                kv = self._worth.kv_bytes(capacity.tokens)
                saved = self._worth.seconds_saved(run.hit_tokens)
                cells = [_cell("" if place else capacity.name), _cell(self._name(policy))]
                if with_bytes:
                    cells.append(_cell("" if place or capacity.endless or kv is None else bytes_text(kv)))
                meter = f'<i style="width:{run.hit_ratio / most:.1%}"></i>'
                meter = f'<span class="meter" style="--of:{self._colour(policy)}">{meter}</span>'
                cells.append(_cell(f"{meter}<span>{percent(run.hit_ratio)}</span>", "ratio"))
                if compared:
                    cells.append(_cell(self._way(policy, capacity.tokens)))
                cells.append(_cell(f"{run.hit_tokens:,}"))
                if saved is not None:
                    cells.append(_cell(seconds_text(saved)))
                cells.append(_cell(f"{run.evicted_tokens:,}", "quiet"))
                kinds = ["first"] if not place and rows else []
                kinds += (
                    ["quiet"]
                    if policy == OPTIMAL
                    else ["best"]
                    if run is best and self._differ(capacity.tokens)
                    else []
                )
                rows.append(_row(cells, " ".join(kinds)))
        lead = "Every run, by capacity."
        if len(self._real) > 1:
            lead += " The policy that finds most is set in bold."
        if compared:
            lead += f" To the bound: how much of what {escape(self._real[0])} leaves to it another policy gets."
        return _section("In figures", lead, _table(heads, rows).replace("<table>", '<table class="runs">'))

    def _differ(self, tokens: int) -> bool:
        """Whether it matters there which policy it is."""
        return len({self._runs[policy, tokens].hit_tokens for policy in self._real}) > 1

    def _way(self, policy: str, tokens: int) -> str:
        """How much of what the first policy leaves to the bound another one gets."""
        base, bound = self._runs[self._real[0], tokens].hit_tokens, self._runs[OPTIMAL, tokens].hit_tokens
        if policy in (self._real[0], OPTIMAL) or bound <= base:
            return ""
        way = (self._runs[policy, tokens].hit_tokens - base) / (bound - base)
        return f"{100 * way:.0f} %".replace("-", "&minus;")

    def _reuse(self, distances: ReuseDistances) -> str:
        drawn = distance_figure(distances, [(each.name, each.tokens) for each in self._capacities])
        first = 1 - distances.reused_tokens / distances.input_tokens
        return _section(
            "How soon tokens return",
            "Input tokens that came before, by how many distinct tokens were used since. An LRU finds what lies "
            "left of its capacity if they run in order, as noted at each line; the rest takes more memory, or a policy "
            "that knows better.",
            f'<div class="wide">{drawn}</div>',
            f"{percent(first)} of the input tokens are seen for the first time.",
        )

    def _tenants(self) -> str:
        counted = [policy for policy in self._real if self._runs[policy, self._capacities[0].tokens].tenants]
        if not counted:
            return ""
        tenants = self._runs[counted[0], self._capacities[0].tokens].tenants
        if [each.tenant for each in tenants] == [""]:
            return _section("By tenant", "The requests of this trace name no tenants.", "")
        found = {
            (policy, each.tokens, hits.tenant): hits.hit_ratio
            for policy in counted
            for each in self._capacities
            for hits in self._runs[policy, each.tokens].tenants
        }
        most = max(found.values()) or 1.0
        span = len(counted)
        groups = "".join(f'<th colspan="{span}">{each.name}</th>' for each in self._capacities)
        above = f"<tr><th></th><th></th><th></th>{groups}</tr>"
        heads = [
            "Tenant or namespace",
            "Requests",
            "Input tokens",
            *(escape(policy) for _ in self._capacities for policy in counted),
        ]
        rows = []
        for tenant in tenants[:_MOST_TENANTS]:
            cells = [
                _cell(escape(tenant.tenant or _NO_TENANT)),
                _cell(f"{tenant.num_requests:,}", "quiet"),
                _cell(f"{tenant.input_tokens:,}", "quiet"),
            ]
            for each in self._capacities:
                for policy in counted:
                    ratio = found.get((policy, each.tokens, tenant.tenant), 0.0)
                    cells.append(f'<td class="heat" style="--at:{ratio / most:.3f}">{percent(ratio)}</td>')
            rows.append(_row(cells))
        more = len(tenants) - _MOST_TENANTS
        return _section(
            "By tenant",
            "Hit ratio of each tenant's requests, by capacity and policy.",
            _table(heads, rows, above),
            f"{more:,} tenants with fewer input tokens are not shown." if more > 0 else "",
        )

    def _terms(self) -> Iterable[tuple[str, str]]:
        yield (
            "Hit ratio",
            "Input tokens whose KV was in the cache when their request was admitted, of all input tokens.",
        )
        yield "Capacity", "Slots of the pool, in tokens; running requests and what is kept free have a share in them."
        if OPTIMAL in self._policies:
            yield (
                "optimal",
                (
                    "Belady's rule, offline: what has to go is what is used again last. It runs requests one by one in "
                    "the trace's order and keeps nothing free, so real caches stay below it, but for what another "
                    "order of the requests in flight can bring."
                ),
            )
        if self._worth.prefill_tokens_per_s is not None:
            yield (
                "Prefill saved",
                "Tokens found over the rate of prefill given: as if every token took as long as any other.",
            )
        if self._worth.kv_bytes_per_token is not None:
            yield "KV", "The pool's tokens times the bytes of one token's KV, in all layers of the model."
