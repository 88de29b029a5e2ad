"""The inspector's page in a real browser: it draws a live cache, and nothing of it fails."""

from __future__ import annotations

import contextlib
import shutil
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.common.exceptions import TimeoutException  # noqa: E402
from selenium.webdriver.chrome.options import Options  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from aradix import Namespace, RadixCache  # noqa: E402
from aradix.observe import inspector  # noqa: E402
from aradix.observe.serve import serving  # noqa: E402
from tests.cache.acts import begin, entered, filled, key  # noqa: E402
from tests.support.caches import opened  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="there is no chromium with its driver"),
]

PATIENCE_SECONDS = 60


class Browser:
    """A page in chromium. Every call blocks."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, url: str) -> None:
        self._driver.get_log("browser")  # which forgets what it tells
        self._driver.get(url)

    def leave(self) -> None:
        """Close the page: it asks its server for nothing any more."""
        self._driver.get("about:blank")

    def run(self, script: str) -> Any:
        """What a script gives."""
        return self._driver.execute_script(f"return {script}")

    def wait_until(self, condition: str) -> None:
        """Wait for a condition in the page."""
        try:
            WebDriverWait(self._driver, PATIENCE_SECONDS, 0.05).until(lambda _: self.run(condition))
        except TimeoutException:
            raise AssertionError(f"never true: {condition}; the page says {self.text('live')}") from None

    def text(self, element_id: str) -> str:
        found: str = self.run(f"document.getElementById({element_id!r}).textContent")
        return found

    def complaints(self) -> list[str]:
        """What the browser had to say of the page; that we look at its pixels is our doing."""
        told = [entry["message"] for entry in self._driver.get_log("browser")]
        return [message for message in told if "getImageData" not in message]

    def requested(self) -> list[str]:
        """Everything that was loaded."""
        found: list[str] = self.run("performance.getEntriesByType('resource').map((entry) => entry.name)")
        return found

    def colours(self) -> int:
        """How many colours the tree is drawn in."""
        found: int = self.run(
            "(() => { const c = document.getElementById('icicle'), d = c.getContext('2d').getImageData(0, 0, c.width, "
            "c.height).data, seen = new Set(); for (let i = 0; i < d.length; i += 4) if (d[i + 3]) seen.add(d[i] << 16 "
            "| d[i + 1] << 8 | d[i + 2]); return seen.size; })()"
        )
        return found

    def point(self, kind: str, x: float, y: float) -> None:
        """A mouse event at a place of the tree, given in parts of its width and in pixels from its top."""
        self.run(
            "(() => { const c = document.getElementById('icicle'), b = c.getBoundingClientRect(); c.dispatchEvent(new "
            f"MouseEvent({kind!r}, {{ clientX: b.left + b.width * {x}, clientY: b.top + {y}, bubbles: true }})); }})()"
        )

    def shoot(self, path: Path) -> None:
        self._driver.save_screenshot(str(path))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    options = Options()
    options.binary_location = CHROMIUM or ""
    profile = tmp_path_factory.mktemp("chromium")
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--window-size=1400,1200",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


async def off(function: Callable[..., Any], *args: Any) -> Any:
    """Call something that blocks, while the cache's loop goes on."""
    return await anyio.to_thread.run_sync(function, *args)


async def busy(cache: RadixCache) -> None:
    await filled(cache, *[key(range(40), range(1000 * n, 1000 * n + 20)) for n in range(1, 9)])
    await filled(cache, *[key(range(n, n + 30), namespace=Namespace(tenant="acme")) for n in range(500, 600, 40)])


async def test_the_page_shows_a_live_cache(browser: Browser, tmp_path: Path) -> None:
    async with opened(512, high_watermark=0.1, low_watermark=0.05) as cache:
        await busy(cache)
        lease = await entered(cache, key(range(40), 77), 1)
        async with serving(inspector(cache), port=0) as url:
            await off(browser.open, url + "?theme=dark")
            await off(browser.wait_until, "tree !== null && state.tick > 0 && document.querySelector('.live.on')")
            stats = cache.stats()
            assert await off(browser.run, "tree.all.t") == stats.evictable + stats.protected
            assert await off(browser.run, "tree.all.k.map((node) => node.ns).sort()") == ["default", "tenant=acme"]
            assert "512 slots" in await off(browser.text, "facts")
            assert "1 tokens pinned" not in await off(browser.text, "tiles")
            assert "acts.py" in await off(browser.text, "leases")
            assert "Nobody waits" in await off(browser.text, "waiters")
            assert await off(browser.colours) > 4
            assert await off(browser.run, "document.querySelectorAll('#bar i').length") >= 3

            # What changes is seen without a reload.
            async with anyio.create_task_group() as tasks:
                waiting = await begin(tasks, cache.lease(key(range(9000, 9500)), reserve=500).__aenter__)
                await off(browser.wait_until, "state.stats.num_slot_waiters === 1")
                assert "admission" in await off(browser.text, "waiters")
                waiting.scope.cancel()
            lease.release()
            async with cache.exclusive(key(range(40))):
                await off(browser.wait_until, "state.gates.length === 1")
                assert "gate granted" in await off(browser.text, "waiters")
            await off(browser.wait_until, "state.gates.length === 0 && state.stats.num_leases === 0")
            assert "No lease is held" in await off(browser.text, "leases")
            await cache.flush()
            await off(browser.wait_until, "tree.all.t === 0")
            assert "Nothing is cached" in await off(browser.text, "empty")
            await off(browser.shoot, tmp_path / "page.png")
            assert (tmp_path / "page.png").stat().st_size > 10_000
            assert await off(browser.complaints) == []
            await off(browser.leave)


async def test_one_can_zoom_search_and_colour(browser: Browser) -> None:
    async with opened(512) as cache:
        await busy(cache)
        async with serving(inspector(cache, show_tokens=True), port=0) as url:
            await off(browser.open, url + "?theme=light")
            await off(browser.wait_until, "tree !== null && cells.length > 3")
            await off(browser.point, "mousemove", 0.05, 60)
            assert "Namespace" in await off(browser.text, "tip")
            await off(browser.point, "click", 0.05, 60)
            assert await off(browser.run, "zoom.length") == 1
            assert "default" in await off(browser.text, "crumbs")
            await off(browser.point, "mousemove", 0.05, 60)
            assert "tokens at or below" in await off(browser.text, "tip")
            assert "0 1 2 3 4 5 6 7" in await off(browser.text, "tip")
            await off(browser.run, "document.querySelector('#crumbs button').click()")
            assert await off(browser.run, "zoom.length") == 0

            before = await off(browser.colours)
            for mode in ("pins", "residency", "hits", "heat"):
                await off(browser.run, f"document.querySelector('[data-mode={mode}]').click()")
                assert await off(browser.run, "mode") == mode
            assert await off(browser.colours) == before

            async def search(text: str) -> str:
                await off(browser.run, f"(document.getElementById('query').value = {text!r}, 0)")
                await off(browser.run, "document.getElementById('find').requestSubmit()")
                await off(browser.wait_until, "document.getElementById('found').classList.contains('on')")
                found: str = await off(browser.text, "found")
                return found

            asked = " ".join(map(str, np.arange(30)))
            assert "30 of 30 tokens are cached in default, over 1 nodes" in await search(asked)
            assert await off(browser.run, "marked.size") == 3
            await off(browser.run, "document.getElementById('unmark').click()")
            assert "Namespace tenant=acme" in await search("acme")
            assert await off(browser.run, "zoom.length") == 1

            await off(browser.run, "document.getElementById('theme').click()")
            assert await off(browser.run, "document.documentElement.dataset.theme") == "dark"
            await off(browser.run, "document.getElementById('pause').click()")
            assert await off(browser.text, "pause") == "Go on"
            await off(browser.run, "(localStorage.clear(), 0)")
            loaded = await off(browser.requested)
            assert {urllib.parse.urlsplit(each).netloc for each in loaded} == {urllib.parse.urlsplit(url).netloc}
            assert await off(browser.complaints) == []
            await off(browser.leave)


async def test_the_page_says_when_nobody_answers_and_when_the_cache_is_closed(browser: Browser) -> None:
    async with opened(64) as cache:
        await filled(cache, key(range(8)))
        exits = contextlib.AsyncExitStack()
        url = await exits.enter_async_context(serving(inspector(cache), port=0))
        await off(browser.open, url)
        await off(browser.wait_until, "document.querySelector('.live.on')")
    async with exits:
        await off(browser.wait_until, "document.getElementById('live').textContent === 'closed'")
    await off(browser.wait_until, "document.getElementById('live').textContent === 'no answer'")
    await off(browser.leave)
