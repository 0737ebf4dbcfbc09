"""The picture of a draft: what is solid, shaded and dim, and that nothing a model writes reaches the terminal raw."""

import io
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from diffusiongemma.cli.canvas import CONTROL, NOISE, SHADES, STRAY, UNKNOWN, level, render, sanitise
from diffusiongemma.cli.show import Answer, LiveCanvas
from diffusiongemma.engine import Commit, Draft, End, Engine, Metrics
from diffusiongemma.text.bytes import byte_tokenizer
from scripted import load_script

ROOT = Path(__file__).parents[2]
TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.special["eos"]


def draft(tokens: list[int], entropy: list[float] | float = 0.0, accepted: list[bool] | bool = True) -> Draft:
    sure = entropy if isinstance(entropy, list) else [entropy] * len(tokens)
    kept = accepted if isinstance(accepted, list) else [accepted] * len(tokens)
    return Draft(0, 1, tokens, sure, kept, TOKENIZER.decode)


def styled(d: Draft) -> list[tuple[str, str]]:
    text = render(d, TOKENIZER)
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def test_settled_is_solid_uncertain_is_shaded_noise_is_dim() -> None:
    d = draft(TOKENIZER.encode("abcd"), [0.0, 0.05, 1.0, 9.0], [True, False, False, False])
    assert styled(d) == [("b", SHADES[0]), ("c", SHADES[2]), ("d", NOISE)]  # "a" has no style of its own
    assert render(d, TOKENIZER, text="before ").plain == "before abcd"


def test_more_entropy_is_never_shown_as_surer() -> None:
    levels = [level(h / 10, accepted=False) for h in range(60)]
    assert levels == sorted(levels)
    assert len(set(levels)) == len(SHADES) + 1
    assert level(9.0, accepted=True) == 0


def test_characters_of_several_tokens_are_put_together() -> None:
    tokens = TOKENIZER.encode("é€")
    assert len(tokens) == 5
    d = draft(tokens, [0.0] * 4 + [9.0], [True] * 4 + [False])
    assert render(d, TOKENIZER).plain == "é€"
    assert styled(d) == [("€", NOISE)]  # as unsure as its last byte
    assert render(draft([*tokens[:1], EOS, *tokens[2:3]]), TOKENIZER).plain == "\ufffd<eos>\ufffd"


def test_control_tokens_and_unknown_ids() -> None:
    a = TOKENIZER.encode("a")
    assert styled(draft([*a, EOS, EOS, EOS, *a])) == [("<eos>", CONTROL), ("×3", CONTROL)]
    assert render(draft([EOS, 0, 0, 0, 0]), TOKENIZER).plain == "<eos><pad>×4"
    assert render(draft([EOS, EOS, *a], entropy=9.0, accepted=False), TOKENIZER).plain == f"{STRAY}{STRAY}a"
    assert render(draft([500]), TOKENIZER).plain == UNKNOWN


def test_line_breaks_break_only_when_settled() -> None:
    tokens = TOKENIZER.encode("a\nb\tc")
    assert render(draft(tokens), TOKENIZER).plain == "a\nb\tc"
    assert render(draft(tokens, 9.0, accepted=False), TOKENIZER).plain == "a↵b⇥c"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x07", "␛[31mred␇"),
        ("a\r\nb\x00\x7f", "a␍\nb␀␡"),
        ("\x9b31m \u202e\u2028", "\ufffd31m \ufffd\ufffd"),
        ("plain é 漢字 👩‍🚀\tok\n", "plain é 漢字 👩‍🚀\tok\n"),
    ],
)
def test_sanitise(raw: str, shown: str) -> None:
    assert sanitise(raw) == shown


def obeyed(text: str) -> bool:
    return any(c not in "\n\t" and (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0) for c in text)


@given(st.lists(st.tuples(st.integers(0, 511), st.floats(0, 12), st.booleans()), min_size=1, max_size=64))
def test_no_draft_can_steer_the_terminal(positions: list[tuple[int, float, bool]]) -> None:
    tokens, entropy, accepted = (list(column) for column in zip(*positions, strict=True))
    assert not obeyed(render(Draft(0, 1, tokens, entropy, accepted, TOKENIZER.decode), TOKENIZER).plain)


@given(st.text())
def test_no_text_can_steer_the_terminal(text: str) -> None:
    assert not obeyed(sanitise(text))
    assert sanitise(sanitise(text)) == sanitise(text)
    assert len(sanitise(text)) == len(text)


@pytest.mark.parametrize("width", [8, 20, 80])
def test_live_canvas_fits_and_leaves_the_text(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusiongemma.cli.show.FRAME", 0.0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=6, color_system=None, _environ={})
    live = LiveCanvas(console, TOKENIZER, steps=3)
    with Engine.random() as engine:
        answer = Answer(engine)
    words = "\x1b[2Jmany words " * 20
    with live:
        for event in (draft(TOKENIZER.encode(words)), Commit(0, [], words), End("length", Metrics())):
            picture = live._picture()
            assert len(console.render_lines(picture)) <= 5
            assert all(len(line) <= width for line in console.render_lines(picture, pad=False))
            live.take(event, answer.take(event))
    shown = out.getvalue()
    assert "block 1" in shown
    end = shown.rsplit("\x1b[2K", 1)[-1]  # what follows the last erased line of the live part
    assert "many" not in end
    live.close(answer)
    assert out.getvalue()[len(shown) :].strip() == sanitise(words).strip()
    assert "\x1b[2J" not in out.getvalue()


def test_without_drafts_the_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The autoregressive twin has none, and does not read the prompt until its end."""
    monkeypatch.setattr("diffusiongemma.cli.show.FRAME", 0.0)
    console = Console(file=io.StringIO(), force_terminal=True, width=40, height=6, color_system=None, _environ={})
    with LiveCanvas(console, TOKENIZER, steps=3) as live:
        last = []
        for text in ("one", "two"):
            live.take(Commit(0, [1], text), text)
            last.append("".join(part.text for part in console.render_lines(live._picture(), pad=False)[-1]))
    assert last == ["1 token so far", "2 tokens so far"]


# ---- scripts/record_canvas.py ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    return load_script("record_canvas")


def test_recording(recorder: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "canvas.svg"
    recorder.main("hello", out, "random:tiny", steps=6, max_new_tokens=40, columns=20, most=4)
    svg = ElementTree.parse(out).getroot()
    name = "{http://www.w3.org/2000/svg}"
    lines = svg.findall(f"{name}g/{name}text")
    assert len({line.get("class", "").split()[0] for line in lines}) >= 4  # as many moments as pictures
    assert any("last" in line.get("class", "") for line in lines)
    style = svg.findtext(f"{name}style") or ""
    assert style.count("@keyframes") == style.count("infinite")
    assert out.stat().st_size < recorder.MAX_BYTES


def test_recording_of_a_board(recorder: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "board.svg"
    recorder.main("easy", out, "nano", sudoku=True, seed=0, columns=60)
    text = out.read_text(encoding="utf-8")
    assert "every row, column and box holds 1 to 9" in text
    assert "dgemma sudoku --random easy --seed 0" in text
    assert text.count("│") >= 9 * 4
    assert f'class="{recorder.CLASSES["bold"]}"' in text  # givens


def test_recorded_lines_say_what_the_picture_says(recorder: ModuleType) -> None:
    text = render(
        draft(TOKENIZER.encode("ab\ncd"), [0.0, 9.0, 0.0, 9.0, 9.0], [True, False, True, False, False]), TOKENIZER
    )
    lines = recorder.wrap(text, Console(width=20), 20)
    assert lines == ((("", "a"), (NOISE, "b")), ((NOISE, "cd"),))


def test_the_readme_shows_a_recording(recorder: ModuleType) -> None:
    assert "docs/canvas.svg" in (ROOT / "README.md").read_text(encoding="utf-8")
    file = ROOT / "docs" / "canvas.svg"
    assert file.stat().st_size < recorder.MAX_BYTES
    assert "infinite" in file.read_text(encoding="utf-8")
