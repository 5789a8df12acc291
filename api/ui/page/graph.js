// The timeline of one graph: when its nodes waited, computed their prompts and drew, and what the end waited for.

import { ask, segment } from "./api.js";
import { make, count } from "./dom.js";

const KINDS = { failed: "failed", cancelled: "cancelled" }; // of what was drawn, where it came to nothing

/** Draw the graph `id` into `place`. Returns whether it still runs. Throws as `ask`. */
export async function showGraph(place, id, signal) {
  const graph = await ask("GET", `v1/graphs/${segment(id)}`, undefined, signal);
  const nodes = Object.entries(graph.nodes);
  const ends = nodes.map(([, node]) => node.end_ms ?? node.first_token_ms ?? node.start_ms ?? 0);
  const all = Math.max(graph.wall_ms ?? 0, ...ends, 1);
  const way = new Set((graph.path ?? []).map((step) => step.node));
  const head = make("p", {}, `${graph.id}: ${graph.status}, ${count(nodes.length)} nodes`,
    graph.wall_ms === null ? "" : `, ${graph.wall_ms.toFixed(0)} ms; the end waited for the bold ones`);
  place.replaceChildren(head, ...nodes.map(([name, node]) => lane(name, node, all, way.has(name))));
  return graph.status === "running";
}

function lane(name, node, all, isOnWay) {
  const { ready_ms: ready, start_ms: start, first_token_ms: first } = node;
  const end = node.end_ms ?? all;
  const parts = start === null
    ? [span("waited", ready, end, all)]
    : [span("waited", ready, start, all), span("computed", start, first ?? end, all),
      first === null ? null : span(KINDS[node.status] ?? "drew", first, end, all)];
  return make(isOnWay ? "div.lane.way" : "div.lane", { title: node.error?.message ?? `${node.kind}, ${node.status}` },
    make("span.name", {}, name, " ", make("small", {}, node.status === "done" ? node.kind : `${node.kind}, ${node.status}`)),
    make("span.track", {}, ...parts.filter(Boolean)),
    make("span.ms", {}, node.end_ms === null ? "–" : `${node.end_ms.toFixed(0)} ms`));
}

function span(kind, from, to, all) {
  if (from === null || to <= from) return null;
  return make(`i.${kind}`, { style: { left: `${(100 * from) / all}%`, width: `${(100 * (to - from)) / all}%` } });
}
