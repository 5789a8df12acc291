// What the page knows: sessions with their capsules and running branches, texts and values by node.
// A node is a capsule, or a branch under way that will leave one: both have the name `REQUEST.BRANCH`.

import { ask, sessionPath } from "./api.js";

const MAX_REMEMBERED = 8192; // texts of nodes
const HELD_MS = 2000; // for which a look at the capsules that are held counts

export class Store {
  constructor() {
    this.sessions = new Map(); // by name: { id, parent, created, nodes: Map, running: [] }
    this.texts = new Map(); // by node: the end of its text, or of its own part
    this.streams = new Map(); // by node: the text that this page's own requests have streamed
    this.values = new Map(); // by capsule: the score that a search of this page gave it
    this.held = new Map(); // by session: when it was asked for, and its capsules that are held
    this.listeners = new Set();
  }

  /** Call `listener` after each change, at most once a frame. */
  listen(listener) {
    this.listeners.add(listener);
  }

  changed() {
    if (this.due) return;
    this.due = requestAnimationFrame(() => {
      this.due = 0;
      for (const listener of this.listeners) listener();
    });
  }

  clear() {
    this.sessions.clear();
    this.texts.clear();
    this.streams.clear();
    this.values.clear();
    this.changed();
  }

  /** Take in an event of `/v1/watch`; the first one of a watch has all sessions. */
  take(event, isFirst) {
    if (isFirst) {
      const named = new Set(event.sessions.map((each) => each.id));
      for (const name of this.sessions.keys()) if (!named.has(name)) this.sessions.delete(name);
    }
    for (const name of event.gone) this.sessions.delete(name);
    for (const each of event.sessions) this.#takeSession(each);
    this.changed();
  }

  #takeSession(told) {
    let session = this.sessions.get(told.id);
    if (session === undefined || told.is_new) {
      session = { id: told.id, nodes: new Map(), running: [] };
      this.sessions.set(told.id, session);
    }
    Object.assign(session, { parent: told.parent, created: told.created, lastUsed: told.last_used });
    for (const node of told.nodes) session.nodes.set(node.capsule, node);
    for (const name of told.gone) session.nodes.delete(name);
    session.prefixes = told.prefixes ?? session.prefixes;
    session.running = told.running;
    for (const branch of told.running) {
      if (branch.tail) remember(this.texts, nameOf(branch), branch.tail);
    }
  }

  /** Whether a node's capsule is held: nothing is asked of one that is gone. */
  async isHeld(node) {
    if (!(Date.now() - this.held.get(node.session)?.at < HELD_MS)) {
      const asked = ask("GET", sessionPath(node.session));
      this.held.set(node.session, { at: Date.now(), capsules: asked.then((told) => new Set(told.nodes.filter((each) => each.held).map((each) => each.capsule))) });
    }
    return (await this.held.get(node.session).capsules).has(node.capsule);
  }

  /** Add what this page's own request streamed of a branch. */
  stream(node, text) {
    remember(this.streams, node, (this.streams.get(node) ?? "") + text);
    this.changed();
  }

  /** The end of a node's text, if it is known. */
  tail(node) {
    const streamed = this.streams.get(node);
    return streamed ? streamed.slice(-200) : this.texts.get(node);
  }

}

/** Set a value, and forget the oldest ones beyond so many. */
export function remember(map, name, value) {
  map.set(name, value);
  if (map.size > MAX_REMEMBERED) map.delete(map.keys().next().value);
}

export const nameOf = (branch) => `${branch.request}.${branch.branch}`;
