// The drawer with figures: of the last answer, of this session, of the server. All as the API reported them.

import { $, el, figure, plural, seconds } from "./dom.js";
import { link } from "./link.js";

const KEPT = 50;

class Metrics {
  rows = [];

  start() {
    this.drawer = $("#drawer");
    this.button = $("#metrics-button");
    this.button.addEventListener("click", () => this.toggle());
    $("#drawer-close").addEventListener("click", () => this.toggle(false));
    this.drawer.addEventListener("keydown", (event) => { if (event.key === "Escape") this.toggle(false); });
    link.addEventListener("health", () => this.#showServer());
    this.#show();
  }

  toggle(open = this.drawer.hidden) {
    this.drawer.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
    document.body.classList.toggle("with-drawer", open);
    if (open) {
      link.ask();
      this.#show();
      $("#drawer-title").focus();
    } else this.button.focus();
  }

  add(tab, recording) {
    const skipped = recording.drafts.reduce((sum, draft) => sum + draft.skipped, 0);
    this.rows.unshift({ tab, usage: recording.usage, skipped });
    this.rows.length = Math.min(this.rows.length, KEPT);
    this.#show();
  }

  #show() {
    const last = this.rows[0];
    const nothing = el("p", { class: "quiet small" }, "Nothing was asked yet.");
    $("#metrics-last").replaceChildren(...(last ? lastFigures(last) : [nothing]));
    $("#metrics-session").hidden = !last;
    $("#metrics-rows").replaceChildren(...this.rows.map(row));
    if (last) $("#metrics-sum").replaceChildren(...sumRow(this.rows));
  }

  #showServer() {
    const { health, status } = link;
    const facts = [["status", status]];
    if (health && status !== "offline") {
      facts.push(["running", health.running], ["waiting", health.waiting], ["up", uptime(health.uptime_seconds)]);
      facts.push(["engine failures", health.engine_failures], ["version", health.version]);
    }
    $("#metrics-server").replaceChildren(...pairs(facts));
  }
}

function lastFigures({ tab, usage, skipped }) {
  const d = usage.diffusion;
  const large = [
    ["steps", figure(d.steps, 0)], ["tokens a forward", figure(d.tokens_per_forward, 2)],
    ["tokens a second", figure(d.tokens_per_second)], ["blocks redone", figure(d.blocks_redone, 0)],
  ].map(([name, value]) => el("div", {}, el("dd", { class: "number" }, value), el("dt", {}, name)));
  const rest = [
    ["asked by", tab], ["answer", plural(usage.completion_tokens, "token")],
    ["prompt", `${plural(usage.prompt_tokens, "token")}, ${usage.prompt_tokens_details.cached_tokens} cached`],
    ["first draft after", seconds(d.first_draft_seconds)], ["whole answer after", seconds(d.total_seconds)],
    ["waited", seconds(d.queue_seconds)], ["blocks", d.blocks], ["passes over a canvas", d.decoder_forwards],
    ["passes over text", d.encoder_forwards], ["positions computed", figure(d.positions, 0)], ["seed", d.seed],
    ...(skipped ? [["drafts skipped", `${skipped}, this page read too slowly`]] : []),
  ];
  return [el("dl", { class: "large-figures" }, ...large), el("dl", { class: "pairs small" }, ...pairs(rest))];
}

const pairs = (facts) =>
  facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { class: "number" }, String(value))]);

function row({ tab, usage }) {
  const d = usage.diffusion;
  const speed = [d.tokens_per_forward, d.tokens_per_second];
  return el("tr", {}, ...cells(tab, d.steps, ...speed, d.blocks_redone, d.total_seconds));
}

function sumRow(rows) {
  const sum = (pick) => rows.reduce((total, one) => total + pick(one.usage), 0);
  const steps = sum((u) => u.diffusion.steps), tokens = sum((u) => u.completion_tokens);
  const busy = sum((u) => u.diffusion.total_seconds - u.diffusion.queue_seconds);
  const redone = sum((u) => u.diffusion.blocks_redone);
  return cells("all", steps, tokens / Math.max(1, steps), tokens / Math.max(1e-9, busy), redone, busy);
}

function cells(name, steps, perForward, perSecond, redone, time) {
  const values = [figure(steps, 0), figure(perForward, 2), figure(perSecond), figure(redone, 0), seconds(time)];
  return [el("th", { scope: "row" }, name), ...values.map((value) => el("td", { class: "number" }, value))];
}

function uptime(value) {
  if (value < 120) return `${Math.round(value)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

export const metrics = new Metrics();
