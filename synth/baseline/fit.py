"""Learns the tree model from a trace."""

from mallee.protocol.errors import ConfigError
from mallee.synth.baseline.arrivals import fit_bursts
from mallee.synth.baseline.core import merge_chains, owners, shared_depths
from mallee.synth.baseline.model import TreeModel
from mallee.synth.baseline.stops import fit_stops
from mallee.synth.core.threads import threads_of
from mallee.traces.trace import Trace


def fit_tree(trace: Trace) -> TreeModel:
    """The tree model of `trace`, whose forks count as requests with whole prompts.

    O(block references). Raises ConfigError for a trace without requests, CodecError if its blocks are
    no prefix tree.
    """
    if not len(trace):
        raise ConfigError(f"{trace.name}: there are no requests to learn from")
    threads = threads_of(trace)
    tree = threads.tree
    depths = shared_depths(trace, tree)
    core, nodes = merge_chains(trace, tree, depths)
    stops, own_text = fit_stops(trace, nodes, depths)
    return TreeModel(
        source=trace.name,
        block_size=trace.block_size,
        rule=trace.rule,
        core=core,
        owners=owners(core, nodes, threads.session),
        stops=stops,
        own_text=own_text,
        output_tokens=trace.output_tokens.copy(),
        bursts=fit_bursts(trace.arrival_s),
    )
