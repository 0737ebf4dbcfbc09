import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Error, expect, sync_playwright

from studio.stage import HANGS, Seen, Served, find_chromium, launch, open_studio, serve

expect.set_options(timeout=1000 * HANGS)  # of itself five seconds


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium on this machine: install one, or name it in the variable CHROMIUM")
    with sync_playwright() as playwright:
        try:
            chromium = launch(playwright, path)
        except Error as error:
            if "CHROMIUM" in os.environ:
                raise
            pytest.skip(f"the Chromium of this machine does not start: {error.message.splitlines()[0]}")
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def served(browser: Browser) -> Iterator[Served]:
    """The embedded model, for all tests that leave the server as they found it."""
    with serve() as server:
        yield server


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1280, "height": 860}, color_scheme="light")
    made.set_default_timeout(1000 * HANGS)
    yield made
    made.close()


@pytest.fixture
def studio(context: BrowserContext, served: Served) -> Iterator[Seen]:
    """The page, open; in the end its console must be empty and its policy unbroken."""
    seen = open_studio(context, served.url)
    yield seen
    seen.check()
