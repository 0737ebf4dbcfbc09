from __future__ import annotations

import pytest

from diffusiongemma.train.data.icons import Icon, canonical, in_test, monochrome, prompts, read_set, split_name

BELL = '<path fill="currentColor" d="M1 2h3v4z"/>'
STROKED = '<path fill="none" stroke="currentColor" d="M1 2h3v4"/>'


@pytest.mark.parametrize(
    ("name", "words", "styles"),
    [
        ("bell", "bell", ()),
        ("bell-off-outline", "bell off", ("outline",)),
        ("access-time-24-filled", "access time", ("filled",)),
        ("bell-outline-rounded", "bell", ("outline", "rounded")),
        ("twotone-alarm", "alarm", ("duotone",)),
        ("arrow-down-2", "arrow down 2", ()),
        ("outline", "outline", ()),
        ("line-chart", "line chart", ()),
    ],
)
def test_split_name(name: str, words: str, styles: tuple[str, ...]) -> None:
    assert split_name(name) == (words, styles)


@pytest.mark.parametrize(
    ("body", "good"),
    [
        (BELL, True),
        (STROKED, True),
        ('<path fill="#ff0000" d="M1 2"/>', False),
        ('<path d="M1 2h3"/>', False),
        ('<path fill="currentColor" id="a" d="M1 2"/>', False),
        ('<g fill="currentColor"><script>x</script></g>', False),
        ('<path fill="currentColor" d="M1 2"><animate/></path>', False),
        (f'<path fill="currentColor" d="{"M1 2" * 400}"/>', False),
    ],
)
def test_monochrome(body: str, good: bool) -> None:
    assert monochrome(body) is good


def test_canonical_form() -> None:
    assert canonical(BELL + "\n ", 0, 0, 24, 24.0) == f'<svg viewBox="0 0 24 24">{BELL} </svg>'.replace("/> <", "/><")


def test_variants_of_a_name_never_straddle_the_split() -> None:
    names = [f"thing{n} part" for n in range(2_000)]
    share = sum(map(in_test, names)) / len(names)
    assert 0.01 < share < 0.04
    for name in names[:200]:
        first, second = name.split()
        assert in_test(name) == in_test(f"{second} {first}s") == in_test(name + " 2")


def test_read_set_styles_tags_and_what_it_leaves_out() -> None:
    data = {
        "prefix": "demo",
        "width": 24,
        "height": 24,
        "icons": {
            "bell": {"body": BELL},
            "bell-outline": {"body": BELL.replace("M1", "M2")},
            "pen": {"body": STROKED, "width": 16},
            "brand-x": {"body": BELL},
            "flag": {"body": '<path fill="red" d="M1 2"/>'},
        },
        "aliases": {"ring": {"parent": "bell"}, "turned": {"parent": "bell", "rotate": 1}},
    }
    found = {icon.name: icon for icon in read_set(data, {"bell": ("alarm", "bell")})}
    assert set(found) == {"bell", "bell-outline", "pen"}
    assert found["bell"].styles == ("filled",)  # its sibling is the outline
    assert found["bell-outline"].styles == ("outline",)
    assert found["pen"].styles == ("outline",)  # drawn with a stroke
    assert found["pen"].svg.startswith('<svg viewBox="0 0 16 24">')
    assert set(found["bell"].tags) == {"alarm", "ring"}


def test_prompts_start_with_the_canonical_one() -> None:
    icon = Icon("demo", "bell-outline", "bell", ("outline",), ("alarm", "ring"), "<svg/>")
    made = prompts(icon)
    assert made[:2] == ["bell, outline", "bell"]
    assert len(made) == len(set(made)) == 4
    assert made == prompts(icon)
    assert prompts(Icon("demo", "bell", "bell", (), (), "<svg/>")) == ["bell"]
