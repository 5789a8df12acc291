// The forest as rows, of which only those in view are elements: thousands cost as much as forty.

import { make, morph, count } from "./dom.js";
import { layout, height, ROW } from "./layout.js";

const MARGIN = 6; // rows beyond the view

export class Forest {
  /** `wants(nodes)` is told the leaves in view whose text is not known; `onChoose(name)` of a choice. */
  constructor(view, canvas, store, { onChoose, wants }) {
    this.view = view;
    this.canvas = canvas;
    this.store = store;
    this.onChoose = onChoose;
    this.wants = wants;
    this.filter = "";
    this.chosen = null;
    this.rows = [];
    this.shown = new Map(); // elements by row's key, with what they were made from
    view.addEventListener("scroll", () => this.#draw(), { passive: true });
    view.addEventListener("pointerdown", (event) => this.#point(event));
    view.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(view);
  }

  /** Lay out and draw what the store has. */
  update() {
    const wanted = this.filter.toLowerCase();
    const sessions = [...this.store.sessions.values()].filter((each) => each.id.toLowerCase().includes(wanted));
    this.rows = layout(sessions);
    this.index = new Map();
    this.rows.forEach((row, i) => (row.nodes ?? []).forEach((node, j) => this.index.set(node.name, [i, j])));
    this.canvas.style.height = `${height(this.rows)}px`;
    this.#draw();
  }

  /** Choose a node or a session by its name, and bring it into view. */
  choose(name, { scroll = true } = {}) {
    this.chosen = name;
    const place = this.#place();
    if (place && scroll) {
      const top = place[0] * ROW;
      if (top < this.view.scrollTop) this.view.scrollTop = top - ROW;
      else if (top + 2 * ROW > this.view.scrollTop + this.view.clientHeight) {
        this.view.scrollTop = top + 2 * ROW - this.view.clientHeight;
      }
    }
    this.#draw();
    this.onChoose(name);
  }

  /** The chosen node as it was laid out, if there is one. */
  get node() {
    const place = this.index?.get(this.chosen);
    return place ? this.rows[place[0]].nodes[place[1]] : null;
  }

  #place() {
    const found = this.index?.get(this.chosen);
    if (found) return found;
    const row = this.rows.findIndex((each) => each.key === this.chosen);
    return row < 0 ? null : [row, 0];
  }

  #point(event) {
    const hit = event.target.closest("[data-name]");
    if (hit) this.choose(hit.dataset.name, { scroll: false });
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowUp: -1, ArrowDown: 1, ArrowLeft: 0, ArrowRight: 0, Home: 0, End: 0 }[event.key];
    if (step === undefined || !this.rows.length) return;
    event.preventDefault();
    const [row, column] = this.#place() ?? [-1, 0];
    if (event.key === "Home") this.#chooseRow(0);
    else if (event.key === "End") this.#chooseRow(this.rows.length - 1);
    else if (step) this.#chooseRow(Math.max(0, Math.min(this.rows.length - 1, row + step)));
    else if (row >= 0) this.#along(row, column, event.key === "ArrowRight" ? 1 : -1);
  }

  #along(row, column, step) {
    const nodes = this.rows[row].nodes ?? [];
    const next = nodes[column + step];
    if (next) return this.choose(next.name);
    if (step < 0) {
      const from = this.rows[row].from;
      if (from) this.choose(this.rows[from.row].nodes.at(-1).name);
      return undefined;
    }
    const below = this.rows.findIndex((each) => each.from?.row === row);
    return below < 0 ? undefined : this.choose(this.rows[below].nodes[0].name);
  }

  #chooseRow(row) {
    const { key, nodes } = this.rows[row];
    this.choose(nodes ? nodes[0].name : key);
  }

  #draw() {
    const first = Math.max(0, Math.floor(this.view.scrollTop / ROW) - MARGIN);
    const last = Math.min(this.rows.length, Math.ceil((this.view.scrollTop + this.view.clientHeight) / ROW) + MARGIN);
    const kept = new Map(), unknown = [];
    for (let i = first; i < last; i += 1) {
      const row = this.rows[i];
      const leaf = row.nodes?.at(-1);
      const tail = leaf ? this.store.tail(leaf.name) : undefined;
      if (leaf?.capsule && tail === undefined) unknown.push(leaf);
      const sign = this.#sign(row, i, first, tail);
      let drawn = this.shown.get(row.key);
      if (!drawn || drawn.sign !== sign) {
        const fresh = this.#element(row, i, first, tail);
        drawn = { sign, element: drawn ? morph(drawn.element, fresh) : fresh };
        if (!drawn.element.isConnected) this.canvas.append(drawn.element);
      }
      kept.set(row.key, drawn);
    }
    for (const [key, { element }] of this.shown) if (!kept.has(key)) element.remove();
    this.shown = kept;
    if (unknown.length) this.wants(unknown);
    const chosen = this.canvas.querySelector(".chosen");
    if (chosen) this.view.setAttribute("aria-activedescendant", chosen.id);
    else this.view.removeAttribute("aria-activedescendant");
  }

  #sign(row, i, first, tail) {
    if (row.kind === "session") {
      const { nodes, running, parent } = row.session;
      return `${i} ${nodes.size} ${running.length} ${parent} ${this.chosen === row.key}`;
    }
    const nodes = row.nodes.map((each) =>
      `${each.name} ${each.x} ${each.width} ${each.prompt} ${each.branch?.state} ${each.name === this.chosen}`);
    const value = this.store.values.get(row.nodes.at(-1).name);
    return `${i} ${this.#forks(i)} ${row.from && Math.max(row.from.row, first - 1)} ${row.from?.x} ${nodes.join("|")} ${tail} ${value}`;
  }

  /** Whether what goes on from row `i` stands in rows below. */
  #forks(i) {
    return this.rows[i + 1]?.from?.row === i;
  }

  #element(row, i, first, tail) {
    const style = { top: `${i * ROW}px` };
    if (row.kind === "session") return this.#sessionRow(row, style);
    const element = make("div.row", { style, role: "group" });
    if (row.from) {
      const rise = (i - Math.max(row.from.row, first - 1)) * ROW;
      element.append(make("div.elbow", {
        style: { left: `${row.from.x}px`, width: `${row.x - row.from.x}px`, top: `${17 - rise}px`, height: `${rise - 4}px` },
      }));
    }
    for (const node of row.nodes) element.append(this.#bar(node));
    const forks = this.#forks(i);
    if (forks) element.append(make("div.dot", { style: { left: `${row.end - 1}px` } }));
    const leaf = row.nodes.at(-1);
    const value = this.store.values.get(leaf.name);
    if (!forks && (tail || value !== undefined)) {
      const shown = (tail ?? "").replace(/\s+/g, " ").trim().slice(-120);
      element.append(make(leaf.branch ? "div.says.live" : "div.says", { style: { left: `${row.end + 6}px` }, "data-name": leaf.name },
        value === undefined ? null : make("span.value", {}, value.toFixed(3)), shown));
    }
    return element;
  }

  #sessionRow(row, style) {
    const { id, nodes, running, parent } = row.session;
    const words = [`${count(nodes.size)} ${nodes.size === 1 ? "capsule" : "capsules"}`];
    if (running.length) words.push(`${count(running.length)} running`);
    if (parent) words.push(`below ${parent}`);
    const chosen = this.chosen === row.key;
    return make(chosen ? "div.row.session.chosen" : "div.row.session",
      { style, role: "treeitem", "aria-selected": String(chosen), id: `row ${row.key}`, "data-name": row.key },
      id, make("small", {}, words.join(", ")));
  }

  #bar(node) {
    const kind = node.isRoot ? "root" : node.branch ? (node.branch.tokens ? "live" : "waiting") : "kept";
    const chosen = node.name === this.chosen;
    const bar = make(`div.node.${kind}${chosen ? ".chosen" : ""}`, {
      role: "treeitem", "aria-selected": String(chosen), id: `node ${node.name}`, "data-name": node.name,
      "aria-label": `${node.branch ? `running, ${node.branch.state}` : node.capsule ? "capsule" : "prompt"}, ${count(node.tokens)} tokens`,
      title: `${count(node.start)} to ${count(node.tokens)} tokens`,
      style: { left: `${node.x}px`, width: `${node.width}px` },
    });
    if (node.prompt && !node.isRoot) bar.append(make("span.prompt", { style: { width: `${node.prompt}px` } }));
    return bar;
  }
}
