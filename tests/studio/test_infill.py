"""Infill: a template with holes, filled before one's eyes."""

from playwright.sync_api import expect

from studio.stage import SHIPPED, Seen, answer_with, draft, heard, listen, notice, noticed, set_option, usage, wait_done

TEMPLATE = "def double(x):\n    return [[?6]]\n\n\ndef half(x):\n    return [[?6]]\n"


def test_holes_are_filled(studio: Seen) -> None:
    page = studio.page
    page.click("#tab-infill")
    page.fill("#infill-input", TEMPLATE)
    assert page.locator("#infill-back mark").all_inner_texts() == ["[[?6]]", "[[?6]]"]
    set_option(page, "infill", seed=5, steps=6, candidates=2, max_tokens=16)
    notice(page, "#infill-output span[class*=lv]")
    listen(page)
    page.click("#panel-infill [data-go]")
    expect(page.locator("#infill-output")).to_contain_text("def half(x):")
    wait_done(page, "infill")
    assert noticed(page), "drafts were shown"

    asked, events = heard(page)
    assert asked["template"] == TEMPLATE
    told = events[-1]
    shown = page.locator("#infill-output").evaluate("(node) => node.textContent")
    filled = page.locator("#infill-output .filled")
    expect(filled).to_have_count(2)
    if SHIPPED:  # else the holes are bytes that may be no text
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
    """Two holes, one after the other: the engine counts the seeds of the second hole on from 16."""
    page = studio.page
    page.click("#tab-infill")
    page.fill("#infill-input", "a = [[?8]]\nb = [[?8]]\n")
    candidates = [
        {"seed": seed, "holes": None if text is None else [text], "score": score, "finish_reason": reason}
        for seed, text, score, reason in (
            (8, "1", -0.001, "stop"),
            (7, "one", -2.0, "length"),
            (9, "1", -0.001, "stop"),
            (23, "2", -0.2, "stop"),
            (24, None, None, "stop"),
        )
    ]
    whole = {"object": "canvas.infill", "text": "a = 1\nb = 2\n", "holes": ["1", "2"], "score": -0.15}
    drafts = [draft(1, ["a = ", "1"], [0.0, 0.2], [True, False]), draft(1, ["\nb = ", "2"], [0.0, 0.2], [True, False])]
    drafts[1]["block"] = 1
    chunks = [{"object": "canvas.infill.chunk", "choices": [], "text": text} for text in ("a = 1", "\nb = 2\n")]
    end = {**whole, "candidates": candidates, "finish_reason": "stop", "usage": usage(2, 2)}
    answer_with(page, "/v1/canvas/infill", [drafts[0], chunks[0], drafts[1], chunks[1], end])
    page.click("#panel-infill [data-go]")
    wait_done(page, "infill")
    output = page.locator("#infill-output")
    assert output.evaluate("(node) => node.textContent") == "a = 1\nb = 2\n"
    found = page.locator(".candidate")
    assert [one.replace("\n", " ") for one in found.all_inner_texts()] == [
        "1 hole 1 · score 0.00 · 2 times",
        "one hole 1 · score −2.00 · cut off",
        "2 hole 2 · score −0.20",
    ]
    assert [found.nth(i).get_attribute("aria-pressed") for i in range(3)] == ["true", "false", "true"]
    found.nth(1).click()
    assert output.evaluate("(node) => node.textContent") == "a = one\nb = 2\n"
    assert [found.nth(i).get_attribute("aria-pressed") for i in range(3)] == ["false", "true", "true"]

    page.locator("#infill-timeline input[type=range]").focus()
    page.keyboard.press("Home")
    assert output.evaluate("(node) => node.textContent") == "a = 1\nb = ▢\n"
    expect(page.locator("#infill-timeline output")).to_contain_text("hole 1 · step 1")
    page.keyboard.press("End")
    assert output.evaluate("(node) => node.textContent") == "a = one\nb = 2\n"


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
