"""`KVEventPublisher`: a cache's events on a ZMQ socket, as routers of vLLM and SGLang workers take them.

On the loop an event sink only puts what was recorded into a queue. A thread hashes the pages, cuts them into blocks,
encodes, sends, keeps the last batches for who missed some, and answers such readers; the sockets are its own. So
neither a slow reader nor a long answer holds the engine up. `wire.py` has the shapes, `blocks.py` the cutting.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import anyio

from aradix.cache.home import Home, is_cancellation
from aradix.cache.radix_cache import RadixCache
from aradix.errors import ConfigError, UsageError
from aradix.events import AllBlocksCleared, KVCacheEvent
from aradix.observe.blocks import make_blocks
from aradix.observe.wire import Wire, batch_encoder

try:
    import zmq
except ImportError as error:
    raise ImportError("KVEventPublisher needs pyzmq: pip install 'aradix[zmq]'") from error

__all__ = ["KVEventPublisher"]

_log = logging.getLogger("aradix.observe")

_KEPT_BATCHES = 10_000
_LINGER_MS = 1_000
_TURNS_A_ROUND = 64
_NO_SEQ = (-1).to_bytes(8, "big", signed=True)
_ASKS_FOR_EPOCH = b"epoch"
_BINDS_FOR = ("*", "::", "0.0.0.0")


def _binds(endpoint: str) -> bool:
    """Whether a PUB socket binds at an endpoint; at others somebody else does, and it connects."""
    return endpoint.startswith(("ipc://", "inproc://")) or any(part in endpoint for part in _BINDS_FOR)


def _address(socket: zmq.Socket[bytes]) -> str:
    """Where a socket was bound or connected to."""
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.decode().rstrip("\0")


class _Turn(NamedTuple):
    """What was recorded in a turn of the loop, or in some, after so many such that were dropped."""

    num_skipped: int
    seconds: float
    events: Sequence[KVCacheEvent]


class KVEventPublisher:
    """Publishes what a cache stores and evicts, as an async context manager inside the cache's own.

    Each batch is three frames: `topic`, `seq` (8 bytes, big-endian, from 0), payload (see `aradix.observe.wire`). The
    first one says what is cached already, the last one that nothing is vouched for any more; each begins with
    `AllBlocksCleared`, so that a reader of an earlier life forgets it.

    A DEALER that sends `[b"", start_seq]` to `replay_endpoint` gets `[b"", topic, seq, payload]` for each of the last
    10,000 batches from that one on, closed by seq -1 and an empty payload. Where they do not reach back so far, it gets
    one batch in their place that says all that is listed, under the last seq sent. `[b"", b"epoch"]` is answered by
    `[b"", topic, epoch, b""]`: another epoch is another life of the publisher, which counts from 0 again (a
    reader that skips what is not newer, as Dynamo's indexer does, has to be registered anew).

    Args:
        cache: open, and made with `enable_kv_cache_events=True`.
        endpoint: of the PUB socket, such as `"tcp://*:5557"`. It binds for `*`, `::`, `0.0.0.0`, ipc and inproc, and
            connects elsewhere.
        replay_endpoint: of the ROUTER socket that answers who missed batches; it binds. None: nobody can ask.
        topic: of all batches; llm-d wants `kv@<pod>@<model>`.
        block_size: tokens a block on the wire; the cache's page size by default. Any other costs the thread some 300
            bytes a page.
        wire: `"map"` for tagged maps, `"array"` for the older tagged arrays.
        queue_size: turns that may wait for the thread, and batches that may wait for a slow reader before he misses
            some. Turns beyond it are dropped; their seqs are left out, and as soon as the thread has caught up, a batch
            says all that is cached then, which takes one walk through the tree.
        dp_rank: the rank that consumers know this worker by.
        delay: seconds that events may wait to be sent in one batch with later ones; 0: each turn of the loop that has
            some makes a batch. It takes work off the loop, the thread and the readers.

    Raises:
        ConfigError: a block size, wire format, queue size, rank or delay that cannot work; on entering also an
            endpoint.
        UsageError: on entering, the cache records no events or is not open.
    """

    def __init__(
        self,
        cache: RadixCache,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        block_size: int | None = None,
        wire: Wire = "map",
        queue_size: int = 100_000,
        *,
        dp_rank: int = 0,
        delay: float = 0.001,
    ) -> None:
        params = cache._params
        block_size = params.page_size if block_size is None else block_size
        for name, value, least in (
            ("block_size", block_size, 1),
            ("queue_size", queue_size, 1),
            ("dp_rank", dp_rank, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an int of at least {least}, got {value!r}")
        if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay < math.inf:
            raise ConfigError(f"delay must be a number of seconds from 0 on, got {delay!r}")
        self._cache = cache
        self._delay = delay
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()
        self._queue_size = queue_size
        self._encode = batch_encoder(wire, block_size, dp_rank)
        self._blocks = make_blocks(
            params.page_size, block_size, is_bigram=params.is_eagle, keeps=replay_endpoint is not None
        )
        self._num_dropped = 0
        self._epoch = 0
        self._home: Home | None = None
        # Written on the loop:
        self._queue: deque[_Turn | anyio.Event] = deque()
        self._num_skipped = 0
        self._lost = False
        self._stopping = False
        self._aborting = False
        # Written by the thread:
        self._next_seq = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=_KEPT_BATCHES)
        self._error: BaseException | None = None

    @property
    def num_dropped(self) -> int:
        """Turns whose events were dropped because the thread was `queue_size` turns behind."""
        return self._num_dropped

    @property
    def epoch(self) -> int:
        """Which life of the publisher this is: nanoseconds at its start; 0 before it."""
        return self._epoch

    @property
    def next_seq(self) -> int:
        """The seq that the next batch will have: so many were sent, or dropped before one that was."""
        return self._next_seq

    @property
    def endpoint(self) -> str:
        """Where the PUB socket is: with the port that was chosen where `*` stood for one."""
        return self._endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where the ROUTER socket is."""
        return self._replay_endpoint

    # ---- opening and closing ----

    async def __aenter__(self) -> Self:
        """Open the sockets, and queue what is cached now. Does not wait, but takes one walk through the tree."""
        if self._home is not None:
            raise UsageError("this publisher was opened already; make another KVEventPublisher")
        self._home = Home()
        self._ended = anyio.Event()
        self._remove_sink = self._cache.add_event_sink(self._put, delay=self._delay)
        try:
            self._open_sockets()
        except BaseException:
            self._remove_sink()
            raise
        self._epoch = time.time_ns()
        self._put([AllBlocksCleared(), *self._cache.current_events()])
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._watch, name="aradix kv events")
        threading.Thread(target=self._run, name="aradix kv events", daemon=True).start()
        _log.info("publishing KV events at %s, replay at %s", self._endpoint, self._replay_endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Send what is queued and close the sockets. Waits for that, and if cancelled drops what is left.

        Raises:
            ExceptionGroup: of what failed in the thread.
        """
        if self._home is None:
            raise UsageError("this publisher was not opened")
        self._cache._event_sinks.deliver()
        self._remove_sink()
        self._append([AllBlocksCleared()])
        self._stopping = True
        self._wake()
        try:
            if error is not None and not is_cancellation(error):
                # The user's own error goes on as it is, not in a group.
                await self._group.__aexit__(None, None, None)
                return None
            return await self._group.__aexit__(kind, error, trace)
        finally:
            os.close(self._bell)
            _log.info("stopped publishing KV events at %s after %d batches", self._endpoint, self._next_seq)

    def _open_sockets(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._router = None if self._replay_endpoint is None else context.socket(zmq.ROUTER)
        sockets = [self._pub] if self._router is None else [self._pub, self._router]
        for socket in sockets:
            socket.sndhwm = max(self._queue_size, _KEPT_BATCHES)
        endpoint = self._endpoint
        try:
            for socket, endpoint in zip(sockets, (self._endpoint, self._replay_endpoint or ""), strict=False):
                socket.ipv6 = "[" in endpoint
                if socket is self._router or _binds(endpoint):
                    socket.bind(endpoint)
                else:
                    socket.connect(endpoint)
        except zmq.ZMQError as error:
            for socket in sockets:
                socket.close(0)
            raise ConfigError(f"no socket can be opened at {endpoint!r}: {error}") from error
        self._endpoint = _address(self._pub)
        if self._router is not None:
            self._replay_endpoint = _address(self._router)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    async def _watch(self) -> None:
        """Wait for the thread's end; what failed there fails here."""
        try:
            await self._ended.wait()
        except BaseException:
            self._aborting = True
            self._wake()
            with anyio.CancelScope(shield=True):
                await self._ended.wait()
            raise
        finally:
            for item in self._queue:
                if isinstance(item, anyio.Event):
                    item.set()
        if self._error is not None:
            raise self._error

    async def sent(self) -> int:
        """Wait until all that was recorded up to now has been handed to the sockets; gives the seq of the next batch.

        Raises:
            UsageError: the publisher is not open.
        """
        if self._home is None or self._stopping:
            raise UsageError("open the publisher first: async with KVEventPublisher(cache, ...) as publisher")
        self._home.check()
        self._cache._event_sinks.deliver()
        reached = anyio.Event()
        self._queue.append(reached)
        self._wake()
        await reached.wait()
        return self._next_seq

    # ---- on the loop ----

    def _put(self, events: Sequence[KVCacheEvent]) -> None:
        """Queue the events of a turn, or drop them."""
        if self._lost or len(self._queue) >= self._queue_size:
            first, self._lost = not self._lost, True
            self._num_skipped += 1
            self._num_dropped += 1
            if first:
                _log.warning("%d turns wait for the KV event thread: dropping until it has caught up", len(self._queue))
                self._wake()  # it may have caught up before it could see that there is something to make good
            return
        self._append(events)

    def _append(self, events: Sequence[KVCacheEvent]) -> None:
        self._queue.append(_Turn(self._num_skipped, time.time(), events))
        self._num_skipped = 0
        if len(self._queue) == 1:
            self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _start_over(self) -> None:
        """Turns were dropped, and the thread has done all the others: say what is cached now."""
        if self._lost and not self._stopping:
            self._cache._event_sinks.deliver()  # to be dropped as well: what is cached now has it all
            self._lost = False
            self._append([AllBlocksCleared(), *self._cache.current_events()])
            _log.info("the KV event thread has caught up: %d turns were dropped in all", self._num_dropped)

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._error = error
        finally:
            linger = 0 if self._aborting else _LINGER_MS
            self._pub.close(linger)
            if self._router is not None:
                self._router.close(linger)
            self._tell(self._ended.set)

    def _tell(self, step: Callable[[], None]) -> None:
        assert self._home is not None
        self._home.call_soon(step)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._bell in ready:
                os.eventfd_read(self._bell)
            # Whoever asks is answered from time to time, even if there is always something to send.
            for _ in range(min(len(self._queue), _TURNS_A_ROUND)):
                if self._aborting:
                    return
                item = self._queue.popleft()
                if isinstance(item, anyio.Event):
                    self._tell(item.set)
                else:
                    self._publish(item)
            if self._router is not None:
                self._answer_all(self._router)
            if self._queue:
                self._wake()
            elif self._stopping or self._aborting:
                return
            elif self._lost:
                self._tell(self._start_over)

    def _publish(self, turn: _Turn) -> None:
        self._next_seq += turn.num_skipped
        events = [wire_event for event in turn.events for wire_event in self._blocks.apply(event)]
        if not events:  # no block was completed, and none broken
            return
        payload = self._encode(turn.seconds, events)
        self._pub.send_multipart((self._topic, self._next_seq.to_bytes(8, "big"), payload))
        self._sent.append((self._next_seq, payload))
        self._next_seq += 1

    def _answer_all(self, router: zmq.Socket[bytes]) -> None:
        while router.poll(0):
            reader, *question = router.recv_multipart()
            asked = question[-1] if question else b""
            envelope = (reader, b"", self._topic)
            if asked == _ASKS_FOR_EPOCH:
                router.send_multipart((*envelope, self._epoch.to_bytes(8, "big"), b""))
                continue
            if len(asked) == 8:
                for seq, payload in self._batches_from(int.from_bytes(asked, "big")):
                    router.send_multipart((*envelope, seq.to_bytes(8, "big"), payload))
            else:
                _log.info("a reader asked for %d bytes that are neither a seq nor %r", len(asked), _ASKS_FOR_EPOCH)
            router.send_multipart((*envelope, _NO_SEQ, b""))

    def _batches_from(self, start: int) -> Iterable[tuple[int, bytes]]:
        """The batches from a seq on, or what stands for them."""
        if start >= self._next_seq:
            return []
        if self._sent and self._sent[0][0] <= start:
            _log.debug("replaying from %d up to %d", start, self._next_seq - 1)
            return [batch for batch in self._sent if batch[0] >= start]
        _log.debug("seq %d is gone: sending all that is listed at %d", start, self._next_seq - 1)
        return [(self._next_seq - 1, self._encode(time.time(), self._blocks.listed()))]
