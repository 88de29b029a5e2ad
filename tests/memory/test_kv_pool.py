"""The KV pools: what is stored at a slot is found there, by layer and by page, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aradix import MHAKVPool, MLAKVPool
from aradix.errors import ConfigError, UsageError
from aradix.memory.kv_pool import BookKVPool, KVPool, Layout

LAYOUTS: tuple[Layout, ...] = ("layer_first", "page_first")
NUM_SLOTS, PAGE_SIZE, NUM_LAYERS = 12, 4, 3


def mha(layout: Layout = "layer_first", dtype: torch.dtype = torch.float32) -> MHAKVPool:
    return MHAKVPool(NUM_SLOTS, PAGE_SIZE, NUM_LAYERS, 2, 8, dtype, "cpu", layout)


def mla(layout: Layout = "layer_first") -> MLAKVPool:
    return MLAKVPool(NUM_SLOTS, PAGE_SIZE, NUM_LAYERS, 6, 2, torch.float32, "cpu", layout)


def random_kv(n: int, heads: int = 2, dim: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, heads, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_stored_at_slots_is_found_there_and_nowhere_else(layout: Layout) -> None:
    pool = mha(layout)
    slots = torch.tensor([15, 4, 9])
    stored = [(random_kv(3, seed=2 * layer), random_kv(3, seed=2 * layer + 1)) for layer in range(NUM_LAYERS)]
    for layer, (k, v) in enumerate(stored):
        pool.set_kv(layer, slots, k, v)
    for layer, (k, v) in enumerate(stored):
        keys, values = pool.get_kv(layer)
        assert keys.shape == values.shape == (NUM_SLOTS + PAGE_SIZE, 2, 8)
        assert torch.equal(keys[slots], k)
        assert torch.equal(values[slots], v)
        assert keys is pool.key_buffer[layer]
        assert values is pool.value_buffer[layer]
        others = [slot for slot in range(NUM_SLOTS + PAGE_SIZE) if slot not in slots]
        assert not keys[others].any()
        assert not values[others].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_a_view_of_the_same_bytes(layout: Layout) -> None:
    pool = mha(layout)
    k, v = random_kv(PAGE_SIZE), random_kv(PAGE_SIZE, seed=1)
    pool.set_kv(1, torch.arange(8, 12), k, v)
    assert pool.pages is not None
    assert pool.pages.shape[0] == NUM_SLOTS // PAGE_SIZE + 1
    assert pool.pages[2].numel() * 4 == pool.page_bytes
    used = pool.pages.flatten(1).ne(0).any(1)
    assert used.tolist() == [False, False, True, False]
    page = pool.layer_pages(1)[2]
    assert sorted(page.flatten().tolist()) == sorted(torch.cat((k.flatten(), v.flatten())).tolist())
    assert not pool.layer_pages(0).any()
    page.zero_()
    assert not pool.key_buffer[1].any()


def test_a_page_of_a_page_first_pool_is_one_piece_and_a_layer_of_a_layer_first_pool_too() -> None:
    pool = mha("page_first")
    assert pool.pages is not None
    assert pool.pages.is_contiguous()
    assert all(rows.is_contiguous() for rows in (*mha().key_buffer, *mha().value_buffer))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_latent_pool_keeps_one_part_and_shows_it_as_keys_and_values(layout: Layout) -> None:
    pool = mla(layout)
    slots = torch.tensor([5, 4])
    latent, rope = random_kv(2, 1, 6), random_kv(2, 1, 2, seed=1)
    pool.set_kv(2, slots, latent, rope)
    keys, values = pool.get_kv(2)
    assert keys.shape == (NUM_SLOTS + PAGE_SIZE, 1, 8)
    assert torch.equal(keys[slots], torch.cat((latent, rope), -1))
    assert torch.equal(values[slots], latent)
    assert values.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
    assert pool.slot_bytes == NUM_LAYERS * 8 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_of_another_dtype_are_converted(dtype: torch.dtype, layout: Layout) -> None:
    pool = mha(layout, dtype)
    k, v = random_kv(2), random_kv(2, seed=1)
    slots = torch.tensor([6, 13])
    pool.set_kv(0, slots, k, v)
    as_bytes = torch.uint8 if dtype.itemsize == 1 else torch.int16
    for rows, given in zip(pool.get_kv(0), (k, v), strict=True):
        assert torch.equal(rows.view(as_bytes)[slots], given.to(dtype).view(as_bytes))


@pytest.mark.parametrize("pool", [mha(), mha("page_first"), mla(), mla("page_first")], ids=repr)
def test_sizes_are_those_of_the_buffers(pool: Any) -> None:
    assert pool.size_bytes == pool.buffer.numel() * pool.buffer.element_size()
    assert pool.size_bytes == pool.page_bytes * (NUM_SLOTS // PAGE_SIZE + 1)
    assert pool.slot_bytes * PAGE_SIZE == pool.page_bytes


def test_a_budget_gives_the_largest_pool_that_fits() -> None:
    page = mha().page_bytes
    for budget, slots in ((2 * page, 4), (4 * page - 1, 8), (4 * page, 12)):
        pool = MHAKVPool.from_budget(budget, PAGE_SIZE, NUM_LAYERS, 2, 8, torch.float32)
        assert pool.num_slots == slots
        assert pool.size_bytes <= budget
    latent = MLAKVPool.from_budget(5 * mla().page_bytes, PAGE_SIZE, NUM_LAYERS, 6, 2, torch.float32)
    assert latent.num_slots == 16
    with pytest.raises(ConfigError, match=f"take {2 * page} bytes"):
        MHAKVPool.from_budget(2 * page - 1, PAGE_SIZE, NUM_LAYERS, 2, 8, torch.float32)


def test_the_format_tells_apart_what_must_not_be_mixed() -> None:
    pools: list[KVPool] = [
        mha(),
        mha("page_first"),
        mha(dtype=torch.float16),
        mla(),
        MHAKVPool(NUM_SLOTS, PAGE_SIZE, NUM_LAYERS, 4, 4, torch.float32),
        MHAKVPool(NUM_SLOTS, PAGE_SIZE, 4, 2, 8, torch.float32),
        MHAKVPool(NUM_SLOTS, 2, NUM_LAYERS, 2, 8, torch.float32),
        MLAKVPool(NUM_SLOTS, PAGE_SIZE, NUM_LAYERS, 4, 4, torch.float32),
        BookKVPool(NUM_SLOTS, PAGE_SIZE),
    ]
    assert len({pool.format_id for pool in pools}) == len(pools)
    assert MHAKVPool(24, PAGE_SIZE, NUM_LAYERS, 2, 8, torch.float32).format_id == mha().format_id


def test_slots_become_pages_only_whole_and_in_order() -> None:
    pool = mha()
    assert pool.page_ids(torch.tensor([12, 13, 14, 15, 4, 5, 6, 7])) == [3, 1]
    assert pool.page_ids([]) == []
    assert BookKVPool(3).page_ids(torch.tensor([3, 1])) == [3, 1]
    wrong: list[Any] = [
        [4, 5, 6],
        [5, 6, 7, 8],
        [4, 6, 5, 7],
        [0, 1, 2, 3],
        [16, 17, 18, 19],
        [4.0, 5.0, 6.0, 7.0],
        [[4, 5, 6, 7]],
    ]
    for slots in wrong:
        with pytest.raises(UsageError):
            pool.page_ids(torch.tensor(slots))


@pytest.mark.parametrize(
    "changed",
    [
        {"num_slots": 10},
        {"num_slots": 0},
        {"page_size": 0},
        {"page_size": True},
        {"num_layers": 0},
        {"num_heads": 0},
        {"head_dim": 1.5},
        {"dtype": "float16"},
        {"layout": "head_first"},
        {"device": "no such"},
        {"num_slots": 1 << 50},
    ],
)
def test_what_cannot_work_is_refused_with_the_value(changed: dict[str, Any]) -> None:
    good: dict[str, Any] = {"num_slots": 8, "page_size": 4, "num_layers": 1, "num_heads": 1, "head_dim": 1}
    MHAKVPool(**good)
    with pytest.raises(ConfigError, match=str(next(iter(changed.values()))).replace("1125899906842624", "bytes")):
        MHAKVPool(**good | changed)


def test_values_of_a_wrong_shape_or_layer_change_nothing() -> None:
    pool = mha()
    slots = torch.tensor([4, 5])
    with pytest.raises(UsageError, match="2 slots take values of shape"):
        pool.set_kv(0, slots, random_kv(3), random_kv(3))
    for layer in (-1, 3):
        with pytest.raises(UsageError, match="of 3"):
            pool.set_kv(layer, slots, random_kv(2), random_kv(2))
        with pytest.raises(UsageError, match="of 3"):
            pool.get_kv(layer)
    assert not pool.buffer.any()


def test_a_pool_of_books_has_sizes_and_no_memory() -> None:
    pool = BookKVPool(1 << 40, 16, slot_bytes=100, num_layers=2)
    assert pool.pages is None
    assert pool.page_bytes == 1600
    assert pool.size_bytes == 100 * ((1 << 40) + 16)
    with pytest.raises(UsageError, match="only keeps books"):
        pool.layer_pages(0)
