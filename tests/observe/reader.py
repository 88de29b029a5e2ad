"""A reader of KV events: it knows the wire and nothing else, and rebuilds from it what a worker holds."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import anyio
import msgspec
import zmq

from aradix import Namespace, RadixCache
from aradix.observe import KVEventPublisher
from aradix.observe.wire import wire_names
from tests.cache.acts import filled, key, settled

__all__ = ["Held", "Mirror", "Reader", "held_by", "joined"]

_ARRAY_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_MARK = "dynamo-cache-salt:"
_NO_SEQ = b"\xff" * 8
_CLEARED = b"AllBlocksCleared"
_POLL_MS = 20


class Held(NamedTuple):
    """A block that a worker holds: all tokens up to its end, and where."""

    medium: str
    lora_name: str | None
    cache_salt: str | None
    prefix: tuple[int, ...]


class _Block(NamedTuple):
    lora_name: str | None
    cache_salt: str | None
    prefix: tuple[int, ...]


def _as_map(event: Any) -> dict[str, Any]:
    """An event in either wire format, as a map."""
    if isinstance(event, dict):
        return event
    kind, *values = event
    wired = {"type": kind, **dict(zip(_ARRAY_FIELDS[kind], values, strict=False))}
    for keys in (wired.get("extra_keys") or [])[:1]:
        (wired["cache_salt"],) = (key.removeprefix(_MARK) for key in keys or () if key.startswith(_MARK))
    return wired


class Mirror:
    """What batches come to, one after the other. It checks what a reader may count on."""

    def __init__(self) -> None:
        self.blocks: dict[int, _Block] = {}
        self.media: dict[str, set[int]] = {}
        self.events: list[dict[str, Any]] = []

    def apply(self, payload: bytes) -> None:
        seconds, events, dp_rank = msgspec.msgpack.decode(payload)
        assert isinstance(seconds, float)
        assert type(dp_rank) is int
        for event in events:
            wired = _as_map(event)
            self.events.append(wired)
            {"BlockStored": self._stored, "BlockRemoved": self._removed, "AllBlocksCleared": self._cleared}[
                wired["type"]
            ](wired)

    def _stored(self, event: dict[str, Any]) -> None:
        size, ids, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
        assert len(ids) == size * len(event["block_hashes"])
        assert len({*event["block_hashes"], parent}) == len(event["block_hashes"]) + 1
        prefix: tuple[int, ...] = ()
        names = (event["lora_name"], event.get("cache_salt"))
        if parent is not None:
            assert any(parent in listed for listed in self.media.values()), "a child came before its parent"
            prefix = self.blocks[parent].prefix
            assert (self.blocks[parent].lora_name, self.blocks[parent].cache_salt) == names
        listed = self.media.setdefault(event["medium"], set())
        for index, block_hash in enumerate(event["block_hashes"]):
            assert 0 <= block_hash < 2**64
            assert block_hash not in listed, "stored twice"
            listed.add(block_hash)
            prefix += tuple(ids[index * size : (index + 1) * size])
            assert self.blocks.setdefault(block_hash, _Block(*names, prefix)) == _Block(*names, prefix)

    def _removed(self, event: dict[str, Any]) -> None:
        listed = self.media[event["medium"]]
        for block_hash in event["block_hashes"]:
            listed.remove(block_hash)
            if not any(block_hash in others for others in self.media.values()):
                del self.blocks[block_hash]

    def _cleared(self, event: dict[str, Any]) -> None:
        self.blocks.clear()
        self.media.clear()

    @property
    def held(self) -> set[Held]:
        found = [Held(medium, *self.blocks[each]) for medium, listed in self.media.items() for each in listed]
        assert len(set(found)) == len(found), "the same tokens twice"
        return set(found)


class Reader:
    """A subscriber that follows the protocol: live batches in order, and a replay where some are missing."""

    def __init__(self, publisher: KVEventPublisher) -> None:
        self._publisher = publisher
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sub = context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(publisher.endpoint.replace("0.0.0.0", "127.0.0.1"))
        self._dealer: zmq.Socket[bytes] | None = None
        if publisher.replay_endpoint is not None:
            self._dealer = context.socket(zmq.DEALER)
            self._dealer.connect(publisher.replay_endpoint)
        self.mirror = Mirror()
        self.next_seq = 0
        self.num_live = 0
        self.topics: set[bytes] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sub.close(0)
        if self._dealer is not None:
            self._dealer.close(0)

    @property
    def can_ask(self) -> bool:
        """Whether there is somebody to ask for what it missed; without, it knows all from the next clearing on."""
        return self._dealer is not None

    def ask(self, question: bytes) -> list[list[bytes]]:
        """The answer of the replay socket, without the empty frame in front. Blocks."""
        assert self._dealer is not None
        self._dealer.send_multipart([b"", question])
        answer = []
        while True:
            empty, *frames = self._dealer.recv_multipart()
            assert empty == b""
            answer.append(frames)
            if not frames[-1]:
                return answer

    def replay(self) -> None:
        """Get what is missing. Blocks."""
        *batches, end = self.ask(self.next_seq.to_bytes(8, "big"))
        assert end[1:] == [_NO_SEQ, b""]
        for topic, seq, payload in batches:
            self._take(topic, seq, payload)

    def take_live(self) -> bool:
        """Take one batch off the SUB socket; whether there was one. Blocks for a moment if there is none."""
        if not self._sub.poll(_POLL_MS):
            return False
        topic, seq, payload = self._sub.recv_multipart()
        number = int.from_bytes(seq, "big")
        if number > self.next_seq and self._dealer is not None:
            self.replay()
        if number >= self.next_seq:
            self._take(topic, seq, payload)
            self.num_live += self.next_seq > 0
        return True

    def _take(self, topic: bytes, seq: bytes, payload: bytes) -> None:
        assert len(seq) == 8
        if self._dealer is None and self.next_seq == 0 and _CLEARED not in payload:
            return  # what it joined in the middle of says nothing to it
        self.next_seq = int.from_bytes(seq, "big") + 1
        self.topics.add(topic)
        self.mirror.apply(payload)

    async def follow(self) -> None:
        """Take all that was published up to now. Waits for the publisher."""
        until = await self._publisher.sent()
        while self.next_seq < until:
            if not await anyio.to_thread.run_sync(self.take_live):
                if self._dealer is not None:
                    await anyio.to_thread.run_sync(self.replay)
                elif not self.num_live:
                    return


async def joined(cache: RadixCache, reader: Reader) -> None:
    """Have something to tell until the reader hears it live: a subscription takes its time to arrive."""
    somewhere = Namespace(extra="until somebody listens")
    while not reader.num_live:
        await filled(cache, key(range(64), namespace=somewhere))
        await cache.flush(somewhere if reader.can_ask else None)
        await settled()
        await reader.follow()


_MEDIA_OF = {"device": ("GPU",), "host": ("CPU",), "both": ("GPU", "CPU")}


def held_by(cache: RadixCache, block_size: int) -> set[Held]:
    """The blocks that a cache holds, on each tier, from its own snapshot."""
    held: set[Held] = set()
    for entry in cache.snapshot()["namespaces"]:
        names = wire_names(Namespace(**entry["namespace"]))
        stack: list[tuple[dict[str, Any], tuple[int, ...]]] = [(child, ()) for child in entry["root"]["children"]]
        while stack:
            node, above = stack.pop()
            prefix = above + tuple(item[0] if isinstance(item, list) else item for item in node["tokens"])
            ends = range(block_size, len(prefix) + 1, block_size)
            # What is above a node on a tier is on that tier.
            held.update(Held(medium, *names, prefix[:end]) for medium in _MEDIA_OF[node["residency"]] for end in ends)
            stack += [(child, prefix) for child in node["children"]]
    return held
