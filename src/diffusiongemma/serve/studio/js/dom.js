// Small helpers around the document.

export const $ = (selector, within = document) => within.querySelector(selector);
export const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

/** el("p", {class: "x", onclick: f}, "text", child) -> an element. Text is always text, never markup. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** At most one call of `paint` a frame, with the newest arguments. `.flush()` does it at once, `.drop()` not at all. */
export function perFrame(paint) {
  let wanted = null, pending = 0;
  const run = () => {
    cancelAnimationFrame(pending);
    pending = 0;
    if (wanted === null) return;
    const given = wanted;
    wanted = null;
    paint(...given);
  };
  const schedule = (...given) => {
    wanted = given;
    pending ||= requestAnimationFrame(run);
  };
  schedule.flush = run;
  schedule.drop = () => { wanted = null; };
  return schedule;
}

/** Tell those who do not see the page, once, what became of something. */
export function announce(text) {
  $("#announcer").textContent = "";
  requestAnimationFrame(() => { $("#announcer").textContent = text; });
}

/** A colour of the theme in force. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** "a · b": what is empty is left out. */
export const dotted = (...parts) => parts.filter(Boolean).join(" · ");

/** A row of examples: [label, what to do]. */
export const chips = (examples) =>
  examples.map(([label, onclick]) => el("button", { type: "button", class: "chip", onclick }, label));

export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 0.9995 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function figure(value, digits = 1) {
  if (value === null || value === undefined) return "–";
  return value >= 1000 ? Math.round(value).toLocaleString("en-GB") : value.toFixed(value >= 100 ? 0 : digits);
}
