"""`Scheduler`: who is computed next. One task forms the batches; one task for each seated request waits in its stead.

    submit          the request waits, the highest priority first, then the earliest
    a seat          a task of its own enters a lease that has room for all its tokens, and keeps it growing
    a step          whoever has slots for what is to be computed: all that decode, and so many tokens of prompts
    settle          whole pages are published, tokens go to their consumers, the ended give their slots back

While a step runs, the tasks take the slots for the next one and enter the leases of those who come. Nothing is waited
for between the end of a step and the beginning of the next but one round of the loop.

A request that must give way (`RetractError`, or a more urgent one that waits) keeps its tokens, gives its lease back
and waits again. It starts from what is cached of it then, which is most of it, since it was published as it came.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from aradix.cache.home import is_cancellation
from aradix.cache.lease import Lease
from aradix.cache.radix_cache import RadixCache
from aradix.engine.request import EngineClosedError, Pulse, Request, StepError, caused
from aradix.engine.runner import Chunk, ModelRunner
from aradix.errors import LeaseReleasedError, RetractError, UsageError

__all__ = ["Scheduler"]

_log = logging.getLogger("aradix.engine")


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request's part of a step: its tokens up to `stop` are computed into the slots of `lease`."""

    request: Request
    lease: Lease
    stop: int
    chunk: Chunk


class Scheduler:
    """The requests of one engine. Nothing here waits but the tasks that `start` starts.

    Args:
        cache: opened.
        runner: computes the steps.
        max_batch_size: requests that have a seat at a time, and so a lease.
        chunk_tokens: the most tokens of prompts in a step.
        join: whether a request waits for what another one is computing.
    """

    def __init__(
        self, cache: RadixCache, runner: ModelRunner, max_batch_size: int, chunk_tokens: int, join: bool
    ) -> None:
        self.waiting: list[Request] = []
        """In the order in which they get a seat."""
        self.seated: list[Request] = []
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decoded_tokens = 0
        self.num_cached_tokens = 0
        self.num_retractions = 0
        self.num_finished = 0
        self.num_aborted = 0
        self.num_failed = 0
        self._mean_seconds = 0.0
        self.left = Pulse()
        """Whoever waits until nobody is here any more."""
        self._cache = cache
        self._runner = runner
        self._clock = cache._params.clock
        self._page_size = cache._params.page_size
        self._max_batch_size = max_batch_size
        self._chunk_tokens = chunk_tokens
        self._join = join
        self._wake = Pulse()
        self._tasks: TaskGroup | None = None
        self._is_filling = False

    # ---- coming and going

    @property
    def is_running(self) -> bool:
        """Whether there is a task to form batches; without it a request would wait for ever."""
        return self._tasks is not None

    @property
    def has_free_seats(self) -> bool:
        """Whether a new request would be admitted at once."""
        return len(self.seated) < self._max_batch_size

    def seconds_seated(self) -> float:
        """From a request's first seat to its end: the mean of those who finished, the late ones counting more.

        Or how long those who are here have been, once that is longer: at first nobody has finished, and who has been
        here for some time goes on, for all one knows, for as long again. Does not wait.
        """
        now = self._clock()
        ages = [now - one.seated_at for one in self.seated if one.seated_at is not None]
        return max(self._mean_seconds, sum(ages) / max(1, len(ages)))

    def submit(self, request: Request) -> None:
        """Let a new request in. Does not wait."""
        bisect.insort(self.waiting, request, key=lambda one: one.order)
        self._fill_seats()
        self._wake.send()  # somebody may have to make way

    def forget(self, request: Request) -> None:
        """A request is over, and has no lease any more."""
        for place in (self.waiting, self.seated):
            if request in place:
                place.remove(request)
        if request.error is not None:
            self.num_failed += 1
        elif request.finish_reason == "abort":
            self.num_aborted += 1
        else:
            self.num_finished += 1
            seconds = self._clock() - (request.seated_at or 0.0)
            self._mean_seconds += (seconds - self._mean_seconds) / min(self.num_finished, 32)
        self._fill_seats()
        self._wake.send()
        self.left.send()

    def _fill_seats(self) -> None:
        if self._is_filling:  # one who cannot be served leaves, and the loop below goes on with the next
            return
        self._is_filling = True
        try:
            while self._tasks is not None and self.waiting and self.has_free_seats:
                # Not while somebody more urgent is short of slots: it would have to give way again at once.
                if any(one.is_short and one.urgency > self.waiting[0].priority for one in self.seated):
                    return
                self._seat(self.waiting.pop(0), self._tasks)
        finally:
            self._is_filling = False

    def _seat(self, request: Request, tasks: TaskGroup) -> None:
        self.seated.append(request)
        if request.seated_at is None:
            request.seated_at = self._clock()
        try:
            request.lease = lease = self._cache.lease(
                request.key(len(request.tokens)),
                reserve=len(request.tokens),
                leave_last=1,
                priority=request.priority,
                resume=request.was_admitted,
                stream=self._runner.stream,
                join=self._join,
            )
        except Exception as error:
            request.fail(error)
        else:
            tasks.start_soon(self._serve, request, lease)

    # ---- the tasks

    def start(self, tasks: TaskGroup) -> None:
        """Start the scheduler's own task, and those of the requests, in a task group. Does not wait."""
        self._tasks = tasks
        tasks.start_soon(self._run)

    async def _run(self) -> None:
        """Never ends by itself; what stops it ends every request. Waits."""
        # Whoever waits for slots, or no longer does, may be more urgent than those who have some.
        self._cache._pressure.on_shortage.append(self._wake.send)
        try:
            while True:
                # Whoever was told of the last step takes his slots for the next one before that is put together.
                await checkpoint()
                self._fill_seats()
                if self._make_way():
                    continue
                turns = self._next_turns()
                if turns:
                    await self._step(turns)
                else:
                    await self._wake.wait()
        except BaseException as error:
            self._tasks = None
            for request in [*self.waiting, *self.seated]:
                if is_cancellation(error):
                    request.end("abort")
                else:
                    request.fail(caused(EngineClosedError(f"the engine failed: {error!r}"), error))
            raise
        finally:
            self._cache._pressure.on_shortage.remove(self._wake.send)

    async def _serve(self, request: Request, lease: Lease) -> None:
        """Holds a seated request's lease: admission, growth, and the way out. Waits."""
        if request.lease is not lease:
            return
        try:
            async with lease:
                self._note_entered(request, lease)
                while request.lease is lease:
                    await self._grow(request, lease)
                    self._wake.send()
                    await request.moved.wait()
        except LeaseReleasedError:
            if request.lease is lease:
                raise
        except RetractError:
            if request.lease is lease:
                self._retract(request)
        except Exception as error:
            if request.lease is lease:
                request.fail(error)

    def _note_entered(self, request: Request, lease: Lease) -> None:
        if self._runner.stream is not None:
            lease.used_on(self._runner.stream)
        if not request.was_admitted:
            self.num_cached_tokens += lease.num_matched
        request.enter(lease.num_matched)

    async def _grow(self, request: Request, lease: Lease) -> None:
        request.is_growing = True
        try:
            while (missing := request.num_slots_wanted - lease.num_tokens) > 0:
                try:
                    await lease.allocate(missing)
                except RetractError:
                    victim = self._least_urgent(below=request.urgency)
                    if victim is None:
                        raise
                    self._retract(victim)
        finally:
            if request.lease is lease:  # else it is said of another one by now
                request.is_growing = False

    # ---- giving way

    def _make_way(self) -> bool:
        """Whoever waits for slots or a seat gets those of the least urgent, if that one is less urgent.

        Whether somebody gave way: then it is to be seen first whether that was enough.
        """
        # By their own priority: whoever computes what others wait for has the slots for all of that already.
        urgent = [one.priority for one in self.seated if one.lease is not None and one.lease.waits_for_slots]
        if self.waiting and not self.has_free_seats:
            urgent.append(self.waiting[0].priority)
        victim = self._least_urgent(below=max(urgent)) if urgent else None
        if victim is None:
            return False
        self._retract(victim)
        return True

    def _least_urgent(self, below: int) -> Request | None:
        """The seated request that should give way to one of that priority: the least urgent, and of those the latest.

        Who is only as urgent as those that wait for what it computes goes before them: one of them goes on with that.
        """
        last = min(self.seated, key=lambda one: (one.urgency, one.priority, -one.number), default=None)
        return last if last is not None and last.urgency < below else None

    def _retract(self, request: Request) -> None:
        """Have a seated request wait again."""
        if request.is_entered:
            self.num_retractions += 1
            _log.info("request %s gives way, after %d tokens", request.request_id, len(request.tokens))
        self.seated.remove(request)
        request.let_go()
        self.submit(request)

    # ---- steps

    def _next_turns(self) -> list[_Turn]:
        """Everybody who can be computed, the most urgent first, as far as the tokens of a step go."""
        turns, num_left = [], self._chunk_tokens
        for request in sorted(self.seated, key=lambda one: (-one.urgency, one.number)):
            lease, begin = request.lease, request.num_computed
            if lease is None or not request.can_step:
                continue
            num_missing = len(request.tokens) - begin
            num_new = 1 if request.is_decoding else min(num_missing, num_left)
            if not num_new:
                continue
            if not request.is_decoding:
                num_left -= num_new
            stop = begin + num_new
            sampler = request.sampler if num_new == num_missing else None
            chunk = Chunk(request.tokens[begin:stop], lease.slots[:stop], sampler)
            turns.append(_Turn(request, lease, stop, chunk))
        return turns

    async def _step(self, turns: Sequence[_Turn]) -> None:
        for turn in turns:
            turn.request.awaits_token = turn.chunk.sampler is not None
            turn.request.moved.send()
        try:
            tokens = await self._runner.step([turn.chunk for turn in turns])
            self._check_answer(turns, tokens)
        except Exception as error:
            _log.warning("a step of %d requests failed: %r", len(turns), error)
            for turn in turns:
                what = f"the step that computed this request, and {len(turns) - 1} others, failed: {error!r}"
                turn.request.fail(caused(StepError(what), error))
            return
        finally:
            for turn in turns:
                turn.request.awaits_token = False
        self.num_steps += 1
        for turn, token in zip(turns, tokens, strict=True):
            self._settle(turn, token)

    def _check_answer(self, turns: Sequence[_Turn], tokens: Sequence[int | None]) -> None:
        if len(tokens) != len(turns):
            raise UsageError(f"the runner gave {len(tokens)} tokens for {len(turns)} chunks")
        for turn, token in zip(turns, tokens, strict=True):
            if turn.chunk.sampler is not None and not (isinstance(token, int) and 0 <= token < self._runner.vocab_size):
                raise UsageError(f"the runner chose {token!r} of a vocabulary of {self._runner.vocab_size}")

    def _settle(self, turn: _Turn, token: int | None) -> None:
        """What a step made of a request, which may have ended, or lost its lease, while the step ran."""
        request = turn.request
        if request.is_over:
            return
        if request.is_decoding:
            self.num_decoded_tokens += 1
        else:
            self.num_prefill_tokens += len(turn.chunk.token_ids)
        if request.lease is turn.lease:
            self._publish(request, turn)
        if token is not None:
            # Good even where the lease is gone: its slots were behind this step.
            request.take(token)

    def _publish(self, request: Request, turn: _Turn) -> None:
        """Commit what was computed, once there is another whole page of it."""
        num_before, request.num_computed = request.num_computed, turn.stop
        request.is_decoding = turn.chunk.sampler is not None
        if turn.stop // self._page_size > num_before // self._page_size:
            turn.lease.commit(request.key(turn.stop))
