"""A real Chromium for tests of the console: Debian's package, driven by playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.needs import needs

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextlib.asynccontextmanager
async def run_browser() -> AsyncIterator[Browser]:
    """Start it; skip the test where there is none."""
    needs("playwright")
    from playwright.async_api import async_playwright

    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium is installed here (apt-get install chromium): the page is tested over HTTP only")
    async with async_playwright() as driver:
        # No sandbox: tests run as root in containers, and the only page is ours.
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = await driver.chromium.launch(executable_path=path, args=options, timeout=150_000)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Watched:
    """A page, and everything that went wrong in it."""

    page: Page
    context: BrowserContext
    wrong: list[str] = field(default_factory=list)
    meant: str = ""  # what the test does wrong, in a word of the browser's
    urls: list[str] = field(default_factory=list)

    def check(self, origin: str) -> None:
        """No error, no violation of the policy, nothing from elsewhere, no cookie."""
        assert [text for text in self.wrong if not self.meant or self.meant not in text] == []
        assert {url for url in self.urls if not url.startswith(f"{origin}/")} == set()


@contextlib.asynccontextmanager
async def open_page(
    browser: Browser,
    url: str,
    *,
    admin_key: str = "",
    motion: str = "no-preference",
) -> AsyncIterator[Watched]:
    """The console in a window of its own, once it has its first answer."""
    origin = "/".join(url.split("/", 3)[:3])
    context = await browser.new_context(
        viewport={"width": 1440, "height": 900},
        reduced_motion=motion,  # type: ignore[arg-type]
    )
    if admin_key:
        await context.add_init_script(f"sessionStorage.setItem('baton.admin-key', '{admin_key}')")
    page = await context.new_page()
    watched = Watched(page, context)
    page.on("pageerror", lambda error: watched.wrong.append(str(error)))
    page.on(
        "console", lambda message: watched.wrong.append(message.text) if is_wrong(message.type, message.text) else None
    )
    page.on("request", lambda request: watched.urls.append(_url(request)))
    page.set_default_timeout(60_000)
    try:
        await page.goto(url)
        await page.wait_for_selector("body.loaded")
        yield watched
        watched.check(origin)
        assert await context.cookies() == []
    finally:
        await context.close()


def is_wrong(kind: str, text: str) -> bool:
    """Chromium itself tells of answers like 401, which the page shows."""
    return kind in ("error", "warning") and "Failed to load resource" not in text


def _url(request: Request) -> str:
    return request.url


# Text that is hard to read: [text, contrast] of every visible one below 4.5 (3 for large), with colours as they are painted.
UNREADABLE = """() => {
  const parts = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);  // color(srgb …) has shares of 1
  const channels = (text) => parts(text).map((value, index) => (text.startsWith("color(") && index < 3 ? 255 * value : value));
  const over = (top, under) => top.slice(0, 3).map((value, index) => value * (top[3] ?? 1) + under[index] * (1 - (top[3] ?? 1)));
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.unshift(channels(getComputedStyle(at).backgroundColor));
    return layers.reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const luminance = (rgb) => rgb.map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const style = getComputedStyle(element);
    if (!walker.currentNode.data.trim() || !element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) continue;
    if (element.closest(".hidden, :disabled, .skip, noscript")) continue;
    const under = ground(element);
    const [a, b] = [luminance(over(channels(style.color), under)), luminance(under)].sort((one, other) => other - one);
    const ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize);
    const enough = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    if (ratio < enough) found.push([walker.currentNode.data, ratio]);
  }
  return found;
}"""
