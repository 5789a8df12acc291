// The chosen node: its facts and text, how it was placed and computed, and what can be done with it.

import { ask, segment, sessionPath } from "./api.js";
import { make, facts, count, ms } from "./dom.js";

const TEXT_TOKENS = 4096; // of a node, that are shown at most
const SURE_MS = 8000; // for the second press of what can't be undone
const PRICES = [["queued", "queued_s"], ["prefill", "prefill_s"], ["decode", "decode_s"], ["fetch", "fetch_s"], ["displaced", "displaced_s"], ["pull", "pull_s"]];
const POLICIES = {
  best_of_n: { n: 8, max_tokens: 32 },
  beam: { width: 4, branch: 2, depth: 4, step_tokens: 8 },
  mcts: { expansions: 12, width: 3, depth: 4, step_tokens: 8 },
};

export class Details {
  constructor(place, store, actions) {
    this.place = place;
    this.store = store;
    this.actions = actions;
    this.asked = new Map(); // what was asked of nodes, by name
  }

  clear() {
    this.asked.clear();
    this.drawn = null;
  }

  /** Show a node as laid out (`null`: none), or the session whose row is chosen. */
  show(name, node) {
    const session = name?.startsWith("session ") ? this.store.sessions.get(name.slice(8)) : null;
    const key = node ? `${name} ${node.capsule ? "kept" : "open"}` : session ? name : "";
    if (key !== this.drawn) {
      this.drawn = key;
      this.live = null;
      this.place.replaceChildren(...(node ? this.#node(node) : session ? this.#session(session) : []));
    }
    if (node && this.live) this.live(node);
  }

  /** Have the fork's form take the next keys. */
  focusFork() {
    this.place.querySelector("form.fork [name=suffix]")?.focus();
  }

  /** As a press of the button that prunes, or ends the branch. */
  pressPrune() {
    this.place.querySelector("button.prune")?.click();
  }

  #session(session) {
    const close = twice("button.danger", "Close the session", () => this.actions.run(`close ${session.id}`, async () => {
      const body = await ask("DELETE", sessionPath(session.id));
      return `closed ${session.id}: ${body.released} capsules released, ${body.cancelled} requests ended`;
    }));
    return [make("h2", {}, session.id), facts([
      ["capsules", count(session.nodes.size)], ["below", session.parent],
      ["begun", new Date(1000 * session.created).toLocaleString()],
      ["last used", new Date(1000 * session.lastUsed).toLocaleString()],
    ]), make("h3", {}, "Ends its requests and releases its capsules"), close];
  }

  #node(node) {
    const parts = [make("h2.mono", {}, node.name)];
    const known = make("div", {}, facts([["tokens", `${count(node.start)} to ${count(node.tokens)}`], ["request", node.request]]));
    parts.push(known);
    if (node.branch) parts.push(...this.#running(node, known));
    else if (node.capsule) parts.push(...this.#capsule(node, known));
    const life = make("div");
    parts.push(life);
    this.#once(`life ${node.request}`, () => this.#life(node)).then((made) => life.replaceChildren(...made));
    return parts;
  }

  #running(node, known) {
    const text = make("pre.text", {}, "");
    this.live = (now) => {
      known.replaceChildren(facts([
        ["state", now.branch?.state], ["tokens", `${count(now.start)} to ${count(now.tokens)}`], ["request", now.request],
      ]));
      text.textContent = this.store.streams.get(now.name) ?? `… ${this.store.texts.get(now.name) ?? ""}`;
    };
    const end = make("button.danger.prune", { onclick: () => this.actions.prune(node) }, "End this branch");
    return [make("h3", {}, "Text so far"), text, make("h3", {}, "Its KV is free at the next step"), end];
  }

  #capsule(node, known) {
    const text = make("pre.text", {}, "…");
    this.#once(`text ${node.capsule}`, () => readText(this.store, node)).then((made) => text.replaceChildren(...made));
    this.#once(`facts ${node.capsule}`, () => readFacts(this.store, node)).then((made) => known.replaceChildren(...made));
    return [make("h3", {}, "Text"), text, ...this.#forkForm(node), ...this.#searchForm(node),
      make("h3", {}, "Ends what went on from here, and releases its capsules"),
      twice("button.danger.prune", "Prune below", () => this.actions.prune(node))];
  }

  #forkForm(node) {
    const form = make("form.act.fork", { autocomplete: "off", onsubmit: (event) => {
      event.preventDefault();
      const given = new FormData(form);
      this.actions.fork(node, given.get("suffix"), Number(given.get("n")), Number(given.get("max_tokens")));
    } },
    make("textarea", { name: "suffix", rows: 2, placeholder: "Text that each branch begins with (may be empty)", "aria-label": "Suffix" }),
    make("div.line", {},
      make("label", {}, "n ", make("input", { name: "n", type: "number", min: 1, value: 4 })),
      make("label", {}, "tokens ", make("input", { name: "max_tokens", type: "number", min: 1, max: 4096, value: 48 })),
      make("button", {}, "Fork")));
    return [make("h3", {}, "Fork: branches that share all of this"), form];
  }

  #searchForm(node) {
    const form = make("form.act.search", { onsubmit: (event) => {
      event.preventDefault();
      const type = new FormData(form).get("policy");
      this.actions.search(node, { type, ...POLICIES[type] });
    } },
    make("div.line", {},
      make("select", { name: "policy", "aria-label": "Policy" }, ...Object.keys(POLICIES).map((each) => make("option", {}, each))),
      make("button", {}, "Search")));
    return [make("h3", {}, "Search from here, by the model's own probabilities"), form];
  }

  async #life({ request, capsule, session }) {
    const parts = [];
    if (capsule && !(await this.store.isHeld({ capsule, session }))) return parts;
    try {
      const explained = await ask("GET", `v1/router/explain?request=${segment(request)}&candidates=16`);
      for (const decision of explained.data) parts.push(...placement(decision));
    } catch (error) {
      if (![403, 404].includes(error.status)) throw error;
    }
    try {
      parts.push(...course(await ask("GET", `v1/requests/${segment(request)}`)));
    } catch (error) {
      if (error.status !== 404) throw error;
    }
    return parts;
  }

  /** The elements that `make` gives: asked for once, then remembered; a failure as its sentence. */
  async #once(key, makeParts) {
    if (!this.asked.has(key)) {
      if (this.asked.size > 200) this.asked.clear();
      this.asked.set(key, makeParts());
    }
    try {
      return await this.asked.get(key);
    } catch (error) {
      this.asked.delete(key);
      return [make("p", {}, error.message)];
    }
  }
}

/** A button that acts when it is pressed a second time soon after. */
function twice(what, label, act) {
  const button = make(what, {}, label);
  let timer = 0;
  const disarm = () => {
    clearTimeout(timer);
    timer = 0;
    button.textContent = label;
  };
  button.addEventListener("click", () => {
    if (timer) {
      disarm();
      act();
      return;
    }
    button.textContent = `${label}: press again`;
    timer = setTimeout(disarm, SURE_MS);
  });
  return button;
}

async function readText(store, node) {
  if (!(await store.isHeld(node))) return ["It is held no more."];
  const start = Math.max(0, node.isRoot ? 0 : node.start, node.tokens - TEXT_TOKENS);
  const told = await ask("GET", `v1/capsules/${segment(node.capsule)}/text?start=${start}`);
  return [start ? make("span.before", {}, `… after ${count(start)} tokens\n`) : "", told.text];
}

async function readFacts(store, node) {
  const told = (await store.isHeld(node)) ? await ask("GET", `v1/capsules/${segment(node.capsule)}`) : { worker: "none" };
  return [facts([
    ["tokens", `${count(node.start)} to ${count(node.tokens)}`], ["request", node.request],
    ["worker", told.worker ?? (told.held === false ? "none: a fork computes it again" : undefined)],
    ["tier", told.tier], ["pinned", told.pinned ? "yes" : undefined],
    ["made", new Date(1000 * node.created).toLocaleTimeString()],
  ])];
}

/** A decision of the router, candidate by candidate. */
function placement(decision) {
  const most = Math.max(...decision.candidates.map((each) => each.total ?? 0), 1e-9);
  const rows = decision.candidates.map((each) => make(each.worker === decision.worker ? "tr.won" : "tr", {},
    make("td", {}, each.worker), make("td.number", {}, count(each.overlap_blocks)),
    make("td", {}, make("span.price", { title: PRICES.map(([name, field]) => `${name} ${ms(each[field])}`).join(", ") },
      ...PRICES.map(([, field]) => make("i", { style: { width: `${(100 * (each[field] ?? 0)) / most}%` } })))),
    make("td.number", {}, each.eligible ? ms(each.total) : "can't")));
  return [make("h3", {}, `Placed on ${decision.worker} by ${decision.reason}, of ${count(decision.num_candidates)}`),
    make("table", {}, make("thead", {}, make("tr", {}, make("th", {}, "worker"), make("th.number", {}, "blocks found"),
      make("th", {}, "price"), make("th.number", {}, "in all"))), make("tbody", {}, ...rows))];
}

/** A request's course, branch by branch. */
function course(life) {
  const shown = life.branches.slice(0, 16);
  const rows = shown.map((each) => make("tr", {}, make("td.number", {}, String(each.index)), make("td", {}, each.state),
    make("td.number", {}, count(each.cached_tokens)), make("td.number", {}, count(each.prefill_tokens)),
    make("td.number", {}, count(each.output_tokens)),
    make("td.number", {}, ms(each.states.find((state) => state.state === "answering")?.at_s))));
  const more = life.branches.length - shown.length;
  return [make("h3", {}, `Its request: ${life.state}`),
    make("table", {}, make("thead", {}, make("tr", {}, ...["", "state", "found", "computed", "drawn", "first token"].map((name) => make("th", {}, name)))),
      make("tbody", {}, ...rows)), more > 0 ? make("p", {}, `and ${count(more)} more branches`) : null].filter(Boolean);
}
