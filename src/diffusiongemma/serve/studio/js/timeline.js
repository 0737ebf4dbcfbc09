// All steps of an answer: a picture of every position's entropy, the curve of the mean, and a slider over both.

import { colour, dotted, el, perFrame, svg } from "./dom.js";

const INSET = 7; // half of the slider's thumb: step i stands under the thumb's middle
const LEAST = 12; // columns while the steps still come, so that the first ones are not huge

export class Timeline {
  #recording = null;
  #live = false;
  #looks = new WeakMap();
  #playing = 0;
  #draw = perFrame(() => this.#paint());

  /** `onSeek(index)`: show that step; the last one means the finished answer. `pick(draft, i)`: does position i count?
   *  `part`: what a block is called. */
  constructor(host, onSeek, { pick = null, part = "block" } = {}) {
    Object.assign(this, { onSeek, pick, part });
    this.heat = el("canvas", { class: "heat", "aria-hidden": true });
    this.line = svg("path", { class: "curve-line" });
    this.halo = svg("path", { class: "curve-halo" });
    this.curve = svg("svg", { class: "curve", "aria-hidden": "true" }, this.halo, this.line);
    this.slider = el("input", { type: "range", min: 0, value: 0, step: 1, "aria-label": "Step" });
    this.button = el("button", { type: "button", class: "icon-button play", "aria-label": "Play the steps again" });
    this.label = el("output", { class: "small number quiet" });
    this.peak = el("span", { class: "peak small number quiet", "aria-hidden": true });
    this.root = el(
      "div", { class: "timeline", hidden: true },
      el("div", { class: "timeline-plot" }, this.heat, this.curve, this.slider),
      el("div", { class: "timeline-row" }, this.button, this.label, this.peak),
    );
    host.append(this.root);
    this.slider.addEventListener("input", () => { this.stop(); this.#seek(Number(this.slider.value)); });
    this.button.addEventListener("click", () => (this.#playing ? this.stop() : this.play()));
    document.addEventListener("themechange", () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(this.root);
  }

  clear() {
    this.stop();
    this.#recording = null;
    this.root.hidden = true;
  }

  /** While the answer comes: follow its newest step. */
  follow(recording) {
    this.#recording = recording;
    this.#live = true;
    this.slider.disabled = this.button.disabled = true;
    this.#update(recording.drafts.length - 1);
  }

  /** The answer is whole (or stopped): its steps can be walked. */
  finish(recording) {
    this.#recording = recording;
    this.#live = false;
    const single = recording.drafts.length < 2;
    this.slider.disabled = this.button.disabled = single;
    this.#update(recording.drafts.length - 1);
  }

  play() {
    const count = this.#recording.drafts.length;
    const wait = Math.min(280, Math.max(70, 3200 / count));
    let at = Number(this.slider.value) >= count - 1 ? -1 : Number(this.slider.value);
    this.#showPlaying(true);
    const next = () => {
      at += 1;
      this.slider.value = at;
      this.#seek(at);
      this.#playing = at < count - 1 ? setTimeout(next, wait) : 0;
      if (!this.#playing) this.#showPlaying(false);
    };
    next();
  }

  stop() {
    clearTimeout(this.#playing);
    this.#playing = 0;
    this.#showPlaying(false);
  }

  #showPlaying(on) {
    this.button.classList.toggle("playing", on);
    this.button.setAttribute("aria-label", on ? "Pause" : "Play the steps again");
  }

  #seek(at) {
    this.#tell(at);
    this.onSeek(at);
  }

  #update(at) {
    const { drafts } = this.#recording;
    this.root.hidden = drafts.length === 0;
    if (!drafts.length) return;
    this.slider.max = this.#columns - 1;
    this.slider.value = at;
    this.#tell(at);
    this.#draw();
  }

  #tell(at) {
    const { drafts } = this.#recording;
    const draft = drafts[at];
    const blocks = drafts.at(-1).block;
    const { count, settled, mean } = this.#look(draft);
    const text = dotted(
      blocks > 0 && `${this.part} ${draft.block + 1}`,
      `step ${draft.step} of ${this.#live ? `at most ${draft.steps}` : lastStep(drafts, at)}`,
      `${settled} of ${count} settled`, `entropy ${mean.toFixed(2)} nats`,
    );
    this.label.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
  }

  /** A draft's positions that count: how many, their levels, how many are settled, and their mean entropy. */
  #look(draft) {
    let found = this.#looks.get(draft);
    if (!found) {
      const at = [...draft.levels.keys()].filter((i) => !this.pick || this.pick(draft, i));
      const sum = at.reduce((total, i) => total + draft.entropy[i], 0);
      const levels = Uint8Array.from(at, (i) => draft.levels[i]);
      const text = at.filter((i) => i < draft.tail).length; // padding behind the answer is no picture worth drawing
      const settled = at.filter((i) => draft.accepted[i]).length;
      found = { count: at.length, levels, text, settled, mean: sum / Math.max(1, at.length) };
      this.#looks.set(draft, found);
    }
    return found;
  }

  get #columns() {
    const count = this.#recording.drafts.length;
    return this.#live ? Math.max(LEAST, count) : Math.max(2, count);
  }

  #paint() {
    if (!this.#recording?.drafts.length || !this.heat.clientWidth) return;
    const { drafts } = this.#recording;
    const width = this.heat.clientWidth, height = this.heat.clientHeight, ratio = devicePixelRatio;
    const apart = (width - 2 * INSET) / (this.#columns - 1);
    this.heat.width = Math.round(width * ratio);
    this.heat.height = Math.round(height * ratio);
    const context = this.heat.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.scale(ratio, ratio);
    const looks = drafts.map((draft) => this.#look(draft));
    context.drawImage(picture(looks), INSET - apart / 2, 0, drafts.length * apart, height);
    const peak = Math.max(0.05, ...looks.map((look) => look.mean));
    const x = (i) => (INSET + i * apart).toFixed(1), y = (mean) => (5 + (height - 10) * (1 - mean / peak)).toFixed(1);
    const points = looks.map(({ mean }, i) => `${x(i)} ${y(mean)}`);
    for (const path of [this.halo, this.line]) path.setAttribute("d", `M${points.join("L")}`);
    this.curve.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.peak.textContent = `mean entropy, peak ${peak.toFixed(2)}`;
  }
}

/** One column a step, one row a position. */
function picture(looks) {
  const shades = Array.from({ length: 6 }, (_, i) => rgba(colour(`--heat${i}`)));
  const width = looks.length, rows = Math.max(6, ...looks.map((look) => look.text));
  const made = new OffscreenCanvas(width, rows);
  const context = made.getContext("2d");
  const image = context.createImageData(width, rows);
  looks.forEach(({ levels }, x) => {
    const shown = levels.subarray(0, rows);
    shown.forEach((level, y) => image.data.set(shades[level], 4 * (y * width + x)));
  });
  context.putImageData(image, 0, 0);
  return made;
}

const rgba = (hex) => [...[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)), 255];

/** How many steps the block (or the attempt) took that step `at` belongs to: a new one begins with step 1 again. */
function lastStep(drafts, at) {
  let last = at;
  while (last + 1 < drafts.length && drafts[last + 1].step > drafts[last].step) last += 1;
  return drafts[last].step;
}
