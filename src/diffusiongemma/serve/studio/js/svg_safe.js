// A drawing that is safe to show: read tag by tag, kept only what a short list allows, and written anew. Nothing of
// the input reaches the output but allowed names, and values made of the characters that their attribute may have; none
// of these can refer to anything. It also reads drafts, which are full of noise: what makes no sense is left out.

const LIMITS = { characters: 16384, elements: 256, depth: 16, dashes: 2000, layers: 32, box: 1e6 };
const SHAPES = new Set(["path", "g", "circle", "ellipse", "rect", "line", "polyline", "polygon"]);
const SENSE = /^[MmLlHhVvCcSsQqTtAaZz0-9eE+\-., \t\r\n]*/; // of a path, up to where its noise begins
const NUMBERS = /^[0-9eE+\-., \t\r\n]*$/;
const LENGTH = /^[+-]?(?:[0-9]*\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?(?:px)?$/;
const SIZE = /^\+?(?:[0-9]*\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?(?:px)?$/;
const SHARE = /^(?:0|1|1\.0+|0?\.[0-9]+|[0-9]{1,2}%|100%)$/;
const COLOURS = "black|silver|gray|white|maroon|red|purple|fuchsia|green|lime|olive|yellow|navy|blue|teal|aqua|orange";
const PAINT = new RegExp(`^(?:currentColor|none|transparent|${COLOURS}|#[0-9a-fA-F]{3,4}|#(?:[0-9a-fA-F]{2}){3,4})$`);
const ATTRIBUTES = new Map(Object.entries({
  d: /^[MmLlHhVvCcSsQqTtAaZz0-9eE+\-., \t\r\n]*$/, points: NUMBERS,
  transform: /^(?:\s*(?:matrix|translate|scale|rotate|skewX|skewY)\s*\([0-9eE+\-., \t\r\n]*\)[\s,]*)*$/,
  "stroke-dasharray": /^(?:none|[0-9eE+., \t\r\n]*)$/,
  "fill-rule": /^(?:nonzero|evenodd)$/, "clip-rule": /^(?:nonzero|evenodd)$/,
  "stroke-linecap": /^(?:butt|round|square)$/, "stroke-linejoin": /^(?:miter|round|bevel)$/,
  ...each("x y x1 y1 x2 y2 cx cy stroke-dashoffset", LENGTH),
  ...each("r rx ry width height stroke-width stroke-miterlimit", SIZE),
  ...each("opacity fill-opacity stroke-opacity", SHARE),
  ...each("fill stroke color", PAINT),
}));
const LABEL = /^(?:xmlns|id|class|version|role|baseProfile|data-[\w.-]+|aria-[\w.-]+)$/; // without effect: no fault
const TAG = /<(\/?)([A-Za-z][\w:-]*)((?:\s+[A-Za-z_:][\w:.-]*\s*=\s*(?:"[^"<>]*"|'[^'<>]*'))*)\s*(\/?)>/g;
const OPEN = /^<([A-Za-z][\w:-]*)((?:\s+[A-Za-z_:][\w:.-]*\s*=\s*"[^"<>]*")*)(\s+(?:d|points)\s*=\s*"[^"<>]*)?[^<>]*$/;
// Text with entities, a comment, or a tag: what plain XML is made of.
const ENTITY = "&(?:amp|lt|gt|quot|apos|#[0-9]{1,7}|#x[0-9a-fA-F]{1,6});";
const VALUE = `(?:"(?:[^"<&]|${ENTITY})*"|'(?:[^'<&]|${ENTITY})*')`;
const STRICT_TAG = `<(\\/?)([A-Za-z_][\\w:.-]*)((?:\\s+[A-Za-z_:][\\w:.-]*\\s*=\\s*${VALUE})*)\\s*(\\/?)>`;
const PIECE = new RegExp(`((?:[^<&]|${ENTITY})+)|<!--(?:(?!--)[^])*-->|${STRICT_TAG}`, "y");
const PAIR = /([A-Za-z_:][\w:.-]*)\s*=\s*(?:"([^"]*)"|'([^']*)')/g;
const GEOMETRY = new Set("d points x y x1 y1 x2 y2 cx cy r rx ry width height".split(" "));

function each(names, pattern) {
  return Object.fromEntries(names.split(" ").map((name) => [name, pattern]));
}

/** -> {box, root, parts, shapes, dropped}; `draft`: cut a path where its noise begins, instead of leaving it out */
export function read(text, draft = false) {
  const drawing = { box: "0 0 24 24", root: new Map(), parts: [], shapes: 0, dropped: [], found: false };
  const source = text.slice(0, LIMITS.characters);
  if (text.length > LIMITS.characters) drawing.dropped.push("all that is too long for an icon");
  const open = [];
  const cost = { length: 0, dash: Infinity, layers: 0 };
  let skipping = null, elements = 0;
  for (const [, closing, tag, attributes, empty] of source.matchAll(TAG)) {
    if (skipping) {
      if (tag === skipping.tag && !empty) skipping.depth += closing ? -1 : 1;
      if (!skipping.depth) skipping = null;
    } else if (tag === "svg") {
      if (!closing && !drawing.found) readRoot(drawing, attributes, draft, cost);
    } else if (!SHAPES.has(tag)) {
      if (!closing) drawing.dropped.push(`<${tag.slice(0, 40)}>`);
      if (!closing && !empty) skipping = { tag, depth: 1 };
    } else if (closing) {
      if (open.at(-1) === tag) drawing.parts.push(`</${open.pop()}>`);
    } else {
      elements += 1;
      if (elements > LIMITS.elements || open.length >= LIMITS.depth) {
        drawing.dropped.push("all that is too much for an icon");
        break;
      }
      const kept = clean(attributes, drawing, draft, cost);
      drawing.shapes += tag !== "g";
      drawing.parts.push(`<${tag}${written(kept)}${empty ? "/>" : ">"}`);
      if (!empty) open.push(tag);
    }
  }
  while (open.length) drawing.parts.push(`</${open.pop()}>`);
  return affordable(drawing, cost);
}

/** A text that is being written from left to right: a tag that is still open ends with what it has. */
export function closed(text) {
  const from = text.lastIndexOf("<");
  const [, tag, whole, path] = (from < 0 ? "" : text.slice(from)).match(OPEN) ?? [];
  return tag ? `${text.slice(0, from)}<${tag}${whole}${path ? `${path}"` : ""}/>` : text;
}

/** A whole document. `ink`: the colour that stands for "the colour of the text". */
export function markup({ box, root, parts }, ink = null) {
  const attributes = new Map(root);
  if (ink) {
    attributes.set("color", ink);
    if (!attributes.has("fill")) attributes.set("fill", "currentColor"); // else black, also on black
  }
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="${box}"${written(attributes)}>${parts.join("")}</svg>`;
}

export const dataUrl = (document) => `data:image/svg+xml,${encodeURIComponent(document)}`;

/** Is it one XML document with an svg element at its root? Read here, since the browser's own parser writes its errors
 *  with inline styles, which the Content-Security-Policy of this page forbids. */
export function isWellFormed(text) {
  const source = text.trim(), open = [];
  let at = 0, roots = 0;
  while (at < source.length) {
    PIECE.lastIndex = at;
    const found = PIECE.exec(source);
    if (!found) return false;
    at = PIECE.lastIndex;
    const [, words, closing, tag, attributes, empty] = found;
    if (words !== undefined) {
      if (!open.length && words.trim()) return false;
    } else if (closing) {
      if (open.pop() !== tag) return false;
    } else if (tag) {
      const names = pairs(attributes).map(([name]) => name);
      roots += !open.length;
      if (new Set(names).size < names.length || (!open.length && tag !== "svg") || roots > 1) return false;
      if (!empty) open.push(tag);
    }
  }
  return roots === 1 && !open.length;
}

function readRoot(drawing, attributes, draft, cost) {
  const values = new Map(pairs(attributes));
  const sides = ["width", "height"].map((side) => (values.get(side) ?? "").replace(/px$/, ""));
  const box = (values.get("viewBox") ?? `0 0 ${sides.join(" ")}`).trim().split(/[\s,]+/);
  const numbers = box.map(Number);
  const isNumber = (part) => LENGTH.test(part) && Math.abs(Number(part)) <= LIMITS.box;
  if (box.length === 4 && box.every(isNumber) && numbers[2] >= 1 / LIMITS.box && numbers[3] >= 1 / LIMITS.box) {
    drawing.box = numbers.join(" ");
    drawing.found = true;
  } else if (!draft) drawing.dropped.push("viewBox");
  for (const name of ["viewBox", "width", "height", "x", "y"]) values.delete(name);
  drawing.root = keep(values, drawing, draft, cost);
}

const pairs = (attributes) =>
  [...attributes.matchAll(PAIR)].map(([, name, double, single]) => [name, double ?? single]);
const clean = (attributes, drawing, draft, cost) => keep(new Map(pairs(attributes)), drawing, draft, cost);

function keep(values, drawing, draft, cost) {
  const kept = new Map();
  for (const [name, given] of values) {
    const pattern = ATTRIBUTES.get(name);
    const value = draft && (name === "d" || name === "points") ? given.match(SENSE)[0] : given;
    if (pattern?.test(value)) {
      kept.set(name, value.replace(/\s/g, " "));
      measure(name, value, cost);
    } else if (pattern || !LABEL.test(name)) drawing.dropped.push(name.slice(0, 40));
  }
  return kept;
}

const written = (values) => [...values].map(([name, value]) => ` ${name}="${value}"`).join("");
const total = (value) =>
  (value.match(/[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?/g) ?? []).reduce((sum, number) => sum + Number(number), 0);

function measure(name, value, cost) {
  if (GEOMETRY.has(name)) cost.length += total(value);
  else if (name === "stroke-dasharray" && total(value) > 0) cost.dash = Math.min(cost.dash, total(value));
  cost.layers += name === "opacity";
}

/** What would keep a browser busy for long is not drawn at all. */
function affordable(drawing, { length, dash, layers }) {
  if (layers <= LIMITS.layers && length / dash <= LIMITS.dashes) return drawing;
  return { ...drawing, parts: [], shapes: 0, dropped: [...drawing.dropped, "all of it: too costly to draw"] };
}
