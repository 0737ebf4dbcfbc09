"""SVG that is safe to show: read by expat, kept only what a short list allows, and written anew.

Nothing of the input reaches the output but allowed names and values that match the pattern of their attribute. There is
no attribute that could refer to anything (no href, no style, no url()), so nothing can be fetched, run or clicked.
Elements that are not allowed go with all that is in them. A DOCTYPE, and with it every entity, is refused, and so is
what is too large or too deep to be an icon.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

from diffusiongemma.errors import SvgError
from diffusiongemma.tasks.svg_path import COMMA, NUMBER, POINTS, TRANSFORM, UNSIGNED, WS, repeated

MAX_CHARACTERS, MAX_ELEMENTS, MAX_DEPTH = 16_384, 256, 16
# What costs a renderer much more than characters: a dash is a shape of its own (a short path can ask for millions), and
# whatever has an opacity is a picture of its own. Real icons have at most 144 and 12 of them.
MAX_DASHES, MAX_LAYERS = 2_000, 32
NAMESPACE = "http://www.w3.org/2000/svg"
SHAPES = frozenset("path g circle ellipse rect line polyline polygon".split())

_LENGTH, _SIZE = rf"{NUMBER}(?:px)?", rf"{UNSIGNED}(?:px)?"
_SHARE = r"(?:0|1|1\.0+|0?\.[0-9]+|[0-9]{1,2}%|100%)"
_NAMES = "black silver gray white maroon red purple fuchsia green lime olive yellow navy blue teal aqua orange".split()
_PAINT = rf"(?:currentColor|none|transparent|{'|'.join(_NAMES)}|#[0-9a-fA-F]{{3,4}}|#(?:[0-9a-fA-F]{{2}}){{3,4}})"
_RULE = "(?:nonzero|evenodd)"
# Attribute -> what its whole value must match.
ATTRIBUTES = {
    "d": r"[MmLlHhVvCcSsQqTtAaZz0-9eE+\-., \t\r\n]*",  # svg_path tells whether it is also right
    "points": POINTS, "transform": TRANSFORM,
    **dict.fromkeys("x y x1 y1 x2 y2 cx cy stroke-dashoffset".split(), _LENGTH),
    **dict.fromkeys("r rx ry width height stroke-width stroke-miterlimit".split(), _SIZE),
    **dict.fromkeys("opacity fill-opacity stroke-opacity".split(), _SHARE),
    **dict.fromkeys("fill stroke color".split(), _PAINT),
    **dict.fromkeys("fill-rule clip-rule".split(), _RULE),
    "stroke-linecap": "(?:butt|round|square)", "stroke-linejoin": "(?:miter|round|bevel)",
    "stroke-dasharray": rf"(?:none|{_SIZE}(?:{COMMA}{_SIZE})*+)",
}  # fmt: skip
_PATTERNS = {name: re.compile(pattern) for name, pattern in ATTRIBUTES.items()}
# Labels without effect on the picture: left out, and no fault.
_LABEL = re.compile(r"(?:id|class|version|role|baseProfile|(?:data|aria)-[\w.-]+)", re.ASCII)
_BOX = re.compile(rf"{WS}*+{repeated(4)}{WS}*+")
_NUMBER = re.compile(NUMBER)
_GEOMETRY = frozenset("d points x y x1 y1 x2 y2 cx cy r rx ry width height".split())
_LIMIT = 1e6  # of the viewBox; also 1e-6 below


@dataclass
class Drawing:
    """A safe drawing, and what of the input is not in it."""

    box: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # left, top, width, height
    root: list[str] = field(default_factory=list)  # attributes of the svg element
    parts: list[str] = field(default_factory=list)  # the markup within it
    paths: list[str] = field(default_factory=list)  # every `d`
    dropped: list[str] = field(default_factory=list)  # what was not allowed

    def markup(self, size: int | None = None) -> str:
        """A whole SVG document; with a size, the longer side is shown in so many pixels."""
        sides = ""
        if size is not None:
            width, height = self.pixels(size)
            sides = f' width="{width}" height="{height}"'
        box = " ".join(f"{value:.10g}" for value in self.box)
        return f'<svg xmlns="{NAMESPACE}"{sides} viewBox="{box}"{"".join(self.root)}>{"".join(self.parts)}</svg>'

    def pixels(self, size: int) -> tuple[int, int]:
        """Width and height of a picture whose longer side has `size` pixels."""
        _, _, width, height = self.box
        scale = size / max(width, height)
        return max(1, round(width * scale)), max(1, round(height * scale))


def read(text: str) -> Drawing:
    """Parse and clean; raises SvgError for what is not an SVG document within the limits."""
    if len(text) > MAX_CHARACTERS:
        raise SvgError(f"{len(text)} characters are no icon: at most {MAX_CHARACTERS} are read")
    reader = _Reader()
    parser = expat.ParserCreate("utf-8", namespace_separator=" ")  # whatever encoding the text may name
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.CharacterDataHandler = reader.characters
    parser.StartDoctypeDeclHandler = reader.doctype
    parser.ProcessingInstructionHandler = reader.instruction
    try:
        parser.Parse(text.strip().encode(), True)
    except expat.ExpatError as error:
        raise SvgError(f"not well-formed XML: {error}") from None
    except UnicodeEncodeError as error:
        raise SvgError(f"not well-formed XML: {error.reason}") from None
    reader.check_cost()
    return reader.drawing


def sanitise(text: str) -> str:
    """The same drawing as an SVG document that can be shown anywhere, as a file or within a page."""
    return read(text).markup()


class _Reader:
    """Expat's events, one after another, into a Drawing."""

    def __init__(self) -> None:
        self.drawing = Drawing()
        self._depth = self._elements = 0
        self._skip_from = 0  # depth of the dropped element that we are in; 0: in none
        self._is_empty = False  # has the element that was opened last no child yet?
        self._length = 0.0  # of all lines, about: the sum of their numbers
        self._dash = float("inf")  # length of the finest dash pattern
        self._layers = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        self._elements += 1
        if self._depth > MAX_DEPTH or self._elements > MAX_ELEMENTS:
            raise SvgError(f"too much for an icon: at most {MAX_ELEMENTS} elements, {MAX_DEPTH} deep, are read")
        namespace, _, tag = name.rpartition(" ")
        known = namespace in ("", NAMESPACE)
        if self._depth == 1:
            if not known or tag != "svg":
                raise SvgError(f"the root element is {tag!r:.40}, not svg")
            self.drawing.box = _box(attributes)
            rest = {k: v for k, v in attributes.items() if k not in ("viewBox", "width", "height", "x", "y")}
            self.drawing.root = self._clean(rest)
        elif not self._skip_from and (not known or tag not in SHAPES):
            self._skip_from = self._depth
            self.drawing.dropped.append(f"<{tag:.40}>")
        elif not self._skip_from:
            self._close_start_tag()
            self.drawing.parts += [f"<{tag}", *self._clean(attributes)]
            self._is_empty = True

    def end(self, name: str) -> None:
        tag = name.rpartition(" ")[2]
        if self._skip_from:
            self._skip_from = 0 if self._depth == self._skip_from else self._skip_from
        elif self._depth > 1:
            self.drawing.parts.append("/>" if self._is_empty else f"</{tag}>")
            self._is_empty = False
        self._depth -= 1

    def characters(self, text: str) -> None:
        if not self._skip_from and not text.isspace():
            self.drawing.dropped.append(f"text {text.strip():.40}")

    def doctype(self, *_: object) -> None:
        raise SvgError("a DOCTYPE is not read: it can declare entities")

    def instruction(self, target: str, _: str) -> None:
        self.drawing.dropped.append(f"<?{target:.40}?>")

    def _close_start_tag(self) -> None:
        if self._is_empty:
            self.drawing.parts.append(">")

    def _clean(self, attributes: dict[str, str]) -> list[str]:
        kept = []
        for name, value in attributes.items():
            pattern = _PATTERNS.get(name)
            if pattern is not None and pattern.fullmatch(value):
                value = re.sub(WS, " ", value)  # a line break would have to be written as a reference
                kept.append(f" {name}={quoteattr(value)}")
                self._measure(name, value)
            elif pattern is not None:
                self.drawing.dropped.append(f"{name}={value!r:.40}")
            elif not _LABEL.fullmatch(name):
                self.drawing.dropped.append(f"{name:.40}")
        return kept

    def _measure(self, name: str, value: str) -> None:
        if name == "d":
            self.drawing.paths.append(value)
        if name in _GEOMETRY:
            self._length += _total(value)
        elif name == "stroke-dasharray" and (pattern := _total(value)) > 0:
            self._dash = min(self._dash, pattern)
        self._layers += name == "opacity"

    def check_cost(self) -> None:
        if self._layers > MAX_LAYERS:
            raise SvgError(
                f"too costly to draw: {self._layers} elements with an opacity, at most {MAX_LAYERS} are drawn"
            )
        if self._length / self._dash > MAX_DASHES:
            raise SvgError(
                f"too costly to draw: about {self._length / self._dash:.0f} dashes, at most {MAX_DASHES} are drawn"
            )


def _total(value: str) -> float:
    return sum(abs(float(number)) for number in _NUMBER.findall(value))


def _box(attributes: dict[str, str]) -> tuple[float, float, float, float]:
    """The viewBox, or one made of width and height; a drawing without a size cannot be drawn."""
    text = attributes.get("viewBox")
    if text is None:
        text = "0 0 {} {}".format(*(attributes.get(side, "").removesuffix("px") for side in ("width", "height")))
    if not _BOX.fullmatch(text):
        raise SvgError(f"no viewBox of four numbers, nor a width and a height: {text!r:.60}")
    left, top, width, height = map(float, _NUMBER.findall(text))
    if not all(1 / _LIMIT <= side <= _LIMIT for side in (width, height)) or max(abs(left), abs(top)) > _LIMIT:
        raise SvgError(f"a viewBox that cannot be drawn: {text!r:.60}")
    return left, top, width, height
