"""`HiRadixCache` in SGLang's shape when copies fail, do not start or are lost: it goes on, and no slot is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aradix.adapters.sglang import (
    EvictParams,
    HiRadixCache,
)
from aradix.memory.copiers import HostCopier, Job
from aradix.memory.streams import HostEvent, InlineStream
from aradix.memory.transfer import Transfer
from tests.adapters.two_tiers import Make, assert_right, drain, insert, loaded


class FaultyCopier(HostCopier):
    """Copies well until told otherwise.

    `num_good`: pages that still come over; those after them fail. `gives_events`: without one it cannot be known what
    the copy comes after. `answers`: otherwise a copy's event breaks when it is asked, so that the copy is lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_good = 10**9
        self.gives_events = True
        self.answers = True

    def new_event(self) -> HostEvent:
        if not self.gives_events:
            raise RuntimeError("no events left")
        return HostEvent() if self.answers else BrokenEvent()

    def launch(self, stream: Any, job: Job, layer: int | None) -> None:
        num_pages = len(job.source_pages)
        part = Job(job.source, job.target, job.source_pages[: self.num_good], job.target_pages[: self.num_good], "")
        self.num_good = max(0, self.num_good - num_pages)
        super().launch(stream, part, layer)
        job.num_pages_done = len(part.source_pages)
        if job.num_pages_done < num_pages:
            raise RuntimeError("the copy engine gave up")


class BrokenEvent(HostEvent):
    """Of a device that cannot be asked any more."""

    def query(self) -> bool:
        raise RuntimeError("the device is gone")

    def synchronize(self) -> None:
        raise RuntimeError("the device is gone")

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Nobody will ever call."""


def make_faulty(make_tiered: Make, **params: Any) -> tuple[HiRadixCache, FaultyCopier]:
    cache, copier = make_tiered(**params), FaultyCopier()
    cache.transfer.close()
    cache.transfer = Transfer(cache.transfer.kv_pool, cache.token_to_kv_pool_host, copier=copier)
    return cache, copier


def test_copies_that_have_ended_are_let_go(make_tiered: Make) -> None:
    cache = make_tiered(num_slots=64)
    for number in range(30):
        insert(cache, range(100 * number, 100 * number + 8))
        drain(cache)
    # Of the last ones their thread may still be telling.
    assert cache.transfer.num_running() + len(cache.transfer.take_done()) < 15


@pytest.mark.parametrize("num_good", [0, 3])
def test_a_failed_store_leaves_what_came_over(make_tiered: Make, num_good: int) -> None:
    cache, copier = make_faulty(make_tiered)
    copier.num_good = num_good
    insert(cache, range(20))
    drain(cache)
    assert cache.core.host_tokens == num_good * 4
    cache.evict(EvictParams(20))
    slots, _ = loaded(cache, range(20))
    assert len(slots) == 0  # the copier has given up: nothing comes back either
    copier.num_good = 100
    slots, _ = loaded(cache, range(20))
    assert len(slots) == num_good * 4
    assert_right(cache, range(20), slots)


@pytest.mark.parametrize("num_good", [0, 1, 2])
def test_an_eviction_ends_where_no_copy_comes_over(make_tiered: Make, num_good: int) -> None:
    cache, copier = make_faulty(make_tiered, policy="write_back")
    for number in range(4):
        insert(cache, range(100 * number, 100 * number + 16))
    copier.num_good = num_good
    assert cache.evict(EvictParams(48)).num_tokens_evicted == 48
    assert cache.evictable_size() == 16
    assert cache.core.host_tokens == num_good * 4


def follow_a_stream(cache: HiRadixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies come after a stream of the engine's, as on a GPU: without events they do not start then."""
    monkeypatch.setattr(cache, "_streams", lambda: (InlineStream(),))


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_store_that_does_not_start_loses_no_slot(
    make_tiered: Make, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, copier = make_faulty(make_tiered, policy=policy)
    follow_a_stream(cache, monkeypatch)
    copier.gives_events = False
    insert(cache, range(20))
    assert cache.evict(EvictParams(20)).num_tokens_evicted == 20
    assert cache.core.host_tokens == 0
    assert cache.token_to_kv_pool_host.available_size() == cache.token_to_kv_pool_host.num_slots


@pytest.mark.parametrize("fault", ["gives_events", "answers"])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_the_slots_of_a_lost_store_stay_out_of_use(make_tiered: Make, policy: str, fault: str) -> None:
    cache, copier = make_faulty(make_tiered, policy=policy)
    setattr(copier, fault, False)
    insert(cache, range(20))
    assert cache.evict(EvictParams(20)).num_tokens_evicted == 20
    drain(cache)
    assert cache.core.host_tokens == 0
    assert cache.token_to_kv_pool_host.allocator.quarantined_size() == 20
    setattr(copier, fault, True)
    insert(cache, range(8))
    drain(cache)
    assert cache.token_to_kv_pool_host.allocator.quarantined_size() == 20


@pytest.mark.parametrize(
    ("fault", "starts", "num_lost"), [("gives_events", False, 0), ("gives_events", True, 20), ("answers", True, 20)]
)
def test_a_load_that_goes_wrong_brings_nothing_and_may_be_tried_again(
    make_tiered: Make, fault: str, starts: bool, num_lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, copier = make_faulty(make_tiered)
    insert(cache, range(20))
    drain(cache)
    cache.evict(EvictParams(20))
    if not starts:
        follow_a_stream(cache, monkeypatch)
    setattr(copier, fault, False)
    slots, node = loaded(cache, range(20))
    assert len(slots) == 0
    assert node is cache.root_node
    assert cache.token_to_kv_pool_allocator.slots.quarantined_size() == num_lost
    setattr(copier, fault, True)
    slots, _ = loaded(cache, range(20))
    assert len(slots) == 20
    assert_right(cache, range(20), slots)
