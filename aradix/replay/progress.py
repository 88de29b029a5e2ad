"""A progress bar on a terminal; without one, or without rich, nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["progress_bar"]

_EVERY = 64


@contextmanager
def progress_bar(title: str, total: int, file: IO[str]) -> Iterator[Callable[[int], None] | None]:
    """A bar on `file` that counts up to `total`; gives what to tell the count to, or None if there is none to draw."""
    bar = _rich_bar(file) if file.isatty() else None
    if bar is None:
        yield None
        return
    with bar:
        task = bar.add_task(title, total=total)
        shown = 0

        def show(done: int) -> None:
            nonlocal shown
            # A bar update costs as much as a small lease.
            if done - shown >= _EVERY or done == total:
                shown = done
                bar.update(task, completed=done)

        yield show


def _rich_bar(file: IO[str]) -> Progress | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(file=file),
        transient=True,
        # What is printed meanwhile goes where it was meant to go.
        redirect_stdout=False,
        redirect_stderr=False,
    )
