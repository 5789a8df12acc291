"""Debian's Chromium, without a screen, for tests of the web page."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from playwright.async_api import Page

BINARY: Final = shutil.which("chromium")
MISSING: Final = (
    "no Chromium: make browser"
    if BINARY is None
    else "no Playwright: pip install playwright"
    if find_spec("playwright") is None
    else None
)
WAIT_MS: Final = 30_000
# It asks nobody but the page's service: no updates, no accounts, no look-ups of its own.
_QUIET: Final = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)


@asynccontextmanager
async def browser_page(**options: Any) -> AsyncIterator["Page"]:
    """A tab of its own. An error of the page's scripts fails the test at the end."""
    from playwright.async_api import async_playwright

    errors: list[str] = []
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=BINARY, args=list(_QUIET))
        try:
            page = await chromium.new_page(**options)
            page.set_default_timeout(WAIT_MS)
            page.on("pageerror", lambda error: errors.append(str(error)))
            yield page
        finally:
            await chromium.close()
    assert not errors, errors
