"""A served model for tests: the real engine and cache over a model of bytes, which says again what it was told last.

Its tokens are the 256 bytes and a few special ones. What follows a sequence is what stood `PERIOD` tokens before the
end of it: so `b"abcdefgh"` goes on `abcdefghabc...`, and a test says what is answered by what it asks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
from starlette.applications import Starlette
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from aradix import RadixCache
from aradix.engine import AsyncEngine, Chunk
from aradix.serve import ChatTemplate, ModelTokenizer, ServedModel, serve_app, service_of
from tests.support.caches import idle_sum, opened

__all__ = ["END", "NAME", "PERIOD", "Served", "TinyRunner", "served", "tiny_model", "tiny_tokenizer"]

PERIOD = 8
NAME = "tiny"
END = "<end>"
SPECIAL = [END, "<system>", "<user>", "<assistant>", "<tool>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'unspeakable' %}{{ raise_exception('I would rather not') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}"
    "{% endfor %}"
)
"""Ends with the last message, so that the answer begins with its last eight bytes."""


def tiny_tokenizer() -> ModelTokenizer:
    """The tokenizer: a token a byte."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return ModelTokenizer(tokenizer, eos_token_ids=[256 + SPECIAL.index(END)], chat_template=TEMPLATE)


class TinyRunner:
    """The model. Its KV is each token and its place, so that a slot with somebody else's KV is found out.

    Args:
        num_slots: of the pool.
        page_size: of the pool.
        max_context: tokens of a sequence.
    """

    vocab_size = 256 + len(SPECIAL)
    stream = None

    def __init__(self, num_slots: int, page_size: int, max_context: int = 1 << 20) -> None:
        self.max_context = max_context
        self.num_steps = 0
        self.is_held = False
        self.failure: Exception | None = None
        self._kv = np.full((num_slots + page_size, 2), -1)
        self._open = anyio.Event()
        self._open.set()

    async def step(self, chunks: Sequence[Chunk]) -> list[int | None]:
        tokens = [self._follow(chunk) for chunk in chunks]
        self.num_steps += 1
        if self.failure is not None:
            raise self.failure
        await anyio.lowlevel.checkpoint()
        self.is_held = not self._open.is_set()
        await self._open.wait()
        return tokens

    def hold(self) -> None:
        """Have the step that runs, or the next one, take until `go_on`."""
        self._open = anyio.Event()

    def go_on(self) -> None:
        """Let it end."""
        self._open.set()

    def _follow(self, chunk: Chunk) -> int | None:
        slots = chunk.slots.numpy()
        begin = len(slots) - len(chunk.token_ids)
        self._kv[slots[begin:], 0] = range(begin, len(slots))
        self._kv[slots[begin:], 1] = chunk.token_ids
        places, tokens = self._kv[slots].T
        assert (places == range(len(slots))).all(), "KV of somebody else, or of another place"
        return None if chunk.sampler is None else int(tokens[max(0, len(tokens) - PERIOD)])


def tiny_model(
    context_length: int = 1000, *, names: Sequence[str] = (NAME, "small"), chats: bool = True
) -> ServedModel:
    """The model as it is served."""
    tokenizer = tiny_tokenizer()
    return ServedModel(
        names,
        tokenizer,
        ChatTemplate(TEMPLATE, tokenizer.named) if chats else None,
        context_length=context_length,
        vocab_size=TinyRunner.vocab_size,
    )


@dataclass
class Served:
    """What is open while it is served."""

    app: Starlette
    cache: RadixCache
    engine: AsyncEngine
    runner: TinyRunner

    async def idle(self) -> None:
        """Waits until nothing is being answered. The requests must end by themselves, or because their clients left."""
        while service_of(self.app).num_requests or self.engine.num_running or self.engine.num_waiting:
            await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def served(
    num_slots: int = 4096,
    page_size: int = 4,
    *,
    model: ServedModel | None = None,
    max_batch_size: int = 8,
    max_waiting: int | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """Serve the model. What was answered must leave nothing behind; a test that fails inside is not asked for that.

    Args:
        options: of `serve_app`.
    """
    model = model or tiny_model()
    tokenizer = tiny_tokenizer()
    runner = TinyRunner(num_slots, page_size)
    async with opened(num_slots, page_size) as cache:
        engine = AsyncEngine(
            cache,
            runner,
            max_batch_size=max_batch_size,
            max_waiting=max_waiting,
            eos_token_ids=tokenizer.eos_token_ids,
            tokenizer=tokenizer,
        )
        async with engine:
            found = Served(serve_app(engine, cache, model, **options), cache, engine, runner)
            yield found
            with anyio.fail_after(60):
                await found.idle()
        assert cache.stats().num_leases == 0
        assert cache.stats().num_slot_waiters == 0
        assert idle_sum(cache) == num_slots
