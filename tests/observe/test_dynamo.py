"""A router's own indexer, NVIDIA Dynamo's, takes the events and answers look-ups as the cache itself would."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any, Literal

import anyio
import pytest

from aradix import EvictParams, Namespace, RadixCache, RadixKey
from aradix.events import BlockRemoved, BlockStored
from aradix.observe import KVEventPublisher, publisher
from aradix.observe.wire import wire_names
from tests.cache.acts import filled, key, settled
from tests.support.caches import opened

pytestmark = [
    pytest.mark.dynamo,
    pytest.mark.skipif(
        importlib.util.find_spec("dynamo") is None or importlib.util.find_spec("dynamo.indexer") is None,
        reason="ai-dynamo-runtime is not installed",
    ),
]

BLOCK = 16
PATIENCE_SECONDS = 60


class Indexer:
    """The indexer's HTTP face, on loopback."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._num_models = 0

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What it answers. Blocks."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def register(self, published: KVEventPublisher, block_size: int) -> str:
        """Have it follow a publisher; gives the name of a model that has this one worker. Blocks."""
        self._num_models += 1
        model = f"model-{self._num_models}"
        self.ask(
            "/register",
            {
                "instance_id": self._num_models,
                "endpoint": published.endpoint.replace("0.0.0.0", "127.0.0.1"),
                "replay_endpoint": published.replay_endpoint,
                "model_name": model,
                "block_size": block_size,
            },
        )
        return model

    def found(self, model: str, asked: RadixKey) -> dict[str, int]:
        """Tokens that the model's only worker holds of a key, tier by tier. Blocks."""
        lora, salt = wire_names(asked.namespace)
        body: dict[str, Any] = {"model_name": model, "token_ids": list(asked)}
        body |= {name: value for name, value in (("lora_name", lora), ("cache_salt", salt)) if value is not None}
        instances = self.ask("/query", body)["instances"]
        tiers: dict[str, Any] = next(iter(instances.values()), {})
        return {tier: tiers.get(tier, 0) for tier in ("gpu", "cpu", "disk")}


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Indexer]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("dynamo") / "log"
    with log.open("wb") as sink:
        running = subprocess.Popen(
            [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "DYN_LOG": "info"},
        )
        try:
            with socket.socket() as waiting:
                waiting.settimeout(PATIENCE_SECONDS)
                while waiting.connect_ex(("127.0.0.1", port)):
                    assert running.poll() is None, log.read_text()
            yield Indexer(port)
        finally:
            running.kill()
            running.wait()


async def follow(indexer: Indexer, cache: RadixCache, published: KVEventPublisher, model: str) -> None:
    """Wait until the indexer has all that was published: a mark is stored last, again and again until it is found."""
    mark = key(range(32), namespace=Namespace(salt=f"mark at {published.next_seq}"))
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            # Subscribing takes its time, and what comes before is made good only when a later batch shows the gap.
            await cache.flush(mark.namespace)
            await filled(cache, mark)
            await settled()
            await published.sent()
            if (await anyio.to_thread.run_sync(indexer.found, model, mark))["gpu"] == len(mark):
                return


@pytest.mark.parametrize("wire", ["map", "array"])
@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_look_ups_agree_with_peek(
    indexer: Indexer, page_size: int, wire: Literal["map", "array"], backend: str
) -> None:
    async def live() -> None:
        async with opened(4096, page_size, enable_kv_cache_events=True) as cache:
            namespaces = (
                Namespace(),
                Namespace(salt="one"),
                Namespace(salt="ab" * 32),
                Namespace(lora="adapter"),
                Namespace(lora="adapter", salt="one"),
                Namespace(salt=1, version=3, tenant="somebody"),
            )
            keys = [key(range(100), namespace=namespace) for namespace in namespaces]
            keys += [key(range(64), range(500, 540), namespace=namespace) for namespace in namespaces[:3]]
            absent = [key(range(100), namespace=Namespace(salt="nobody's")), key(range(1, 100))]
            await filled(cache, *keys[:3])  # before anybody publishes
            async with KVEventPublisher(
                cache, "tcp://0.0.0.0:*", "tcp://127.0.0.1:*", block_size=BLOCK, wire=wire
            ) as published:
                await filled(cache, *keys[3:])  # before anybody listens
                await settled()
                model = await anyio.to_thread.run_sync(indexer.register, published, BLOCK)
                for num_evicted in (0, 32, 96, 256):
                    await cache.evict(EvictParams(num_evicted))
                    await follow(indexer, cache, published, model)
                    for each in (*keys, *absent):
                        found = await anyio.to_thread.run_sync(indexer.found, model, each)
                        assert found["gpu"] == cache.peek(each) // BLOCK * BLOCK, each
                assert any(0 < cache.peek(each) < 96 for each in keys)
                await cache.flush()
                await follow(indexer, cache, published, model)
                for each in keys:
                    assert not any((await anyio.to_thread.run_sync(indexer.found, model, each)).values())

    anyio.run(live, backend=backend)


def held_on(medium: str, prompt: RadixKey, num_blocks: int) -> BlockStored:
    """The event of the first blocks of a prompt."""
    stored = b"".join(prompt.hash_chain(BLOCK)[:num_blocks])
    return BlockStored(
        stored, None, prompt.token_ids().tobytes()[: len(stored) * BLOCK // 8], BLOCK, prompt.namespace, medium
    )


async def follow_tiers(indexer: Indexer, published: KVEventPublisher, model: str) -> None:
    """As `follow`, with a mark on each tier alone: the indexer keeps them apart, and one may be behind the others."""
    number = published.next_seq
    marks = {tier: key(range(32), namespace=Namespace(salt=f"{tier} at {number}")) for tier in ("gpu", "cpu", "disk")}
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            published._put([held_on(tier.upper(), mark, 2) for tier, mark in marks.items()])
            await published.sent()
            found = {
                tier: (await anyio.to_thread.run_sync(indexer.found, model, mark))[tier] for tier, mark in marks.items()
            }
            if set(found.values()) == {32}:
                return


def test_tiers_are_told_apart(indexer: Indexer) -> None:
    async def live() -> None:
        async with opened(256, BLOCK, enable_kv_cache_events=True) as cache:
            async with KVEventPublisher(cache, "tcp://0.0.0.0:*", "tcp://127.0.0.1:*") as published:
                prompt = key(range(64))
                digests = prompt.hash_chain(BLOCK)

                async def found_after(*events: BlockStored | BlockRemoved) -> tuple[int, ...]:
                    published._put(list(events))
                    await follow_tiers(indexer, published, model)
                    return tuple((await anyio.to_thread.run_sync(indexer.found, model, prompt)).values())

                model = await anyio.to_thread.run_sync(indexer.register, published, BLOCK)
                await follow_tiers(indexer, published, model)
                on_device, *_ = await found_after(held_on("GPU", prompt, 4), held_on("CPU", prompt, 3))
                assert on_device == 64
                assert (await found_after(BlockRemoved(b"".join(digests[1:]))))[:2] == (16, 48)
                removed = BlockRemoved(b"".join(digests[1:3]), medium="CPU")
                assert await found_after(removed, held_on("DISK", prompt, 2)) == (16, 16, 32)

    anyio.run(live)


def test_who_comes_too_late_for_a_replay_gets_all_that_is_listed(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_KEPT_BATCHES", 4)

    async def live() -> None:
        async with opened(1024, 4, enable_kv_cache_events=True) as cache:
            async with KVEventPublisher(cache, "tcp://0.0.0.0:*", "tcp://127.0.0.1:*", block_size=BLOCK) as published:
                keys = [key(range(40), range(100 * number, 100 * number + 24)) for number in range(1, 12)]
                for each in keys:
                    await filled(cache, each)
                    await settled()
                await cache.evict(EvictParams(60))
                model = await anyio.to_thread.run_sync(indexer.register, published, BLOCK)
                await follow(indexer, cache, published, model)
                for each in keys:
                    found = await anyio.to_thread.run_sync(indexer.found, model, each)
                    assert found["gpu"] == cache.peek(each) // BLOCK * BLOCK

    anyio.run(live)
