// One thing that a tab does: started and stopped by one button, its errors shown where they happened.

import { ApiError } from "./api.js";
import { $, dotted, el } from "./dom.js";
import { link } from "./link.js";

export class Task {
  #controller = null;

  /** `button` starts and, while it runs, stops. `note`: a line about how it goes. `alerts`: where errors are shown. */
  constructor({ panel, button, note, alerts, stopLabel = "Stop" }) {
    Object.assign(this, { panel, button, note, alerts, stopLabel });
    this.label = button.textContent;
    panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.busy) {
        event.preventDefault();
        this.stop();
      }
    });
  }

  /** The form's button and the Enter key start; while it runs, the button stops. */
  startedBy(form, start) {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.busy) start();
    });
    // Not by the form: a field that must be filled in would keep it from being sent.
    this.button.addEventListener("click", (event) => {
      if (!this.busy) return;
      event.preventDefault();
      this.stop();
    });
  }

  get busy() {
    return this.#controller !== null;
  }

  stop() {
    this.#controller?.abort();
  }

  /** `work(signal)`; true if it came to its end. */
  async run(work) {
    if (this.busy) {
      this.stop();
      return false;
    }
    this.#controller = new AbortController();
    this.#show(true);
    this.alerts.replaceChildren();
    try {
      if (!link.model) await link.ask();
      if (!link.model) throw new ApiError(0, "No model answers yet: wait until the server is ready.");
      await work(this.#controller.signal);
      return true;
    } catch (error) {
      if (error.name === "AbortError") this.say("Stopped.");
      else this.fail(error);
      return false;
    } finally {
      this.#controller = null;
      this.#show(false);
    }
  }

  say(text) {
    this.note.textContent = text;
  }

  fail(error) {
    this.say("");
    this.alerts.replaceChildren(alertBox(error));
    if (error instanceof ApiError) link.heard(error);
    else console.error(error); // a mistake of this page
  }

  #show(busy) {
    this.panel.toggleAttribute("data-busy", busy);
    this.button.textContent = busy ? this.stopLabel : this.label;
    this.button.classList.toggle("stop", busy);
  }
}

const HEADLINES = {
  0: "No connection", 400: "The server refused this request", 401: "An API key is needed", 404: "Not found",
  413: "Too large", 429: "The server is busy", 503: "The server cannot answer now", 504: "It took too long",
};

function alertBox(error) {
  const told = error instanceof ApiError;
  const headline = told ? HEADLINES[error.status] ?? `Error ${error.status}` : "The page made a mistake";
  const facts = dotted(
    error.param && `field ${error.param}`,
    error.status && `status ${error.status}`,
    error.retryAfter && `try again in ${error.retryAfter} s`,
  );
  return el(
    "div", { class: "alert", role: "alert" },
    el("strong", {}, headline),
    el("p", {}, sentence(told ? error.message : String(error))),
    facts ? el("p", { class: "small quiet" }, facts) : null,
  );
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?…]$/.test(text) ? "" : ".");

/** The parts of a panel that every task has. */
export const partsOf = (panel) => ({
  panel, button: $("[data-go]", panel), note: $("[data-note]", panel), alerts: $("[data-alerts]", panel),
});
