// Sessions as rows of bars. A row is a run of nodes without forks; what branches off stands in rows below, so
// that a prefix which branches share is drawn once. Widths grow with the logarithm of a node's tokens.

import { nameOf } from "./store.js";

export const ROW = 26; // pixels
const LEFT = 16, GAP = 2, INDENT = 18;

const width = (tokens) => Math.round(8 + 14 * Math.log2(1 + Math.max(0, tokens) / 16));

/** Rows from top to bottom: `{ kind: "session", session }`, or
 *  `{ kind: "chain", nodes, x, from }` with `from` `{ row, x }` where it branches off. */
export function layout(sessions) {
  const rows = [];
  for (const session of inOrder(sessions)) {
    rows.push({ kind: "session", key: `session ${session.id}`, session });
    addTree(rows, session);
  }
  return rows;
}

/** Those that are below others come after them; else the newest first. */
function inOrder(sessions) {
  const byName = new Map(sessions.map((each) => [each.id, each]));
  const below = new Map();
  const tops = [];
  for (const each of sessions) {
    const parent = each.parent && each.parent !== each.id ? byName.get(each.parent) : undefined;
    if (parent) below.set(parent.id, [...(below.get(parent.id) ?? []), each]);
    else tops.push(each);
  }
  const ordered = [], seen = new Set();
  const todo = tops.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
  while (todo.length || seen.size < sessions.length) {
    const each = todo.pop() ?? sessions.find((other) => !seen.has(other.id)); // parents in a circle
    if (seen.has(each.id)) continue;
    seen.add(each.id);
    ordered.push(each);
    todo.push(...(below.get(each.id) ?? []));
  }
  return ordered;
}

function addTree(rows, session) {
  const children = childrenOf(session);
  const todo = (children.get("") ?? []).map((node) => ({ node, x: LEFT, from: null })).reverse();
  while (todo.length) {
    const { node, x, from } = todo.pop();
    const row = { kind: "chain", key: node.name, nodes: [], x, from, session };
    const index = rows.push(row) - 1;
    let at = x, each = node, below;
    for (;;) {
      const size = width(each.tokens - each.start);
      const prompt = each.promptEnd > each.start
        ? Math.round((size * (each.promptEnd - each.start)) / Math.max(1, each.tokens - each.start)) : 0;
      row.nodes.push({ ...each, x: at, width: size, prompt: Math.min(size, prompt) });
      at += size + GAP;
      below = children.get(each.name) ?? [];
      if (below.length !== 1) break;
      each = below[0];
    }
    row.end = at;
    if (below.length) {
      const start = { row: index, x: at + 3 };
      todo.push(...below.map((child) => ({ node: child, x: at + INDENT, from: start })).reverse());
    }
  }
}

/** Nodes by the name of the one before them, "" of none. Answers of one prompt get a node for it. */
function childrenOf(session) {
  const nodes = new Map(); // by the capsule that they are, or will leave
  for (const each of session.nodes.values()) {
    const name = each.is_root ? `${session.id} from ${each.capsule}` : each.capsule; // another session has it, too
    nodes.set(each.capsule, { name, session: session.id, parent: each.parent ?? "", tokens: each.tokens,
      prompt: each.prompt_tokens, request: each.request, capsule: each.capsule, isRoot: each.is_root, created: each.created });
  }
  for (const each of session.running) {
    const name = nameOf(each);
    if (nodes.has(name)) continue;
    nodes.set(name, { name, session: session.id, parent: each.capsule ?? "", tokens: null, drawn: each.tokens,
      prompt: each.prompt_tokens, request: each.request, branch: each });
  }
  for (const { tokens, capsules } of session.prefixes ?? []) { // those of all come before those of some
    const within = capsules.map((each) => nodes.get(each)).filter(Boolean);
    if (within.length < 2) continue;
    const name = `${within[0].name} prefix ${tokens}`;
    nodes.set(name, { name, session: session.id, parent: within[0].parent, tokens, promptEnd: tokens, request: within[0].request });
    for (const node of within) node.parent = name;
  }
  const children = new Map();
  for (const node of nodes.values()) {
    const before = nodes.get(node.parent);
    node.parent = before ? before.name : "";
    const list = children.get(node.parent) ?? [];
    list.push(node);
    children.set(node.parent, list);
  }
  measure(children);
  return children;
}

/** Where each node's own tokens begin, and where its prompt ends. */
function measure(children) {
  const todo = [["", 0]];
  while (todo.length) {
    const [name, start] = todo.pop();
    const list = shared(children.get(name) ?? [], start, name);
    if (list.length) children.set(name, list);
    for (const node of list) {
      node.start = node.isRoot ? 0 : start;
      if (node.tokens === null) node.tokens = Math.max(node.start, node.prompt ?? 0) + node.drawn;
      node.promptEnd = node.isRoot ? node.tokens : Math.min(node.tokens, node.promptEnd ?? node.prompt ?? 0);
      if (node.answers) children.set(node.name, node.answers);
      todo.push([node.name, node.tokens]);
    }
  }
}

/** `list`, but that several answers of one prompt stand below a node of that prompt. */
function shared(list, start, parent) {
  const byRequest = new Map();
  for (const node of list) {
    byRequest.set(node.request, [...(byRequest.get(node.request) ?? []), node]);
  }
  return [...byRequest.values()].flatMap((group) => {
    const end = group[0].prompt ?? 0;
    if (group.length < 2 || end <= start || group.some((node) => node.isRoot)) return group;
    const name = `${group[0].request} prompt`;
    return [{ name, session: group[0].session, parent, tokens: end, promptEnd: end, request: group[0].request, answers: group }];
  });
}

/** Total height of rows, in pixels. */
export const height = (rows) => rows.length * ROW;
