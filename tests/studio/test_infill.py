"""Infill: a template with holes, filled before one's eyes."""

from playwright.sync_api import expect

from studio.stage import Seen, Served, notice, noticed, set_option, wait_done

TEMPLATE = "def double(x):\n    return [[?6]]\n\n\ndef half(x):\n    return [[?6]]\n"


def test_holes_are_filled(studio: Seen, served: Served) -> None:
    page = studio.page
    page.click("#tab-infill")
    page.fill("#infill-input", TEMPLATE)
    assert page.locator("#infill-back mark").all_inner_texts() == ["[[?6]]", "[[?6]]"]
    set_option(page, "infill", seed=5, steps=6, candidates=2, max_tokens=16)
    notice(page, "#infill-output span[class*=lv]")
    page.click("#panel-infill [data-go]")
    expect(page.locator("#infill-output")).to_contain_text("def half(x):")
    wait_done(page, "infill")
    assert noticed(page), "drafts were shown"

    embedded = bool(served.get("/v1/models")["data"][0]["abilities"]["tasks"])
    body = {"template": TEMPLATE, "seed": 5, "candidates": 2, "max_tokens": 16, "diffusion": {"steps": 6}}
    told = served.post("/v1/canvas/infill", body | ({"strategy": "fim"} if embedded else {}))
    shown = page.locator("#infill-output").evaluate("(node) => node.textContent")
    filled = page.locator("#infill-output .filled")
    expect(filled).to_have_count(2)
    if embedded:  # else the holes are bytes that may be no text
        assert shown == told["text"]
        assert [filled.nth(i).evaluate("(node) => node.textContent") for i in range(2)] == told["holes"]
    expect(page.locator("#panel-infill [data-note]")).to_contain_text("2 holes")
    assert page.locator(".candidate[aria-pressed=true]").count() >= 1

    slider = page.locator("#infill-timeline input[type=range]")
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator("#infill-output .filled")).to_have_count(0)
    assert page.locator("#infill-output .given").count() > 0, "what was given is told from what the model writes"
    page.keyboard.press("End")
    expect(page.locator("#infill-output .filled")).to_have_count(2)


def test_another_candidate_can_be_chosen(studio: Seen) -> None:
    page = studio.page
    page.click("#tab-infill")
    page.fill("#infill-input", "a = [[?8]]\n")
    set_option(page, "infill", seed=1, steps=4, candidates=4)
    page.click("#panel-infill [data-go]")
    wait_done(page, "infill")
    candidates = page.locator(".candidate")
    assert candidates.count() >= 2
    candidates.last.click()
    expect(candidates.last).to_have_attribute("aria-pressed", "true")
    chosen = candidates.last.locator("code").inner_text()
    shown = page.locator("#infill-output .filled").evaluate("(node) => node.textContent")
    assert chosen in (shown.strip(), "(nothing)") or not shown.isprintable()


def test_a_selection_becomes_a_hole(studio: Seen) -> None:
    page = studio.page
    page.click("#tab-infill")
    page.fill("#infill-input", "total = price * 2\n")
    page.locator("#infill-input").evaluate("(node) => node.setSelectionRange(8, 17)")
    page.locator("#infill-input").press("Alt+h")
    assert page.input_value("#infill-input") == "total = [[?]]\n"
    expect(page.locator("#infill-back mark")).to_have_text("[[?]]")


def test_what_the_api_refuses_is_said(studio: Seen) -> None:
    page = studio.page
    page.click("#tab-infill")
    page.fill("#infill-input", "no hole at all")
    page.click("#panel-infill [data-go]")
    alert = page.locator("#panel-infill [role=alert]")
    expect(alert).to_contain_text("has no hole")
    expect(alert).to_contain_text("status 400")
    assert "400" in studio.complaints.pop(), "the browser itself notes a failed request, and nothing else"
    page.fill("#infill-input", "one [[?2]]")
    set_option(page, "infill", steps=2, candidates=1)
    page.click("#panel-infill [data-go]")
    wait_done(page, "infill")
    expect(alert).to_have_count(0)
