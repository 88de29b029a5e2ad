"""Blocks stand for tokens: equal ids for equal ones, distinct ids for distinct ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aradix.replay.request import MAX_BLOCK_ID, MAX_TOKEN, expand_blocks
from tests.replay.traces import block_request, token_request

_IDS = st.integers(0, MAX_BLOCK_ID)


@given(st.lists(_IDS, min_size=1, max_size=20), st.sampled_from([2, 4, 64, 512]))
def test_a_block_is_its_ids_two_halves_over_and_over(ids: list[int], block_size: int) -> None:
    tokens = expand_blocks(np.array(ids, np.int64), block_size)
    assert tokens.dtype == np.int32
    pages = tokens.reshape(len(ids), block_size)
    for block, page in zip(ids, pages.tolist(), strict=True):
        assert page == [block & MAX_TOKEN, block >> 31] * (block_size // 2)


@given(_IDS, _IDS)
def test_distinct_ids_differ_and_equal_ids_agree(one: int, other: int) -> None:
    pages = expand_blocks(np.array([one, other], np.int64), 2).reshape(2, 2)
    assert (pages[0].tolist() == pages[1].tolist()) == (one == other)


def test_every_token_of_a_block_can_be_a_key() -> None:
    tokens = expand_blocks(np.array([0, MAX_TOKEN, MAX_BLOCK_ID], np.int64), 2)
    assert tokens.min() >= 0
    assert tokens.tolist() == [0, 0, MAX_TOKEN, 0, MAX_TOKEN, MAX_TOKEN]


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 5, 12, 100, None])
def test_a_limit_cuts_the_expanded_prompt(limit: int | None) -> None:
    request = block_request([7, 8, 9])
    assert request.num_tokens == 12
    assert request.prompt(limit).tolist() == request.prompt().tolist()[:limit]


def test_token_ids_are_the_prompt_itself() -> None:
    request = token_request([5, 6, 7])
    assert request.prompt().tolist() == [5, 6, 7]
    assert request.prompt(2).tolist() == [5, 6]
    assert np.shares_memory(request.prompt(), request.ids)
