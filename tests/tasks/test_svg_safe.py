"""The sanitiser: real drawings pass unchanged, hostile ones lose their teeth, whatever they are made of."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diffusiongemma.errors import SvgError
from diffusiongemma.tasks.svg_safe import (
    ATTRIBUTES,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_LAYERS,
    NAMESPACE,
    SHAPES,
    read,
    sanitise,
)

XMLNS = f'xmlns="{NAMESPACE}"'
XLINK = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
SQUARE = '<path fill="currentColor" d="M4 4h16v16H4z"/>'


def icon(body: str, attributes: str = 'viewBox="0 0 24 24"') -> str:
    return f"<svg {attributes}>{body}</svg>"


@pytest.mark.parametrize(
    "body",
    [
        SQUARE,
        '<g fill="none" stroke="currentColor" stroke-width="1.5"><path d="M5 12h14"/><circle cx="2" cy="2" r="3"/></g>',
        '<rect width="10" height="8" x="2" y="3" opacity=".5" stroke-linecap="round" transform="rotate(15 8 8)"/>',
        '<g fill-rule="evenodd"><g><ellipse cx="12" cy="12" rx="3" ry="4"/></g><line x1="1" y1="2" x2="3" y2="4"/></g>',
        '<polygon points="1 2 3,4 5-6" fill="#ff8800"/><polyline points="" stroke="red" stroke-dasharray="1 2, 3"/>',
        '<path stroke-dasharray="0" d="M0 0h999"/><path stroke-dasharray=".01 8" d="M4 16v48M16 4h48M16 64h48z"/>',
        '<path opacity=".2"/>' * MAX_LAYERS,
        "",
    ],
)
def test_plain_drawings_stay_as_they_are(body: str) -> None:
    assert sanitise(icon(body)) == icon(body, f'{XMLNS} viewBox="0 0 24 24"')
    assert read(icon(body)).dropped == []


HOSTILE = [
    "<script>alert(1)</script>",
    "<script xlink:href='x.js' xmlns:xlink='http://www.w3.org/1999/xlink'/>",
    "<h:script xmlns:h='http://www.w3.org/1999/xhtml'>alert(1)</h:script>",
    "<foreignObject><body xmlns='http://www.w3.org/1999/xhtml'><iframe src='x'/></body></foreignObject>",
    "<a href='javascript:alert(1)'><circle r='9'/></a>",
    "<image href='http://evil.example/x.png'/>",
    "<use href='other.svg#a'/>",
    "<style>@import url(http://evil.example/x.css)</style>",
    "<path style='fill:url(http://evil.example)' d='M1 2h3'/>",
    "<path fill='url(#a)' d='M1 2h3'/>",
    "<path fill='url(javascript:alert(1))' d='M1 2h3'/>",
    "<path onclick='alert(1)' d='M1 2h3'/>",
    "<path ONLOAD='alert(1)' d='M1 2h3'/>",
    "<path filter='url(#f)' mask='url(#m)' clip-path='url(#c)' d='M1 2h3'/>",
    "<set attributeName='href' to='javascript:alert(1)'/>",
    "<animate attributeName='d' values='x'/>",
    "<text>javascript:</text>",
    "<svg onload='alert(1)'/>",
    "<g transform='rotate(1) url(x)'/>",
    "<path d='M1 2 javascript:alert(1)'/>",
    "<path d='M1 2&#34; onload=&#34;alert(1)'/>",
    "<path fill='red&quot; onclick=&quot;alert(1)' d='M1 2'/>",
    "<circle r='1&lt;script&gt;'/>",
    "<![CDATA[<script>alert(1)</script>]]>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "<?xml-stylesheet href='http://evil.example/x.xsl'?>",
    "<path xml:base='http://evil.example/' d='M1 2'/>",
    "<PATH d='M1 2'/>",
    "<metadata><g/></metadata>",
    "<g onmouseover='alert(1)' href='javascript:1'><script>1</script><path d='M0 0h9v9z'/></g>",
]
_ALLOWED_TAG = re.compile(rf"</?(?:svg|{'|'.join(SHAPES)})\b")


def assert_harmless(markup: str) -> None:
    """Only allowed elements and attributes, with values that hold nothing but numbers, names and colours."""
    root = ElementTree.fromstring(markup)
    assert root.tag == f"{{{NAMESPACE}}}svg"
    for element in root.iter():
        assert element is root or element.tag.removeprefix(f"{{{NAMESPACE}}}") in SHAPES
        assert not (element.text or "").strip()
        assert not (element.tail or "").strip()
        assert set(element.keys()) <= {*ATTRIBUTES, *({"viewBox", "width", "height"} if element is root else ())}
        for value in element.attrib.values():
            assert re.fullmatch(r"[A-Za-z0-9#%+\-., ()\n\t\r]*", value), value
            assert "url" not in value.lower()
    rest = markup.replace(NAMESPACE, "").lower()
    assert not re.search(r"script|href|style|url\(|import|&|<!|<\?|\bon[a-z]+=|:", rest), markup
    assert len(re.findall("<", markup)) == len(_ALLOWED_TAG.findall(markup))


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_markup_is_disarmed_and_told(attack: str) -> None:
    drawing = read(icon(f"{SQUARE}{attack}{SQUARE}"))
    markup = drawing.markup()
    assert drawing.dropped
    assert_harmless(markup)
    assert markup.count(SQUARE) == 2  # what is sound stays


def test_hostile_root() -> None:
    root = f'viewBox="0 0 9 9" onload="alert(1)" style="x" {XLINK} xlink:href="y" fill="none" width="100%"'
    assert sanitise(icon(SQUARE, root)) == icon(SQUARE, f'{XMLNS} viewBox="0 0 9 9" fill="none"')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('<!DOCTYPE svg SYSTEM "http://evil.example/x.dtd"><svg viewBox="0 0 9 9"/>', "DOCTYPE"),
        ('<!DOCTYPE s [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><svg viewBox="0 0 9 9">&b;</svg>', "DOCTYPE"),
        ('<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg viewBox="0 0 9 9">&x;</svg>', "DOCTYPE"),
        ('<svg viewBox="0 0 9 9">&x;</svg>', "undefined entity"),
        (icon("<g>" * MAX_DEPTH + "</g>" * MAX_DEPTH), "deep"),
        (icon("<g/>" * MAX_ELEMENTS), "elements"),
        (icon(f"<x>{'<g/>' * MAX_ELEMENTS}</x>"), "elements"),
        (icon(" " * MAX_CHARACTERS), "characters"),
        (icon('<path stroke-dasharray=".024" d="M0 0h20h-20h20"/>'), "2500 dashes"),
        (icon('<g stroke-dasharray="1e-9 0"><circle r="20"/></g>'), "dashes"),
        (icon('<path stroke-dasharray="1" d="M0 0h1e999"/>'), "inf dashes"),
        (icon('<g opacity=".5"/>' * (MAX_LAYERS + 1)), "opacity"),
        ("", "not well-formed"),
        ("   ", "not well-formed"),
        ("bell", "not well-formed"),
        ('<svg viewBox="0 0 9 9"><path d="M1 2"', "not well-formed"),
        ('<svg viewBox="0 0 9 9"><g></svg>', "not well-formed"),
        ('<svg viewBox="0 0 9 9"/>more', "not well-formed"),
        ('<svg viewBox="0 0 9 9" viewBox="0 0 9 9"/>', "duplicate attribute"),
        ('<svg viewBox="0 0 9 9" xlink:href="x"/>', "unbound prefix"),
        ('<svg viewBox="0 0 9 9">\x00</svg>', "not well-formed"),
        ('<svg viewBox="0 0 9 9">\ud800</svg>', "not well-formed"),
        ("<html/>", "root element"),
        ('<svg xmlns="http://www.w3.org/1999/xhtml" viewBox="0 0 9 9"/>', "root element"),
        ("<svg/>", "viewBox"),
        ('<svg viewBox="0 0 9"/>', "viewBox"),
        ('<svg viewBox="0 0 x 9"/>', "viewBox"),
        ('<svg viewBox="0 0 0 9"/>', "viewBox"),
        ('<svg viewBox="0 0 -9 9"/>', "viewBox"),
        ('<svg viewBox="0 0 1e999 9"/>', "viewBox"),
        ('<svg viewBox="1e999 0 9 9"/>', "viewBox"),
        ('<svg width="100%" height="9"/>', "viewBox"),
    ],
)
def test_what_is_refused_is_a_named_error(text: str, says: str) -> None:
    with pytest.raises(SvgError, match=says):
        sanitise(text)


def test_foreign_forms_of_the_same_drawing() -> None:
    plain = sanitise(icon(SQUARE))
    prefixed = icon(SQUARE).replace("<svg", f'<s:svg xmlns:s="{NAMESPACE}"').replace("</svg", "</s:svg")
    assert sanitise(prefixed.replace("<path", "<s:path")) == plain
    sized = icon(SQUARE, f'{XMLNS} width="24" height="24px"')
    assert sanitise(f'<?xml version="1.0" encoding="UTF-16"?>\n{sized}') == plain
    labelled = icon(SQUARE.replace("<path", '<path id="a" class="b" data-x="c"'), 'role="img" viewBox="0 0 24 24"')
    assert read(f"<!-- made by hand -->\n{labelled}\n").markup() == plain
    assert read(labelled).dropped == []


def test_size_gives_the_longer_side() -> None:
    drawing = read('<svg viewBox="0 0 24 12"/>')
    assert drawing.markup(256) == f'<svg {XMLNS} width="256" height="128" viewBox="0 0 24 12"></svg>'
    assert read('<svg viewBox="0 0 .00001 9"/>').pixels(64) == (1, 64)


# Trees of allowed and hostile names and values, written by ElementTree: well-formed, so that none is simply refused.
TAGS = st.sampled_from([*sorted(SHAPES), "svg", "script", "style", "image", "foreignObject", "animate", "use", "Path"])
NAMES = st.sampled_from([*ATTRIBUTES, "onload", "onclick", "href", "style", "viewBox", "src", "id", "FILL", "mask"])
PARTS = [
    "url(#a)",
    "javascript:1",
    "&",
    '"',
    "'",
    "<",
    ">",
    "1",
    ".5",
    "-2",
    "currentColor",
    "M1 2",
    "none",
    "rotate(1)",
]
PARTS += [" ", ",", "\n", "%", "px", "#fff", "round", "evenodd", "]]>", "<!--", "\u2028", "é"]
VALUES = st.lists(st.sampled_from(PARTS), max_size=3).map("".join)


def grow(inner: st.SearchStrategy[list[ElementTree.Element]]) -> st.SearchStrategy[ElementTree.Element]:
    def build(
        tag: str, attributes: dict[str, str], text: str, inner: list[ElementTree.Element], space: str
    ) -> ElementTree.Element:
        made = ElementTree.Element(f"{{{space}}}{tag}" if space else tag, attributes)
        made.text = text
        made.extend(inner)
        return made

    spaces = st.sampled_from(["", "", NAMESPACE, "http://www.w3.org/1999/xhtml"])
    attributes = st.dictionaries(NAMES, VALUES, max_size=4)
    return st.builds(build, TAGS, attributes, st.just("") | VALUES, inner, spaces)


TREES = st.recursive(grow(st.just([])), lambda children: grow(st.lists(children, max_size=3)), max_leaves=12)


def check(text: str) -> None:
    """Refused, or harmless and from then on unchanged."""
    try:
        markup = sanitise(text)
    except SvgError:
        return
    assert_harmless(markup)
    assert sanitise(markup) == markup
    assert read(markup).dropped == []


@given(st.lists(TREES, max_size=3), st.dictionaries(NAMES.filter(lambda name: name != "viewBox"), VALUES, max_size=3))
def test_any_tree_of_hostile_parts_comes_out_harmless(trees: list[ElementTree.Element], root: dict[str, str]) -> None:
    whole = ElementTree.Element("svg", {"viewBox": "0 0 24 24", **root})
    whole.extend(trees)
    text = ElementTree.tostring(whole, encoding="unicode")
    assert_harmless(sanitise(text))  # nothing of it is refused
    check(text)


@given(st.text() | st.text(alphabet="<>/svgpath \"'=&;![]-?d:MxL1#"))
@example("<svg viewBox='0 0 9 9'><g d='M1\n2'/></svg>")
def test_any_text_is_harmless_or_refused(text: str) -> None:
    check(text)


@given(st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=3), st.data())
def test_damaged_attacks(attacks: list[str], data: st.DataObject) -> None:
    """An attack with a piece cut out or written twice."""
    text = icon("".join(attacks))
    at, to = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    check(text[:at] + text[to:])
    check(text[:to] + text[at:])
