"""The model is the model: its logits are those of transformers' Llama, from whatever file it was read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aradix.engine import LlamaConfig, LlamaModel, LlamaRunner
from aradix.engine.weights import read_folder, read_gguf
from aradix.errors import ConfigError
from tests.engine.tiny_llama import CONFIG, MLP_SIZE, cold, tiny_model

PROMPT = [(17 * place) % 91 + 3 for place in range(40)]
CLOSE = 1e-5
"""transformers takes norms and angles in float32, whatever the rest is in."""


def reference(model: LlamaModel, **rope: Any) -> Any:
    """transformers' Llama with the same weights."""
    from transformers import LlamaForCausalLM

    made: Any = LlamaForCausalLM(hf_config(model, **rope)).to(torch.float64).eval()
    missing, unknown = made.load_state_dict(model.weights, strict=False)
    assert not unknown
    assert missing in ([], ["lm_head.weight"])
    return made


def hf_config(model: LlamaModel, **rope: Any) -> Any:
    from transformers import LlamaConfig as Theirs

    shape = model.config
    return Theirs(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=MLP_SIZE,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_context,
        rms_norm_eps=shape.rms_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta, **rope},
        tie_word_embeddings="lm_head.weight" not in model.weights,
        architectures=["LlamaForCausalLM"],
    )


def logits(model: LlamaModel, prompt: list[int]) -> torch.Tensor:
    """After each token of a prompt."""
    slots = torch.arange(1, len(prompt) + 1)
    return model.logits(model.hidden([(prompt, slots)], model.make_pool(len(prompt), 1)))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES: list[tuple[LlamaConfig, bool, dict[str, Any]]] = [
    (CONFIG, False, {}),
    (replace(CONFIG, num_kv_heads=4, head_dim=16, rope_theta=500.0, rms_epsilon=1e-3), True, {}),
    (replace(CONFIG, num_kv_heads=1, rope_theta=500.0, rope_llama3=(8.0, 1.0, 4.0, 32)), True, LLAMA3),
]


@pytest.mark.parametrize(("config", "tied", "rope"), SHAPES, ids=["grouped", "wide, tied", "llama 3.1"])
def test_logits_are_those_of_transformers(config: LlamaConfig, tied: bool, rope: dict[str, Any]) -> None:
    model = tiny_model(config, tied)
    with torch.inference_mode():
        theirs = reference(model, **rope)(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits(model, PROMPT), theirs, atol=CLOSE, rtol=0)


def test_greedy_tokens_are_those_of_transformers() -> None:
    model = tiny_model()
    theirs = reference(model).generate(
        torch.tensor([PROMPT[:9]]),
        attention_mask=torch.ones(1, 9),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
    )
    assert cold(model, PROMPT[:9], 20) == theirs[0, 9:].tolist()


def test_a_ragged_batch_is_each_of_its_sequences() -> None:
    model = tiny_model()
    pool = model.make_pool(256, 1)
    whole = logits(model, PROMPT)
    # Three sequences, in slots that lie across one another: nothing known, all but some, all but the last token.
    slots = [torch.arange(1, 121, 3), torch.arange(120, 0, -3), torch.arange(2, 122, 3)]
    spans = [(0, 35), (30, 35), (39, 40)]
    for rows, (begin, _) in zip(slots[1:], spans[1:], strict=True):
        model.hidden([(PROMPT[:begin], rows[:begin])], pool)
    runs = [(PROMPT[begin:end], rows[:end]) for rows, (begin, end) in zip(slots, spans, strict=True)]
    hidden = model.hidden(runs, pool)
    expected = torch.cat([whole[begin:end] for begin, end in spans])
    torch.testing.assert_close(model.logits(hidden), expected, atol=1e-12, rtol=0)


# ---- folders of Hugging Face's


def saved(folder: Path, model: LlamaModel, **rope: Any) -> Path:
    """A folder as transformers saves it, its weights in several files."""
    reference(model, **rope).save_pretrained(folder, max_shard_size="40KB")
    return folder


@pytest.mark.parametrize(("config", "tied", "rope"), SHAPES, ids=["grouped", "wide, tied", "llama 3.1"])
def test_a_folder_of_transformers_is_read_as_it_was_saved(
    tmp_path: Path, config: LlamaConfig, tied: bool, rope: dict[str, Any]
) -> None:
    model = tiny_model(config, tied)
    read = read_folder(saved(tmp_path, model, **rope), torch.float64, "cpu")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert read.config == config
    torch.testing.assert_close(logits(read, PROMPT), logits(model, PROMPT), atol=1e-12, rtol=0)


def test_a_folder_from_before_transformers_5_is_read(tmp_path: Path) -> None:
    config, tied, rope = SHAPES[2]
    saved(tmp_path, tiny_model(config, tied), **rope)
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    parameters = said.pop("rope_parameters")
    said |= {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
    file.write_text(json.dumps(said))
    assert read_folder(tmp_path, torch.float64, "cpu").config == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"sliding_window": 128}, "sliding window of 128"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "'yarn'"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads"),
        ({"num_hidden_layers": 3}, "9 of 29 weights are missing"),
        ({"attention_bias": True}, "attention_bias"),
        ({"vocab_size": None}, "does not say vocab_size"),
    ],
)
def test_what_would_say_nothing_sensible_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    saved(tmp_path, tiny_model())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        read_folder(tmp_path, torch.float64, "cpu")


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config.json"):
        LlamaRunner.from_folder(tmp_path)
    saved(tmp_path, tiny_model())
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match="has no"):
        LlamaRunner.from_folder(tmp_path)


# ---- GGUF


def neighbours(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The rows of a projection as GGUF has them, whose rotary pairs are neighbours."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def written(path: Path, model: LlamaModel, factors: Any = None, **fields: Any) -> Path:
    """A GGUF file of a model, in float32, with other fields if told."""
    import gguf

    from aradix.engine.weights import _GGUF_NAMES, _GGUF_PARTS

    shape = model.config
    writer = gguf.GGUFWriter(path, fields.pop("architecture", "llama"))
    said = {
        "llama.block_count": shape.num_layers,
        "llama.embedding_length": shape.hidden_size,
        "llama.context_length": shape.max_context,
        "llama.attention.head_count": shape.num_heads,
        "llama.attention.head_count_kv": shape.num_kv_heads,
        "llama.attention.key_length": shape.head_dim,
        **{name.replace("__", "."): value for name, value in fields.items()},
    }
    for name, value in said.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", shape.rms_epsilon)
    writer.add_float32("llama.rope.freq_base", shape.rope_theta)
    writer.add_token_list([f"token {i}" for i in range(shape.vocab_size)])
    theirs = {ours: name for name, ours in _GGUF_NAMES.items()}
    for name, weight in model.weights.items():
        if name in theirs:
            writer.add_tensor(theirs[name], weight.float().numpy())
            continue
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            weight = neighbours(weight, shape.num_heads if "q_proj" in part else shape.num_kv_heads)
        short = next(short for short, long in _GGUF_PARTS.items() if long == part)
        writer.add_tensor(f"blk.{layer}.{short}.weight", weight.float().numpy())
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_is_read_as_it_was_written(tmp_path: Path, tied: bool) -> None:
    model = tiny_model(tied=tied)
    read = read_gguf(written(tmp_path / "a.gguf", model), torch.float64, "cpu")
    assert replace(read.config, rms_epsilon=1e-5) == CONFIG
    torch.testing.assert_close(logits(read, PROMPT), logits(model, PROMPT), atol=1e-4, rtol=0)


def test_rotary_factors_in_a_gguf_file_count(tmp_path: Path) -> None:
    config, tied, _ = SHAPES[2]
    model = tiny_model(config, tied)
    factors = replace(config, rope_llama3=None).rotary_frequencies() / config.rotary_frequencies()
    read = read_gguf(written(tmp_path / "a.gguf", model, factors), torch.float64, "cpu")
    torch.testing.assert_close(logits(read, PROMPT), logits(model, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "gpt2"}, "is a gpt2"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn'"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__block_count": None}, "does not say llama.block_count"),
        ({"llama__block_count": 3}, "9 of 29 weights are missing"),
    ],
)
def test_a_gguf_file_of_another_model_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_gguf(written(tmp_path / "a.gguf", tiny_model(), **fields), torch.float64, "cpu")


def test_gguf_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        LlamaRunner.from_gguf(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(b"something else altogether")
    with pytest.raises(ConfigError, match="is no GGUF file"):
        LlamaRunner.from_gguf(tmp_path / "a.gguf")
