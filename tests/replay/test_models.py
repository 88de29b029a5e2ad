"""What a token's KV takes, and what hits are worth."""

from __future__ import annotations

import pytest

from aradix.replay.models import MODELS, Worth, model_named
from aradix.replay.report import bytes_text, seconds_text
from aradix.replay.request import ReplayError


@pytest.mark.parametrize(
    ("name", "value_type", "kv_bytes"),
    [
        ("Llama-3.1-8B", "bf16", 128 * 1024),
        ("llama-3.1-70b", "bf16", 320 * 1024),
        ("Llama-3.1-70B", "fp8", 160 * 1024),
        ("Qwen3-8B", "bf16", 144 * 1024),
        ("Qwen3-32B", "fp16", 256 * 1024),
        ("Mistral-7B-v0.3", "bf16", 128 * 1024),
        # One latent of 576 a layer, for keys and values of all heads.
        ("DeepSeek-V3", "bf16", 61 * 576 * 2),
        ("SmolLM2-135M", "fp32", 30 * 2 * 3 * 64 * 4),
    ],
)
def test_a_models_kv_follows_from_its_shape(name: str, value_type: str, kv_bytes: int) -> None:
    _, shape = model_named(name)
    assert shape.bytes_per_token(value_type) == kv_bytes


def test_every_model_of_the_table_has_kv_of_one_kind() -> None:
    for name, shape in MODELS.items():
        assert shape.layers > 0, name
        assert (shape.kv_heads > 0 and shape.head_dim > 0) != (shape.latent_dim > 0), name


def test_a_model_that_is_not_there_says_which_are() -> None:
    with pytest.raises(ReplayError, match=r"'gpt-9' is none of .*SmolLM2-135M; give --kv-bytes-per-token"):
        model_named("gpt-9")


def test_what_is_not_known_is_worth_nothing_that_is_said() -> None:
    assert Worth().kv_bytes(10) is None
    assert Worth().seconds_saved(10) is None
    worth = Worth(kv_bytes_per_token=1024, prefill_tokens_per_s=2000)
    assert (worth.kv_bytes(10), worth.seconds_saved(10_000)) == (10_240, 5)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (122 * 2**30, "122 GiB"), (2**41, "2 TiB")]
)
def test_bytes_are_short(num_bytes: float, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.25 s"),
        (59.94, "59.9 s"),
        (59.99, "1 min 00 s"),
        (61, "1 min 01 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (3_600_000, "1,000 h 00 min"),
    ],
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
