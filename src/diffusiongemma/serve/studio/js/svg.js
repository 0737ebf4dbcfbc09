// SVG: markup on the left, what it draws on the right, while both form.

import { isEmbedded, prompted, record } from "./ask.js";
import { CanvasText } from "./canvastext.js";
import { $, announce, chips, colour, dotted, el, perFrame, plural, seconds } from "./dom.js";
import { link } from "./link.js";
import { Options, fieldsOf } from "./options.js";
import { dataUrl, isWellFormed, markup, read } from "./svg_safe.js";
import { Task, partsOf } from "./task.js";
import { Timeline } from "./timeline.js";

const WISHES = [
  ["bell", "outline"], ["star", "filled"], ["arrow right", "outline"], ["folder", "outline"], ["lock", "filled"],
  ["sun", "outline"],
];
const KEPT = 16;
const FENCED = /```(?:svg|xml|html)?[ \t]*\n([\s\S]*?)\n?```/;

export function startSvg() {
  const panel = $("#panel-svg"), form = $("#svg-form"), wish = $("#svg-wish"), style = $("#svg-style");
  const task = new Task(partsOf(panel));
  const options = new Options($("#svg-options"), ["seed", "steps", "entropy_bound"]);
  const text = new CanvasText($("#svg-markup"));
  const picture = new Picture($("#svg-picture"));
  const timeline = new Timeline($("#svg-timeline"), (at) => show(shown, at));
  const paint = perFrame((recording) => show(recording, recording.drafts.length - 1));
  let shown = null;

  function show(recording, at) {
    if (at < 0) return;
    const draft = recording.drafts[at];
    const whole = recording.usage && at === recording.drafts.length - 1;
    if (whole) text.settle(recording.text || { text: "(an empty answer)", class: "quiet" });
    else text.show(draft, recording.before(draft));
    picture.draw(read(whole ? extract(recording.text) : recording.before(draft) + words(draft), !whole));
    caption(whole ? judge(recording) : "");
  }

  function caption(said) {
    $("#svg-caption").textContent = said;
  }

  const draw = () => task.run(async (signal) => {
    const values = options.read();
    if (!values) return;
    const name = [wish.value, style.value].map(plain).filter(Boolean).join(", ");
    timeline.clear();
    text.settle("");
    picture.clear();
    caption("");
    task.say("");
    for (const id of ["#svg-copy", "#svg-save"]) $(id).hidden = true;
    try {
      const [path, body] = prompted([{ role: "user", content: requestFor(name) }], fieldsOf(values));
      const recording = await record("svg", path, body, (so_far) => {
        shown = so_far;
        paint(so_far);
        timeline.follow(so_far);
      }, signal);
      paint.flush();
      finish(recording, name);
      addToGallery({ recording, name });
      announce(`${name}: ${judge(recording)}`);
    } catch (error) {
      paint.flush();
      if (shown?.drafts.length) timeline.finish(shown);
      throw error;
    }
  });

  function finish(recording, name) {
    shown = recording;
    timeline.finish(recording);
    show(recording, recording.drafts.length - 1);
    $("#svg-picture").alt = `Icon: ${name}`;
    const d = recording.usage.diffusion;
    const size = `${plural(recording.usage.completion_tokens, "token")} in ${plural(d.steps, "step")}`;
    task.say(dotted(name, size, seconds(d.total_seconds), `seed ${d.seed}`));
    const drawing = read(extract(recording.text));
    $("#svg-copy").hidden = !navigator.clipboard;
    const save = $("#svg-save");
    save.hidden = !drawing.shapes;
    save.href = dataUrl(markup(drawing));
    save.download = `${name.replace(/[^a-z0-9]+/g, "-")}.svg`;
  }

  const gallery = $("#svg-gallery"), list = $("ul", gallery);
  function addToGallery({ recording, name }) {
    const drawing = read(extract(recording.text));
    if (!drawing.shapes) return;
    const image = el("img", { alt: name, width: 40, height: 40 });
    const paintThumb = () => { image.src = dataUrl(markup(drawing, colour("--ink"))); };
    paintThumb();
    document.addEventListener("themechange", paintThumb);
    const again = () => { if (!task.busy) finish(recording, name); };
    list.prepend(el("li", {}, el("button", { type: "button", title: name, onclick: again }, image)));
    while (list.children.length > KEPT) list.lastChild.remove();
    gallery.hidden = false;
  }

  task.startedBy(form, draw);
  $("#svg-copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(extract(shown.text));
    announce("Copied");
  });
  const drawThis = (what, how) => {
    if (task.busy) return;
    [wish.value, style.value] = [what, how];
    draw();
  };
  $("#svg-starters").append(...chips(WISHES.map(([what, how]) => [`${what}, ${how}`, () => drawThis(what, how)])));
  document.addEventListener("themechange", () => picture.repaint());
  link.addEventListener("model", () => {
    const honest = `${link.model.id} learned how icons are written better than what things look like. `;
    $("#svg-about").textContent = isEmbedded() ? honest : "";
  });
}

const requestFor = (name) => (isEmbedded() || !link.model.abilities.chat
  ? `SVG icon\n${name}`
  : `Write an SVG icon with viewBox="0 0 24 24" that shows: ${name}. Answer with the markup alone.`);

const plain = (text) => text.trim().toLowerCase().replace(/\s+/g, " ");
const extract = (text) => text.match(FENCED)?.[1] ?? text;
const words = (draft) => draft.tokens.filter((_, i) => !draft.special.has(i)).join("");

function judge(recording) {
  const source = extract(recording.text);
  const { shapes, dropped } = read(source);
  const faults = [];
  if (!isWellFormed(source)) faults.push("the markup is not well-formed");
  if (dropped.length) faults.push(`left out: ${[...new Set(dropped)].slice(0, 4).join(", ")}`);
  if (recording.finish === "length") faults.push("it was cut off");
  const said = shapes ? plural(shapes, "shape") : "Nothing can be drawn";
  return faults.length ? `${said}; ${faults.join("; ")}.` : `${said}, sound markup.`;
}

/** An image that changes without flicker: the next one is decoded before it is shown. */
class Picture {
  #drawing = null;
  #turn = 0;

  constructor(image) {
    this.image = image;
  }

  clear() {
    this.#drawing = null;
    this.#turn += 1;
    this.image.hidden = true;
    this.image.removeAttribute("src");
  }

  repaint() {
    if (this.#drawing) this.draw(this.#drawing);
  }

  async draw(drawing) {
    if (!drawing.shapes) return;
    this.#drawing = drawing;
    const url = dataUrl(markup(drawing, colour("--ink")));
    const turn = (this.#turn += 1);
    const next = new Image();
    next.src = url;
    try {
      await next.decode();
    } catch {
      return; // not drawable: the one before stays
    }
    if (turn !== this.#turn) return;
    this.image.src = url;
    this.image.hidden = false;
  }
}
