"""What is shown of the runs: a line of JSON each, or one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

import msgspec

from aradix.replay.driver import ReplayResult
from aradix.replay.models import Worth
from aradix.replay.optimal import OPTIMAL

__all__ = ["as_json", "bytes_text", "print_table", "seconds_text"]

_LEFT = frozenset({"policy"})
_ANY_WIDTH = 10_000
_NO_WORTH = Worth()
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def bytes_text(num_bytes: float) -> str:
    """Bytes in a unit that keeps them short, such as 122 GiB."""
    size, unit = num_bytes, 0
    while size >= 1000 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {_BYTE_UNITS[unit]}"


def seconds_text(seconds: float) -> str:
    """A time as hours, minutes and seconds, such as 2 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02} min"


def as_json(result: ReplayResult, *, trace: str, capacity: str, worth: Worth = _NO_WORTH) -> str:
    """One run as one line of JSON. `capacity` is as it was asked for; `capacity_tokens` what it came to."""
    setup = result.setup
    fields: dict[str, Any] = {
        "trace": trace,
        "policy": setup.policy,
        "capacity": capacity,
        "capacity_tokens": setup.num_pages * setup.page_size,
        "page_size": setup.page_size,
        "concurrency": setup.concurrency,
        "low_watermark": setup.low_watermark,
        "high_watermark": setup.high_watermark,
        "core": setup.core,
        "requests": result.num_requests,
        "input_tokens": result.input_tokens,
        "hit_tokens": result.hit_tokens,
        "hit_ratio": round(result.hit_ratio, 6),
        "prefill_tokens": result.prefill_tokens,
        "output_tokens": result.output_tokens,
        "evicted_tokens": result.evicted_tokens,
        "slot_waits": result.num_waits,
        "retracts": result.num_retracts,
        "lease_p50_us": round(result.lease_p50_us, 1),
        "lease_p99_us": round(result.lease_p99_us, 1),
        "requests_per_s": round(result.requests_per_s, 1),
        "seconds": round(result.seconds, 3),
    }
    if setup.join:
        fields |= {
            "joins": result.num_joins,
            "joined_tokens": result.joined_tokens,
            "join_takeovers": result.num_takeovers,
        }
    if setup.num_host_pages:
        fields |= {
            "host_capacity_tokens": setup.num_host_pages * setup.page_size,
            "write_policy": setup.write_policy,
            "storage": None if setup.storage is None else str(setup.storage),
            "load_back_tokens": result.load_back_tokens,
            "backuped_tokens": result.backuped_tokens,
            "prefetched_tokens": result.prefetched_tokens,
        }
    if worth.kv_bytes_per_token is not None:
        fields["kv_bytes_per_token"] = worth.kv_bytes_per_token
        fields["capacity_bytes"] = worth.kv_bytes(fields["capacity_tokens"])
    if (saved := worth.seconds_saved(result.hit_tokens)) is not None:
        fields["prefill_seconds_saved"] = round(saved, 3)
    return msgspec.json.encode(fields).decode()


def _row(result: ReplayResult, capacity: str, worth: Worth) -> dict[str, str]:
    tokens = result.setup.num_pages * result.setup.page_size
    row = {
        "policy": result.setup.policy,
        "capacity": "endless" if capacity == "inf" else f"{tokens:,}",
    }
    if (kv_bytes := worth.kv_bytes(tokens)) is not None:
        row["KV"] = "" if capacity == "inf" else bytes_text(kv_bytes)
    row["hit ratio"] = f"{result.hit_ratio:.4f}"
    if (saved := worth.seconds_saved(result.hit_tokens)) is not None:
        row["saved"] = seconds_text(saved)
    if result.setup.num_host_pages:
        row["loaded"] = f"{result.load_back_tokens:,}"
    if result.setup.join:
        row |= {"computed": f"{result.prefill_tokens:,}", "joined": f"{result.joined_tokens:,}"}
    row["evicted"] = f"{result.evicted_tokens:,}"
    # Nobody took a lease to find the bound.
    leases = {
        "waits": f"{result.num_waits:,}",
        "p50 us": f"{result.lease_p50_us:,.0f}",
        "p99 us": f"{result.lease_p99_us:,.0f}",
        "req/s": f"{result.requests_per_s:,.0f}",
    }
    return row | (dict.fromkeys(leases, "-") if result.setup.policy == OPTIMAL else leases)


def print_table(
    results: Sequence[tuple[str, ReplayResult]], *, title: str, file: IO[str], worth: Worth = _NO_WORTH
) -> None:
    """All runs as a table, "p50 us" and "p99 us" being of a lease, with every number whole.

    Drawn by rich where it is installed and `file` is a terminal wide enough, plain otherwise.

    Args:
        results: the capacity each was asked for, and the run; at least one.
        title: the line above.
        file: to print to.
        worth: what tokens are worth, which adds columns.
    """
    rows = [_row(result, capacity, worth) for capacity, result in results]
    if not (file.isatty() and _print_rich(rows, title, file)):
        _print_plain(rows, title, file)


def _print_rich(rows: Sequence[dict[str, str]], title: str, file: IO[str]) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    console = Console(file=file)
    # The narrower gap is only for a table that does not fit otherwise: rich would cut its numbers.
    for gap in (1, 0):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
        for name in rows[0]:
            table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row.values())
        if console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum <= console.width:
            console.print(Text(title), table, sep="\n")
            return True
    return False


def _print_plain(rows: Sequence[dict[str, str]], title: str, file: IO[str]) -> None:
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}

    def line(cells: dict[str, str]) -> str:
        fitted = (
            cells[name].ljust(widths[name]) if name in _LEFT else cells[name].rjust(widths[name]) for name in names
        )
        return "  ".join(fitted).rstrip()

    print(title, line({name: name for name in names}), *(line(row) for row in rows), sep="\n", file=file)
