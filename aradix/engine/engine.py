"""`AsyncEngine`: requests in, tokens out."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from aradix.cache.home import Home, is_cancellation
from aradix.cache.radix_cache import RadixCache
from aradix.engine.request import EngineClosedError, Generation, Overloaded, Request
from aradix.engine.runner import ModelRunner
from aradix.engine.sampling import Sampler, SamplingParams
from aradix.engine.scheduler import Scheduler
from aradix.engine.text import TextStream, Tokenizer
from aradix.errors import ConfigError, RequestTooLargeError, UsageError
from aradix.keys import Namespace, RadixKey

__all__ = ["AsyncEngine", "EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine did since it was opened; `running` and `waiting` are of now.

    Args:
        running: requests that have a seat.
        waiting: requests that wait for one.
        finished: requests that came to their end.
        aborted: requests that nobody wanted any more.
        failed: requests that ended in an error.
        steps: of the model.
        prefill_tokens: tokens of prompts that were computed, and of retracted requests those computed again.
        cached_tokens: tokens of prompts that were not computed, because the cache had them.
        decoded_tokens: tokens that were computed one by one.
        retractions: times that a request gave its slots back and waited again.
    """

    running: int
    waiting: int
    finished: int
    aborted: int
    failed: int
    steps: int
    prefill_tokens: int
    cached_tokens: int
    decoded_tokens: int
    retractions: int


class AsyncEngine:
    """A scheduler over a cache and a model. Use it with `async with`, inside that of its cache.

        async with RadixCache(runner.cache_params()) as cache, AsyncEngine(cache, runner) as engine:
            async for token in engine.generate(prompt_ids, SamplingParams(max_tokens=100)):
                ...

    Leaving ends every request that is still there; `await engine.drain()` first lets them finish.

    Args:
        cache: opened, and on the runner's stream: `CacheInitParams(streams=(runner.stream,))`.
        runner: the model.
        max_batch_size: requests that are computed at a time.
        chunk_tokens: the most tokens of prompts in a step, so that long prompts do not hold up those who decode.
        max_waiting: requests that may wait for a place in the batch; beyond them `generate` raises `Overloaded`. `None`
            for no limit.
        join: a request waits for what another one is computing instead of computing the same: of many that come
            together with a prompt in common, one computes it.
        eos_token_ids: with which the model says that it is done.
        tokenizer: for `Generation.text` and stop texts.

    Raises:
        ConfigError: a value that cannot work; a cache that does not know the runner's stream.
    """

    def __init__(
        self,
        cache: RadixCache,
        runner: ModelRunner,
        *,
        max_batch_size: int = 8,
        chunk_tokens: int = 512,
        max_waiting: int | None = None,
        join: bool = True,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        for name, value, least in (("max_batch_size", max_batch_size, 1), ("chunk_tokens", chunk_tokens, 1)):
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} must be an int of at least {least}, got {value!r}")
        if max_waiting is not None and (type(max_waiting) is not int or max_waiting < 0):
            raise ConfigError(f"max_waiting must be an int of at least 0, or None, got {max_waiting!r}")
        if type(join) is not bool:
            raise ConfigError(f"join must be a bool, got {join!r}")
        params = cache._params
        if params.is_eagle:
            raise ConfigError("the engine decodes one token at a time; a cache with is_eagle=True is of no use to it")
        if runner.stream is not None and runner.stream not in params.streams:
            raise ConfigError(
                f"the cache does not know the stream that the model runs on, {runner.stream!r} "
                "(hint: CacheInitParams(streams=(runner.stream,)), or runner.cache_params())"
            )
        self._capacity = params.allocator.usable_size
        self._page_size = params.page_size
        self._runner = runner
        self._scheduler = Scheduler(cache, runner, max_batch_size, chunk_tokens, join)
        self._max_batch_size = max_batch_size
        self._max_waiting = max_waiting
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._home: Home | None = None
        self._task_group: TaskGroup | None = None
        self._is_open = False
        self._num_requests = 0

    # ---- opening and closing

    async def __aenter__(self) -> Self:
        """Start the scheduler. Does not wait."""
        if self._home is not None:
            raise UsageError("this engine was opened already; make another AsyncEngine")
        self._home = Home()
        self._task_group = anyio.create_task_group()
        await self._task_group.__aenter__()
        self._scheduler.start(self._task_group)
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Abort what is left, and end the scheduler. Does not wait for a running step."""
        if self._home is None or self._task_group is None:
            raise UsageError("this engine was not opened")
        self._is_open = False
        self._task_group.cancel_scope.cancel()
        if error is not None and not is_cancellation(error):
            # The user's own error goes on as it is, not in a group; a failure in the background still comes first.
            await self._task_group.__aexit__(None, None, None)
            return None
        return await self._task_group.__aexit__(kind, error, trace)

    async def drain(self) -> None:
        """Take no more requests, and wait until the last one has ended. Cancelled, it stays closed to new ones."""
        self._is_open = False
        scheduler = self._scheduler
        while scheduler.waiting or scheduler.seated:
            await scheduler.left.wait()

    # ---- requests

    def generate(
        self,
        token_ids: Any,
        sampling: SamplingParams | None = None,
        *,
        extra_key: str | Namespace | None = None,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        priority: int = 0,
        request_id: str | None = None,
    ) -> Generation:
        """Tokens that follow a prompt, as an async iterator. Does not wait; the request is under way at once.

        Args:
            token_ids: the prompt, any flat sequence or buffer of ints.
            sampling: greedy, 16 tokens, unless told otherwise.
            extra_key, cache_salt, lora_name: the namespace of the cache: what must not be shared never meets. The
                model is the same for all.
            priority: higher goes first, and takes the place of lower ones under pressure. Who computes what a
                request waits for (`join`) is at least as urgent as that one meanwhile.
            request_id: names it in logs; made up where it is left out.

        Raises:
            InvalidKeyError: token ids that are none.
            UsageError: no tokens, ids that the model does not know, stop texts without a tokenizer.
            RequestTooLargeError: more tokens than the pool, or the model, can ever hold.
            Overloaded: too many wait already.
            EngineClosedError: the engine is closed, or being drained, or was cancelled with what is around it.
        """
        if self._home is None:
            raise UsageError("this engine is not open; use `async with AsyncEngine(...)`")
        self._home.check()
        if not self.is_open:
            raise EngineClosedError("the engine is closed, or being drained, and takes no more requests")
        sampling = SamplingParams() if sampling is None else sampling
        namespace = _namespace(extra_key, cache_salt, lora_name)
        key = RadixKey(token_ids, namespace)
        self._check_prompt(key, sampling)
        if type(priority) is not int:
            raise UsageError(f"priority must be an int, got {priority!r}")
        if sampling.stop and self._tokenizer is None:
            raise UsageError("stop texts need a tokenizer: AsyncEngine(..., tokenizer=...)")
        self.check_load()
        self._num_requests += 1
        request = Request(
            self._num_requests,
            key.token_ids().tolist(),
            namespace,
            sampling,
            Sampler(sampling, secrets.randbits(64)),
            sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | self._eos_token_ids,
            priority,
            f"request-{self._num_requests}" if request_id is None else request_id,
            None if self._tokenizer is None else TextStream(self._tokenizer, sampling.stop),
            self._scheduler.forget,
        )
        self._scheduler.submit(request)
        return Generation(request, self._home)

    def _check_prompt(self, key: RadixKey, sampling: SamplingParams) -> None:
        num_prompt, vocab_size = len(key), self._runner.vocab_size
        if not num_prompt:
            raise UsageError("a prompt needs at least one token; begin it with the model's own first one")
        largest = int(key.token_ids().max())
        if largest >= vocab_size:
            raise UsageError(f"token id {largest} is beyond the model's vocabulary of {vocab_size}")
        num_tokens = num_prompt + sampling.max_tokens
        if num_tokens > self._runner.max_context:
            raise RequestTooLargeError(
                f"a prompt of {num_prompt} tokens and max_tokens={sampling.max_tokens} make {num_tokens}; the model "
                f"takes {self._runner.max_context} (hint: shorten the prompt, or ask for fewer tokens)"
            )
        # The last token's KV is never computed.
        num_slots = -(-(num_tokens - 1) // self._page_size) * self._page_size
        if num_slots > self._capacity():
            raise RequestTooLargeError(
                f"a prompt of {num_prompt} tokens and max_tokens={sampling.max_tokens} need {num_slots} slots; the "
                f"pool has {self._capacity()} (hint: ask for fewer tokens, or make a larger pool)"
            )

    def check_load(self) -> None:
        """Whether another request would be let in now, before work is put into one. Does not wait.

        Raises:
            Overloaded: too many wait already.
        """
        scheduler = self._scheduler
        num_waiting = len(scheduler.waiting)
        # Who gets a seat at once does not wait.
        if self._max_waiting is None or num_waiting < max(self._max_waiting, int(scheduler.has_free_seats)):
            return
        # As long as it takes until one of the seats, and so a place in the queue, is free, if the requests go on as
        # they did so far.
        retry_after = max(1.0, scheduler.seconds_seated() / self._max_batch_size)
        raise Overloaded(
            f"{len(scheduler.seated)} requests run and {num_waiting} wait, of at most {self._max_waiting}; "
            f"try again in {retry_after:.0f} s",
            retry_after,
        )

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: it is neither closed nor being drained, and has not failed."""
        return self._is_open and self._scheduler.is_running

    @property
    def max_requests(self) -> int | None:
        """Requests that can be here at a time, with a seat or waiting for one; `None` for no limit."""
        return None if self._max_waiting is None else self._max_batch_size + self._max_waiting

    @property
    def num_running(self) -> int:
        """Requests that have a seat."""
        return len(self._scheduler.seated)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._scheduler.waiting)

    def stats(self) -> EngineStats:
        """What it did so far. Does not wait."""
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.seated),
            waiting=len(scheduler.waiting),
            finished=scheduler.num_finished,
            aborted=scheduler.num_aborted,
            failed=scheduler.num_failed,
            steps=scheduler.num_steps,
            prefill_tokens=scheduler.num_prefill_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            decoded_tokens=scheduler.num_decoded_tokens,
            retractions=scheduler.num_retractions,
        )


def _namespace(extra_key: str | Namespace | None, cache_salt: str | None, lora_name: str | None) -> Namespace:
    """One namespace of all that must not be shared."""
    namespace = Namespace.of(extra_key)
    named = {"salt": cache_salt, "lora": lora_name}
    for name, value in named.items():
        if value is not None:
            if getattr(namespace, name) is not None:
                raise UsageError(f"extra_key={namespace!r} names a {name} already, beside {value!r}")
            namespace = namespace._replace(**{name: value})
    return namespace
