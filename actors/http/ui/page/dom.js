// Elements, made without markup: texts of users are never read as HTML.

/** An element: `make("p.note", { title: "…" }, "text", child)`. Properties that begin with "on" are listeners. */
export function make(what, properties = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((each) => each !== null && each !== undefined && each !== ""));
  return element;
}

/** A list of names and values; those without a value are left out. */
export function facts(entries) {
  const list = make("dl.facts");
  for (const [name, value] of entries) {
    if (value === undefined || value === null || value === "") continue;
    list.append(make("dt", {}, name), make("dd", {}, value));
  }
  return list;
}

export const count = (number) => Math.round(number).toLocaleString("en-US");

export const ms = (seconds) =>
  seconds === null || seconds === undefined ? "–" : `${(1000 * seconds).toFixed(seconds < 0.1 ? 1 : 0)} ms`;

/** A share as a bar, with its sentence. */
export function meter(share, text) {
  const full = Math.max(0, Math.min(1, share || 0));
  const bar = make(full > 0.9 ? "i.hot" : "i", { style: { width: `${100 * full}%` } });
  return make("div", {}, make("span", {}, text), make("div.meter", {}, bar));
}
