// A draft as text: settled tokens solid, uncertain ones shaded by entropy, noise dim.
// One span a position is made once; a step changes only what differs, so 256 positions cost one layout a frame.

import { el } from "./dom.js";

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const END = "∎"; // the end of the answer and the padding behind it
const STRAY = "◇"; // a control token amid the text

/** Text that does nothing but appear: what is invisible, or turns the writing direction, becomes a symbol. */
export const visible = (text) =>
  text.replace(CONTROL, (mark) => (mark < " " ? String.fromCharCode(0x2400 + mark.charCodeAt(0)) : "\ufffd"));

export class CanvasText {
  #spans = [];
  #shown = []; // [class, text] of each span
  #before = el("span");

  constructor(host) {
    this.host = host;
    host.classList.add("canvas-text");
    host.replaceChildren(this.#before);
  }

  /** `before`: text that is final already; `mine(i)`: is position i the model's, and not given? */
  show(draft, before = "", mine = () => true) {
    const count = draft.tokens.length;
    this.#grow(count);
    setText(this.#before, visible(before));
    const { tail } = draft;
    for (let i = 0; i < this.#spans.length; i += 1) {
      if (i >= count || i > tail) this.#set(i, "", "");
      else if (i === tail) this.#set(i, `mark lv${draft.levels[i]}`, END);
      else if (draft.special.has(i)) this.#set(i, "mark", draft.special.has(i - 1) ? "" : STRAY);
      else this.#set(i, `lv${draft.levels[i]}${mine(i) ? "" : " given"}`, piece(draft.tokens[i], draft.levels[i]));
    }
  }

  /** Final text alone; `parts`: strings, or {text, class}. */
  settle(...parts) {
    this.#spans = [];
    this.#shown = [];
    const nodes = parts.map((part) => el("span", { class: part.class }, visible(part.text ?? part)));
    this.#before = el("span");
    this.host.replaceChildren(this.#before, ...nodes);
  }

  #grow(count) {
    if (!this.#spans.length) this.host.replaceChildren(this.#before);
    if (this.#spans.length >= count) return;
    const added = Array.from({ length: count - this.#spans.length }, () => document.createElement("span"));
    this.#spans.push(...added);
    this.#shown.push(...added.map(() => ["", ""]));
    this.host.append(...added);
  }

  #set(i, name, text) {
    const shown = this.#shown[i];
    if (shown[0] !== name) this.#spans[i].className = shown[0] = name;
    if (shown[1] !== text) this.#spans[i].textContent = shown[1] = text;
  }
}

/** A line break obeyed while it is uncertain would make everything behind it jump. */
function piece(token, level) {
  const text = visible(token);
  return level === 0 ? text : text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** What the shades mean. */
export function legend() {
  const swatches = [5, 4, 3, 2, 1, 0].map((level) => el("i", { class: `swatch heat${level}` }));
  const ramp = el("span", { class: "ramp", "aria-hidden": true }, ...swatches);
  return el("p", { class: "legend small quiet" }, "noise", ramp, "settled");
}
