"""Holes, forms and edits through the API are what the engine gives, streamed or whole."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from diffusiongemma.engine import collect
from diffusiongemma.tasks import format
from diffusiongemma.tasks.evaluation import Variant
from diffusiongemma.tasks.sudoku import HEAT, SudokuBoard, turn
from diffusiongemma.tasks.sudoku_solver import parse
from serve.live import EMBEDDED, ENDLESS, QUICK, Live, check_error, sse, wait_until

STEPS = {"steps": 3}
DRAFTS = {"stream": True, "stream_options": {"include_drafts": True}}
TEMPLATE = "a = [[?3]]\nb = [[?4]]\n"
ASK = [{"role": "user", "content": "Sudoku"}]


def infill(live: Live, **body: Any) -> dict[str, Any]:
    response = live.post("/v1/canvas/infill", {"seed": 1, "diffusion": STEPS} | body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_holes_are_filled_as_the_engine_fills_them(live: Live) -> None:
    found = infill(live, template=TEMPLATE, candidates=4)
    expected = live.engine.fill(TEMPLATE, seed=1, candidates=4, **STEPS)
    assert found["object"] == "canvas.infill"
    assert found["text"] == expected.text
    assert found["holes"] == list(expected.holes)
    assert found["text"] == f"a = {found['holes'][0]}\nb = {found['holes'][1]}\n"
    assert len(found["candidates"]) == len(expected.candidates)
    assert found["usage"]["diffusion"]["seed"] == 1


def test_the_reply_says_whether_a_canvas_settled(live: Live) -> None:
    form = {"messages": ASK, "template": "12[[?1]]0[[?1]]"}
    for confidence, all_of_them in ((1e-6, False), (100.0, True)):
        found = infill(live, **form, diffusion={"steps": 3, "stability": 0, "confidence": confidence})
        usage = found["usage"]["diffusion"]  # random weights may write no text: then there is a second canvas
        assert usage["blocks_settled"] == (usage["blocks"] if all_of_them else 0)


def test_a_template_may_be_a_list(live: Live) -> None:
    parts = ["a = ", {"max_tokens": 3}, "\nb = ", {"max_tokens": 4, "min_tokens": 2}, "\n"]
    found = infill(live, template=parts, candidates=2)
    assert found["text"].startswith("a = ")
    assert len(found["holes"]) == 2
    literal = infill(live, template=["[[?]] ", {"max_tokens": 2}, " end"], candidates=1)
    assert literal["text"].startswith("[[?]] ")


def test_a_form_holds_its_texts(live: Live) -> None:
    """A Sudoku in small: givens, a hole of one token for each empty cell, the conversation as the prompt."""
    puzzle = "1200340056"
    form = "".join("[[?1]]" if c == "0" else c for c in puzzle)
    found = infill(live, messages=ASK, template=form)
    assert len(found["holes"]) == 4
    rest = iter(found["holes"])
    assert found["text"] == "".join(next(rest) if c == "0" else c for c in puzzle)
    expected = live.engine.form(ASK, form, seed=1, **STEPS)
    assert found["text"] == expected.text
    several = infill(live, messages=ASK, template=form, candidates=3)
    assert {one["seed"] for one in several["candidates"]} == {1, 2, 3}


def test_the_prompt_of_a_chat_is_the_one_that_the_embedded_model_was_trained_on(embedded: Live) -> None:
    if not EMBEDDED:
        pytest.skip("no model is embedded")
    for request in (format.sudoku_request("0" * 81), format.svg_request("bell, outline")):
        prompt = embedded.engine.request([{"role": "user", "content": request}]).prompt
        trained = format.chat_prompt(embedded.engine.tokenizer.encode, request)
        assert list(prompt)[-len(trained) :] == trained  # its template may put examples before it


def test_a_form_gives_the_board_that_the_command_gives(embedded: Live) -> None:
    """… for the same seed, also in a later look. Two steps are too few: it shows if anything differs."""
    if not EMBEDDED:
        pytest.skip("no model is embedded")
    puzzle = "800000000003600000070090200050007000000045700000100030001000068008500010090000400"
    engine, boards = embedded.engine, set()
    for seed, look in ((1, 0), (2, 0), (3, 1)):
        request = SudokuBoard.of(engine).request(engine, parse(puzzle), Variant(steps=2), seed, look=look)
        turned = "".join(turn(puzzle, look))
        form = {
            "messages": [{"role": "user", "content": f"Sudoku\n{turned}"}],
            "template": turned.replace("0", "[[?1]]"),
            "diffusion": {"canvas": 96, "steps": 2, **HEAT},
        }
        found = infill(embedded, seed=seed, **form)
        assert found["text"] == collect(engine.events(request)).text
        boards.add(found["text"])
    assert len(boards) > 1


@pytest.mark.parametrize("drafts", [True, False])
def test_a_stream_ends_with_the_whole_object(live: Live, drafts: bool) -> None:
    body = {
        "model": live.model, "template": TEMPLATE, "seed": 1, "candidates": 2, "diffusion": STEPS, "stream": True,
        "stream_options": {"include_drafts": drafts},
    }  # fmt: skip
    with live.client() as client, client.stream("POST", "/v1/canvas/infill", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = list(sse(response))
    whole = infill(live, template=TEMPLATE, candidates=2)
    assert events[-1] == ("done", None)
    last = events[-2][1]
    assert {k: last[k] for k in ("object", "text", "holes")} == {k: whole[k] for k in ("object", "text", "holes")}
    chunks = [data["text"] for _, data in events[:-2] if data["object"] == "canvas.infill.chunk"]
    assert "".join(chunks) == whole["text"]
    names = {name for name, _ in events}
    assert ("canvas.draft" in names) == drafts


def test_an_edit_keeps_what_it_must(live: Live) -> None:
    text = "def add(a, b):\n    return a - b\n"
    body = {"text": text, "strength": 0.6, "keep": [[0, 14]], "seed": 3, "diffusion": {"steps": 4}}
    response = live.post("/v1/canvas/edit", body)
    assert response.status_code == 200, response.text
    found = response.json()
    expected = live.engine.edit(text, 0.6, [(0, 14)], seed=3, steps=4)
    assert found["text"] == expected.text
    (start, end), *_ = found["keep"]
    assert found["text"][start:end] == text[:14]
    assert found["noised"] == expected.noised > 0
    unchanged = live.post("/v1/canvas/edit", body | {"strength": 0}).json()
    assert unchanged["text"] == text
    assert unchanged["changed"] == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("infill", {"template": "no hole"}, "template"),
        ("infill", {"template": 3}, "template"),
        ("infill", {"template": TEMPLATE, "candidates": 17}, "candidates"),
        ("infill", {"template": TEMPLATE, "strategy": "guess"}, "strategy"),
        ("infill", {"template": TEMPLATE, "n": 2}, "n"),
        ("infill", {"template": TEMPLATE, "stop": "x"}, "stop"),
        ("infill", {"template": ["a", {"max_tokens": 2, "min_tokens": 3}]}, "template"),
        (
            "infill",
            {"template": ["a", {"max_tokens": 9}, {"max_tokens": 900, "min_tokens": 600}, "b" * 30]},
            "template",
        ),
        ("infill", {"template": "[[?]]", "messages": ASK}, "template"),
        ("infill", {"template": "[[?9999]]", "messages": ASK}, "template"),
        ("infill", {"template": "[[?2]]", "messages": ASK, "strategy": "canvas"}, "strategy"),
        ("infill", {"template": "[[?2]]", "messages": ASK, "max_tokens": 3}, "max_tokens"),
        ("infill", {"template": TEMPLATE, "diffusion": {"mode": "ar"}, "candidates": 2, "strategy": "canvas"}, None),
        ("edit", {"text": ""}, "text"),
        ("edit", {"text": "abc", "strength": 2}, "strength"),
        ("edit", {"text": "abc", "keep": [[0, 9]]}, "keep"),
        ("edit", {"text": "abc", "keep": [[0]]}, "keep.0"),
        ("edit", {"text": "abc", "diffusion": {"canvas": 8}}, "diffusion.canvas"),
        ("edit", {"text": "abc", "diffusion": {"mode": "ar"}}, "diffusion.mode"),
    ],
)
def test_mistakes_are_named(live: Live, path: str, body: dict[str, Any], param: str | None) -> None:
    check_error(live.post(f"/v1/canvas/{path}", body), 400, param)


def test_the_limit_of_new_tokens_holds_for_holes_and_edits(live: Live) -> None:
    """Holes that stated their size, and texts to edit, had none."""
    old = live.server.state.settings.max_tokens
    object.__setattr__(live.server.state.settings, "max_tokens", 10)
    try:
        for path, body, param in (
            ("infill", {"template": "a[[?11]]"}, "template"),
            ("infill", {"template": "a[[?6]]b[[?5]]"}, "template"),
            ("infill", {"template": ["a", {"max_tokens": 11}]}, "template"),
            ("infill", {"template": "[[?11]]", "messages": ASK}, "template"),
            ("edit", {"text": "abcdefghijk"}, "text"),
        ):
            response = live.post(f"/v1/canvas/{path}", body)
            check_error(response, 400, param)
            assert "this server allows 10" in response.text
        infill(live, template="a[[?6]]b[[?4]]")
        infill(live, template="a[[?]]b[[?]]c[[?3]]")  # holes without a size share what is left
        response = live.post("/v1/canvas/infill", {"template": "a[[?]]b[[?]]", "max_tokens": 6})
        check_error(response, 400, "template")
        assert "the holes may take 12 tokens in all" in response.text
        form = {"messages": ASK, "template": "a[[?]]b[[?]]"}  # what is wrong with a form comes first
        assert "must state its size" in live.post("/v1/canvas/infill", form).text
        check_error(live.post("/v1/canvas/infill", {**form, "max_tokens": 300}), 400, "max_tokens")
        check_error(
            live.post("/v1/chat/completions", {"messages": ASK, "max_completion_tokens": 11}),
            400,
            "max_completion_tokens",
        )
    finally:
        object.__setattr__(live.server.state.settings, "max_tokens", old)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": ASK, "max_tokens": 200, "diffusion": ENDLESS}),
        ("completions", {"prompt": "x", "max_tokens": 200, "n": 3, "diffusion": ENDLESS}),
        ("completions", {"prompt": "x", "suffix": "y", "diffusion": {"steps": 1000, "early_stop": False}}),
        ("canvas/infill", {"template": TEMPLATE, "diffusion": {"steps": 1000, "early_stop": False}}),
        ("canvas/infill", {"messages": ASK, "template": "[[?3]]", "diffusion": {"steps": 1000, "early_stop": False}}),
        ("canvas/edit", {"text": "abcdef", "diffusion": {"steps": 1000, "early_stop": False}}),
    ],
)
def test_a_client_that_goes_away_stops_its_work_before_the_next_step(
    live: Live, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """… counted from when the server hears of it, between two steps: otherwise it would depend on how the event loop
    and the engine take turns. The second tick is the one in which the engine notices that it has nothing to do."""
    scheduler, between, heard_at = live.engine.scheduler, threading.Lock(), list[int]()
    tick = scheduler.tick

    def one_step() -> None:
        with between:
            tick()

    monkeypatch.setattr(scheduler, "tick", one_step)
    body = {"model": live.model, **DRAFTS} | body
    with live.client() as client, client.stream("POST", f"/v1/{path}", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        wait_until(lambda: len(live.server.state._jobs) == 1)
        (job,) = live.server.state._jobs
        cancel = job.scope.cancel

        def note() -> None:
            with between:
                heard_at.append(scheduler.ticks)
                cancel()

        job.scope.cancel = note
    live.wait_idle()
    assert scheduler.ticks - heard_at[0] <= 2
    assert live.server.state.health().running == 0


def test_a_time_limit_ends_a_request(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    object.__setattr__(live.server.state.settings, "request_seconds", 0.3)
    try:
        slow = {"prompt": "x", "max_tokens": 200, "diffusion": ENDLESS}
        for streamed in (False, True):  # nothing was sent yet, so it has its status in both
            response = live.post("/v1/completions", slow | {"stream": streamed})
            assert check_error(response, 504)["code"] == "time_limit"
            assert response.headers["x-should-retry"] == "false"
        object.__setattr__(live.server.state.settings, "request_seconds", 3.0)  # the first draft must come before it
        with (
            live.client() as client,
            client.stream("POST", "/v1/completions", json={"model": live.model, **DRAFTS} | slow) as stream,
        ):
            events = list(sse(stream))
        assert events[-2][1]["error"]["code"] == "time_limit"
    finally:
        object.__setattr__(live.server.state.settings, "request_seconds", 300.0)
    live.wait_idle()
    assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 4, "diffusion": QUICK}).status_code == 200
