// Puts the page together: tabs, theme, the line about the model, and what is said when the server is lost.

import { $, $$, figure } from "./dom.js";
import { link } from "./link.js";
import { metrics } from "./metrics.js";
import { startChat } from "./chat.js";
import { startInfill } from "./infill.js";
import { startRace } from "./race.js";
import { startSudoku } from "./sudoku.js";
import { startSvg } from "./svg.js";

// ---- tabs: arrow keys walk them, Home and End jump, the address remembers -------------------------------------------

const tabs = $$('[role="tab"]');

function choose(tab, focus = false) {
  for (const one of tabs) {
    const on = one === tab;
    one.setAttribute("aria-selected", String(on));
    one.tabIndex = on ? 0 : -1;
    $(`#${one.getAttribute("aria-controls")}`).hidden = !on;
  }
  if (focus) tab.focus();
  document.title = `${tab.textContent.trim()} · dgemma studio`;
  document.dispatchEvent(new CustomEvent("tabchange", { detail: tab.dataset.tab }));
}

function startTabs() {
  const named = () => tabs.find((tab) => `#${tab.dataset.tab}` === location.hash) ?? tabs[0];
  for (const tab of tabs) {
    tab.addEventListener("click", () => { location.hash = tab.dataset.tab; choose(tab); });
    tab.addEventListener("keydown", (event) => {
      const at = tabs.indexOf(tab), last = tabs.length - 1;
      const right = at === last ? 0 : at + 1, left = at === 0 ? last : at - 1;
      const next = { ArrowRight: right, ArrowLeft: left, Home: 0, End: last }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      location.hash = tabs[next].dataset.tab;
      choose(tabs[next], true);
    });
  }
  window.addEventListener("hashchange", () => choose(named()));
  choose(named());
}

// ---- who answers ----------------------------------------------------------------------------------------------------

function showModel() {
  const { model } = link;
  const size = model.parameters >= 1e9 ? `${figure(model.parameters / 1e9)} B` : `${figure(model.parameters / 1e6)} M`;
  $("#model-name").textContent = model.id;
  $("#model-size").textContent = `${size} parameters`;
  $("#model-about").textContent = model.description;
  $("#model").hidden = false;
}

const SAID = {
  offline: "The server does not answer. This page tries again every two seconds; what you see is kept.",
  loading: "The model is being loaded.",
  draining: "The server is shutting down: it takes no new requests.",
  failing: "The server's engine failed several times in a row. Its log says why.",
  locked: "This server asks for an API key.",
};

function showStatus() {
  const { status } = link;
  const words = { ok: "ready", connecting: "connecting", offline: "no connection", locked: "key needed" };
  $("#status").dataset.status = status;
  $("#status-text").textContent = words[status] ?? status;
  const banner = $("#banner");
  banner.hidden = !(status in SAID);
  $("#banner-text").textContent = SAID[status] ?? "";
  $("#key-form").hidden = status !== "locked";
}

function startLink() {
  link.addEventListener("model", showModel);
  link.addEventListener("status", showStatus);
  $("#key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    link.unlock($("#key").value.trim());
    $("#key").value = "";
  });
  return link.start();
}

function startTheme() {
  const button = $("#theme-button");
  const tell = () => {
    const dark = document.documentElement.dataset.theme === "dark";
    button.setAttribute("aria-label", dark ? "Light theme" : "Dark theme");
    $("#theme-colour").content = dark ? "#0f1214" : "#faf9f6";
  };
  button.addEventListener("click", () => window.toggleTheme());
  document.addEventListener("themechange", tell);
  tell();
}

startTheme();
metrics.start();
for (const start of [startChat, startInfill, startSudoku, startSvg, startRace]) start();
startTabs();
await startLink();
document.documentElement.dataset.started = ""; // for tests: every listener is in place, the server was asked
