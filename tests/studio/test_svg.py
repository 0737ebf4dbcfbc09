"""SVG: markup and picture side by side; whatever a model writes, the picture is plain shapes in an image."""

from xml.etree import ElementTree

import pytest
from playwright.sync_api import expect

from diffusiongemma.tasks.svg_safe import sanitise
from studio.stage import (
    SHAPE,
    SHIPPED,
    STAR,
    Seen,
    Served,
    answer_chat,
    choose_mode,
    draft,
    drawn,
    heard,
    keep_busy,
    listen,
    notice,
    noticed,
    set_option,
    wait_done,
)


@pytest.mark.skipif(not SHIPPED, reason="the embedded model is not in this build")
def test_the_embedded_model_draws_on_a_canvas(studio: Seen) -> None:
    page = studio.page
    page.click("#tab-svg")
    choose_mode(page, "diffusion")
    page.fill("#svg-wish", "Arrow  Right")
    notice(page, "#svg-markup span[class*=lv]")
    listen(page)
    for seed in range(1, 6):  # a drawing now and then is none
        set_option(page, "svg", seed=seed, steps=16)
        page.click("#panel-svg [data-go]")
        wait_done(page, "svg")
        if page.locator("#svg-gallery img").count():
            break
    assert noticed(page), "drafts were shown"
    asked, events = heard(page)
    assert asked["messages"] == [{"role": "user", "content": "SVG icon\narrow right, outline"}]
    text = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    assert page.locator("#svg-markup").evaluate("(node) => node.textContent") == text
    assert "<svg" in drawn(page)
    expect(page.locator("#svg-picture")).to_be_visible()
    expect(page.locator("#svg-caption")).to_contain_text("shape")
    expect(page.locator("#svg-gallery img")).to_have_count(1)


def test_the_picture_forms_with_its_markup(studio: Seen) -> None:
    page = studio.page
    page.click("#tab-svg")
    noise = ["<svg viewBox=", '"0 0 24 24">', '<path d="M4 4h16', "q?##", '"/>', "</svg>"]
    clean = ["<svg viewBox=", '"0 0 24 24">', '<path d="M4 4h16', "v16H4z", '"/>', "</svg>"]
    drafts = [
        draft(1, noise, [0.0, 0.0, 0.2, 4.0, 0.1, 0.0], [True, True, False, False, False, True]),
        draft(2, clean, [0.0] * 6, [True] * 6),
    ]
    answer_chat(page, "".join(clean), drafts)
    page.click("#panel-svg [data-go]")
    wait_done(page, "svg")
    expect(page.locator("#svg-caption")).to_have_text("1 shape, sound markup.")
    assert 'd="M4 4h16v16H4z"' in drawn(page)
    page.locator("#svg-timeline input[type=range]").focus()
    page.keyboard.press("Home")
    page.wait_for_function(
        "() => document.querySelector('#svg-picture').src.includes(encodeURIComponent('d=\"M4 4h16q\"'))"
    )
    assert page.locator("#svg-markup span.lv5").inner_text() == "q?##"


PLAIN = [
    '<g fill="none" stroke="currentColor" stroke-width="1.5"><path d="M5 12h14"/><circle cx="2" cy="2" r="3"/></g>',
    '<rect width="10" height="8" x="2" y="3" opacity=".5" stroke-linecap="round" transform="rotate(15 8 8)"/>',
    '<g fill-rule="evenodd"><g><ellipse cx="12" cy="12" rx="3" ry="4"/></g><line x1="1" y1="2" x2="3" y2="4"/></g>',
    '<polygon points="1 2 3,4 5-6" fill="#ff8800"/><polyline points="" stroke="red" stroke-dasharray="1 2, 3"/>',
    '<circle r="-1"/><circle r="1e2px"/><rect width="5%" height="x"/><path opacity="2"/><path id="a" class="b"/>',
]
HOSTILE = [
    "<script>alert(1)</script>",
    '<a href="javascript:alert(1)"><circle r="9"/></a>',
    '<image href="http://evil.example/x.png"/>',
    '<use href="other.svg#a"/>',
    "<style>@import url(http://evil.example/x.css)</style>",
    '<path d="M0 0h9" onclick="alert(1)" style="fill:url(http://evil.example)" fill="url(#a)"/>',
    '<foreignObject><iframe src="x"></iframe></foreignObject>',
    '<animate attributeName="href" to="javascript:alert(1)"/><set onbegin="alert(1)"/>',
    '<g filter="url(#f)" mask="url(#m)"><rect width="5" height="5" fill="red&quot; onload=&quot;x"/></g>',
    "<!DOCTYPE svg [<!ENTITY e SYSTEM 'file:///etc/passwd'>]><text>&e;</text>",
]


def test_hostile_markup_is_harmless(studio: Seen) -> None:
    page = studio.page
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.click("#tab-svg")
    answer_chat(page, f'<svg viewBox="0 0 24 24" onload="alert(1)">{"".join(HOSTILE)}{SHAPE}</svg>')
    page.click("#panel-svg [data-go]")
    wait_done(page, "svg")
    document = drawn(page)
    for word in ("script", "javascript", "href", "url(", "on", "style", "foreign", "image", "animate", "evil", "&"):
        assert word not in document.replace("none", "").replace("http://www.w3.org", ""), (word, document)
    assert "M12 3l3 6h6" in document
    expect(page.locator("#svg-caption")).to_contain_text("left out: onload, <script>, <a>, <image>")
    assert all("evil" not in url for url in requests)


def test_the_same_shapes_as_the_package_draws(studio: Seen) -> None:
    """The page's own reader keeps nothing that `tasks/svg_safe.py` does not."""
    script = """async (texts) => {
        const { markup, read } = await import("/studio/js/svg_safe.js");
        return texts.map((text) => markup(read(text)));
    }"""
    texts = [STAR, *(f'<svg viewBox="0 0 24 24">{part}</svg>' for part in (*PLAIN, *HOSTILE[:9]))]
    assert studio.page.evaluate(script, texts) == [sanitise(text) for text in texts]


TOO_MUCH = [
    ("<svg viewBox='0 0 9 9'>" + "<g>" * 30 + "<path d='M0 0h9'/>", 0),
    ("<svg viewBox='0 0 9 9'>" + "<path d='M0 0h9'/>" * 400, 256),
    ("<svg viewBox='0 0 9 9'><path stroke-dasharray='.001' d='M0 0h99999'/></svg>", 0),
    ("<svg viewBox='0 0 9 9'>" + "<path opacity='.5' d='M0 0h9'/>" * 40, 0),
    ("<" * 20_000, 0),
    ("<path " + "a='' " * 9_000, 0),
    ("1" * 20_000 + "<svg viewBox='0 0 " + "9" * 400 + " 9'/>", 0),
    ("<svg " + "&" * 16_000, 0),
    ("<svg>" + "<!-" * 5_000, 0),
]


def test_what_is_too_much_is_not_drawn(studio: Seen) -> None:
    script = """async (text) => {
        const { isWellFormed, read } = await import("/studio/js/svg_safe.js");
        const began = performance.now(), drawing = read(text);
        isWellFormed(text);
        return [drawing.shapes, performance.now() - began];
    }"""
    for text, shapes in TOO_MUCH:
        tries = [studio.page.evaluate(script, text) for _ in range(3)]
        assert {found for found, _ in tries} == {shapes}, text[:60]
        assert min(milliseconds for _, milliseconds in tries) < 1_000, text[:60]  # a machine may be busy for a while


def test_what_is_well_formed(studio: Seen) -> None:
    script = """async (texts) => {
        const { isWellFormed } = await import("/studio/js/svg_safe.js");
        return texts.map(isWellFormed);
    }"""
    texts = [STAR, "<svg/>", "<svg><g></g><!-- x --></svg>", '<svg a="&lt;"/>', "<svg>&amp;</svg>", f" {STAR}\n"]
    wrong = ["", "x", "<p/>", "<svg>", "<svg></g>", "<svg a=1/>", '<svg a="1" a="2"/>', "<svg/><svg/>", "x<svg/>"]
    wrong += ["<svg>&e;</svg>", "<svg><g></svg></g>", '<svg a="<"/>', "<!DOCTYPE svg><svg/>"]
    for text in (*texts, *wrong):
        try:
            parsed = ElementTree.fromstring(text)
        except ElementTree.ParseError:
            assert text in wrong
        else:
            assert (text in texts) == (parsed.tag == "svg" and "DOCTYPE" not in text)
    assert studio.page.evaluate(script, texts) == [True] * len(texts)
    assert studio.page.evaluate(script, wrong) == [False] * len(wrong)


def test_stop_reaches_the_engine(studio: Seen, served: Served) -> None:
    page = studio.page
    page.click("#tab-svg")
    choose_mode(page, "diffusion")
    keep_busy(page, "completions")  # with a chat template or without
    set_option(page, "svg", steps=1000)
    before = served.left()
    page.click("#panel-svg [data-go]")
    page.wait_for_selector("#svg-timeline .timeline:not([hidden])")
    page.click("#panel-svg [data-go]")
    wait_done(page, "svg")
    expect(page.locator("#panel-svg [data-note]")).to_have_text("Stopped.")
    served.wait_left(before + 1)
    expect(page.locator("#panel-svg [data-go]")).to_have_text("Draw")
    page.click("#panel-svg [data-go]")
    page.wait_for_selector("#svg-timeline .timeline:not([hidden])")
    page.locator("#svg-wish").press("Escape")
    wait_done(page, "svg")
    served.wait_left(before + 2)
