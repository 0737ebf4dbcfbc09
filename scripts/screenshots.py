"""The pictures of the studio in docs/studio: a real server, a real Chromium, real answers with fixed seeds.

    python scripts/screenshots.py            # all of them, in about a minute
    python scripts/screenshots.py sudoku     # one

Needs playwright and a Chromium (or the variable CHROMIUM that names one), as tests/studio does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the stage is the same as that of the tests

from studio.stage import find_chromium, launch, open_studio, serve, set_option, wait_done  # noqa: E402

FOLDER = ROOT / "docs" / "studio"
EXPERT = ".6.......4...893...1.6.37.........137.69.5..8...3.8.6......6....7.5..8..9.58.7..."  # of qqwing, `expert`
DESK, PHONE = (1280, 820), (360, 740)
PATIENCE = 300  # seconds for an answer, on a machine that others use as well


def seek(page: Page, tab: str, share: float) -> None:
    """Move the slider of a tab to a step."""
    slider = page.locator(f"#panel-{tab} .timeline:not([hidden]) input[type=range]").last
    at = round(share * int(slider.get_attribute("max") or 0))
    slider.evaluate("(node, at) => { node.value = at; node.dispatchEvent(new Event('input')); }", at)


def chat(page: Page) -> None:
    set_option(page, "chat", seed=4, steps=48)  # nano's own number of steps; asked for, an icon is drawn on a canvas
    page.click("#chat-options summary")
    for text in ("sort 47195406", "SVG icon\nbell, outline"):
        page.fill("#chat-input", text)
        page.keyboard.press("Enter")
        wait_done(page, "chat", PATIENCE)
    seek(page, "chat", 0.6)


def infill(page: Page) -> None:
    page.select_option("#infill-example", label="a method")
    set_option(page, "infill", seed=1, candidates=4)
    page.click("#infill-options summary")
    page.click("#panel-infill [data-go]")
    wait_done(page, "infill", PATIENCE)


def sudoku(page: Page, share: float = 0.34) -> None:
    page.fill("#sudoku-text", EXPERT)
    page.evaluate("document.querySelector('#sudoku-level input[value=expert]').checked = true")
    set_option(page, "sudoku", seed=2, attempts=8)
    page.click("#sudoku-options summary")
    page.click("#panel-sudoku [data-go]")
    wait_done(page, "sudoku", PATIENCE)
    seek(page, "sudoku", share)


def sudoku_dark(page: Page) -> None:
    sudoku(page, 1)
    page.click("#metrics-button")


def svg(page: Page) -> None:
    """All examples, so that nothing is picked; the folder last, for it is shown large."""
    chips = page.locator("#svg-starters .chip").all_inner_texts()
    for text in sorted(chips, key=lambda text: text.startswith("folder")):
        page.click(f"#svg-starters .chip:has-text('{text}')")
        wait_done(page, "svg", PATIENCE)


def race(page: Page) -> None:
    page.click("#panel-race [data-go]")
    wait_done(page, "race", PATIENCE)


PICTURES: dict[str, tuple[str, Callable[[Page], None], tuple[int, int], bool]] = {
    "chat": ("chat", chat, DESK, False),
    "infill": ("infill", infill, DESK, False),
    "sudoku": ("sudoku", sudoku, DESK, False),
    "sudoku-dark": ("sudoku", sudoku_dark, DESK, True),
    "svg": ("svg", svg, (1280, 930), False),
    "race": ("race", race, (1280, 880), True),
    "phone": ("sudoku", sudoku, PHONE, False),
}


def take(browser: Browser, url: str, name: str) -> None:
    tab, act, (width, height), dark = PICTURES[name]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        device_scale_factor=2 if width < 600 else 1,
    )
    seen = open_studio(context, url, tab)
    act(seen.page)
    seen.page.mouse.move(0, 0)
    seen.page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0);")
    seen.page.wait_for_timeout(500)  # transitions
    file = FOLDER / f"{name}.png"
    seen.page.screenshot(path=file)
    seen.check()
    context.close()
    print(f"{file.relative_to(ROOT)}  {file.stat().st_size / 1024:.0f} KiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the screenshots of docs/studio.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}; all if left out")
    names = parser.parse_args().names or list(PICTURES)
    if wrong := [name for name in names if name not in PICTURES]:
        parser.error(f"there is no picture {wrong[0]!r}; there are: {', '.join(PICTURES)}")
    path = find_chromium()
    if path is None:
        parser.error("no Chromium was found: install one, or name it in the variable CHROMIUM")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with serve() as served, sync_playwright() as playwright:
        browser = launch(playwright, path)
        for name in names:
            take(browser, served.url, name)
        browser.close()


if __name__ == "__main__":
    main()
