"""An analysis in numbers, for programs: nested dicts of floats that JSON can hold.

    name, requests, duration_s, block_size, rule ("floor", "ceil")
    lengths    isl, osl: Quantiles, tokens
    arrivals   rate_per_s; gap_s: Quantiles; gap_cv; dispersion, autocorrelation: {bin's seconds: value};
               tick_s: what all timestamps are multiples of, or null
    tree       blocks (distinct), roots, branch_nodes, width_2_share; branch_width, branch_depth,
               block_depth: Quantiles. Roots and branches are of requests where these fork
    reuse      ideal_hit, mean_hit_share (of requests); new_tokens, new_blocks, hit_depth (blocks),
               gap_requests, gap_s: Quantiles; lru: [{share, blocks, hit_rate,
               engine_hit_rate}], of plain LRU and of one that gives up the ends of prompts first;
               windows: ideal hit rate of each fortieth of the requests
    sessions   sessions, lines; turns, turns_per_line, lines_per_session, duration_s, turn_gap_s:
               Quantiles; relations: {extends, rolls_back, diverges, resets, returns: share};
               rollback_tokens: Quantiles
    hierarchy  spawns; children, start_stagger_s, live_siblings, join_wait_s, spawn_wait_s,
               shared_with_parent: Quantiles
    forks      null, or trees, expanded_share; width, depth, leaf_depth, backtrack_levels: Quantiles
    second_order  {name: Spearman's correlation}

Quantiles are {count, mean, p5, p25, p50, p75, p90, p99, max}, null where nothing of the kind is there.
What a name means exactly is told where `Analysis` and its parts are.
"""

import math
from typing import Any, Final

import numpy as np

from mallee.synth.analysis.analysis import Analysis
from mallee.synth.analysis.arrivals import variation
from mallee.synth.analysis.forks import Forks
from mallee.synth.analysis.stack import SHARES
from mallee.traces.numbers import Floats

QUANTILES: Final = (5, 25, 50, 75, 90, 99)


def summary_of(analysis: Analysis) -> dict[str, Any]:
    """The module has the keys."""
    found: dict[str, Any] = {
        "name": analysis.name,
        "requests": analysis.num_requests,
        "duration_s": analysis.duration_s,
        "block_size": analysis.block_size,
        "rule": analysis.rule,
        "lengths": {"isl": quantiles(analysis.isl), "osl": quantiles(analysis.osl)},
        "arrivals": _arrivals(analysis),
        "tree": _tree(analysis),
        "reuse": _reuse(analysis),
        "sessions": _sessions(analysis),
        "hierarchy": _hierarchy(analysis),
        "forks": None if analysis.forks is None else _forks(analysis.forks),
        "second_order": analysis.second_order,
    }
    return {name: _finite(value) for name, value in found.items()}


def quantiles(values: Floats) -> dict[str, float] | None:
    """None of nothing."""
    if not len(values):
        return None
    shares = [each / 100 for each in QUANTILES]
    found = zip(QUANTILES, np.quantile(values, shares).tolist(), strict=True)
    return {
        "count": len(values),
        "mean": float(values.mean()),
        **{f"p{share}": value for share, value in found},
        "max": float(values.max()),
    }


def _arrivals(analysis: Analysis) -> dict[str, Any]:
    span = analysis.duration_s
    return {
        "rate_per_s": analysis.num_requests / span if span else None,
        "gap_s": quantiles(analysis.gaps_s),
        "gap_cv": variation(analysis.gaps_s),
        "dispersion": {f"{width:g}": value for width, value in analysis.dispersion.items()},
        "autocorrelation": {
            f"{width:g}": value for width, value in analysis.autocorrelation.items()
        },
        "tick_s": analysis.tick_s,
    }


def _tree(analysis: Analysis) -> dict[str, Any]:
    widths = analysis.branch_widths
    return {
        "blocks": analysis.num_blocks,
        "roots": analysis.roots,
        "branch_nodes": len(widths),
        "width_2_share": float(np.mean(widths == 2)) if len(widths) else None,
        "branch_width": quantiles(widths),
        "branch_depth": quantiles(analysis.branch_depths),
        "block_depth": quantiles(analysis.depths),
    }


def _reuse(analysis: Analysis) -> dict[str, Any]:
    depth = analysis.hit_depth + analysis.new_blocks
    has_blocks = depth > 0
    hit_shares = analysis.hit_depth[has_blocks] / depth[has_blocks]
    sizes = analysis.mrc_sizes
    curves = analysis.hits_at(sizes), analysis.engine_curve.hits_at(sizes)
    curve = zip(SHARES, sizes.tolist(), *(each.tolist() for each in curves), strict=True)
    return {
        "ideal_hit": analysis.ideal_hit,
        "mean_hit_share": float(hit_shares.mean()) if len(hit_shares) else None,
        "new_tokens": quantiles(analysis.new_tokens),
        "new_blocks": quantiles(analysis.new_blocks),
        "hit_depth": quantiles(analysis.hit_depth),
        "gap_requests": quantiles(analysis.reuse_gap_requests),
        "gap_s": quantiles(analysis.reuse_gap_s),
        "lru": [
            {"share": share, "blocks": int(size), "hit_rate": plain, "engine_hit_rate": engine}
            for share, size, plain, engine in curve
        ]
        if analysis.num_blocks
        else [],
        "windows": analysis.hit_windows.tolist(),
    }


def _sessions(analysis: Analysis) -> dict[str, Any]:
    related = analysis.relations
    counts = {
        "extends": related.extends,
        "rolls_back": related.rolls_back,
        "diverges": related.diverges,
        "resets": related.resets,
        "returns": related.returns,
    }
    return {
        "sessions": len(analysis.turns_per_session),
        "lines": len(analysis.turns_per_line),
        "turns": quantiles(analysis.turns_per_session),
        "turns_per_line": quantiles(analysis.turns_per_line),
        "lines_per_session": quantiles(analysis.lines_per_session),
        "duration_s": quantiles(analysis.session_duration_s),
        "turn_gap_s": quantiles(analysis.turn_gaps_s),
        "relations": {name: count / max(1, related.total) for name, count in counts.items()},
        "rollback_tokens": quantiles(related.rollback_tokens),
    }


def _hierarchy(analysis: Analysis) -> dict[str, Any]:
    return {
        "spawns": len(analysis.children_per_spawn),
        "children": quantiles(analysis.children_per_spawn),
        "start_stagger_s": quantiles(analysis.start_stagger_s),
        "live_siblings": quantiles(analysis.live_siblings),
        "join_wait_s": quantiles(analysis.join_wait_s),
        "spawn_wait_s": quantiles(analysis.spawn_wait_s),
        "shared_with_parent": quantiles(analysis.shared_with_parent),
    }


def _forks(forks: Forks) -> dict[str, Any]:
    return {
        "trees": forks.trees,
        "expanded_share": forks.expanded_share,
        "width": quantiles(forks.widths),
        "depth": quantiles(forks.depths),
        "leaf_depth": quantiles(forks.leaf_depths),
        "backtrack_levels": quantiles(forks.backtracks),
    }


def _finite(value: Any) -> Any:
    """`value` with None for numbers that are none, at any depth."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
