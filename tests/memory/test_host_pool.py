"""The host pool: slots by pages, pages as bytes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from aradix import HostKVPool, MHAKVPool
from aradix.errors import ConfigError, DoubleFreeError, UsageError
from aradix.memory.fences import FutureFence
from aradix.memory.kv_pool import BookKVPool, Layout

LAYOUTS: tuple[Layout, ...] = ("layer_first", "page_first")


def pools(layout: Layout = "layer_first", num_slots: int = 16) -> tuple[MHAKVPool, HostKVPool]:
    pool = MHAKVPool(8, 4, 2, 1, 2, torch.float32, "cpu", layout)
    return pool, HostKVPool(num_slots, 4, pool)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_has_the_devices_shape_in_one_piece(layout: Layout) -> None:
    pool, host = pools(layout)
    assert pool.pages is not None
    assert host.pages is not None
    assert host.pages.shape == (5, *pool.pages.shape[1:])
    assert host.pages.is_contiguous()
    assert host.format_id == pool.format_id
    assert host.size_bytes == 5 * pool.page_bytes
    assert host.is_pinned == torch.cuda.is_available()


def test_slots_come_and_go_by_whole_pages() -> None:
    _, host = pools()
    slots = host.alloc(12)
    assert slots is not None
    assert host.page_ids(slots) == [1, 2, 3]
    assert host.available_size() == 4
    assert host.alloc(8) is None
    host.free(slots[4:8])
    assert host.available_size() == 8
    with pytest.raises(DoubleFreeError):
        host.free(slots[4:8])


def test_slots_that_a_copy_touches_come_back_with_its_fence() -> None:
    _, host = pools()
    slots = host.alloc(16)
    copy: Future[None] = Future()
    host.free(slots, fence=FutureFence(copy))
    assert (host.available_size(), host.fenced_size()) == (0, 16)
    assert host.alloc(4) is None
    copy.set_result(None)
    assert host.alloc(16) is not None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_of_a_page_go_to_any_other_page_of_the_same_format(layout: Layout) -> None:
    _, host = pools(layout)
    other = pools(layout)[1]
    assert host.pages is not None
    assert other.pages is not None
    host.pages[3] = torch.randn(host.pages.shape[1:], generator=torch.Generator().manual_seed(0))
    data = host.get_page(3)
    assert len(data) == host.page_bytes
    other.set_page(1, data)
    assert torch.equal(other.pages[1], host.pages[3])
    assert not other.pages[2:].any()
    host.pages[3].zero_()
    assert any(data)  # a copy: what is stored later is what was read


def test_bytes_of_another_length_and_pages_that_are_none_are_refused() -> None:
    _, host = pools()
    wrong: list[tuple[int, Any]] = [(1, b"short"), (0, bytes(host.page_bytes)), (5, bytes(host.page_bytes))]
    for page, data in wrong:
        with pytest.raises(UsageError):
            host.set_page(page, data)
    with pytest.raises(UsageError, match="from 1 to 4"):
        host.get_page(0)


def test_a_budget_gives_the_largest_pool_that_fits() -> None:
    pool, _ = pools()
    assert HostKVPool.from_budget(4 * pool.page_bytes + 1, pool).num_slots == 12
    with pytest.raises(ConfigError, match="holds no page"):
        HostKVPool.from_budget(2 * pool.page_bytes - 1, pool)


def test_a_pool_that_does_not_fit_is_refused() -> None:
    pool, _ = pools()
    with pytest.raises(ConfigError, match="page_size is 2 but the device pool's is 4"):
        HostKVPool(8, 2, pool)
    with pytest.raises(ConfigError, match="not a multiple"):
        HostKVPool(6, 4, pool)
    with pytest.raises(ConfigError, match="pages"):
        HostKVPool(1 << 28, 4, MHAKVPool(4, 4, 64, 64, 128, torch.float32))


def test_without_pinned_memory_plain_memory_does(caplog: pytest.LogCaptureFixture) -> None:
    pool, _ = pools()
    if torch.cuda.is_available():
        assert HostKVPool(8, 4, pool, pin_memory=True).is_pinned
    else:
        assert not HostKVPool(8, 4, pool, pin_memory=True).is_pinned
        assert "no pinned memory" in caplog.text


def test_over_a_pool_of_books_pages_have_no_bytes() -> None:
    host = HostKVPool(1 << 20, 16, BookKVPool(64, 16))
    slots = host.alloc(32)
    assert slots is not None
    assert host.pages is None
    assert not host.is_pinned
    assert host.get_page(1) == b""
    host.set_page(1, b"")
    with pytest.raises(UsageError, match="0 bytes"):
        host.set_page(1, b"x")
