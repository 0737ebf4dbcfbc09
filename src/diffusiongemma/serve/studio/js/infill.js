// Infill: a text with holes on the left, the same while its holes fill on the right.

import { isEmbedded, record } from "./ask.js";
import { CanvasText } from "./canvastext.js";
import { $, announce, dotted, el, figure, perFrame, plural, seconds } from "./dom.js";
import { link } from "./link.js";
import { Options, fieldsOf, only } from "./options.js";
import { EXAMPLES } from "./infill_examples.js";
import { Task, partsOf } from "./task.js";
import { Timeline } from "./timeline.js";

const HOLE = /\[\[\?[0-9]*\]\]/g;
const SEEDS_A_HOLE = 16; // the engine counts a hole's candidates on from here

export function startInfill() {
  const panel = $("#panel-infill"), input = $("#infill-input");
  const task = new Task(partsOf(panel));
  const preset = { candidates: 2, max_tokens: 32 };
  const options = new Options($("#infill-options"), ["seed", "steps", "candidates", "max_tokens"], preset);
  const editor = new Editor(input, $("#infill-back"));
  const view = new Filling($("#infill-output"), $("#infill-timeline"), $("#infill-candidates"));

  const fill = () => task.run(async (signal) => {
    const values = options.read();
    if (!values) return;
    const template = input.value;
    view.begin(template);
    task.say("");
    const body = { template, ...fieldsOf(values), ...only(values, "candidates", "max_tokens") };
    if (isEmbedded()) body.strategy = "fim"; // what it was trained for, also with several holes
    try {
      const recording = await record("infill", "/v1/canvas/infill", body, (so_far) => view.follow(so_far), signal);
      view.finish(recording);
      const { result: { holes }, usage } = recording, d = usage.diffusion;
      task.say(dotted(
        plural(holes.length, "hole"), plural(usage.completion_tokens, "token"),
        `${plural(d.steps, "step")} over all candidates`, seconds(d.total_seconds), `seed ${d.seed}`,
      ));
      announce(`Filled with: ${holes.join("; ")}`);
    } catch (error) {
      view.breakOff();
      throw error;
    }
  });

  $("[data-go]", panel).addEventListener("click", fill);
  input.addEventListener("keydown", (event) => {
    if (event.altKey && event.code === "KeyH") { event.preventDefault(); editor.cutHole(); }
    if ((event.ctrlKey || event.metaKey) && event.key === "Enter") { event.preventDefault(); if (!task.busy) fill(); }
  });
  $("#infill-hole").addEventListener("click", () => editor.cutHole());
  const copy = $("#infill-copy");
  copy.addEventListener("click", () => navigator.clipboard.writeText(view.text).then(() => announce("Copied")));
  const select = $("#infill-example");
  select.append(...EXAMPLES.map(({ name }, i) => el("option", { value: i }, name)));
  const load = () => { editor.set(EXAMPLES[Number(select.value)].template); view.begin(input.value); };
  select.addEventListener("change", load);
  load();
  link.addEventListener("model", () => {
    $("#infill-about").textContent = about(link.model);
  });
}

function about({ id, abilities }) {
  if (isEmbedded()) {
    return `${id} learned to fill holes in Python: both sides count, and it decides where a hole ends. `
      + "It is small, so expect plausible lines, not always right ones.";
  }
  if (abilities.infill === "fim") return `${id} sees both sides of a hole, and decides where it ends.`;
  return "What stands behind a hole is pinned on the canvas; several lengths are tried.";
}

/** A textarea over its own text with the holes marked. */
class Editor {
  constructor(input, back) {
    Object.assign(this, { input, back });
    input.addEventListener("input", () => this.#mark());
    input.addEventListener("scroll", () => { back.scrollTop = input.scrollTop; back.scrollLeft = input.scrollLeft; });
  }

  set(text) {
    this.input.value = text;
    this.#mark();
  }

  /** The selection becomes a hole. */
  cutHole() {
    const { selectionStart, selectionEnd } = this.input;
    this.input.focus();
    this.input.setRangeText("[[?]]", selectionStart, selectionEnd, "end");
    this.#mark();
  }

  #mark() {
    const { texts, holes } = split(this.input.value);
    const nodes = texts.flatMap((text, i) => [text, i < holes.length ? el("mark", {}, holes[i]) : ""]);
    this.back.replaceChildren(...nodes, "\n");
  }
}

const split = (template) => ({ texts: template.split(HOLE), holes: template.match(HOLE) ?? [] });

/** The text while its holes fill. */
class Filling {
  #paint = perFrame((recording) => this.#show(recording.drafts.length - 1));

  constructor(output, timeline, candidates) {
    this.canvas = new CanvasText(output);
    const pick = (draft, i) => this.#look(draft).mine(i);
    this.timeline = new Timeline(timeline, (at) => this.#seek(at), { pick, part: "hole" });
    this.candidates = candidates;
    this.rest = el("span", { class: "rest" });
  }

  begin(template) {
    Object.assign(this, split(template), { recording: null, text: "" });
    this.chosen = [];
    this.timeline.clear();
    this.candidates.hidden = true;
    $("#infill-copy").hidden = true;
    this.canvas.settle(...this.#between(this.holes.map(() => ({ text: "   ", class: "gap" }))));
  }

  follow(recording) {
    this.recording = recording;
    if (!recording.drafts.length) return;
    this.#paint(recording);
    this.timeline.follow(recording);
  }

  finish(recording) {
    this.#paint.flush();
    this.recording = recording;
    this.chosen = [...recording.result.holes];
    this.timeline.finish(recording);
    this.#settle();
    this.#listCandidates();
    $("#infill-copy").hidden = !navigator.clipboard;
  }

  breakOff() {
    this.#paint.flush();
    if (this.recording?.drafts.length) this.timeline.finish(this.recording);
  }

  #seek(at) {
    if (this.recording.result && at === this.recording.drafts.length - 1) this.#settle();
    else this.#show(at);
  }

  #show(at) {
    const draft = this.recording.drafts[at], { mine, behind } = this.#look(draft);
    this.canvas.show(draft, this.recording.before(draft), mine);
    this.rest.textContent = behind;
    this.canvas.host.append(this.rest);
  }

  /** A draft holds the text before its hole and the hole, or, with all holes on one canvas, everything.
   *  -> which positions are the model's, and the text behind */
  #look(draft) {
    if (draft.look) return draft.look;
    const whole = draft.tokens.join("");
    const together = this.holes.length > 1 && !isEmbedded() && this.texts.every((text) => whole.includes(text));
    const lead = (this.texts[draft.block] ?? "").length;
    let length = 0;
    const starts = draft.tokens.map((token) => (length += token.length) - token.length);
    const mine = together ? (i) => draft.entropy[i] > 0 || !draft.accepted[i] : (i) => starts[i] >= lead;
    draft.look = { mine, behind: together ? "" : this.texts.slice(draft.block + 1).join("▢") };
    return draft.look;
  }

  #settle() {
    this.canvas.settle(...this.#between(this.chosen.map((text) => ({ text, class: "filled" }))));
    this.text = this.texts.map((text, i) => text + (this.chosen[i] ?? "")).join("");
  }

  /** The fixed texts, and these between them. */
  #between(fillings) {
    return this.texts.flatMap((text, i) => (i < fillings.length ? [text, fillings[i]] : [text]));
  }

  #listCandidates() {
    const { result, usage } = this.recording;
    const whole = (one) => one.holes.length === this.holes.length; // else it is of one hole alone
    const refreshers = [];
    const place = (one) => (whole(one) ? 0 : Math.floor((one.seed - usage.diffusion.seed) / SEEDS_A_HOLE));
    const items = [...alike(result.candidates.filter((one) => one.holes !== null), place)].map(([one, times]) => {
      const first = place(one);
      const facts = dotted(
        !whole(one) && `hole ${first + 1}`, `score ${score(one.score)}`,
        one.finish_reason === "length" && "cut off", times > 1 && `${times} times`,
      );
      const button = el(
        "button", { type: "button", class: "candidate" },
        el("code", {}, one.holes.map((text) => text.trim() || "(nothing)").join("  ⋯  ")),
        el("span", { class: "small quiet number" }, facts),
      );
      refreshers.push(() => {
        button.setAttribute("aria-pressed", String(one.holes.every((text, i) => this.chosen[first + i] === text)));
      });
      button.addEventListener("click", () => {
        one.holes.forEach((text, i) => { this.chosen[first + i] = text; });
        this.#settle();
        refreshers.forEach((refresh) => refresh());
      });
      return el("li", {}, button);
    });
    refreshers.forEach((refresh) => refresh());
    $("ol", this.candidates).replaceChildren(...items);
    this.candidates.hidden = items.length < 2;
  }
}

/** Candidates that say the same in the same place, once each, with how often they came; the first has the best score. */
function alike(candidates, place) {
  const found = new Map();
  for (const one of candidates) {
    const key = JSON.stringify([place(one), one.holes]);
    found.set(key, [found.get(key)?.[0] ?? one, (found.get(key)?.[1] ?? 0) + 1]);
  }
  return found.values();
}

/** A mean log-probability; one that rounds to nothing has no sign. */
const score = (value) => figure(value, 2).replace(/^-(?=0\.00$)/, "").replace("-", "−");
