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

/** Make `old` look as `fresh`, in place as far as their elements agree: what is pointed at stays there.
 *  Returns the element that is shown. Listeners stay those of `old`. */
export function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return fresh;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return old;
  }
  for (const name of old.getAttributeNames()) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const name of fresh.getAttributeNames()) {
    const value = fresh.getAttribute(name);
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  old.style.cssText = fresh.style.cssText; // as an attribute it would be refused: the page has no inline styles
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((child, i) => (i < before.length ? morph(before[i], child) : old.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
  return old;
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
