// SVG: markup on the left, what it draws on the right, while both form.

import { isEmbedded, prompted, record } from "./ask.js";
import { CanvasText } from "./canvastext.js";
import { $, $$, announce, chips, colour, dotted, el, perFrame, plural, seconds } from "./dom.js";
import { link } from "./link.js";
import { Options, fieldsOf, oneByOne } from "./options.js";
import { closed, dataUrl, isWellFormed, markup, read } from "./svg_safe.js";
import { Task, partsOf } from "./task.js";
import { Timeline } from "./timeline.js";

const WISHES = [
  ["bell", "outline"], ["star", "filled"], ["arrow right", "outline"], ["folder", "outline"], ["lock", "filled"],
  ["sun", "outline"],
];
const KEPT = 16;
const ATTEMPTS = 6; // the twin's, as `dgemma svg` has them; after the first by lot, else it would say the same again
const WAITING = {
  diffusion: "A canvas of noise will become markup here.", ar: "Markup will be written here, one token after another.",
};
const FENCED = /```(?:svg|xml|html)?[ \t]*\n([\s\S]*?)\n?```/;

export function startSvg() {
  const panel = $("#panel-svg"), form = $("#svg-form"), wish = $("#svg-wish"), style = $("#svg-style");
  const task = new Task(partsOf(panel));
  const options = new Options($("#svg-options"), ["seed", "steps", "entropy_bound"]);
  const text = new CanvasText($("#svg-markup"));
  const picture = new Picture($("#svg-picture"));
  const timeline = new Timeline($("#svg-timeline"), (at) => show(shown, at));
  const paint = perFrame((recording) => show(recording, recording.drafts.length - 1));
  const mode = () => $("#svg-mode :checked").value;
  let shown = null, chosen = false;
  let best = null; // drawn with the best token each time: asked for once more, it is drawn by lot

  function show(recording, at) {
    const draft = recording.drafts[at];
    const whole = recording.usage && at === recording.drafts.length - 1;
    if (whole) text.settle(recording.text || { text: "(an empty answer)", class: "quiet" });
    else if (draft) text.show(draft, recording.before(draft));
    else text.settle(recording.text);
    const forming = draft ? recording.before(draft) + words(draft) : closed(recording.text); // the twin has no drafts
    picture.draw(read(whole ? extract(recording.text) : forming, !whole));
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
      const icon = mode() === "ar" ? await byTwin(name, values, signal) : await byDiffusion(name, values, signal);
      finish(icon);
      addToGallery(icon);
      announce(`${name}: ${judge(icon.recording)}`);
    } catch (error) {
      paint.flush();
      if (shown?.drafts.length) timeline.finish(shown);
      throw error;
    }
  });

  async function ask(name, fields, signal) {
    const [path, body] = prompted([{ role: "user", content: requestFor(name) }], fields);
    const recording = await record("svg", path, body, (so_far) => {
      shown = so_far;
      paint(so_far);
      timeline.follow(so_far);
    }, signal);
    paint.flush();
    return recording;
  }

  async function byDiffusion(name, values, signal) {
    const recording = await ask(name, fieldsOf(values, { mode: "diffusion" }), signal);
    const { usage: { completion_tokens: tokens, diffusion: d } } = recording;
    const size = `${plural(tokens, "token")} in ${plural(d.steps, "step")}`;
    return { recording, name, note: dotted(name, size, seconds(d.total_seconds), `seed ${d.seed}`) };
  }

  /** One token after another: the best ones, and if that is no sound icon, by lot, until one is. */
  async function byTwin(name, { seed }, signal) {
    const tried = [];
    let lot = seed !== undefined || best === name;
    do {
      const recording = await ask(name, oneByOne({ seed }, lot), signal);
      const how = lot ? `seed ${recording.usage.diffusion.seed}` : "the best token each time";
      tried.push({ recording, how, worth: worth(recording) });
      if (!lot) best = name;
      if (lot && seed !== undefined) seed += 1;
      lot = true;
      const next = tried.length + 1;
      if (!tried.at(-1).worth.sound && next <= ATTEMPTS) task.say(`Not sound: attempt ${next} of at most ${ATTEMPTS}`);
    } while (!tried.at(-1).worth.sound && tried.length < ATTEMPTS);
    const { recording, how } = tried.reduce((one, two) => (two.worth.rank > one.worth.rank ? two : one));
    const time = tried.reduce((total, one) => total + one.recording.usage.diffusion.total_seconds, 0);
    const size = `${plural(recording.usage.completion_tokens, "token")}, one by one`;
    const attempts = tried.length > 1 && plural(tried.length, "attempt");
    return { recording, name, note: dotted(name, size, seconds(time), how, attempts) };
  }

  function finish({ recording, name, note }) {
    shown = recording;
    timeline.finish(recording);
    show(recording, recording.drafts.length - 1);
    $("#svg-picture").alt = `Icon: ${name}`;
    task.say(note);
    const drawing = read(extract(recording.text));
    $("#svg-copy").hidden = !navigator.clipboard;
    const save = $("#svg-save");
    save.hidden = !drawing.shapes;
    save.href = dataUrl(markup(drawing));
    save.download = `${name.replace(/[^a-z0-9]+/g, "-")}.svg`;
  }

  const gallery = $("#svg-gallery"), list = $("ul", gallery);
  function addToGallery(icon) {
    const { recording, name } = icon;
    const drawing = read(extract(recording.text));
    if (!drawing.shapes) return;
    const image = el("img", { alt: name, width: 40, height: 40 });
    const paintThumb = () => { image.src = dataUrl(markup(drawing, colour("--ink"))); };
    paintThumb();
    document.addEventListener("themechange", paintThumb);
    const again = () => { if (!task.busy) finish(icon); };
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
  for (const radio of $$("#svg-mode input")) {
    radio.addEventListener("change", () => { chosen = true; explain(); });
  }
  link.addEventListener("model", () => {
    if (!chosen) $(`#svg-mode [value=${link.model.abilities.svg_mode}]`).checked = true;
    explain();
  });

  function explain() {
    const twin = mode() === "ar";
    if (twin) options.offer(["seed"], { seed: "best tokens" });
    else options.offer(["seed", "steps", "entropy_bound"]);
    $("#svg-markup").dataset.empty = twin ? WAITING.ar : WAITING.diffusion;
    if (!link.model) return;
    const { id, abilities } = link.model;
    const honest = isEmbedded() && `${id} learned how icons are written better than what things look like.`;
    const better = abilities.svg_mode === "ar" && (twin
      ? `Drawn one token after another: ${id}'s better way.`
      : `Drawn on a canvas: ${id} does better one by one.`);
    $("#svg-about").textContent = [honest, better].filter(Boolean).map((said) => `${said} `).join("");
  }
}

const requestFor = (name) => (isEmbedded() || !link.model.abilities.chat
  ? `SVG icon\n${name}`
  : `Write an SVG icon with viewBox="0 0 24 24" that shows: ${name}. Answer with the markup alone.`);

const plain = (text) => text.trim().toLowerCase().replace(/\s+/g, " ");
const extract = (text) => text.match(FENCED)?.[1] ?? text;
const words = (draft) => draft.tokens.filter((_, i) => !draft.special.has(i)).join("");

/** What an answer is worth, as far as it can be said without looking at the picture. */
function worth(recording) {
  const source = extract(recording.text);
  const { shapes, dropped } = read(source);
  const faults = [];
  if (!isWellFormed(source)) faults.push("the markup is not well-formed");
  if (dropped.length) faults.push(`left out: ${[...new Set(dropped)].slice(0, 4).join(", ")}`);
  if (recording.finish === "length") faults.push("it was cut off");
  return { shapes, faults, sound: shapes > 0 && !faults.length, rank: (shapes ? 10 : 0) - faults.length };
}

function judge(recording) {
  const { shapes, faults } = worth(recording);
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
