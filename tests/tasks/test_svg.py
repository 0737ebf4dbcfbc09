"""Icons: the wishes, the grader on sound and broken drawings, pictures of them, the contact sheet."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from diffusiongemma.engine import Engine
from diffusiongemma.errors import ConfigError, DataError, InputError, SvgError
from diffusiongemma.tasks import format, svg
from diffusiongemma.tasks.svg import SvgCase, cases, document, grade, render
from diffusiongemma.tasks.svg_render import MAX_SIZE, coverage
from diffusiongemma.train.data.icons import Icon, in_test
from diffusiongemma.train.data.svg_set import build_svg_set, choose
from scripted import load_script

FILLED = '<svg viewBox="0 0 24 24"><path fill="currentColor" d="M4 4h16v16H4z"/></svg>'
# Drawn by hand in the manner of the training data: strokes, arcs, several shapes, odd view boxes, faint and full ones.
LENS = '<circle cx="11" cy="11" r="7"/><path d="m20 20l-4-4"/>'
RING = "M128 24a104 104 0 1 0 104 104A104.11 104.11 0 0 0 128 24m0 192a88 88 0 1 1 88-88a88.1 88.1 0 0 1-88 88"
FULL = "M0 2a2 2 0 0 1 2-2h12a2 2 0 0 1 2 2v12a2 2 0 0 1-2 2H2a2 2 0 0 1-2-2z"
WIDE = '<svg viewBox="-2 -2 20 10"><rect width="15" height="6" fill="currentColor" transform="rotate(3 8 4)"/></svg>'
SOUND = [
    FILLED,
    f'<svg viewBox="0 0 24 24"><g fill="none" stroke="currentColor" stroke-width="2">{LENS}</g></svg>',
    f'<svg viewBox="0 0 256 256"><path fill="currentColor" d="{RING}" opacity=".2"/></svg>',
    '<svg viewBox="0 0 80 80"><path fill="none" stroke="currentColor" d="M40 16v33.6m0 10.8v2.4"/></svg>',
    WIDE,
    f'<svg viewBox="0 0 16 16"><path fill="currentColor" d="{FULL}"/></svg>',
    '<svg viewBox="0 0 16 16"><polygon points="3 13 8 3 13 13" fill="currentColor" fill-rule="evenodd"/></svg>',
]


@pytest.mark.parametrize("text", SOUND)
def test_sound_icons_pass(text: str) -> None:
    found = grade(text)
    assert found.ok, found.problems
    assert found.problems == ()
    assert svg.INK_LEAST <= found.ink <= svg.INK_MOST
    assert grade(f"\n{text}\n").ok
    assert grade(f"```svg\n{text}\n```\n").ok
    assert grade(document(text, 100)).ok


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        (FILLED[:-3], "well_formed"),
        (FILLED.replace('"M', '"M"'), "well_formed"),
        (f"Here you are: {FILLED}", "well_formed"),
        (FILLED + FILLED, "well_formed"),
        (FILLED.replace("24 24", "24"), "well_formed"),
        ("", "well_formed"),
        (FILLED.replace("</svg>", "<script/></svg>"), "allowed"),
        (FILLED.replace("</svg>", "<path/>x</svg>"), "allowed"),
        (FILLED.replace("<path", '<path onclick="x"'), "allowed"),
        (FILLED.replace("currentColor", "currentColo"), "allowed"),
        (FILLED.replace("H4z", "H4zz3"), "paths_valid"),
        (FILLED.replace("H4z", "H4a1 1 0 3 0 1 1z"), "paths_valid"),
        (FILLED.replace("</svg>", '<path d="1 2"/></svg>'), "paths_valid"),
        (FILLED.replace('"currentColor"', '"none"'), "visible"),
        (FILLED.replace("M4 4", "M40 40").replace("H4z", "h-16z"), "visible"),  # outside of the view box
        (FILLED.replace("M4 4h16v16H4z", "M4 4h16"), "visible"),  # a line is no area
        (FILLED.replace("M4 4h16v16H4z", "M0 0h24v24H0z"), "visible"),  # everything
        (FILLED.replace("M4 4h16v16H4z", ""), "visible"),
        (FILLED.replace("M4 4h16v16H4z", "M4 4h.5v.5z"), "visible"),
        ('<svg viewBox="0 0 24 24"/>', "visible"),
    ],
)
def test_each_fault_is_found_alone(text: str, fails: str) -> None:
    found = grade(text)
    assert not found.ok
    assert found.problems
    judged = {name: getattr(found, name) for name in ("well_formed", "allowed", "paths_valid", "visible")}
    if fails == "well_formed":
        assert not any(judged.values())
    else:
        assert judged == dict.fromkeys(judged, True) | {fails: False}
    assert json.loads(json.dumps(found.to_dict()))["ok"] is False


@given(st.sampled_from(SOUND), st.data())
def test_grading_never_fails_on_broken_text(text: str, data: st.DataObject) -> None:
    at, to = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    broken = text[:at] + data.draw(st.text(alphabet='<>/="MaZ1. \x00é', max_size=4)) + text[to:]
    found = grade(broken)
    assert found.ok or found.problems
    if found.visible:
        assert document(broken).startswith("<svg xmlns=")


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_a_picture_shows_what_the_markup_says() -> None:
    area = coverage(render(FILLED, 48))
    assert area.shape == (48, 48)
    assert area[10:38, 10:38].min() == 1.0
    assert area[:7].max() == 0.0
    assert area.mean() == pytest.approx((16 / 24) ** 2, abs=0.01)
    with Image.open(io.BytesIO(render(WIDE, 64, "#ffffff"))) as image:  # the view box is twice as wide as high
        assert image.size == (64, 32)
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_nothing_but_clean_markup_reaches_the_renderer(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(render(FILLED, 24))
    image = f'<image href="{secret}" width="24" height="24"/>'
    assert coverage(render(f'<svg viewBox="0 0 24 24">{image}</svg>', 24)).max() == 0.0


def test_picture_mistakes() -> None:
    with pytest.raises(SvgError, match="well-formed"):
        render("<svg")
    for size in (0, MAX_SIZE + 1):
        with pytest.raises(InputError, match="pixels"):
            render(FILLED, size)


@pytest.mark.parametrize(("module", "package"), [("resvg_py", "resvg-py"), ("PIL", "pillow")])
def test_a_missing_renderer_is_a_mistake_of_the_installation_and_no_grade(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=f"pip install {package}"):
        grade(FILLED)


# ---- wishes ----------------------------------------------------------------------------------------------------------


def test_built_in_wishes_are_500_different_names_that_training_never_saw() -> None:
    found = cases()
    assert len(found) == len({case.prompt for case in found}) == len({case.id for case in found}) == 500
    assert all(in_test(case.prompt.split(",")[0]) for case in found)


def test_limit_and_seed() -> None:
    every = cases()
    some = cases(limit=20, seed=1)
    assert some == cases(limit=20, seed=1) != cases(limit=20, seed=2)
    assert some == [case for case in every if case in some]
    with pytest.raises(InputError, match="limit"):
        cases(limit=0)


def test_own_file(tmp_path: Path) -> None:
    file = tmp_path / "wishes.txt"
    file.write_text('bell, outline\n\n{"prompt": "cat", "id": "7"}\n{"prompt": " dog "}\n', encoding="utf-8")
    expected = [SvgCase("bell, outline", "line 1"), SvgCase("cat", "7"), SvgCase("dog", "line 4")]
    assert cases(file) == expected
    packed = tmp_path / "wishes.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert cases(packed) == expected


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no wish"),
        ("a\n{", "line 2 is not JSON"),
        ('{"name": "bell"}', "line 1: a `prompt`"),
        ('{"prompt": 3}', "`prompt`"),
    ],
)
def test_mistakes_in_an_own_file(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "wishes.txt"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=says):
        cases(file)
    with pytest.raises(DataError, match="cannot read"):
        cases(tmp_path / "none.txt")


def test_prompt_is_the_trained_one() -> None:
    with Engine.load("random:tiny") as engine:
        expected = format.chat_prompt(engine.tokenizer.encode, "SVG icon\nbell, outline")
        assert svg.prompt(engine, "  Bell,   Outline ") == tuple(expected)
        with pytest.raises(InputError, match="nothing to draw"):
            svg.prompt(engine, " ")


def made_icon(words: str, name: str, body: str = FILLED) -> Icon:
    return Icon("demo", name, words, ("outline",), (), body)


def test_set_takes_each_name_once_and_reports_what_the_grader_refuses(tmp_path: Path) -> None:
    icons = [made_icon(f"w{i}", f"w{i}-{style}") for i in range(12) for style in ("a", "b")]
    icons += [made_icon("bad", "bad", "<svg/>")]
    chosen = choose(icons, 13)
    assert len({icon.words for icon in chosen}) == 13
    assert {icon.name[-1] for icon in chosen} >= {"a", "b"}
    assert chosen == choose(icons[::-1], 13)
    with pytest.raises(DataError, match="only 13"):
        choose(icons, 14)

    source, out = tmp_path / "icons_test.jsonl.gz", tmp_path / "eval" / "names.jsonl.gz"
    with pytest.raises(DataError, match="not there"):
        build_svg_set(source, out)
    source.write_bytes(gzip.compress("\n".join(json.dumps(vars(icon)) for icon in icons).encode()))
    report = build_svg_set(source, out, 13)
    assert report["true_drawings_passed"] == 12
    assert list(report["refused"]) == ["demo:bad"]
    assert [case.prompt for case in cases(out)] == [f"{icon.words}, outline" for icon in chosen]
    first = out.read_bytes()
    build_svg_set(source, out, 13)
    assert out.read_bytes() == first


# ---- the contact sheet -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("contact_sheet")


def test_sheet_shows_icons_and_failures(script: ModuleType) -> None:
    cells = [script.Cell.of("square, filled", 3, FILLED), script.Cell.of("a long name " * 5, 4, "<svg")]
    picture = script.sheet(cells, 2, "title")
    step = (script.ICON + 2 * script.PAD) * script.SCALE
    middle = (script.HEAD + script.ICON // 2) * script.SCALE
    assert picture.size[0] == 2 * step
    assert picture.getpixel((step // 2, middle)) == (0x11, 0x11, 0x11)  # drawn
    corner = script.PAD * script.SCALE, script.HEAD * script.SCALE
    assert picture.getpixel((step + corner[0], corner[1])) == (0xB4, 0x23, 0x18)  # the frame of a failure
    assert picture.getpixel((step + step // 2, middle + 40 * script.SCALE)) == (0xFD, 0xEC, 0xEA)


def test_sheet_is_made_by_seeds(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sheet.png"
    script.main(out, model="random:tiny", count=3, columns=2, seed=5, steps=1)
    report = json.loads(capsys.readouterr().out)
    assert report == {"file": str(out), "icons": 3, "ok": 0, "visible": 0}  # random weights draw nothing
    with Image.open(out) as image:
        assert image.size[0] == 2 * (script.ICON + 2 * script.PAD) * script.SCALE
    with Engine.load("random:tiny") as engine:
        wishes = [case.prompt for case in cases()[:3]]
        cells = script.answers(engine, wishes, 5, "diffusion", 1)
        assert [cell.seed for cell in cells] == [5, 6, 7]
        assert cells[2].text == engine.generate(svg.prompt(engine, wishes[2]), seed=7, steps=1).text
        twin = script.answers(engine, wishes[:1], 5, "ar")[0].text
        assert twin == engine.generate(svg.prompt(engine, wishes[0]), mode="ar", temperature=0.0).text
        with pytest.raises(ConfigError, match="steps has no effect in mode 'ar'"):
            script.answers(engine, wishes[:1], 5, "ar", 1)


def test_sheet_of_kept_answers(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, titles = tmp_path / "svg.jsonl", []
    again = [{"text": FILLED}, {"text": "<svg"}]
    rows = [{"mode": "ar", "case": "a", "seed": 0, "text": FILLED, "tried": []}]
    rows += [{"mode": "ar", "case": "b", "seed": 1_000, "text": "<svg", "tried": again}]
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mode, cells = script.kept_answers(kept, 64)
    assert (mode, [(cell.wish, cell.seed, cell.text) for cell in cells]) == (
        "ar", [("a", 0, FILLED), ("b", 1_000, FILLED)],
    )  # fmt: skip
    real = script.sheet
    monkeypatch.setattr(script, "sheet", lambda *args: titles.append(args[2]) or real(*args))
    script.main(tmp_path / "sheet.png", kept=kept, columns=2)
    assert titles[0].startswith("nano, one token after another · first 2 held-out names · seeds 0 to 1000")
    with pytest.raises(InputError, match="--mode and --steps have no effect with --answers"):
        script.main(tmp_path / "sheet.png", kept=kept, mode="diffusion")
