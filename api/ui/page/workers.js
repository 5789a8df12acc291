// The workers: what each runs, what waits, and its cache by tier. For operators.

import { ask } from "./api.js";
import { make, count, meter } from "./dom.js";

/** Draw the workers of the service into `place`. Throws as `ask`. */
export async function showWorkers(place, signal) {
  try {
    const { data } = await ask("GET", "v1/router/workers", undefined, signal);
    data.sort((one, other) => one.worker.localeCompare(other.worker, "en", { numeric: true }));
    place.replaceChildren(...data.map(card));
    if (!data.length) place.replaceChildren(make("p", {}, "No worker is known here."));
  } catch (error) {
    if (error.status !== 403) throw error;
    place.replaceChildren(make("p", {}, "Workers are shown to an operator's key. Your own sessions need none."));
  }
}

function card(worker) {
  const { num_blocks: all, active_blocks: active, tiers } = worker;
  const below = Object.entries(tiers?.blocks ?? {}).filter(([, num]) => num);
  return make("section.card", { "aria-label": worker.worker },
    make("h2", {}, worker.worker, make(worker.state === "ready" ? "span.ready" : "span.other", {}, worker.state)),
    meter(active / Math.max(1, all), `device: ${count(active)} of ${count(all)} blocks in use`),
    ...below.map(([tier, num]) => make("div", {}, `${tier}: ${count(num)} blocks`)),
    make("div", {}, `${count(worker.rows)} rows run, ${count(worker.waiting)} wait, ${count(worker.prefill_tokens)} prompt tokens to compute`),
    make("div", {}, `${count(worker.indexed_blocks)} blocks known to the router, lease ${worker.lease_age_s.toFixed(1)} s ago`),
    worker.device ? make("div", {}, worker.device) : null,
    make("div", {}, `weights ${worker.weight_version}`));
}
