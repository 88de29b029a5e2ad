"""`Request`: one generation inside the engine; `Generation`: what its consumer holds of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Self

import anyio

from aradix.cache.home import Home
from aradix.cache.lease import Lease
from aradix.engine.sampling import Sampler, SamplingParams
from aradix.engine.text import TextStream
from aradix.errors import AradixError, CapacityError, UsageError
from aradix.keys import Namespace, RadixKey

__all__ = ["EngineClosedError", "FinishReason", "Generation", "Overloaded", "Pulse", "Request", "StepError", "caused"]

FinishReason = Literal["stop", "length", "abort"]


class Overloaded(CapacityError):
    """As many requests wait as the engine lets wait; `retry_after` is in seconds, an estimate."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosedError(AradixError):
    """The engine is closed, or is being drained, and takes no more requests."""


class StepError(AradixError):
    """A step of the model failed, and with it every request that it computed; the cause is what the runner raised."""


def caused(error: AradixError, cause: BaseException) -> AradixError:
    """An error with its cause: a new one for each request, since whoever raises one writes into it."""
    error.__cause__ = cause
    return error


class Pulse:
    """Wakes whoever waits now. Look at what you wait for first, and do not wait for anything else in between."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def send(self) -> None:
        """Wake them. Does not wait."""
        self._event.set()
        self._event = anyio.Event()

    async def wait(self) -> None:
        """Until the next `send`."""
        await self._event.wait()


class Request:
    """One generation, from its arrival to its last token. Nothing here waits.

    `tokens` are the prompt's and what was generated, which is never lost: a request that gives its slots back has its
    KV computed again. The KV of the first `num_computed` of them stands in the slots of `lease`.

    Args:
        number: in the order of arrival.
        stop_token_ids: those of the sampling, and the model's own unless they are to be ignored.
        text: follows the generated tokens, where there is a tokenizer.
        on_end: told once, after the slots went back.
    """

    def __init__(
        self,
        number: int,
        token_ids: Sequence[int],
        namespace: Namespace,
        sampling: SamplingParams,
        sampler: Sampler,
        stop_token_ids: frozenset[int],
        priority: int,
        request_id: str,
        text: TextStream | None,
        on_end: Callable[[Request], None],
    ) -> None:
        self.number = number
        self.tokens = list(token_ids)
        self.num_prompt = len(self.tokens)
        self.namespace = namespace
        self.sampling = sampling
        self.sampler = sampler
        self.stop_token_ids = stop_token_ids
        self.priority = priority
        self.request_id = request_id
        self.text = text
        self.seated_at: float | None = None
        self._on_end = on_end
        self.lease: Lease | None = None
        self.is_entered = False
        self.is_growing = False
        self.is_decoding = False
        self.awaits_token = False
        self.was_admitted = False
        self.num_computed = 0
        self.num_cached = 0
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.told = Pulse()
        """Its consumer: another token, or the end."""
        self.moved = Pulse()
        """The task that holds its lease: a step with it began, or the lease is gone."""

    @property
    def order(self) -> tuple[int, int]:
        """Who gets a seat first: the highest priority, then the earliest. It never changes."""
        return (-self.priority, self.number)

    @property
    def urgency(self) -> int:
        """Its priority, or that of the most urgent one that waits for what it computes."""
        return self.priority if self.lease is None else self.lease.urgency

    @property
    def is_over(self) -> bool:
        """Whether there will be no more tokens."""
        return self.finish_reason is not None or self.error is not None

    @property
    def is_short(self) -> bool:
        """Whether it asks for slots, to be entered or to grow."""
        return self.lease is not None and (self.is_growing or self.lease.waits_for_slots)

    @property
    def num_slots_wanted(self) -> int:
        """Slots for all its tokens, and for the one that a step is choosing, unless it is the last."""
        coming = 1 if self.awaits_token else 0
        # The last token's KV is never computed.
        return min(len(self.tokens) + coming, self.num_prompt + self.sampling.max_tokens - 1)

    @property
    def can_step(self) -> bool:
        """Whether there is something to compute, and room for it."""
        return self.is_entered and self.lease is not None and self.lease.num_tokens >= self.num_slots_wanted

    def key(self, num_tokens: int) -> RadixKey:
        """The first tokens as the cache knows them."""
        return RadixKey(self.tokens[:num_tokens], self.namespace)

    def enter(self, num_matched: int) -> None:
        """Its lease is entered, and the KV of so many tokens is there."""
        self.is_entered = True
        self.is_decoding = False
        self.num_computed = num_matched
        if not self.was_admitted:
            self.was_admitted = True
            self.num_cached = num_matched

    def take(self, token: int) -> None:
        """The next token. It may end the generation."""
        if token in self.stop_token_ids:
            self.end("stop")
            return
        self.tokens.append(token)
        try:
            is_stopped = self.text is not None and self.text.push(token)
        except Exception as error:  # of somebody's tokenizer: the others can do without the text of this one
            self.fail(error)
            return
        if is_stopped:
            self.end("stop")
        elif len(self.tokens) == self.num_prompt + self.sampling.max_tokens:
            self.end("length")
        self.told.send()

    def end(self, reason: FinishReason) -> None:
        """There are no more tokens; the slots go back."""
        if self.is_over:
            return
        try:
            if self.text is not None:
                self.text.finish()
        except Exception as error:
            self.fail(error)
            return
        self.finish_reason = reason
        self._leave()

    def fail(self, error: BaseException) -> None:
        """There are no more tokens, and the consumer shall know why; the slots go back."""
        if self.is_over:
            return
        self.error = error
        self._leave()

    def _leave(self) -> None:
        self.let_go()
        self.told.send()
        self._on_end(self)

    def let_go(self) -> None:
        """Give the slots back, those that a running step uses behind that step; whoever waits with the lease wakes."""
        lease, self.lease = self.lease, None
        self.is_entered = self.is_growing = False
        if lease is not None:
            lease.release()
        self.moved.send()


class Generation:
    """An async iterator over the generated token ids: what `engine.generate` returns, and one task reads.

    It ends the request when its consumer is cancelled while it waits, and when it is dropped or closed.
    """

    def __init__(self, request: Request, home: Home) -> None:
        self._request = request
        self._home = home
        self._num_read = request.num_prompt

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        """The next token. Waits until there is one; cancelled meanwhile, the request is aborted.

        Raises:
            StopAsyncIteration: there are no more; `finish_reason` says why.
            StepError: a step of the model failed.
            EngineClosedError: the engine failed.
            AradixError: the cache was closed, or has no room for the request any more.
            Exception: whatever the tokenizer raised, which made no text of a token.
        """
        request = self._request
        while self._num_read == len(request.tokens):
            if request.error is not None:
                raise request.error
            if request.finish_reason is not None:
                raise StopAsyncIteration
            try:
                await request.told.wait()
            except BaseException:
                request.end("abort")
                raise
        self._num_read += 1
        return request.tokens[self._num_read - 1]

    def abort(self) -> None:
        """End the request now, whatever it is doing. Does not wait; later than its end it changes nothing.

        Slots that a running step uses come back when that step is over.
        """
        self._home.check()
        self._request.end("abort")

    async def aclose(self) -> None:
        """As `abort`; there is nothing to wait for."""
        self.abort()

    def __del__(self) -> None:
        request = self._request
        if not request.is_over:
            # This may run on another thread, or in the middle of a step.
            self._home.call_soon(lambda: request.end("abort"))

    @property
    def request_id(self) -> str:
        """As it was given, or made up."""
        return self._request.request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        """`"stop"`, `"length"` or `"abort"`; `None` while it runs, and where it failed."""
        return self._request.finish_reason

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._request.num_prompt

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose KV was found when the request was first admitted; 0 until then."""
        return self._request.num_cached

    @property
    def token_ids(self) -> list[int]:
        """What was generated so far, read or not."""
        return self._request.tokens[self._request.num_prompt :]

    @property
    def text(self) -> str:
        """The text so far, as far as it is certain; up to the stop text that ended it.

        Raises:
            UsageError: the engine has no tokenizer.
        """
        if self._request.text is None:
            raise UsageError("the engine has no tokenizer: AsyncEngine(..., tokenizer=...)")
        return self._request.text.text

    def __repr__(self) -> str:
        request = self._request
        state = request.finish_reason or ("failed" if request.error is not None else "running")
        return (
            f"<Generation {request.request_id}: {request.num_prompt} prompt tokens, {len(self.token_ids)} new, {state}>"
        )
