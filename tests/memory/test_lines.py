"""Compiled copies go on while Python is busy, hold on to nothing, and let the interpreter end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from aradix import HostKVPool, MHAKVPool
from aradix.errors import UsageError
from aradix.memory.copiers import HostCopier
from aradix.memory.kv_pool import Layout
from aradix.memory.lines import LineStream, NativeCopier
from aradix.memory.streams import HostStream
from aradix.memory.transfer import Transfer
from tests.support.places import ROOT

_native: Any = pytest.importorskip("aradix._native")

P = 4
MAX_SPINS = 5_000_000


def opened() -> tuple[MHAKVPool, HostKVPool, Transfer]:
    pool = MHAKVPool(8 * P, P, 2, 2, 8)
    host = HostKVPool(8 * P, P, pool)
    pool.buffer.normal_()
    return pool, host, Transfer(pool, host)


def test_pools_in_host_memory_are_copied_by_the_compiled_copier() -> None:
    *_, transfer = opened()
    assert isinstance(transfer._copier, NativeCopier)
    assert isinstance(transfer.store_stream, LineStream)
    transfer.close()


def test_copies_go_on_while_a_thread_keeps_the_interpreter_to_itself() -> None:
    pool, host, transfer = opened()
    slots = np.arange(P, 3 * P)  # torch would let go of the interpreter as it computes
    transfer.store(slots, slots).synchronize()  # the threads are there
    batches = [slots + 2 * P, slots + 4 * P]
    before = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        copies = [transfer.store(batch, batch) for batch in batches]
        for _ in range(MAX_SPINS):
            if all(copy.done() for copy in copies):
                break
    finally:
        sys.setswitchinterval(before)
    assert all(copy.done() and copy.error is None for copy in copies)
    assert pool.pages is not None
    assert host.pages is not None
    assert torch.equal(host.pages[3:7], pool.pages[3:7])
    transfer.close()


@pytest.mark.parametrize("copier", [HostCopier, NativeCopier])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_rows_of_one_byte_may_lie_apart(layout: Layout, copier: type[HostCopier]) -> None:
    pool = MHAKVPool(4, 1, 2, 1, 1, dtype=torch.uint8, layout=layout)
    host = HostKVPool(4, 1, pool)
    pool.buffer.copy_(torch.arange(pool.buffer.numel()).view(pool.buffer.shape))
    transfer = Transfer(pool, host, copier=copier())
    there, back = np.arange(1, 4), np.array([2, 4, 1])
    assert pool.pages is not None
    assert host.pages is not None
    stored = transfer.store(there, back)
    stored.synchronize()
    assert torch.equal(host.pages[[2, 4, 1]], pool.pages[1:4])
    loaded = transfer.load(back, there[::-1].copy(), by_layer=True)
    loaded.synchronize()
    assert torch.equal(pool.pages[[3, 2, 1]], host.pages[[2, 4, 1]])
    assert (stored.error, loaded.error) == (None, None)
    transfer.close()


def test_streams_of_both_kinds_wait_for_one_another() -> None:
    plain, compiled = HostStream(), LineStream()
    seen: list[int] = []
    for i in range(20):
        first, second = (plain, compiled) if i % 2 else (compiled, plain)
        first.launch(lambda i=i: seen.append(i))  # type: ignore[misc]
        first.record_event().wait(second)
    plain.synchronize()
    compiled.synchronize()
    assert seen == list(range(20))
    plain.close()
    compiled.close()


def test_what_was_asked_of_a_mark_is_told_once_before_or_after() -> None:
    stream = LineStream()
    told: list[str] = []
    for i in range(50):
        marker = stream.mark()
        marker.add_done_callback(lambda _: told.append("early"))
        marker.add_done_callback(lambda _: told.append("second"))
        if i % 2:
            marker.wait()
        marker.add_done_callback(lambda _: told.append("late"))
    stream.close()
    assert marker.done()
    assert {word: told.count(word) for word in ("early", "second", "late")} == {"early": 50, "second": 50, "late": 50}


@pytest.mark.parametrize("kind", [HostStream, LineStream])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_thread_that_cannot_be_started_is_tried_again(
    kind: type[HostStream], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    tried: list[threading.Thread] = []

    def start_but_one(thread: threading.Thread) -> None:
        tried.append(thread)
        if len(tried) == failing:
            raise RuntimeError("can't start new thread")
        start(thread)

    stream = kind()
    monkeypatch.setattr(threading.Thread, "start", start_but_one)
    with contextlib.suppress(RuntimeError):
        stream.mark()
    if failing == 2:
        other = kind()
        tried.clear()
        with contextlib.suppress(RuntimeError):
            other.mark()
        other.close()  # whichever of its threads is there ends
    marker = stream.mark()
    assert stream._thread is not None
    told: list[str] = []
    marker.add_done_callback(lambda _: told.append("reached"))
    stream.close()
    assert told == ["reached"]


def test_pages_that_do_not_fit_are_refused() -> None:
    wide, narrow = np.zeros((4, 2, 8), np.uint64), np.zeros((4, 8), np.uint64)
    for source, target in ((wide, narrow), (narrow, narrow.view(np.uint32)), (narrow, narrow[:, ::2])):
        with pytest.raises(ValueError, match="one shape"):
            _native.PageViews(source, target)
    with pytest.raises(TypeError, match="arrays"):
        _native.PageViews(narrow[0], narrow[0])
    stream = LineStream()
    views = _native.PageViews(narrow, np.zeros((3, 8), np.uint64))
    for source_pages, target_pages in (([4], [0]), ([0], [3]), ([-1], [0])):
        with pytest.raises(IndexError):
            stream.launch_copy(views, source_pages, target_pages)
    with pytest.raises(ValueError, match="as many"):
        stream.launch_copy(views, [0, 1], [0])
    stream.close()
    with pytest.raises(UsageError, match="closed"):
        stream.launch_copy(views, [0], [0])


def test_what_has_run_is_let_go() -> None:
    stream = LineStream()
    views = _native.PageViews(np.ones((4, 8)), np.zeros((4, 8)))
    before = sys.getrefcount(views)
    for _ in range(100):
        stream.launch_copy(views, [0], [1])
        stream.synchronize()
    assert sys.getrefcount(views) < before + 3  # no more than the last one
    stream.launch_copy(views, [0], [1])
    stream.close()
    del stream
    assert sys.getrefcount(views) == before


def test_page_ids_are_those_of_the_plain_way() -> None:
    rng = np.random.default_rng(0)
    for page_size in (1, 3, 16):
        for _ in range(200):
            pages = rng.integers(0, 6, rng.integers(0, 5))
            slots = (pages[:, None] * page_size + np.arange(page_size)).ravel()
            if len(slots) and rng.random() < 0.3:
                slots[rng.integers(len(slots))] += rng.integers(-1, 2)
            if rng.random() < 0.1:
                slots = slots[:-1]
            whole = len(slots) % page_size == 0 and all(
                row[0] % page_size == 0 and row.tolist() == list(range(row[0], row[0] + page_size))
                for row in slots.reshape(-1, page_size)
            )
            right = whole and all(1 <= page <= 4 for page in (slots[::page_size] // page_size).tolist())
            found = _native.page_ids(slots, page_size, 4)
            assert found == ((slots[::page_size] // page_size).tolist() if right else None)
    assert _native.page_ids([1], 1, 4) is None
    assert _native.page_ids(np.array([1], np.int32), 1, 4) is None
    assert _native.page_ids(np.arange(1, 9)[::2], 1, 9) is None


def test_an_interpreter_that_ends_in_the_middle_of_copies_just_ends() -> None:
    script = """
import torch
from aradix import HostKVPool, MHAKVPool
from aradix.memory.transfer import Transfer
pool = MHAKVPool(512, 16, 8, 8, 128)
host = HostKVPool(512, 16, pool)
transfer = Transfer(pool, host, on_done=lambda: None)
slots = torch.arange(16, 528)
transfer.store(slots, slots).add_done_callback(print)
copies = [transfer.store(slots, slots) for _ in range(20)]
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
