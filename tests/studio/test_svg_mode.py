"""SVG, on a canvas or one token after another: the page follows the model's habit until somebody chooses."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from studio.stage import (
    SHAPE,
    SHIPPED,
    STAR,
    Seen,
    Served,
    answer_chat,
    answer_with,
    choose_mode,
    drawn,
    heard,
    listen,
    notice,
    noticed,
    open_studio,
    set_option,
    usage,
    wait_done,
)


@pytest.mark.skipif(not SHIPPED, reason="the embedded model is not in this build")
def test_the_embedded_model_draws_one_by_one(studio: Seen) -> None:
    """As its settings say. The picture forms before its markup is whole."""
    page = studio.page
    page.click("#tab-svg")
    expect(page.locator("#svg-about")).to_contain_text("one token after another: nano's better way")
    page.fill("#svg-wish", "arrow right")
    notice(page, "#panel-svg[data-busy] #svg-picture:not([hidden])")
    listen(page)
    page.click("#panel-svg [data-go]")
    wait_done(page, "svg")
    assert noticed(page), "the picture formed"
    asked, events = heard(page)
    assert asked["diffusion"] == {"mode": "ar"}
    text = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    assert page.locator("#svg-markup").evaluate("(node) => node.textContent") == text
    expect(page.locator("#svg-caption")).to_contain_text("shape")
    expect(page.locator("#svg-timeline .timeline")).to_be_hidden()
    expect(page.locator("#panel-svg [data-note]")).to_contain_text("one by one")


@pytest.fixture
def causal(context: BrowserContext, served: Served) -> Iterator[Seen]:
    """The page, of a model that draws one token after another."""

    def tell(route: Route) -> None:
        models = route.fetch().json()
        models["data"][0]["abilities"] |= {"svg_mode": "ar", "tasks": ["svg"]}
        route.fulfill(json=models)

    context.route("**/v1/models", tell)
    seen = open_studio(context, served.url, "svg")
    yield seen
    seen.check()


def requests_of(page: Page) -> list[Any]:
    """What the page will have asked for."""
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    return asked


def answer_one_by_one(page: Page, text: str, finish: str = "stop") -> None:
    def chunk(content: str, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"content": content}, "text": content, "finish_reason": reason}
        return {"object": "chat.completion.chunk", "choices": [choice]}

    pieces = [chunk(text[i : i + 5]) for i in range(0, len(text), 5)]
    last = {"object": "chat.completion.chunk", "choices": [], "usage": usage(len(pieces), len(pieces))}
    for path in ("/v1/chat/completions", "/v1/completions"):
        page.unroute(f"**{path}")
        answer_with(page, path, [*pieces, chunk("", finish), last])


def draw(page: Page) -> None:
    page.click("#panel-svg [data-go]")
    wait_done(page, "svg")


def test_a_models_habit_is_followed(causal: Seen) -> None:
    page, note = causal.page, causal.page.locator("#panel-svg [data-note]")
    asked = requests_of(page)
    answer_one_by_one(page, STAR)
    expect(page.locator("#svg-mode [value=ar]")).to_be_checked()
    draw(page)
    assert (asked[0]["diffusion"], asked[0]["temperature"], "seed" in asked[0]) == ({"mode": "ar"}, 0, False)
    expect(page.locator("#svg-caption")).to_have_text("1 shape, sound markup.")
    expect(note).to_contain_text("one by one · 100 ms · the best token each time")
    assert SHAPE.split('d="')[1] in drawn(page)
    draw(page)  # the best tokens would be the same again
    assert (asked[1]["temperature"], "seed" in asked[1]) == (0.5, False)
    expect(note).to_contain_text("seed 7")
    set_option(page, "svg", seed=3)
    page.fill("#svg-wish", "star")
    draw(page)
    assert (asked[2]["temperature"], asked[2]["seed"]) == (0.5, 3), "a seed that is given has an effect"
    assert len(asked) == 3


def test_options_of_the_other_way_are_not_sent(causal: Seen) -> None:
    page = causal.page
    asked = requests_of(page)
    choose_mode(page, "diffusion")
    set_option(page, "svg", steps=9, entropy_bound=0.2)
    answer_chat(page, STAR)
    draw(page)
    assert asked[0]["diffusion"] == {"mode": "diffusion", "steps": 9, "entropy_bound": 0.2}
    assert "temperature" not in asked[0]
    choose_mode(page, "ar")
    expect(page.locator("#svg-options [name=steps]")).to_be_hidden()
    answer_one_by_one(page, STAR)
    draw(page)
    assert asked[1]["diffusion"] == {"mode": "ar"}


def test_what_is_not_sound_is_drawn_again(causal: Seen) -> None:
    page = causal.page
    asked = requests_of(page)
    answer_one_by_one(page, STAR[:-6], "length")
    draw(page)
    assert [request["temperature"] for request in asked] == [0] + [0.5] * 5
    expect(page.locator("#svg-caption")).to_have_text("1 shape; the markup is not well-formed; it was cut off.")
    expect(page.locator("#panel-svg [data-note]")).to_contain_text("the best token each time · 6 attempts")


def test_a_choice_outlasts_the_model(causal: Seen) -> None:
    page = causal.page
    choose_mode(page, "diffusion")
    expect(page.locator("#svg-about")).to_contain_text("does better one by one")
    page.evaluate("import('/studio/js/link.js').then(({ link }) => link.dispatchEvent(new Event('model')))")
    expect(page.locator("#svg-mode [value=diffusion]")).to_be_checked()


def test_chat_follows_the_habit_too(causal: Seen) -> None:
    """Until an option of the canvas is given; a seed is none."""
    page, figures = causal.page, causal.page.locator(".turn.answer .who")
    asked = requests_of(page)
    page.click("#tab-chat")
    answer_one_by_one(page, STAR)
    page.locator("#chat-starters .chip", has_text="SVG icon").click()
    wait_done(page, "chat")
    assert (asked[0]["diffusion"], asked[0]["temperature"], "seed" in asked[0]) == ({"mode": "ar"}, 0, False)
    expect(page.locator(".turn.answer .bubble")).to_have_text(STAR)
    expect(page.locator(".turn.answer .timeline")).to_be_hidden()
    expect(figures).to_contain_text("one by one · 100 ms · the best token each time")

    def ask(text: str, **options: float) -> Any:
        set_option(page, "chat", **options)
        page.fill("#chat-input", text)
        page.press("#chat-input", "Enter")
        wait_done(page, "chat")
        return asked[-1]

    icon = "SVG icon\nstar"
    by_lot = ask(icon, seed=3)
    assert (by_lot["diffusion"], by_lot["temperature"], by_lot["seed"]) == ({"mode": "ar"}, 0.5, 3)
    expect(figures.last).to_contain_text("seed 7")
    answer_chat(page, "1234")
    assert ask("sort 4213")["diffusion"] == {"canvas": 24}
    answer_chat(page, STAR)
    canvas = ask(icon, steps=9)
    assert (canvas["diffusion"], "temperature" in canvas) == ({"steps": 9}, False)
    expect(figures.last).to_contain_text("in 1 step")


def test_a_tag_that_is_being_written(studio: Seen) -> None:
    script = """async (texts) => {
        const { closed } = await import("/studio/js/svg_safe.js");
        return texts.map(closed);
    }"""
    begun = '<svg viewBox="0 0 9 9">'
    expected = {
        "": "",
        "<": "<",
        "no tag": "no tag",
        begun: begun,
        begun[:-4]: "<svg/>",
        f'{begun}<path fill="none" d="M1 2h': f'{begun}<path fill="none" d="M1 2h"/>',
        f'{begun}<path fill="none" stroke="cur': f'{begun}<path fill="none"/>',
        f'{begun}<path d="M1 2h3" fil': f'{begun}<path d="M1 2h3"/>',
        f'{begun}<path d="M1 2h3"/></sv': f'{begun}<path d="M1 2h3"/></sv',
    }
    assert dict(zip(expected, studio.page.evaluate(script, list(expected)), strict=True)) == expected
