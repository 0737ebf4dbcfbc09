"""Race: the same prompt by diffusion and by its twin, with the times that the server reports."""

from playwright.sync_api import expect

from studio.stage import Seen, notice, set_option, wait_done


def test_both_run_and_replay(studio: Seen) -> None:
    page = studio.page
    page.click("#tab-race")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or "") if request.method == "POST" else None)
    page.fill("#race-prompt", "max 12 905 77")
    set_option(page, "race", max_tokens=24, steps=8)
    page.click("#panel-race [data-go]")
    wait_done(page, "race")
    assert len(asked) == 2
    assert '"mode":"ar"' in asked[1]
    assert '"mode"' not in asked[0]

    for lane in ("diffusion", "ar"):
        root = page.locator(f"[data-lane={lane}]")
        expect(root).to_have_class("card lane done")
        assert float(root.locator("[data-clock]").inner_text().removesuffix(" s")) > 0
        expect(root.locator("[data-figures]")).to_contain_text("tokens a second")
    verdict = page.locator("#race-verdict")
    expect(verdict).to_contain_text("Diffusion took")
    expect(verdict).to_contain_text("times")
    widths = page.locator("#race-bars .bar").evaluate_all(
        "(bars) => bars.map((bar) => bar.getBoundingClientRect().width)"
    )
    assert len(widths) == 2
    assert min(widths) > 0

    texts = page.locator("[data-lane] [data-text]").all_inner_texts()
    notice(page, ".lane:not(.done)")
    page.click("#race-replay")
    page.wait_for_function("() => window.noticed")
    expect(page.locator(".lane.done")).to_have_count(2)
    assert page.locator("[data-lane] [data-text]").all_inner_texts() == texts
