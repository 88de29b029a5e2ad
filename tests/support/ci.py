"""A pytest plugin for CI: a green run means that everything ran."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["NothingSkipped"]

MAY_SKIP = {"gpu", "sglang"}


class NothingSkipped:
    """Fails the session where the traces are missing, or where a test was skipped that need not be.

    What may be skipped is marked: `gpu` needs a GPU, `sglang` a release of SGLang, whose requirements contradict ours.

    Args:
        shared: the folder of traces, which must be there.
    """

    def __init__(self, shared: Path) -> None:
        self._shared = shared
        self._skipped: list[str] = []

    def pytest_sessionstart(self) -> None:
        if not self._shared.is_dir():
            raise pytest.UsageError(f"CI needs the traces, but there is no folder {self._shared}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not MAY_SKIP & set(report.keywords):
            self._skipped.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in self._skipped:
            terminalreporter.write_line(
                f"skipped in CI, which only tests marked {' or '.join(sorted(MAY_SKIP))} may be: {nodeid}", red=True
            )
