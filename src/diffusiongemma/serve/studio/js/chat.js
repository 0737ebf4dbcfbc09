// Chat: the canvas resolves inside the answer's bubble; afterwards a slider walks through all of its steps.

import { isEmbedded, prompted, record } from "./ask.js";
import { CanvasText, legend } from "./canvastext.js";
import { $, announce, chips, dotted, el, figure, perFrame, plural, seconds } from "./dom.js";
import { link } from "./link.js";
import { Options, fieldsOf, oneByOne, only } from "./options.js";
import { Task, partsOf } from "./task.js";
import { Timeline } from "./timeline.js";

// What the embedded model gets right: 12 of 12 of each kind of game when the chips were chosen. Sums it does not.
const LEARNED = [
  "sort 47195406", "reverse 2241549", "max 60 180 4", "2614 ? 865", "SVG icon\nbell, outline",
];
const GENERAL = ["Why is the sky blue?", "Write a haiku about noise.", "Explain diffusion in two sentences."];
const DIGITS_CANVAS = 24; // what the embedded model learned games with digits in

export function startChat() {
  const panel = $("#panel-chat"), form = $("#chat-form"), input = $("#chat-input"), log = $("#chat-log");
  const task = new Task(partsOf(panel));
  const options = new Options($("#chat-options"), ["seed", "steps", "entropy_bound", "max_tokens"]);
  let messages = [];

  const send = (text) => task.run(async (signal) => {
    const values = options.read();
    if (!values) return;
    input.value = "";
    const turn = [...(isEmbedded() ? [] : messages), { role: "user", content: text }];
    log.append(el("li", { class: "turn user" }, el("p", { class: "bubble" }, text)));
    const fields = fieldsFor(text, values);
    const answer = new Answer(log, fields);
    task.say("");
    showEmpty(false);
    try {
      const [path, body] = prompted(turn, { ...fields, ...only(values, "max_tokens") });
      const recording = await record("chat", path, body, (so_far) => answer.follow(so_far), signal);
      answer.finish(recording);
      messages = [...turn, { role: "assistant", content: recording.text }];
    } catch (error) {
      answer.breakOff(error.name === "AbortError" ? "stopped" : "broken off");
      throw error;
    }
  });

  function showEmpty(empty) {
    $("#chat-empty").hidden = !empty;
    $("#chat-clear").hidden = empty;
  }

  task.startedBy(form, () => { if (input.value.trim()) send(input.value.trim()); });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!task.busy) form.requestSubmit();
  });
  $("#chat-clear").addEventListener("click", () => {
    task.stop();
    messages = [];
    log.replaceChildren();
    showEmpty(true);
    input.focus();
  });
  $("#chat-legend").append(legend());
  link.addEventListener("model", () => {
    $("#chat-about").textContent = about();
    const texts = isEmbedded() ? LEARNED : GENERAL;
    const examples = texts.map((text) => [text.replace("\n", " "), () => { if (!task.busy) send(text); }]);
    $("#chat-starters").replaceChildren(...chips(examples));
  });
}

function about() {
  const { id, abilities } = link.model;
  if (isEmbedded()) {
    return `${id} is no chat model. It learned four things: Sudoku, holes in Python and icons, each in a tab of its `
      + "own, and here games with digits: sort, reverse, max, compare (?). Sums it mostly gets wrong. Each message "
      + "stands alone.";
  }
  if (!abilities.chat) return `${id} has no chat template: it continues your text.`;
  return `${id} answers. A block of text starts as noise and settles, all positions at once.`;
}

/** Icons are drawn as the model draws them best, unless an option asks for a canvas. */
function fieldsFor(text, values) {
  if (!isEmbedded()) return fieldsOf(values);
  const icon = text.startsWith("SVG icon\n"), { seed, steps, entropy_bound } = values;
  if (icon && link.model.abilities.svg_mode === "ar" && steps === undefined && entropy_bound === undefined) {
    return oneByOne(values, seed !== undefined);
  }
  if (icon || text.startsWith("Sudoku\n")) return fieldsOf(values);
  return fieldsOf(values, { canvas: Math.min(DIGITS_CANVAS, link.model.canvas_length) });
}

/** One answer in the log, to a request with these fields. */
class Answer {
  #paint = perFrame((recording) => this.#show(recording, recording.drafts.length - 1, false));

  constructor(log, fields) {
    this.twin = fields.diffusion?.mode === "ar";
    this.sure = fields.temperature === 0;
    this.bubble = el("div", { class: "bubble" });
    this.figures = el("span", { class: "quiet number" }, this.twin ? "writing …" : "settling …");
    this.thinking = el("div", { class: "thinking small quiet", hidden: true });
    const who = el("p", { class: "who small" }, el("strong", {}, link.model.id), " ", this.figures);
    this.root = el("li", { class: "turn answer" }, who, this.thinking, this.bubble);
    this.text = new CanvasText(this.bubble);
    this.timeline = new Timeline(this.root, (at) => this.#show(this.recording, at, true));
    log.append(this.root);
    this.root.scrollIntoView({ block: "nearest" });
  }

  follow(recording) {
    this.recording = recording;
    this.#paint(recording);
    this.timeline.follow(recording);
  }

  finish(recording) {
    this.#paint.flush();
    const { usage } = recording;
    const d = usage.diffusion;
    const tokens = plural(usage.completion_tokens, "token");
    const pace = this.twin ? [`${tokens}, one by one`]
      : [`${tokens} in ${plural(d.steps, "step")}`, `${figure(d.tokens_per_forward, 2)} a step`];
    this.figures.textContent = dotted(
      ...pace, seconds(d.total_seconds), this.sure ? "the best token each time" : `seed ${d.seed}`,
      recording.finish === "length" && "cut off",
    );
    this.timeline.finish(recording);
    this.thinking.hidden = !recording.thinking;
    this.thinking.textContent = recording.thinking;
    this.#show(recording, recording.drafts.length - 1, true);
    announce(`${link.model.id}: ${recording.text || "an empty answer"}`);
  }

  /** What had settled stays. */
  breakOff(why) {
    this.#paint.flush();
    this.figures.textContent = why;
    this.root.classList.add("broken");
    if (this.recording) this.timeline.finish(this.recording);
  }

  #show(recording, at, whole) {
    const last = at === recording.drafts.length - 1;
    if (at < 0 || (whole && last && recording.usage)) {
      const { text } = recording;
      this.text.settle(text || { text: "(an empty answer)", class: "quiet" });
    } else this.text.show(recording.drafts[at], recording.before(recording.drafts[at]));
    if (!whole) this.root.scrollIntoView({ block: "nearest" });
  }
}
