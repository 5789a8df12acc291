"""Rules of searches fitted to the trees of a source, by moments."""

from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.synth.programs.exchange import below_each
from mallee.synth.programs.forest import Bools, Forest, forest_of
from mallee.synth.programs.orders import Order, depths_of
from mallee.synth.programs.prompts import OWN
from mallee.synth.programs.rules.drafts import PER_HOUR, Texts
from mallee.synth.programs.rules.trees import Beam, DepthFirst, Uct, Widths
from mallee.synth.programs.rules.uct import exploration_for
from mallee.traces.trace import Ints, Trace
from mallee.traces.workload import NO_PARENT

Rules: TypeAlias = Beam | DepthFirst | Uct

_TRIAL_NODES: Final = 5000  # grown to see how deep trees get


def fit_rules(trace: Trace, *, seed: int = 0) -> Rules:
    """Rules of the order in which most requests of `trace` were searched. As `rules_of`."""
    return rules_of(forest_of(trace), seed=seed)


def rules_of(forest: Forest, *, seed: int = 0) -> Rules:
    """Rules of the order in which most requests of `forest` were searched.

    A beam is fitted by its width and levels, a depth-first search by how often it goes deeper and its
    budget, all else by UCT whose exploration gives as deep trees; `seed` is for its trials. Raises
    ConfigError if nothing was searched.
    """
    sizes = np.bincount(forest.order, weights=forest.sizes, minlength=len(Order)).astype(np.int64)
    sizes[[Order.RECORDED, Order.FREE]] = 0
    if not sizes.any():
        raise ConfigError(f"{forest.name}: no trees that were searched; learn it as a session")
    order = Order(int(sizes.argmax()))
    is_in = forest.order[forest.program] == order
    num_trees = int((forest.order == order).sum())
    texts = _texts(forest, is_in)
    begin_s = forest.begin_s[forest.order == order]
    span_s = max(forest.end_s, float(begin_s.max())) - float(begin_s.min())
    per_hour = 3600.0 * num_trees / span_s if span_s > 0 else PER_HOUR
    width = np.bincount(forest.nodes.parent[is_in & ~_roots(forest)], minlength=len(is_in))
    expanded = is_in & (width > 0)
    depth = forest.nodes.depth
    levels = int(depth[is_in].max())
    if order is Order.BREADTH:
        beams = np.bincount(depth[expanded], minlength=2)[1:] / num_trees
        beam = max(1, round(float(beams.max(initial=1.0))))
        return Beam(beam, max(1, levels), _widths(width[expanded]), texts, per_hour)
    if order is Order.DEPTH:
        tried = is_in & (depth > 0) & (depth < levels)
        follow = float(expanded[tried].mean()) if tried.any() else 0.0
        budget = int(forest.sizes[forest.order == order].max()) - 1
        return DepthFirst(
            max(1, budget), max(1, levels), follow, _widths(width[expanded]), texts, per_hour
        )
    fitted = _uct(forest, order, _full_widths(forest, expanded, width), texts, seed)
    return replace(fitted, per_hour=per_hour)


def _uct(forest: Forest, order: Order, widths: Widths, texts: Texts, seed: int) -> Uct:
    trees = np.flatnonzero(forest.order == order)
    is_in = forest.order[forest.program] == order
    visits = max(1, round(float(forest.sizes[trees].mean())) - 1)
    mean_depth = float(forest.nodes.depth[is_in].mean())
    levels = int(forest.nodes.depth[is_in].max())
    trials = max(8, _TRIAL_NODES // visits)

    def mean_depth_at(exploration: float) -> float:
        rules = Uct(visits, levels, exploration, widths, texts)
        rng = np.random.default_rng(seed)  # the same draws at each exploration
        grown = [depths_of(rules.tree(rng, visits + 1)) for _ in range(trials)]
        return sum(map(sum, grown)) / sum(map(len, grown))

    return Uct(visits, levels, exploration_for(mean_depth, mean_depth_at), widths, texts)


def _full_widths(forest: Forest, expanded: Bools, width: Ints) -> Widths:
    """Mean width of nodes once they are full: only then are their children followed.

    Nodes that were not followed might have got more. Leaving them out would favour narrow nodes, which are
    full earlier; so this is the mean by Kaplan and Meier, in whose terms they are censored.
    """
    is_full = expanded & (below_each(forest.nodes.parent) > width)
    full = np.bincount(width[is_full], minlength=2)
    cut = np.bincount(width[expanded & ~is_full], minlength=len(full))[: len(full)]
    at_least = full[::-1].cumsum()[::-1]
    beyond = cut[::-1].cumsum()[::-1] - cut
    stops = full / np.maximum(at_least + beyond, 1)
    return Widths(max(1.0, float(np.cumprod(1.0 - stops)[:-1].sum())))


def _widths(widths: Ints) -> Widths:
    return Widths(float(widths.mean()) if len(widths) else 1.0)


def _roots(forest: Forest) -> Bools:
    found: Bools = forest.nodes.parent == NO_PARENT
    return found


def _texts(forest: Forest, is_in: Bools) -> Texts:
    nodes, prompts = forest.nodes, forest.prompts
    roots = nodes.prompt[is_in & _roots(forest)]
    forks = is_in & ~_roots(forest)
    outputs = nodes.output_tokens[forks & (nodes.output_tokens > 0)]
    owner = np.repeat(np.arange(len(prompts)), np.diff(prompts.run_starts))
    of_others = np.where(prompts.run_state == OWN, 0, prompts.run_count)
    shared = np.bincount(owner, weights=of_others, minlength=len(prompts)) * forest.block_size
    tokens = prompts.shared * forest.block_size + prompts.tail_tokens
    return Texts(
        shared=round(float(shared[roots].mean())),
        task=max(0, round(float((tokens - shared)[roots].mean()))),
        step=round(float(nodes.added_tokens[forks].mean())) if forks.any() else 0,
        output=max(1.0, float(outputs.mean())) if len(outputs) else 1.0,
        output_sigma=float(np.log(outputs).std()) if len(outputs) else 0.0,
    )
