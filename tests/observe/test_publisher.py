"""The publisher: what it sends to whom, what it does when it cannot keep up, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import zmq

from aradix import EvictParams, Namespace
from aradix.errors import ConfigError, UsageError
from aradix.observe import KVEventPublisher, publisher
from tests.cache.acts import filled, key, settled
from tests.observe.reader import Held, Reader, held_by, joined
from tests.support.caches import opened

pytestmark = pytest.mark.anyio

PUB = "tcp://0.0.0.0:*"
REPLAY = "tcp://127.0.0.1:*"


def batches_in(answer: list[list[bytes]]) -> Iterator[tuple[int, list[str]]]:
    for _, seq, payload in answer[:-1]:
        _, events, _ = msgspec.msgpack.decode(payload)
        yield int.from_bytes(seq, "big"), [event["type"] for event in events]


async def test_a_live_reader_hears_every_batch_once_under_the_topic() -> None:
    async with opened(256, 4, enable_kv_cache_events=True) as cache:
        async with KVEventPublisher(cache, PUB, REPLAY, topic="kv@pod@model", dp_rank=2, delay=0) as published:
            with Reader(published) as reader:
                await joined(cache, reader)
                num_live, next_seq = reader.num_live, reader.next_seq
                for number in range(5):
                    await filled(cache, key(range(number, number + 8)))
                    await settled()
                await reader.follow()
                assert reader.next_seq == next_seq + 5
                assert reader.num_live == num_live + 5
                assert reader.topics == {b"kv@pod@model"}
                assert reader.mirror.held == held_by(cache, 4)
                assert published.num_dropped == 0


async def test_who_comes_late_asks_for_what_there_was() -> None:
    async with opened(256, 4, enable_kv_cache_events=True) as cache:
        await filled(cache, key(range(8)))
        async with KVEventPublisher(cache, PUB, REPLAY, delay=0) as published:
            await filled(cache, key(range(20, 28)))
            await settled()
            await cache.evict(EvictParams(4))
            await settled()
            assert await published.sent() == 3
            with Reader(published) as reader:
                answer = reader.ask((0).to_bytes(8, "big"))
                assert list(batches_in(answer)) == [
                    (0, ["AllBlocksCleared", "BlockStored"]),
                    (1, ["BlockStored"]),
                    (2, ["BlockRemoved"]),
                ]
                assert [seq for seq, _ in batches_in(reader.ask((2).to_bytes(8, "big")))] == [2]
                assert list(batches_in(reader.ask((3).to_bytes(8, "big")))) == []
                reader.replay()
                assert reader.mirror.held == held_by(cache, 4)
                assert reader.ask(b"epoch") == [[b"", published.epoch.to_bytes(8, "big"), b""]]
                assert list(batches_in(reader.ask(b"what?"))) == []


@pytest.mark.parametrize("block_size", [4, 6])
async def test_beyond_what_is_kept_a_reader_gets_all_that_is_listed(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_KEPT_BATCHES", 3)
    async with opened(256, 4, enable_kv_cache_events=True) as cache:
        async with KVEventPublisher(cache, PUB, REPLAY, block_size=block_size, delay=0) as published:
            for number in range(6):
                await filled(cache, key(range(12), range(100 + number, 112 + number), namespace=Namespace(salt="s")))
                await settled()
            await cache.evict(EvictParams(20))
            await settled()
            last = await published.sent() - 1
            with Reader(published) as reader:
                ((seq, kinds),) = batches_in(reader.ask((0).to_bytes(8, "big")))
                assert seq == last
                assert kinds[0] == "AllBlocksCleared"
                assert set(kinds[1:]) == {"BlockStored"}
                reader.replay()
                assert reader.mirror.held == held_by(cache, block_size)
                await joined(cache, reader)
                assert reader.mirror.held == held_by(cache, block_size)


async def test_the_same_tokens_under_two_salts_are_two_blocks_and_one_stays_listed() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        async with KVEventPublisher(cache, PUB, REPLAY, block_size=8) as published:
            for salt in ("one", "two"):
                await filled(cache, key(range(8), namespace=Namespace(salt=salt)))
            await settled()
            await cache.evict(EvictParams(8))
            await settled()
            with Reader(published) as reader:
                await reader.follow()
                stored = [event for event in reader.mirror.events if event["type"] == "BlockStored"]
                assert [event["token_ids"] for event in stored] == [list(range(8))] * 2
                assert stored[0]["block_hashes"] != stored[1]["block_hashes"]
                assert reader.mirror.held == {Held("GPU", None, "two", tuple(range(8)))}


async def test_splits_and_merges_are_not_told() -> None:
    async with opened(64, 2, enable_kv_cache_events=True) as cache:
        async with KVEventPublisher(cache, PUB, REPLAY) as published:
            await filled(cache, key(range(8)))
            await settled()
            before = await published.sent()
            async with cache.lease(key(range(4), 90, 91)), cache.lease(key(range(2), 90, 91)):
                assert cache.stats().num_nodes == 3
            await settled()
            assert await published.sent() == before


async def test_a_slow_thread_makes_gaps_that_are_counted_and_then_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = threading.Event()
    serve = KVEventPublisher._serve

    def held_up(self: KVEventPublisher) -> None:
        may_go.wait()
        serve(self)

    monkeypatch.setattr(KVEventPublisher, "_serve", held_up)
    async with opened(256, enable_kv_cache_events=True) as cache:
        async with KVEventPublisher(cache, PUB, REPLAY, queue_size=3, delay=0) as published:
            for number in range(8):
                await filled(cache, key(number))
                await settled()
            assert published.num_dropped == 6  # what was cached at the start, and two turns, wait
            may_go.set()
            while await published.sent() < 10:
                await settled()
            with Reader(published) as reader:
                answer = list(batches_in(reader.ask((0).to_bytes(8, "big"))))
                assert [seq for seq, _ in answer] == [0, 1, 2, 9]
                assert answer[3][1] == ["AllBlocksCleared", *["BlockStored"] * 8]
                await reader.follow()
                assert reader.mirror.held == held_by(cache, 1)
                await filled(cache, key(77))
                await settled()
                await reader.follow()
                assert reader.next_seq == 11
                assert reader.mirror.held == held_by(cache, 1)
                assert published.num_dropped == 6


async def test_a_thread_that_catches_up_while_it_is_said_to_lag_makes_good_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go, idle = threading.Event(), threading.Event()
    serve = KVEventPublisher._serve

    def held_up(self: KVEventPublisher) -> None:
        may_go.wait()
        serve(self)

    class Watched(zmq.Poller):
        """Tells that the thread has done all there was, and has seen what there is to make good."""

        def poll(self, timeout: int | None = None) -> list[Any]:
            if not published._queue:
                idle.set()
            return super().poll(timeout)

    def caught_up(*_: object) -> None:
        may_go.set()
        idle.wait()

    monkeypatch.setattr(KVEventPublisher, "_serve", held_up)
    monkeypatch.setattr(zmq, "Poller", Watched)
    monkeypatch.setattr(publisher._log, "warning", caught_up)
    async with opened(64, enable_kv_cache_events=True) as cache:
        published = KVEventPublisher(cache, PUB, queue_size=1, delay=0)
        async with published:
            await filled(cache, key(1))  # what was cached at the start waits, so this is dropped
            while published.num_dropped == 0:
                await settled()
            # Nobody asks for anything: it is for the cache and the thread to go on.
            while published._lost:
                await settled()
            assert await published.sent() == 2 + published.num_dropped


async def test_the_events_of_many_turns_are_one_batch_and_sent_waits_for_no_time_to_pass() -> None:
    async with opened(256, 4, enable_kv_cache_events=True) as cache:
        async with KVEventPublisher(cache, PUB, REPLAY, delay=3_600) as published:
            first = await published.sent()
            for number in range(5):
                await filled(cache, key(range(number, number + 8)))
                await settled()
            with Reader(published) as reader:
                await reader.follow()
                assert await published.sent() == first + 1
                ((seq, kinds),) = list(batches_in(reader.ask(first.to_bytes(8, "big"))))
                assert (seq, kinds) == (first, ["BlockStored"] * 5)
                assert reader.mirror.held == held_by(cache, 4)
                await filled(cache, key(range(100, 108)))
        # What was not due when the block ended is told, before it is taken back.
        assert published.next_seq == first + 3


async def test_events_are_sent_though_nobody_asks_for_it() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        async with KVEventPublisher(cache, PUB) as published:
            first = await published.sent()
            await filled(cache, key(range(8)))
            with anyio.fail_after(60):
                while published.next_seq == first:
                    await settled()


async def test_what_is_not_delivered_yet_is_not_told_twice_when_all_is_told_anew() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        async with KVEventPublisher(cache, PUB, REPLAY) as published:
            await published.sent()
            published._lost = (
                True  # the thread had fallen behind, and has caught up in the turn in which this is stored
            )
            await filled(cache, key(range(8)))
            published._start_over()
            with Reader(published) as reader:
                await reader.follow()  # which asserts that nothing is stored twice
                assert reader.mirror.held == held_by(cache, 1)
            assert published.num_dropped == 1


async def test_leaving_says_that_nothing_is_vouched_for(tmp_path: Path) -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        endpoint = f"ipc://{tmp_path}/kv"
        published = KVEventPublisher(cache, endpoint)
        async with published:
            assert (published.endpoint, published.replay_endpoint) == (endpoint, None)
            reader = Reader(published)
            await joined(cache, reader)
            await filled(cache, key(range(4)))
            await settled()
            await reader.follow()
            assert len(reader.mirror.held) == 4
        with reader:
            while reader.mirror.held:
                reader.take_live()
        with pytest.raises(UsageError, match="open the publisher"):
            await published.sent()
        await filled(cache, key(range(8)))
        assert len(cache.take_events()) == 1


async def test_a_pub_socket_connects_where_somebody_else_binds() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.SUB) as sub:
        sub.subscribe(b"")
        sub.bind("tcp://127.0.0.1:*")
        address = sub.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        async with opened(64, enable_kv_cache_events=True) as cache:
            async with KVEventPublisher(cache, address.decode().rstrip("\0")) as published:
                number = 0
                while not sub.poll(5):
                    number += 1
                    await filled(cache, key(number % 60))
                    await cache.flush()
                    await settled()
                    await published.sent()
                topic, _, payload = sub.recv_multipart()
                assert topic == b""
                assert msgspec.msgpack.decode(payload)[2] == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"block_size": 0}, "block_size must be an int of at least 1, got 0"),
        ({"queue_size": True}, "queue_size must be an int of at least 1, got True"),
        ({"dp_rank": -1}, "dp_rank must be an int of at least 0, got -1"),
        ({"wire": "json"}, "wire must be"),
        ({"delay": -1}, "delay must be a number of seconds from 0 on, got -1"),
        ({"delay": float("nan")}, "delay must be"),
        ({"delay": True}, "delay must be"),
    ],
)
async def test_what_cannot_work_is_said_at_once(options: dict[str, Any], match: str) -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        with pytest.raises(ConfigError, match=match):
            KVEventPublisher(cache, PUB, **options)


async def test_an_endpoint_that_is_taken_or_none_at_all_is_refused_on_entering() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        async with KVEventPublisher(cache, PUB, REPLAY) as published:
            for arguments in (
                (PUB, published.replay_endpoint),
                (published.endpoint,),
                ("somewhere",),
                ("gopher://127.0.0.1:70",),
            ):
                other = KVEventPublisher(cache, *arguments)
                with pytest.raises(ConfigError, match="no socket can be opened at"):
                    await other.__aenter__()
            assert len(cache._event_sinks) == 1
            with pytest.raises(UsageError, match="opened already"):
                await published.__aenter__()


async def test_it_needs_a_cache_that_records_events() -> None:
    async with opened(64) as cache:
        with pytest.raises(UsageError, match="enable_kv_cache_events=True"):
            await KVEventPublisher(cache, PUB).__aenter__()


async def test_what_fails_in_the_thread_ends_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("in the thread")

    monkeypatch.setattr(KVEventPublisher, "_publish", broken)
    async with opened(64, enable_kv_cache_events=True) as cache:
        with pytest.raises(ExceptionGroup) as caught:
            async with KVEventPublisher(cache, PUB):
                await anyio.sleep_forever()
        assert caught.group_contains(ZeroDivisionError, match="in the thread")
        assert len(cache._event_sinks) == 0


async def test_the_users_own_error_leaves_as_it_is_and_a_cancellation_stops_it() -> None:
    async with opened(64, enable_kv_cache_events=True) as cache:
        with pytest.raises(KeyError, match="mine"):
            async with KVEventPublisher(cache, PUB):
                raise KeyError("mine")
        with anyio.CancelScope() as scope:
            async with KVEventPublisher(cache, PUB) as published:
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert published._pub.closed
