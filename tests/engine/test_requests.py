"""What becomes of one request: its tokens, its end, and whose slots are whose on the way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from aradix import ChunkCache, Namespace, RadixCache, RadixKey, SlotAllocator
from aradix.engine import AsyncEngine, Chunk, EngineClosedError, Overloaded, StepError
from aradix.errors import ConfigError, InvalidKeyError, RequestTooLargeError, UsageError
from aradix.params import CacheInitParams
from tests.engine.hash_runner import HashRunner, expected
from tests.engine.workplace import new, on_both_loops, read, working

PROMPT = list(range(100, 120))
OTHER = list(range(300, 310))


# ---- tokens and ends


@on_both_loops
async def test_a_request_has_its_tokens_one_by_one() -> None:
    runner = HashRunner()
    async with working(runner) as (_, engine):
        answer = engine.generate(PROMPT, new(5))
        times = []
        async for token in answer:
            times.append(anyio.current_time())
            assert token == expected(PROMPT, 5)[len(times) - 1] == answer.token_ids[-1]
        assert [later - earlier for earlier, later in itertools.pairwise(times)] == [1.0] * 4
        assert (answer.finish_reason, answer.num_prompt_tokens, answer.num_cached_tokens) == ("length", 20, 0)
    assert runner.batches == [[20], [1], [1], [1], [1]]


@on_both_loops
async def test_tokens_that_end_it_are_no_part_of_it() -> None:
    tokens = expected(PROMPT, 6)
    async with working(HashRunner(), eos_token_ids=[tokens[4]]) as (_, engine):
        for sampling, length, reason in (
            (new(6), 4, "stop"),
            (new(6, ignore_eos=True), 6, "length"),
            (new(6, stop_token_ids=frozenset(tokens[2:4])), 2, "stop"),
            (new(6, ignore_eos=True, stop_token_ids=frozenset(tokens[5:])), 5, "stop"),
            (new(4), 4, "length"),
        ):
            answer = engine.generate(PROMPT, sampling)
            assert await read(answer) == tokens[:length]
            assert answer.finish_reason == reason


@on_both_loops
async def test_what_was_said_is_reused_when_the_talk_goes_on() -> None:
    runner = HashRunner()
    async with working(runner, page_size=4) as (cache, engine):
        first = await read(engine.generate(PROMPT, new(9)))
        talk = [*PROMPT, *first, 7, 8, 9]
        answer = engine.generate(talk, new(2))
        assert await read(answer) == expected(talk, 2)
        assert answer.num_cached_tokens == 28  # 20 of the prompt and 8 of the answer, whose last one was never computed
        again = engine.generate(PROMPT, new(1))
        assert await read(again) == first[:1]
        assert again.num_cached_tokens == 16  # of 20: one at least is computed, and a page is shared whole or not
        assert cache.peek(RadixKey(talk)) == 32
        assert engine.stats().cached_tokens == 28 + 16


@on_both_loops
async def test_what_must_not_be_shared_is_not() -> None:
    async with working(HashRunner(), num_slots=256) as (_, engine):
        for options in ({}, {"cache_salt": "a"}, {"lora_name": "a"}, {"extra_key": "a"}):
            for cached in (0, 19):
                answer = engine.generate(PROMPT, new(1), **options)  # type: ignore[arg-type]
                assert await read(answer) == expected(PROMPT, 1)
                assert answer.num_cached_tokens == cached
        same = engine.generate(PROMPT, new(1), extra_key=Namespace(salt="a"))
        await read(same)
        assert same.num_cached_tokens == 19
        with pytest.raises(UsageError, match="names a salt already"):
            engine.generate(PROMPT, extra_key=Namespace(salt="a"), cache_salt="b")


@on_both_loops
async def test_without_a_cache_nothing_is_reused() -> None:
    runner = HashRunner()
    async with working(runner, cache_class=ChunkCache) as (_, engine):
        for _ in range(2):
            answer = engine.generate(PROMPT, new(2))
            assert await read(answer) == expected(PROMPT, 2)
            assert answer.num_cached_tokens == 0
    assert engine.stats().prefill_tokens == 40


# ---- batches


@on_both_loops
async def test_long_prompts_come_in_chunks_and_hold_up_nobody_who_decodes() -> None:
    runner = HashRunner()
    async with working(runner, num_slots=128, chunk_tokens=8) as (_, engine):
        early = engine.generate(OTHER[:3], new(6))
        assert await anext(early) == expected(OTHER[:3], 1)[0]
        late = engine.generate(PROMPT, new(2))
        assert await read(late) == expected(PROMPT, 2)
        assert await read(early) == expected(OTHER[:3], 6)[1:]
    assert runner.batches[1:] == [[1], [1, 8], [1, 8], [1, 4], [1, 1]]


@on_both_loops
async def test_a_batch_is_no_larger_than_it_may_be() -> None:
    runner = HashRunner()
    async with working(runner, num_slots=256, max_batch_size=3) as (_, engine):
        answers = [engine.generate([i, *OTHER], new(3)) for i in range(7)]
        assert (engine.num_running, engine.num_waiting) == (3, 4)
        for i, answer in enumerate(answers):
            assert await read(answer) == expected([i, *OTHER], 3)
    assert max(map(len, runner.batches)) == 3
    # Nobody waits for the others' end: who leaves is followed at once.
    assert len(runner.batches) == 9


@on_both_loops
async def test_the_next_step_is_prepared_while_one_runs() -> None:
    runner = HashRunner()
    async with working(runner) as (cache, engine):
        answer = engine.generate(PROMPT, new(3))
        await anyio.sleep(0.5)  # virtual: in the middle of the first step
        assert runner.is_running
        assert cache.stats().leased == 21  # the slot of the token that is being chosen
        other = engine.generate(OTHER, new(1))
        await anyio.sleep(0.1)
        assert runner.is_running
        assert (cache.stats().num_leases, cache.stats().leased) == (2, 31)
        assert await read(answer) == expected(PROMPT, 3)
        assert await read(other) == expected(OTHER, 1)
    assert runner.batches == [[20], [1, 10], [1]]


# ---- ends before time


@on_both_loops
async def test_slots_of_who_vanishes_in_a_step_come_back_when_it_is_over() -> None:
    runner = HashRunner()
    async with working(runner, num_slots=32) as (cache, engine):
        allocator = cache._params.allocator
        answer = engine.generate(PROMPT, new(5))
        await anyio.sleep(0.5)  # virtual: in the middle of the first step
        answer.abort()
        assert (answer.finish_reason, answer.token_ids) == ("abort", [])
        assert (cache.stats().num_leases, cache.stats().leased) == (0, 0)
        assert (allocator.available_size(), allocator.fenced_size()) == (11, 21)
        assert allocator.alloc(12) is None  # for somebody whom no stream orders
        await anyio.sleep(0.6)
        allocator.reclaim()
        assert allocator.available_size() == 32
        # The same slots behind the step serve the next one of the same stream.
        running = engine.generate(PROMPT, new(2))
        await anyio.sleep(0.5)
        running.abort()
        next_one = engine.generate([*OTHER, *OTHER], new(2))
        assert await read(next_one) == expected([*OTHER, *OTHER], 2)


@on_both_loops
async def test_every_way_to_vanish_ends_the_request_at_once() -> None:
    async with working(HashRunner(), num_slots=256) as (cache, engine):
        cancelled, closed, dropped = (engine.generate([*OTHER, i], new(9)) for i in range(3))
        waited = engine.generate(OTHER, new(9))
        with anyio.move_on_after(1.5):
            await read(cancelled)
        await closed.aclose()
        del dropped
        async for _ in waited:
            break
        assert (cancelled.finish_reason, closed.finish_reason, waited.finish_reason) == ("abort", "abort", None)
        await anyio.sleep(0.1)  # virtual: dropping may happen anywhere, so the loop is told
        assert engine.stats().aborted == 3
        assert cache.stats().num_leases == 1
        waited.abort()
        waited.abort()
        assert await read(waited) == waited.token_ids[1:]
        assert engine.stats().aborted == 4


@on_both_loops
async def test_a_step_that_fails_fails_its_requests_and_publishes_nothing() -> None:
    def fail(chunks: Sequence[Chunk]) -> Exception | None:
        return RuntimeError("out of luck") if len(runner.batches) == 2 else None

    runner = HashRunner(fail=fail)
    async with working(runner, num_slots=256) as (cache, engine):
        answers = [engine.generate(prompt, new(4)) for prompt in (PROMPT, OTHER)]
        for answer, prompt in zip(answers, (PROMPT, OTHER), strict=True):
            assert await anext(answer) == expected(prompt, 1)[0]
            with pytest.raises(StepError, match="out of luck") as caught:
                await read(answer)
            assert isinstance(caught.value.__cause__, RuntimeError)
            assert answer.finish_reason is None
        assert cache.peek(RadixKey([*PROMPT, *answers[0].token_ids])) == 20
        assert (engine.stats().failed, engine.num_running) == (2, 0)
        for prompt in (PROMPT, OTHER):
            assert await read(engine.generate(prompt, new(4))) == expected(prompt, 4)


@on_both_loops
async def test_a_runner_that_answers_nonsense_fails_the_step() -> None:
    for nonsense, message in (([], "0 tokens for 1 chunks"), ([None], "chose None"), ([1000], "chose 1000")):
        runner = HashRunner()

        async def step(chunks: Sequence[Chunk], nonsense: Any = nonsense) -> Any:
            return nonsense

        runner.step = step  # type: ignore[method-assign]
        async with working(runner) as (_, engine):
            with pytest.raises(StepError, match=message):
                await read(engine.generate(OTHER))


# ---- who is let in


@on_both_loops
async def test_what_cannot_be_answered_is_refused_with_numbers() -> None:
    async with working(HashRunner(max_context=50), num_slots=40, page_size=4) as (_, engine):
        for prompt, sampling, kind, message in (
            ([], new(1), UsageError, "at least one token"),
            ([5, 1000], new(1), UsageError, "token id 1000 is beyond the model's vocabulary of 1000"),
            ([-1], new(1), InvalidKeyError, "-1"),
            (PROMPT, new(31), RequestTooLargeError, "20 tokens and max_tokens=31 make 51; the model takes 50"),
            (PROMPT, new(22), RequestTooLargeError, "20 tokens and max_tokens=22 need 44 slots; the pool has 40"),
            (PROMPT, new(1, stop=("x",)), UsageError, "need a tokenizer"),
        ):
            with pytest.raises(kind, match=message):
                engine.generate(prompt, sampling)
        with pytest.raises(UsageError, match="priority must be an int"):
            engine.generate(PROMPT, priority=1.5)  # type: ignore[arg-type]
        answer = engine.generate(PROMPT, new(21))  # the last token needs no slot
        with pytest.raises(UsageError, match="tokenizer"):
            _ = answer.text
        assert await read(answer) == expected(PROMPT, 21)


@on_both_loops
async def test_too_many_who_wait_are_sent_away() -> None:
    for max_waiting in (0, 2):
        async with working(HashRunner(), max_batch_size=2, max_waiting=max_waiting) as (_, engine):
            answers = [engine.generate([*OTHER, i], new(3)) for i in range(2 + max_waiting)]
            with pytest.raises(Overloaded, match=f"2 requests run and {max_waiting} wait") as caught:
                engine.generate(PROMPT)
            assert caught.value.retry_after >= 1
            for i, answer in enumerate(answers):
                assert await read(answer) == expected([*OTHER, i], 3)
            assert await read(engine.generate(PROMPT, new(1))) == expected(PROMPT, 1)
            assert engine.stats().finished == 3 + max_waiting


@on_both_loops
async def test_who_is_sent_away_is_told_how_long_requests_take() -> None:
    runner = HashRunner()
    params = runner.cache_params(256, 1, clock=anyio.current_time)
    async with (
        RadixCache(params) as cache,
        AsyncEngine(cache, runner, max_batch_size=2, max_waiting=1) as engine,
    ):

        async def retry_after() -> float:
            with pytest.raises(Overloaded) as caught:
                engine.generate(PROMPT)
            return caught.value.retry_after

        assert engine.max_requests == 3
        answers = [engine.generate([i, *OTHER], new(20)) for i in range(3)]
        assert await retry_after() == 1.0  # nothing is known yet
        await anyio.sleep(9.5)  # virtual
        assert await retry_after() == 9.5 / 2  # nobody has finished, and two have been here for so long
        for answer in answers:
            await read(answer)
        # They took 20 steps each with a seat; how long the third one waited for it is no matter.
        answers = [engine.generate([5, i, *OTHER], new(2)) for i in range(3)]
        assert await retry_after() == 10.0
        for answer in answers:
            await read(answer)
        answers = [engine.generate([6, i, *OTHER], new(2)) for i in range(3)]
        assert 5.0 < await retry_after() < 10.0
        cache.check()


@on_both_loops
async def test_draining_answers_who_is_in_and_lets_nobody_in() -> None:
    async with working(HashRunner(), max_batch_size=1) as (_, engine):
        answers = [engine.generate([*OTHER, i], new(3)) for i in range(2)]
        await engine.drain()
        assert [await read(answer) for answer in answers] == [expected([*OTHER, i], 3) for i in range(2)]
        with pytest.raises(EngineClosedError):
            engine.generate(OTHER)


@on_both_loops
async def test_leaving_ends_what_is_left_and_keeps_the_users_error() -> None:
    runner = HashRunner()
    async with RadixCache(runner.cache_params(64, 1)) as cache:
        for error in (None, KeyError("the user's own")):
            with pytest.raises(type(error)) if error else anyio.CancelScope():
                async with AsyncEngine(cache, runner, max_batch_size=1) as engine:
                    answers = [engine.generate([*OTHER, i], new(9)) for i in range(2)]
                    assert await anext(answers[0]) == expected([*OTHER, 0], 1)[0]
                    if error:
                        raise error
            assert [answer.finish_reason for answer in answers] == ["abort", "abort"]
            assert await read(answers[0]) == answers[0].token_ids[1:]
            assert cache.stats().num_leases == 0
            with pytest.raises(EngineClosedError):
                engine.generate(OTHER)
            with pytest.raises(UsageError, match="opened already"):
                async with engine:
                    pass


@on_both_loops
async def test_a_failure_of_the_engine_reaches_everybody() -> None:
    runner = HashRunner()
    async with RadixCache(runner.cache_params(64, 1)) as cache:
        with pytest.raises(ExceptionGroup) as caught:
            async with AsyncEngine(cache, runner) as engine:
                answer = engine.generate(OTHER, new(9))
                engine._scheduler._settle = None  # type: ignore[assignment,method-assign]
                await read(answer)
        assert caught.group_contains(TypeError)
        with pytest.raises(EngineClosedError, match="the engine failed"):
            await read(answer)
        assert cache.stats().num_leases == 0


@on_both_loops
async def test_however_many_wait_a_cache_that_takes_none_of_them_fails_each_for_itself() -> None:
    async with working(HashRunner(), max_batch_size=1) as (cache, engine):
        first, *others = (engine.generate([i, *OTHER], new(2)) for i in range(900))
        open_lease = cache.lease

        def refuse(*args: Any, **options: Any) -> Any:
            raise RequestTooLargeError("the pool shrank")

        cache.lease = refuse  # type: ignore[method-assign]
        assert await read(first) == expected([0, *OTHER], 2)
        for answer in others:
            with pytest.raises(RequestTooLargeError):
                await read(answer)
        assert engine.stats().failed == 899
        cache.lease = open_lease  # type: ignore[method-assign]
        assert await read(engine.generate(OTHER, new(2))) == expected(OTHER, 2)


@on_both_loops
async def test_who_comes_after_the_engine_was_cancelled_does_not_wait_for_ever() -> None:
    runner = HashRunner()
    async with RadixCache(runner.cache_params(64, 1)) as cache:
        with anyio.CancelScope() as around:
            async with AsyncEngine(cache, runner) as engine:
                await anyio.sleep(1)
                around.cancel()
                with anyio.CancelScope(shield=True):  # as of a server that says good-bye
                    await anyio.sleep(1)
                    with pytest.raises(EngineClosedError):
                        engine.generate(OTHER)
                    await engine.drain()
        assert cache.stats().num_leases == 0


def test_a_set_up_that_cannot_work_is_refused() -> None:
    runner = HashRunner()
    cache = RadixCache(runner.cache_params(64, 1))
    for options, message in (
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"chunk_tokens": True}, "chunk_tokens"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"join": 1}, "join"),
    ):
        with pytest.raises(ConfigError, match=message):
            AsyncEngine(cache, runner, **options)
    with pytest.raises(ConfigError, match="does not know the stream"):
        AsyncEngine(RadixCache(CacheInitParams(SlotAllocator(64))), runner)
    with pytest.raises(ConfigError, match="is_eagle"):
        AsyncEngine(RadixCache(runner.cache_params(64, 1, is_eagle=True)), runner)
    with pytest.raises(UsageError, match="not open"):
        AsyncEngine(cache, runner).generate(PROMPT)
