"""The inspector's server: what it tells of a live cache, what it hides, and who reaches it."""

from __future__ import annotations

import functools
import json
import socket
import urllib.error
import urllib.request
from typing import Any

import anyio
import pytest

from aradix import CacheInitParams, Namespace, RadixCache, SlotAllocator
from aradix.errors import ConfigError
from aradix.observe import inspector
from aradix.observe.loopback import guarded, is_loopback
from aradix.observe.serve import attached, serving
from tests.cache.acts import begin, entered, filled, joiner, key, leader
from tests.support.caches import opened

pytestmark = pytest.mark.anyio


class Answer:
    def __init__(self, status: int, headers: dict[str, str], text: str) -> None:
        self.status = status
        self.headers = headers
        self.text = text

    @property
    def found(self) -> Any:
        return json.loads(self.text)


def fetched(url: str, method: str = "GET") -> Answer:
    """What a URL answers. Blocks."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30) as answer:
            return Answer(answer.status, dict(answer.headers), answer.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, dict(error.headers), error.read().decode())


def said_to(port: int, host: str, address: str = "127.0.0.1") -> str:
    """What the page answers to somebody who calls it by that name. Blocks."""
    with socket.create_connection((address, port)) as connection:
        connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return connection.recv(100).decode()


async def ask(url: str, method: str = "GET") -> Answer:
    return await anyio.to_thread.run_sync(functools.partial(fetched, url, method))


async def with_tree(url: str) -> Any:
    """The state, once the tree was surveyed."""
    found = (await ask(f"{url}api/state")).found
    while not found["walk"]:
        found = (await ask(f"{url}api/state")).found
    return found


async def test_it_tells_what_the_cache_is_and_what_goes_on_in_it() -> None:
    async with opened(64, 4, eviction_policy="lfu", high_watermark=0.1) as cache:
        async with serving(inspector(cache), port=0) as url:
            about = (await ask(f"{url}api/about")).found
            assert (about["policy"], about["page_size"], about["num_slots"], about["high"]) == ("lfu", 4, 64, 0.1)
            await filled(cache, key(range(16)), key(range(8), 50, 51, 52, 53, namespace=Namespace(tenant="t")))
            lease = await entered(cache, key(range(16), 90), 4)
            async with anyio.create_task_group() as tasks:
                waiting = await begin(tasks, cache.lease(key(range(200, 260)), reserve=60).__aenter__)
                found = await with_tree(url)
                waiting.scope.cancel()
                first = await leader(tasks, cache, key(range(300, 308)), 8)
                acts = [await joiner(tasks, cache, key(range(300, 320)), reserve=reserve) for reserve in (None, 20)]
                joined = (await ask(f"{url}api/state")).found
                assert [(each["kind"], each["tokens"]) for each in joined["waiters"]] == [("join", 8), ("join", 20)]
                assert joined["stats"]["num_joiners"] == 2
                for act in acts:
                    act.scope.cancel()
                first.release()
            stats = found["stats"]
            assert stats["num_slots"] == 64
            assert sum(root["t"] for root in found["tree"]) == stats["evictable"] + stats["protected"]
            assert {root["ns"] for root in found["tree"]} == {"default", "tenant=t"}
            (held,) = found["leases"]
            assert held["where"].split(":")[0].endswith("acts.py")
            assert (held["matched"], held["tokens"], held["ns"], held["waiting"]) == (16, 20, "default", False)
            (waiter,) = found["waiters"]
            assert (waiter["kind"], waiter["tokens"]) == ("admission", 60)
            assert found["samples"][-1][1] == stats["queries"]
            again = (await ask(f"{url}api/state?walk={found['walk']}&since={found['now']}")).found
            assert (again["tree"] is None) == (again["walk"] == found["walk"])
            assert all(sample[0] > found["now"] for sample in again["samples"])
            lease.release()
            async with cache.exclusive(key(range(16))):
                (gate,) = (await ask(f"{url}api/state")).found["gates"]
                assert gate["granted"]
                assert gate["depth"] == 16


async def test_searching_finds_a_prefix_in_its_namespace() -> None:
    async with opened(64) as cache:
        await filled(cache, key(range(1, 9)), key(range(1, 5), 30, 31))
        async with serving(inspector(cache), port=0) as url:
            found = (await ask(f"{url}api/search?tokens=1,2,3,4,5,99")).found
            assert (found["matched"], found["asked"], found["ns"]) == (5, 6, "default")
            assert [node["n"] for node in found["path"]] == [0, 4, 4]
            assert (await ask(f"{url}api/search?tokens=")).found["matched"] == 0
            for wrong in ("1,x", "-1", str(2**40)):
                answer = await ask(f"{url}api/search?tokens={wrong}")
                assert answer.status == 400
                assert "token ids" in answer.found["error"]
            assert cache.stats().queries == 2  # looking counts for nothing


async def test_a_namespace_is_searched_by_its_root_whatever_its_fields_are() -> None:
    spaces = [Namespace(version=1), Namespace(version="1"), Namespace(lora="a,tenant=b"), Namespace(salt="#1=&é")]
    async with opened(64) as cache:
        for number, space in enumerate(spaces):
            await filled(cache, key(range(number + 1), namespace=space))
        async with serving(inspector(cache), port=0) as url:
            tree = (await with_tree(url))["tree"]
            assert len(tree) == len(spaces)
            for root in tree:
                found = (await ask(f"{url}api/search?tokens=0,1,2,3&root={root['id']}")).found
                assert (found["matched"], found["ns"]) == (root["t"], root["ns"])
            assert (await ask(f"{url}api/search?tokens=0")).found["matched"] == 0
            leaf = tree[0]["k"][0]["id"]
            for wrong in (leaf, 10**9, "x", "9" * 40):
                answer = await ask(f"{url}api/search?tokens=0&root={wrong}")
                assert (answer.status, "no namespace" in answer.found["error"]) == (400, True)


@pytest.mark.parametrize("allowed", [False, True])
async def test_token_ids_are_hidden_unless_allowed(allowed: bool) -> None:
    async with opened(64) as cache:
        await filled(cache, key(range(123456, 123466)))
        async with serving(inspector(cache, show_tokens=allowed), port=0) as url:
            found = await with_tree(url)
            assert ("123456" in json.dumps(found)) == allowed


async def test_nothing_can_be_changed_and_nothing_is_loaded_from_elsewhere() -> None:
    async with opened(64) as cache:
        async with serving(inspector(cache), port=0) as url:
            page = await ask(url)
            assert page.status == 200
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in page.text
            for path in ("", "api/state", "api/about", "api/search"):
                for method in ("POST", "PUT", "DELETE"):
                    assert (await ask(url + path, method)).status == 405
            assert (await ask(f"{url}api/flush")).status == 404


async def test_it_binds_to_loopback_unless_told() -> None:
    async with opened(64) as cache:
        app = inspector(cache)
        async with serving(app, port=0) as url:
            assert url.startswith("http://127.0.0.1:")
            assert (await ask(url)).status == 200
            port = int(url.rstrip("/").rpartition(":")[2])
            assert (await anyio.to_thread.run_sync(said_to, port, "evil.example")).startswith("HTTP/1.1 400")
            assert (await anyio.to_thread.run_sync(said_to, port, f"localhost:{port}")).startswith("HTTP/1.1 200")
        async with serving(app, "127.0.0.2", 0) as url:
            port = int(url.rstrip("/").rpartition(":")[2])
            for name, status in (("evil.example", 400), ("127.0.0.2", 200), ("[::1]:80", 200)):
                said = await anyio.to_thread.run_sync(said_to, port, name, "127.0.0.2")
                assert said.startswith(f"HTTP/1.1 {status}")
        async with serving(app, "127.1", 0) as url:  # another name of loopback
            port = int(url.rstrip("/").rpartition(":")[2])
            assert (await anyio.to_thread.run_sync(said_to, port, "evil.example")).startswith("HTTP/1.1 400")
            assert (await anyio.to_thread.run_sync(said_to, port, "127.1")).startswith("HTTP/1.1 200")
        async with serving(app, "0.0.0.0", 0) as url:
            assert url.startswith("http://0.0.0.0:")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"cannot be served at 127.0.0.1:{port}"):
                async with serving(app, port=port):
                    pass


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("localhost", True), ("::1", True), ("127.8.9.10", True), ("0.0.0.0", False), ("::", False), ("a.example", False)],
)
def test_what_loopback_is(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local
    assert (guarded(inspector, host, []) is inspector) is not is_local


async def test_a_cache_that_is_not_open_says_so_and_a_closed_one_still_answers() -> None:
    cache = RadixCache(CacheInitParams(allocator=SlotAllocator(8)))
    async with serving(inspector(cache), port=0) as url:
        answer = await ask(f"{url}api/state")
        assert (answer.status, answer.found) == (503, {"error": "the cache is not open yet"})
        async with cache:
            assert not (await ask(f"{url}api/state")).found["closed"]
        assert (await ask(f"{url}api/state")).found["closed"]
        cache.check()


async def test_attaching_shows_the_page_of_another_inspector() -> None:
    async with opened(64) as cache:
        await filled(cache, key(range(8)))
        async with serving(inspector(cache), port=0) as inner:
            app = await anyio.to_thread.run_sync(attached, inner)
            async with serving(app, port=0) as url:
                assert (await ask(url)).text == (await ask(inner)).text
                assert (await with_tree(url))["tree"][0]["t"] == 8
                assert (await ask(f"{url}api/search?tokens=0,1,9")).found["matched"] == 2
                assert (await ask(f"{url}api/search?tokens=x")).status == 400
                assert (await ask(f"{url}api/../secret")).status == 404
        async with serving(app, port=0) as url:
            answer = await ask(f"{url}api/state")
            assert answer.status == 503
            assert "does not answer" in answer.found["error"]
        for wrong, match in (
            (inner, "does not answer"),
            ("somewhere", "no http URL"),
            ("file:///etc/passwd", "no http URL"),
        ):
            with pytest.raises(ConfigError, match=match):
                await anyio.to_thread.run_sync(attached, wrong)
