// Ties the page together: the watch of sessions, the panes, the keys, and what is done by clicks.

import { ask, credentials, events, segment } from "./api.js";
import { make, count } from "./dom.js";
import { Details } from "./details.js";
import { Forest } from "./forest.js";
import { Store, remember } from "./store.js";
import { showWorkers } from "./workers.js";

const $ = (id) => document.getElementById(id);
const PANES = ["forest", "workers"];
const RETRY_MS = [500, 1000, 2000, 5000], EVERY_MS = 1000, TEXTS_AT_ONCE = 4, TAIL_TOKENS = 40;

const MARKS = /<\|[^|<>]*\|>|^[^<\s]*\|>/g; // of chat templates; the text may begin within one

const store = new Store();
let pane = "forest", watching = null, polling = null;

// Messages

let saying = 0;
function say(text, isBad = false) {
  $("state").textContent = text;
  $("state").classList.toggle("bad", isBad);
  clearTimeout(saying);
  saying = setTimeout(showHealth, 6000);
}

function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

async function showHealth() {
  clearTimeout(saying);
  try {
    const health = await ask("GET", "health");
    const workers = health.workers ? `, ${count(health.workers.length)} workers` : "";
    say(`${health.status}${workers}`, health.status !== "ok");
  } catch (error) {
    say(error.status === 503 ? "no worker" : "no answer", true);
  }
}

const sleep = (time, signal) => new Promise((done) => {
  const timer = setTimeout(done, time);
  signal?.addEventListener("abort", () => { clearTimeout(timer); done(); });
});

// The watch: one stream after the other, until the key changes

async function watch(signal) {
  for (let failures = 0; !signal.aborted;) {
    try {
      let isFirst = true;
      for await (const event of events("GET", "v1/watch", undefined, signal)) {
        store.take(event, isFirst);
        isFirst = false;
        failures = 0;
        trouble("");
      }
    } catch (error) {
      if (signal.aborted) return;
      const wantsKey = error.status === 401 || error.status === 403;
      trouble(wantsKey ? `${error.message} Give a key by the button "Key".` : `${error.message}: the page tries again`);
      if (wantsKey) return;
      await sleep(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)], signal);
      failures += 1;
    }
  }
}

function begin() {
  watching?.abort();
  watching = new AbortController();
  store.clear();
  details.clear();
  watch(watching.signal);
  showHealth();
  openPane(pane);
}

// Actions

/** Run `work`, and say its sentence, or why it failed. */
async function run(what, work) {
  try {
    const said = await work();
    if (said) say(said);
  } catch (error) {
    say(`${what}: ${error.message}`, true);
  }
}

/** The chunks of a stream of choices: their texts become those of `REQUEST.INDEX`. */
async function follow(path, body) {
  let request = null, num = 0;
  for await (const event of events("POST", path, { ...body, stream: true })) {
    request ??= event.id;
    for (const choice of event.choices ?? []) {
      num += 1;
      if (choice.text) store.stream(`${request}.${choice.index}`, choice.text);
    }
  }
  return num;
}

const actions = {
  run,
  fork: (node, suffix, n, maxTokens) => run("fork", async () => {
    const more = suffix ? { suffixes: Array(n).fill(suffix) } : { n };
    say(`${n} branches`);
    await follow(`v1/capsules/${segment(node.capsule)}/fork`, { ...more, max_tokens: maxTokens, mallee: { session: node.session } });
  }),
  prune: (node) => run("prune", async () => {
    if (node.branch) {
      await ask("POST", `v1/requests/${segment(node.request)}/prune`, { branches: [node.branch.branch] });
      return "the branch is ended";
    }
    const told = await ask("POST", `v1/capsules/${segment(node.capsule)}/prune`, {});
    return `${count(told.requests.length)} requests ended, ${count(told.released)} capsules released`;
  }),
  search: (node, policy) => run("search", async () => {
    say(`search: ${policy.type}`);
    const body = { capsule: node.capsule, policy, stream: true, mallee: { session: node.session } };
    let last = null;
    for await (const event of events("POST", "v1/search", body)) {
      last = event;
      for (const each of event.nodes ?? []) if (each.capsule && each.score !== null) store.values.set(each.capsule, each.score);
      store.changed();
    }
    const best = last.nodes[last.principal.at(-1) ?? 0];
    if (best?.capsule) forest.choose(best.capsule);
    return `${policy.type}: best ${last.score?.toFixed(3) ?? "–"}, ${count(last.tokens)} tokens, ${count(last.expansions)} expansions`;
  }),
};

// Texts of leaves in view, a few at a time

const fetching = new Set();
async function wants(nodes) {
  for (const node of nodes) {
    if (fetching.size >= TEXTS_AT_ONCE) return;
    if (fetching.has(node.name)) continue;
    fetching.add(node.name);
    const own = node.tokens > node.promptEnd ? node.promptEnd : node.start; // what was drawn, if anything was
    const start = Math.max(node.isRoot ? 0 : own, node.tokens - TAIL_TOKENS);
    store.isHeld(node)
      .then((held) => held ? ask("GET", `v1/capsules/${segment(node.capsule)}/text?start=${start}`) : { text: "" })
      .then((told) => told.text.replace(MARKS, " "), () => "")
      .then((text) => remember(store.texts, node.name, text))
      .finally(() => { fetching.delete(node.name); store.changed(); });
  }
}

const details = new Details($("details"), store, actions);
const forest = new Forest($("forest"), $("canvas"), store, {
  wants, onChoose: (name) => details.show(name, forest.node),
});

const nothing = make("p.empty", {}, "No sessions yet. A session is the tree of one agent's requests: name it in a request",
  " (mallee.session, a header such as x-session-id, or Mallee(..., session=\"mine\") of the SDK), or ask something above.");
store.listen(() => {
  if (pane !== "forest") return;
  forest.update();
  const sessions = [...store.sessions.values()];
  const sum = (of) => sessions.reduce((all, each) => all + of(each), 0);
  $("counts").textContent = `${count(sessions.length)} ${sessions.length === 1 ? "session" : "sessions"}, ${count(sum((each) => each.nodes.size))} capsules, `
    + `${count(sum((each) => each.running.length))} running`;
  if (sessions.length) nothing.remove();
  else $("canvas").append(nothing);
  details.show(forest.chosen, forest.node);
});

// Panes

function openPane(name) {
  pane = name;
  for (const each of PANES) {
    $(`${each}-pane`).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", String(each === name));
  }
  polling?.abort();
  polling = new AbortController();
  if (name === "workers") poll((signal) => showWorkers($("workers"), signal).then(() => true), polling.signal);
  if (name === "forest") store.changed();
}

/** Call `look` each second until it returns false. */
async function poll(look, signal) {
  while (!signal.aborted) {
    try {
      if (!(await look(signal))) return;
      trouble("");
    } catch (error) {
      if (signal.aborted) return;
      trouble(error.message);
      if (error.status === 404 || error.status === 401) return;
    }
    await sleep(EVERY_MS, signal);
  }
}

for (const name of PANES) $(`tab-${name}`).addEventListener("click", () => openPane(name));
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = new FormData(event.target);
  run("ask", () => follow("v1/completions", {
    prompt: given.get("text"), n: Number(given.get("n")), max_tokens: Number(given.get("max_tokens")),
    mallee: { session: given.get("session") || `page-${Date.now().toString(36)}` },
  }).then(() => ""));
});
$("filter").addEventListener("input", (event) => {
  forest.filter = event.target.value;
  forest.update();
});

// Key, theme and help

$("open-key").addEventListener("click", () => {
  const form = $("key").querySelector("form");
  form.elements.key.value = credentials.key;
  form.elements.salt.value = credentials.salt;
  $("key").showModal();
});
$("key").addEventListener("close", () => {
  if ($("key").returnValue !== "use") return;
  const form = $("key").querySelector("form");
  credentials.set(form.elements.key.value.trim(), form.elements.salt.value.trim());
  trouble("");
  begin();
});
$("open-help").addEventListener("click", () => $("help").showModal());

const THEME = "mallee.theme";
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem(THEME, name);
}
const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
document.documentElement.dataset.theme = localStorage.getItem(THEME) ?? dark;
const turnTheme = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
$("theme").addEventListener("click", turnTheme);

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, textarea, select");
  if (event.key === "Escape" && isTyping) $("forest").focus();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const does = {
    1: () => openPane("forest"), 2: () => openPane("workers"),
    d: turnTheme, "?": () => $("help").showModal(), "/": () => $("filter").focus(),
    f: () => details.focusFork(), p: () => details.pressPrune(),
  }[event.key];
  if (!does) return;
  event.preventDefault();
  does();
});

begin();
$("forest").focus();
