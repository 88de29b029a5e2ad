"""Which token is chosen, and which parameters are refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from aradix.engine import Sampler, SamplingParams
from aradix.errors import ConfigError

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 2.0], dtype=torch.float64)


def drawn(params: SamplingParams, num_draws: int, seed: int = 0) -> list[int]:
    sampler = Sampler(params, seed)
    return [sampler.choose(LOGITS, position) for position in range(num_draws)]


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    assert set(drawn(SamplingParams(), 5)) == {1}
    assert Sampler(SamplingParams(), 0).is_greedy
    assert not Sampler(SamplingParams(temperature=0.1), 0).is_greedy


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_are_as_likely_as_the_model_says(temperature: float) -> None:
    num_draws = 2000
    found = torch.bincount(torch.tensor(drawn(SamplingParams(temperature=temperature), num_draws)), minlength=5)
    likely = torch.softmax(LOGITS / temperature, -1)
    # Five standard deviations; the seed is fixed.
    assert ((found / num_draws - likely).abs() < 5 * (likely * (1 - likely) / num_draws).sqrt()).all()


@pytest.mark.parametrize(
    ("top_p", "among"),
    [(1e-9, {1}), (0.3, {1}), (0.5, {1, 4}), (0.85, {1, 2, 4}), (0.95, {0, 1, 2, 4}), (1.0, set(range(5)))],
)
def test_top_p_leaves_the_unlikely_out(top_p: float, among: set[int]) -> None:
    # The likeliest have .39, .39, .14, .05 and .02 of the probability.
    assert set(drawn(SamplingParams(temperature=1.0, top_p=top_p), 1000)) == among


def test_a_low_temperature_is_nearly_greedy_and_never_nan() -> None:
    assert set(drawn(SamplingParams(temperature=1e-9), 100)) == {1, 4}  # which are equally likely


@pytest.mark.parametrize("temperature", [1e-300, 1e-308, 5e-324])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_lowest_temperatures_take_the_likeliest_too(temperature: float, sign: int) -> None:
    logits = sign * torch.tensor([1.0, 30.0, 2.0, 29.0, 40.0, 0.5])
    sampler = Sampler(SamplingParams(temperature=temperature), 1)
    assert {sampler.choose(logits, position) for position in range(20)} == {int(logits.argmax())}


def test_the_highest_temperature_makes_all_alike() -> None:
    assert set(drawn(SamplingParams(temperature=sys.float_info.max), 200)) == set(range(5))


def test_a_draw_depends_on_the_seed_and_the_place_alone() -> None:
    params = SamplingParams(temperature=1.0)
    first = drawn(params, 50, seed=1)
    assert first == drawn(params, 50, seed=1)
    assert first != drawn(params, 50, seed=2)
    backwards = Sampler(params, 1)
    assert [backwards.choose(LOGITS.float(), position) for position in reversed(range(50))] == first[::-1]
    assert drawn(SamplingParams(temperature=1.0, seed=1), 50, seed=9) == first
    assert len(drawn(SamplingParams(temperature=1.0, seed=2**64 - 1), 5)) == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens .* got 0"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature .* got -0.1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p .* got 0"),
        ({"top_p": 1.01}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop": "abc"}, "stop must be a tuple"),
        ({"stop": ("a", "")}, "none of them empty"),
    ],
)
def test_what_cannot_work_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**wrong)


def test_any_collection_will_do() -> None:
    params = SamplingParams(stop_token_ids=[1, 2, 2], stop=["a"])  # type: ignore[arg-type]
    assert (params.stop_token_ids, params.stop) == (frozenset({1, 2}), ("a",))
    assert hash(params) == hash(SamplingParams(stop_token_ids=frozenset({2, 1}), stop=("a",)))
