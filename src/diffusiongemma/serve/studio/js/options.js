// The sampler's options of a tab, folded away: what is left empty keeps the model's own value.

import { el } from "./dom.js";
import { link } from "./link.js";

const FIELDS = {
  seed: {
    label: "Seed", about: "The same seed gives the same text.", hint: "fresh", min: 0, max: Number.MAX_SAFE_INTEGER,
  },
  steps: {
    label: "Steps at most", about: "Fewer are faster and rougher.",
    hint: (sampling) => sampling.steps, min: 1, max: 1000,
  },
  entropy_bound: {
    label: "Entropy bound", about: "Nats that accepted positions may sum to.",
    hint: (sampling) => sampling.entropy_bound, min: 0.001, max: 1000, step: "any",
  },
  attempts: { label: "Attempts", about: "If it breaks the rules, try the next seed.", hint: "1", min: 1, max: 20 },
  candidates: { label: "Candidates", about: "Fillings that are tried; the likeliest wins.", hint: "", min: 1, max: 16 },
  max_tokens: { label: "Tokens at most", hint: "", min: 1, max: 4096, about: "The answer is cut there." },
};

export class Options {
  #inputs = {};
  #hints = {};

  /** `names`: which fields; `preset`: values to begin with. */
  constructor(host, names, preset = {}) {
    const fields = names.map((name) => {
      const { label, min, max, step, about } = FIELDS[name];
      const limits = { min, max, step: step ?? 1, value: preset[name] };
      const input = el("input", { type: "number", inputmode: "decimal", name, title: about, ...limits });
      this.#inputs[name] = input;
      return el("label", { class: "field" }, el("span", {}, label), input);
    });
    const grid = el("div", { class: "options-grid" }, ...fields);
    this.root = el("details", { class: "options" }, el("summary", {}, "Options"), grid);
    host.append(this.root);
    link.addEventListener("model", () => this.#hint());
    this.#hint();
  }

  /** Numbers that were given, by name; false if one of them cannot be (the browser says why). */
  read() {
    const values = {};
    for (const [name, input] of Object.entries(this.#inputs)) {
      if (input.parentNode.hidden) continue;
      if (!input.checkValidity()) {
        this.root.open = true; // else the browser has nowhere to say what is wrong
        input.reportValidity();
        return false;
      }
      if (input.value !== "") values[name] = Number(input.value);
    }
    return values;
  }

  /** Only these have an effect now: the others are hidden and not read. `hints`: what an empty one means now. */
  offer(names, hints = {}) {
    for (const [name, input] of Object.entries(this.#inputs)) input.parentNode.hidden = !names.includes(name);
    this.#hints = hints;
    this.#hint();
  }

  #hint() {
    for (const [name, input] of Object.entries(this.#inputs)) {
      const hint = this.#hints[name] ?? FIELDS[name].hint;
      input.placeholder = typeof hint === "string" ? hint : link.model ? `${hint(link.model.sampling)}` : "";
    }
  }
}

/** Of some values, those that were given. */
export const only = (values, ...names) =>
  Object.fromEntries(names.filter((name) => values[name] !== undefined).map((name) => [name, values[name]]));

/** Options -> the fields of a request: `seed` at the top, the sampler's under `diffusion`. */
export function fieldsOf(values, diffusion = {}) {
  const sampler = { ...diffusion, ...only(values, "steps", "entropy_bound") };
  return { ...only(values, "seed"), ...(Object.keys(sampler).length ? { diffusion: sampler } : {}) };
}

const REDRAW = 0.5; // the twin's temperature by lot, as `dgemma svg` has it

/** Fields that ask for one token after another: the best ones, or, `lot`, drawn by lot. */
export const oneByOne = (values, lot) => ({
  diffusion: { mode: "ar" }, ...(lot ? { temperature: REDRAW, ...only(values, "seed") } : { temperature: 0 }),
});
