"""The page around the tabs: keyboard, themes, a phone, figures, and a server that goes and comes back."""

from playwright.sync_api import Browser, BrowserContext, Page, expect

from studio.stage import MODEL, SHIPPED, Seen, Served, answer_chat, free_port, open_studio, serve, wait_done

TABS = ("chat", "infill", "sudoku", "svg", "race")


def test_it_says_who_answers(studio: Seen, served: Served) -> None:
    page = studio.page
    model = served.get("/v1/models")["data"][0]
    line = page.locator(".model-line")
    expect(line).to_contain_text(model["id"])
    expect(line).to_contain_text(model["description"])
    expect(line).to_contain_text(f"{model['parameters'] / 1e6:.1f} M parameters")
    expect(page.locator("#status")).to_have_text("ready")
    if SHIPPED:
        expect(page.locator("#chat-about")).to_contain_text("no chat model")


def test_tabs_by_keyboard(studio: Seen) -> None:
    page = studio.page
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#tab-chat")).to_be_focused()
    outline = page.locator("#tab-chat").evaluate("(tab) => getComputedStyle(tab).outlineStyle")
    assert outline == "solid", "focus can be seen"
    for tab in (*TABS[1:], "chat"):
        page.keyboard.press("ArrowRight")
        expect(page.locator(f"#tab-{tab}")).to_be_focused()
        expect(page.locator(f"#tab-{tab}")).to_have_attribute("aria-selected", "true")
        assert page.locator("[role=tabpanel]:visible").get_attribute("id") == f"panel-{tab}"
    page.keyboard.press("End")
    expect(page.locator("#panel-race")).to_be_visible()
    assert page.url.endswith("#race")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#panel-svg")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator("#metrics-button")).to_be_focused()
    page.reload()
    page.wait_for_selector("html[data-started]", state="attached")
    expect(page.locator("#panel-svg")).to_be_visible()


def test_names_for_those_who_do_not_see(studio: Seen) -> None:
    """Every control has a name, every panel belongs to its tab."""
    page = studio.page
    for tab in TABS:
        page.click(f"#tab-{tab}")
        panel = page.get_by_role("tabpanel", name=page.locator(f"#tab-{tab}").inner_text())
        expect(panel).to_be_visible()
        unnamed = panel.evaluate("""(panel) => [...panel.querySelectorAll("button, input, select, textarea, a")]
            .filter((node) => node.checkVisibility())
            .filter((node) => !(node.innerText || node.ariaLabel || node.labels?.length || node.title))
            .map((node) => node.outerHTML)""")
        assert unnamed == []


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_light_and_dark(browser: Browser, served: Served) -> None:
    context = browser.new_context(color_scheme="dark")
    seen = open_studio(context, served.url)
    page = seen.page
    dark = background(page)
    page.emulate_media(color_scheme="light")
    page.wait_for_selector("html[data-theme=light]", state="attached")
    light = background(page)
    assert dark != light
    page.click("#theme-button")
    assert background(page) == dark
    page.reload()
    page.wait_for_selector("html[data-started]", state="attached")
    assert background(page) == dark, "a choice is remembered"
    page.click("#theme-button")
    assert background(page) == light
    seen.check()
    context.close()


def test_a_phone(browser: Browser, served: Served) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    seen = open_studio(context, served.url)
    page = seen.page
    for tab in TABS:
        page.locator(f"#tab-{tab}").tap()
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 360, f"{tab} is {wide} wide"
        boxes = page.locator(f"#panel-{tab} button:visible, .tabs button").evaluate_all(
            "(nodes) => nodes.map((node) => [node.getBoundingClientRect(), node.innerText])"
        )
        assert all(box["left"] >= 0 and box["right"] <= 360 for box, _ in boxes), boxes
    page.locator("#metrics-button").tap()
    expect(page.locator("#drawer")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    seen.check()
    context.close()


def test_metrics(studio: Seen) -> None:
    page = studio.page
    page.click("#metrics-button")
    expect(page.locator("#drawer-title")).to_be_focused()
    expect(page.locator("#metrics-last")).to_contain_text("Nothing was asked yet")
    answer_chat(page, "four")
    page.fill("#chat-input", "2 + 2 =")
    page.keyboard.press("Enter")
    wait_done(page, "chat")
    figures = page.locator(".large-figures")
    for name, value in (
        ("steps", "1"),
        ("tokens a forward", "4.00"),
        ("tokens a second", "40.0"),
        ("blocks redone", "0"),
    ):
        expect(figures.locator("div", has_text=name)).to_contain_text(value)
    expect(page.locator("#metrics-rows tr")).to_have_count(1)
    expect(page.locator("#metrics-server")).to_contain_text("running")
    page.locator("#drawer-title").press("Escape")
    expect(page.locator("#drawer")).to_be_hidden()
    expect(page.locator("#metrics-button")).to_be_focused()


def test_a_busy_server_is_said(studio: Seen) -> None:
    page = studio.page
    error = (
        '{"error": {"message": "the queue is full", "type": "rate_limit_error", "param": null, "code": "queue_full"}}'
    )
    headers = {"Retry-After": "4", "Content-Type": "application/json"}
    for path in ("**/v1/chat/completions", "**/v1/completions"):
        page.route(path, lambda route: route.fulfill(status=429, headers=headers, body=error))
    page.fill("#chat-input", "1 + 1 =")
    page.keyboard.press("Enter")
    alert = page.locator("#panel-chat [role=alert]")
    expect(alert).to_contain_text("The server is busy")
    expect(alert).to_contain_text("The queue is full.")
    expect(alert).to_contain_text("try again in 4 s")
    assert "429" in studio.complaints.pop()


def test_a_lost_server_and_its_return(context: BrowserContext) -> None:
    port = free_port()
    with serve("random:tiny", port=port) as first:
        seen = open_studio(context, first.url)
        page = seen.page
        page.locator("#chat-options summary").click()
        page.fill("#chat-options input[name=steps]", "1000")
        page.fill("#chat-input", "hello")
        page.locator("#chat-input").press("Enter")
        page.wait_for_selector(".turn.answer .timeline:not([hidden])")
        first.kill()
        wait_done(page, "chat")
        expect(page.locator("#panel-chat [role=alert]")).to_contain_text("No connection")
        expect(page.locator("#banner")).to_contain_text("does not answer")
        expect(page.locator("#status")).to_have_text("no connection")
        expect(page.locator(".turn.answer.broken .bubble")).to_be_visible()
    assert all("ERR_" in text for text in seen.complaints), seen.complaints
    with serve("random:tiny", port=port):
        expect(page.locator("#banner")).to_be_hidden()
        expect(page.locator("#status")).to_have_text("ready")
        page.fill("#chat-options input[name=steps]", "2")
        page.fill("#chat-options input[name=max_tokens]", "8")
        page.fill("#chat-input", "again")
        page.locator("#chat-input").press("Enter")
        expect(page.locator(".turn.answer")).to_have_count(2)
        wait_done(page, "chat")
        expect(page.locator("#panel-chat [role=alert]")).to_have_count(0)
        expect(page.locator(".turn.answer:last-child .who")).to_contain_text("in 2 steps")


def test_a_server_with_keys(context: BrowserContext) -> None:
    with serve("random:tiny", key="a-secret-of-32-characters-or-more") as server:
        seen = open_studio(context, server.url)
        page = seen.page
        expect(page.locator("#banner")).to_contain_text("asks for an API key")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("key needed")
        page.fill("#key", server.key or "")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#banner")).to_be_hidden()
        expect(page.locator("#model-name")).to_have_text("random:tiny")
        assert all("401" in text for text in seen.complaints)
        seen.complaints.clear()
        page.reload()
        page.wait_for_selector("html[data-started]", state="attached")
        expect(page.locator("#status")).to_have_text("ready")
        seen.check()


def test_every_file_is_served_and_nothing_is_fetched_from_elsewhere(context: BrowserContext, served: Served) -> None:
    page = context.new_page()
    answers: list[tuple[str, int]] = []
    page.on("response", lambda response: answers.append((response.url, response.status)))
    page.goto(served.url)
    page.wait_for_selector("html[data-started]", state="attached")
    assert all(url.startswith(served.url + "/") and status == 200 for url, status in answers), answers
    policy = page.request.get(served.url).headers["content-security-policy"]
    assert "unsafe" not in policy
    assert MODEL in page.locator("#model-name").inner_text()
