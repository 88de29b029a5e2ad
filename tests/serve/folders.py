"""Folders as Hugging Face's models come, small enough to be made by a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from aradix.engine.llama import LAYER_PARTS

__all__ = ["small_llama", "tokenizer_folder"]


def tokenizer_folder(at: Path, *, processor: bool = True, **files: Any) -> Path:
    """A model's folder with a tokenizer of bytes, and settings by file."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<eot>")])
    if processor:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(at / "tokenizer.json"))
    for name, settings in files.items():
        (at / f"{name}.json").write_text(json.dumps(settings), "utf-8")
    return at


def small_llama(at: Path) -> Path:
    """A Llama of two layers, whose weights are drawn: it answers, and nobody knows what."""
    hidden, heads, kv_heads, inner, vocab = 16, 4, 2, 32, 259
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer_folder(at, processor=False, config=config, tokenizer_config={"chat_template": template})
    kv = hidden // heads * kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    names = {
        f"model.layers.{i}.{part}.weight": shapes.get(part, (hidden, hidden)) for i in (0, 1) for part in LAYER_PARTS
    }
    names |= {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    draw = torch.Generator().manual_seed(1)
    save_file({name: torch.randn(shape, generator=draw) for name, shape in names.items()}, at / "model.safetensors")
    return at
