// Race: the same prompt by diffusion and by the autoregressive twin. Each runs alone, for true times; then both replay.

import { isEmbedded, prompted, record } from "./ask.js";
import { CanvasText } from "./canvastext.js";
import { $, announce, chips, el, figure, perFrame, plural, seconds } from "./dom.js";
import { link } from "./link.js";
import { Options, fieldsOf, only } from "./options.js";
import { isSolution, parse } from "./sudoku_rules.js";
import { Task, partsOf } from "./task.js";

const PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079";
const LEARNED = [ // `canvas`: the width that the embedded model learned this in
  { name: "a Sudoku", text: `Sudoku\n${PUZZLE}`, canvas: 96 },
  { name: "digits to sort", text: "sort 9514203867", canvas: 24 },
  // On a canvas and one by one, as all that races, whichever way the model draws icons better (`svg_mode`).
  { name: "an icon", text: "SVG icon\nstar, outline", canvas: 256 },
];
const GENERAL = [
  { name: "a list", text: "List the planets with one fact each." },
  { name: "a story", text: "Tell a story of a lighthouse in 100 words." },
];
const LONGEST = 8000; // milliseconds of a replay; slower races are shown faster, and say so

export function startRace() {
  const panel = $("#panel-race"), form = $("#race-form"), prompt = $("#race-prompt"), result = $("#race-result");
  const task = new Task(partsOf(panel));
  const preset = { max_tokens: 256 };
  const options = new Options($("#race-options"), ["seed", "steps", "entropy_bound", "max_tokens"], preset);
  const lane = (name) => new Lane($(`[data-lane="${name}"]`, panel));
  const lanes = { diffusion: lane("diffusion"), ar: lane("ar") };
  const starters = () => (isEmbedded() ? LEARNED : GENERAL);
  let replaying = 0;

  const start = () => task.run(async (signal) => {
    const values = options.read();
    if (!values) return;
    stopReplay();
    result.hidden = true;
    for (const one of Object.values(lanes)) one.clear();
    const turn = [{ role: "user", content: prompt.value }];
    const known = starters().find(({ text }) => text === prompt.value);
    const canvas = isEmbedded() && known ? { canvas: Math.min(known.canvas, link.model.canvas_length) } : {};
    const common = only(values, "max_tokens");
    const diffusion = { ...common, ...fieldsOf(values, canvas) };
    const ar = { ...common, ...fieldsOf(only(values, "seed"), { mode: "ar" }), temperature: 0 };
    task.say("Diffusion writes …");
    await lanes.diffusion.run(...prompted(turn, diffusion), signal);
    task.say("The twin writes, token by token …");
    await lanes.ar.run(...prompted(turn, ar), signal);
    task.say("");
    tell();
  });

  function tell() {
    const [one, two] = [lanes.diffusion, lanes.ar];
    const ratio = two.writing / one.writing;
    const [mine, its] = [one, two].map((l) => `${seconds(l.writing)} and ${plural(l.passes, "pass", "passes")}`);
    const faster = ratio >= 1 ? `${figure(ratio)} times faster` : `${figure(1 / ratio)} times slower`;
    const judged = compare(prompt.value, one.recording.text, two.recording.text);
    const text = `Diffusion took ${mine}, its twin ${its}: ${faster}. ${judged}`;
    $("#race-verdict").textContent = text;
    const longest = Math.max(one.writing, two.writing);
    $("#race-bars").replaceChildren(...[["diffusion", one], ["twin", two]].map(([name, one]) => {
      const bar = el("i", { class: `bar ${name}` });
      bar.style.width = `${(100 * one.writing) / longest}%`; // through the object model: no inline style in markup
      const track = el("span", { class: "bar-track" }, bar);
      const time = el("span", { class: "number" }, seconds(one.writing));
      return el("div", { class: "bar-row small" }, el("span", {}, name), track, time);
    }));
    result.hidden = false;
    announce(text);
  }

  function replay() {
    stopReplay();
    const all = Object.values(lanes);
    const longest = 1000 * Math.max(...all.map((one) => one.writing));
    const speed = Math.max(1, Math.ceil(longest / LONGEST));
    const began = performance.now();
    task.say(speed > 1 ? `Replayed at ${speed} times the speed.` : "Replayed at true speed.");
    const tick = (now) => {
      const at = (now - began) * speed;
      for (const one of all) one.showAt(at);
      replaying = at < longest ? requestAnimationFrame(tick) : 0;
    };
    replaying = requestAnimationFrame(tick);
  }

  function stopReplay() {
    cancelAnimationFrame(replaying);
    replaying = 0;
  }

  task.startedBy(form, start);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(); }
  });
  $("#race-replay").addEventListener("click", replay);
  link.addEventListener("model", () => {
    const examples = starters().map(({ name, text }) => [name, () => { prompt.value = text; prompt.focus(); }]);
    $("#race-starters").replaceChildren(...chips(examples));
    if (!prompt.value) prompt.value = starters()[0].text;
  });
}

/** A Sudoku can be judged, other answers only be held against each other. */
function compare(prompt, one, two) {
  const givens = prompt.startsWith("Sudoku\n") ? parse(prompt.slice(7)) : null;
  if (!givens) return one === two ? "Both wrote the same." : "They wrote different texts.";
  const [first, second] = [one, two].map((text) => isSolution([...text].map(Number), givens));
  if (first === second) return first ? "Both boards obey the rules." : "Both boards break the rules.";
  return `Its board ${first ? "obeys" : "breaks"} the rules, the twin's ${second ? "obeys" : "breaks"} them.`;
}

/** One of the two. Its clock shows the time of writing: reading the prompt is the same work for both. */
class Lane {
  #paint = perFrame((recording) => this.#draw(recording, Infinity));

  constructor(root) {
    this.clock = $("[data-clock]", root);
    this.figures = $("[data-figures]", root);
    this.text = new CanvasText($("[data-text]", root));
    this.root = root;
  }

  clear() {
    this.recording = null;
    this.text.settle("");
    this.figures.replaceChildren();
    this.clock.textContent = "0.00 s";
    this.root.classList.remove("done");
  }

  get writing() {
    const d = this.recording.usage.diffusion;
    return d.total_seconds - d.prefill_seconds;
  }

  get passes() {
    return this.recording.usage.diffusion.steps;
  }

  async run(path, body, signal) {
    this.root.classList.add("running");
    let first = null, ticking = 0;
    const tick = (now) => {
      if (first !== null) this.clock.textContent = clock((now - first) / 1000);
      ticking = requestAnimationFrame(tick);
    };
    ticking = requestAnimationFrame(tick);
    try {
      this.recording = await record("race", path, body, (so_far) => {
        first ??= performance.now();
        this.#paint(so_far);
      }, signal);
    } finally {
      cancelAnimationFrame(ticking);
      this.#paint.flush();
      this.root.classList.remove("running");
    }
    this.#finish();
  }

  /** As it stood so many milliseconds after the prompt was read. */
  showAt(milliseconds) {
    const read = 1000 * this.recording.usage.diffusion.prefill_seconds;
    const done = milliseconds >= 1000 * this.writing;
    this.clock.textContent = clock(done ? this.writing : milliseconds / 1000);
    this.root.classList.toggle("done", done);
    this.#draw(this.recording, done ? Infinity : milliseconds + read);
  }

  #draw(recording, until) {
    const draft = recording.drafts.findLast((one) => one.at <= until);
    const written = recording.pieces.filter((piece) => piece.at <= until).map((piece) => piece.text).join("");
    const settled = (recording.usage && until === Infinity) || !draft || written.length > draft.before;
    if (settled) this.text.settle(until === Infinity && recording.usage ? recording.text : written);
    else this.text.show(draft, recording.before(draft));
  }

  #finish() {
    const { usage } = this.recording, d = usage.diffusion;
    this.clock.textContent = clock(this.writing);
    this.root.classList.add("done");
    this.#draw(this.recording, Infinity);
    const facts = [
      ["passes", d.steps], ["tokens", usage.completion_tokens], ["tokens a pass", figure(d.tokens_per_forward, 2)],
      ["tokens a second", figure(usage.completion_tokens / Math.max(1e-9, this.writing))],
      ["reading the prompt", seconds(d.prefill_seconds - d.queue_seconds)],
    ];
    const pair = ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { class: "number" }, String(value)));
    this.figures.replaceChildren(...facts.map(pair));
  }
}

const clock = (value) => `${value.toFixed(2)} s`;
