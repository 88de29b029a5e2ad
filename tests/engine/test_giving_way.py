"""Who computes first and who gives way: by priority, also that of those who wait for what one computes."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from aradix import RadixKey
from aradix.engine import AsyncEngine, Chunk, Generation
from tests.engine.hash_runner import HashRunner, expected
from tests.engine.workplace import new, on_both_loops, read, working

PROMPT = list(range(100, 120))
OTHER = list(range(300, 310))


# ---- together


@on_both_loops
async def test_of_many_who_come_together_one_computes_what_they_share() -> None:
    for join, num_computed in ((True, 20 + 4), (False, 5 * 21)):
        runner = HashRunner()
        async with working(runner, num_slots=256, chunk_tokens=8, join=join) as (cache, engine):
            answers = [engine.generate([*PROMPT, i], new(3)) for i in range(5)]
            await anyio.sleep(0.5)  # virtual: in the first step
            assert cache.stats().num_leases == (1 if join else 5)
            for i, answer in enumerate(answers):
                assert await read(answer) == expected([*PROMPT, i], 3)
            assert engine.stats().prefill_tokens == num_computed + join
            assert [answer.num_cached_tokens for answer in answers] == ([0, 20, 20, 20, 20] if join else [0] * 5)
            assert engine.stats().retractions == 0


@on_both_loops
async def test_who_waits_for_another_goes_on_where_that_one_ends() -> None:
    def fail(chunks: Sequence[Chunk]) -> Exception | None:
        return RuntimeError("out of luck") if len(runner.batches) == 2 and not vanishes else None

    for vanishes in (True, False):
        runner = HashRunner(fail=fail)
        async with working(runner, num_slots=256, chunk_tokens=8) as (_, engine):
            leader, *others = (engine.generate([*PROMPT, i], new(3)) for i in range(4))
            await anyio.sleep(1.5)  # virtual: 8 tokens are published, and 8 on their way
            if vanishes:
                leader.abort()
            for i, answer in enumerate(others, start=1):
                assert await read(answer) == expected([*PROMPT, i], 3)
            assert (leader.finish_reason, engine.stats().failed) == (("abort", 0) if vanishes else (None, 1))
            assert [answer.num_cached_tokens for answer in others] == [8, 20, 20]


@on_both_loops
async def test_nobody_gives_way_for_one_who_waits_for_what_he_computes() -> None:
    async with working(HashRunner(), num_slots=256, chunk_tokens=8) as (_, engine):
        slow = engine.generate([*PROMPT, 1], new(2), priority=0)
        await anyio.sleep(0.5)  # virtual
        urgent = engine.generate([*PROMPT, 2], new(2), priority=1)
        assert await read(urgent) == expected([*PROMPT, 2], 2)
        assert await read(slow) == expected([*PROMPT, 1], 2)
        assert urgent.num_cached_tokens == 20
        assert engine.stats().retractions == 0


@on_both_loops
async def test_who_computes_what_an_urgent_one_waits_for_is_as_urgent() -> None:
    """Else whoever comes between the two in priority would be computed before both."""
    firsts: dict[str, float] = {}

    async def first(name: str, answer: Generation) -> None:
        await anext(answer)
        firsts[name] = anyio.current_time() - began
        await read(answer)

    async with working(HashRunner(), num_slots=256, chunk_tokens=4) as (_, engine):
        async with anyio.create_task_group() as tasks:
            began = anyio.current_time()
            tasks.start_soon(first, "low", engine.generate([*PROMPT, 1], new(1)))
            await anyio.sleep(0.5)  # virtual: 4 tokens are on their way
            for i in range(2):
                middle = engine.generate([i, *range(400, 439)], new(1), priority=1)
                tasks.start_soon(first, f"middle {i}", middle)
            tasks.start_soon(first, "urgent", engine.generate([*PROMPT, 2], new(1), priority=2))
    # 5 steps are the low one's, for what the two share, and one is the urgent one's, who may be woken a step later.
    assert firsts.pop("urgent") in (6.0, 7.0)
    assert firsts == {"middle 0": 16.0, "middle 1": 26.0, "low": 26.0}


@on_both_loops
async def test_who_computes_what_an_urgent_one_waits_for_keeps_seat_and_slots() -> None:
    for options in ({"max_batch_size": 3, "num_slots": 256}, {"num_slots": 64}):
        async with working(HashRunner(), chunk_tokens=4, **options) as (_, engine):  # type: ignore[arg-type]
            low = engine.generate([*PROMPT, 1], new(2))
            await anyio.sleep(0.5)  # virtual
            urgent = engine.generate([*PROMPT, 2], new(2), priority=3)
            middle = engine.generate([1, *PROMPT], new(2), priority=1)
            await anyio.sleep(0.5)
            other = engine.generate([*OTHER, *OTHER, *OTHER], new(2), priority=2)
            assert await read(urgent) == expected([*PROMPT, 2], 2)
            assert urgent.num_cached_tokens == 20
            assert engine.stats().retractions > 0
            assert await read(other) == expected([*OTHER, *OTHER, *OTHER], 2)
            assert await read(middle) == expected([1, *PROMPT], 2)
            assert await read(low) == expected([*PROMPT, 1], 2)


@on_both_loops
async def test_where_all_are_short_who_computes_for_an_urgent_one_is_the_last_to_give_way() -> None:
    async with working(HashRunner(), num_slots=31) as (_, engine):
        middle = engine.generate(OTHER[:9], new(9), priority=1)
        await anyio.sleep(0.5)  # virtual
        low = engine.generate([*PROMPT, 1], new(3))
        await anyio.sleep(0.1)
        urgent = engine.generate([*PROMPT, 2], new(3), priority=2)
        await anyio.sleep(0.9)  # in the second step two want a slot more, and there is none
        assert engine.stats().retractions == 1
        assert await read(urgent) == expected([*PROMPT, 2], 3)
        assert urgent.num_cached_tokens == 20
        assert await read(low) == expected([*PROMPT, 1], 3)
        assert await read(middle) == expected(OTHER[:9], 9)


@on_both_loops
async def test_who_gave_way_to_one_who_computes_for_an_urgent_one_does_not_come_back_at_once() -> None:
    """Else the two would go on like this for ever, at one moment of time: what gave way had nothing to give."""
    async with (
        working(HashRunner(), num_slots=31) as (cache, engine),
        cache.lease(RadixKey(range(500, 510))) as outside,
    ):
        await outside.allocate(10)
        low = engine.generate([*PROMPT, 1], new(3))
        await anyio.sleep(0.1)  # virtual
        urgent = engine.generate([*PROMPT, 2], new(3), priority=2)
        middle = engine.generate([*OTHER, *OTHER], new(3), priority=1)  # waits for its first slots
        await anyio.sleep(0.1)
        with anyio.fail_after(0.1):
            await outside.allocate(1)  # now all wait
        outside.release()
        assert await read(urgent) == expected([*PROMPT, 2], 3)
        assert await read(middle) == expected([*OTHER, *OTHER], 3)
        assert await read(low) == expected([*PROMPT, 1], 3)


@on_both_loops
async def test_the_most_urgent_has_the_seat_of_who_computes_for_an_urgent_one_who_goes_on_with_it() -> None:
    async with working(HashRunner(), num_slots=256, max_batch_size=2, chunk_tokens=4) as (cache, engine):
        low = engine.generate([*PROMPT, 1], new(2))
        await anyio.sleep(0.5)  # virtual: 4 tokens are on their way
        urgent = engine.generate([*PROMPT, 2], new(2), priority=1)
        await anyio.sleep(0.1)
        most = engine.generate(OTHER, new(2), priority=2)
        assert await read(most) == expected(OTHER, 2)
        assert await read(urgent) == expected([*PROMPT, 2], 2)
        assert urgent.num_cached_tokens == 4
        assert await read(low) == expected([*PROMPT, 1], 2)
        assert engine.stats().retractions == cache.stats().join_takeovers == 1


# ---- beside leases that are not the engine's


@on_both_loops
async def test_an_urgent_one_who_no_longer_waits_for_anothers_commits_gets_the_slots_of_the_less_urgent() -> None:
    async with working(HashRunner(), num_slots=64) as (cache, engine):
        async with cache.lease(RadixKey(range(500, 522))) as outside:
            await outside.allocate(22)
            async with cache.lease(RadixKey(PROMPT), join=True) as lead:
                await lead.allocate(20)
                urgent = engine.generate([*PROMPT, 7], new(2), priority=1)
                low = engine.generate(OTHER, new(40))
                await anyio.sleep(60)  # virtual: it has all that is left, and wants more
                assert (lead.urgency, len(urgent.token_ids), engine.stats().retractions) == (1, 0, 0)
                lead.commit(RadixKey(PROMPT))  # what is in these slots was never written, nor is it looked at
                assert len(await read(urgent)) == 2
                assert engine.stats().retractions == 1
        assert await read(low) == expected(OTHER, 40)


@on_both_loops
async def test_who_waits_for_anothers_commits_keeps_nobody_from_a_seat() -> None:
    async with working(HashRunner(), num_slots=64) as (cache, engine):
        async with cache.lease(RadixKey(range(500, 550))) as outside:
            await outside.allocate(50)
            urgent = engine.generate([*PROMPT, *PROMPT, 7], new(2), priority=1)
            await anyio.sleep(1)  # virtual
            low = engine.generate(OTHER[:3], new(2))
            await anyio.sleep(1)
            assert engine.num_waiting == 1
            async with cache.lease(RadixKey([*PROMPT, *PROMPT]), join=True):
                outside.truncate(49)  # so that it is matched again
                assert await read(low) == expected(OTHER[:3], 2)
                assert cache.stats().num_joiners == 1
        assert await read(urgent) == expected([*PROMPT, *PROMPT, 7], 2)


@on_both_loops
async def test_who_waits_at_a_gate_keeps_nobody_from_a_seat() -> None:
    async with working(HashRunner(), num_slots=64) as (cache, engine):
        assert len(await read(engine.generate(OTHER, new(1)))) == 1
        async with cache.lease(RadixKey(range(500, 540))) as outside:
            await outside.allocate(40)
            urgent = engine.generate([*OTHER, *PROMPT], new(2), priority=1)
            await anyio.sleep(1)  # virtual
            async with cache.exclusive(RadixKey(OTHER[:5])):
                outside.release()
                await anyio.sleep(1)
                assert await read(engine.generate(PROMPT[:3], new(2))) == expected(PROMPT[:3], 2)
                assert not urgent.token_ids
        assert await read(urgent) == expected([*OTHER, *PROMPT], 2)


# ---- giving way


@on_both_loops
async def test_the_most_urgent_go_first_and_then_the_earliest() -> None:
    ended = []

    async def one(engine: AsyncEngine, number: int, priority: int) -> None:
        prompt = [*OTHER, number]
        assert await read(engine.generate(prompt, new(2), priority=priority)) == expected(prompt, 2)
        ended.append(number)

    async with working(HashRunner(), max_batch_size=1) as (_, engine):
        async with anyio.create_task_group() as tasks:
            for number, priority in enumerate((1, 0, 1, 2, 0)):
                tasks.start_soon(one, engine, number, priority)
    assert ended == [3, 0, 2, 1, 4]


@on_both_loops
async def test_the_urgent_take_the_seat_and_the_slots_of_the_least_urgent() -> None:
    for options in ({"max_batch_size": 1}, {"num_slots": 30}):
        async with working(HashRunner(), **options) as (cache, engine):  # type: ignore[arg-type]
            low = engine.generate(PROMPT, new(6), priority=-1)
            assert await anext(low) == expected(PROMPT, 1)[0]
            high = engine.generate([*OTHER, *OTHER], new(4))
            assert await read(high) == expected([*OTHER, *OTHER], 4)
            assert len(low.token_ids) < 6
            assert await read(low) == expected(PROMPT, 6)[1:]
            assert engine.stats().retractions == 1
            assert low.num_cached_tokens == 0  # what it found when it came back is not what it was spared
            assert cache.stats().resumes == 1


@on_both_loops
async def test_as_many_give_way_as_the_urgent_one_needs_and_come_back_when_it_is_served() -> None:
    async with working(HashRunner(), num_slots=40) as (cache, engine):
        low = [engine.generate([i, *OTHER], new(3), priority=i) for i in range(3)]
        await anyio.sleep(0.5)  # virtual: 36 slots are taken
        high = engine.generate(PROMPT, new(2), priority=5)
        await anyio.sleep(1.0)
        assert [len(answer.token_ids) for answer in low] == [1, 1, 1]
        assert engine.stats().retractions == 2  # the lowest: 16 slots are left beside the third one, and 12 do not do
        assert cache.stats().num_leases == 2
        assert await read(high) == expected(PROMPT, 2)
        for i, answer in enumerate(low):
            assert await read(answer) == expected([i, *OTHER], 3)


@on_both_loops
async def test_the_urgent_are_let_in_though_nothing_can_be_computed() -> None:
    """Somebody else has the slots that those who are here wait for, so no step ends after which one would look."""
    for num_outside, options, prompt in ((40, {"max_batch_size": 1}, [*PROMPT, *OTHER]), (30, {}, PROMPT)):
        async with working(HashRunner(), num_slots=64, **options) as (cache, engine):  # type: ignore[arg-type]
            async with cache.lease(RadixKey(range(500, 500 + num_outside))) as outside:
                await outside.allocate(num_outside)
                low = engine.generate(prompt, new(20))
                await anyio.sleep(60)  # virtual
                assert low.finish_reason is None
                num_steps = engine.stats().steps
                await anyio.sleep(60)
                assert engine.stats().steps == num_steps
                urgent = engine.generate([7, *PROMPT], new(2), priority=1)
                with anyio.fail_after(60):
                    assert await read(urgent) == expected([7, *PROMPT], 2)
            assert await read(low) == expected(prompt, 20)


@on_both_loops
async def test_an_urgent_one_whom_a_gate_held_up_is_let_in_though_nothing_can_be_computed() -> None:
    async with working(HashRunner(), num_slots=64) as (cache, engine):
        async with cache.lease(RadixKey(range(500, 530))) as outside:
            await outside.allocate(30)
            assert len(await read(engine.generate(OTHER, new(1)))) == 1
            async with cache.exclusive(RadixKey(OTHER[:5])):
                urgent = engine.generate([*OTHER, *PROMPT], new(2), priority=1)
                low = engine.generate(PROMPT, new(20))
                await anyio.sleep(60)  # virtual
                assert not urgent.token_ids
                assert low.finish_reason is None
            with anyio.fail_after(60):
                assert await read(urgent) == expected([*OTHER, *PROMPT], 2)
        assert await read(low) == expected(PROMPT, 20)


@on_both_loops
async def test_who_must_give_way_loses_no_token_and_says_none_twice() -> None:
    async with working(HashRunner(), num_slots=48) as (_, engine):
        answers = [engine.generate(PROMPT[i:], new(20)) for i in range(4)]
        seen: list[list[int]] = [[] for _ in answers]

        async def one(i: int) -> None:
            seen[i] = await read(answers[i])

        async with anyio.create_task_group() as tasks:
            for i in range(4):
                tasks.start_soon(one, i)
        assert seen == [expected(PROMPT[i:], 20) for i in range(4)]
        assert engine.stats().retractions > 0
