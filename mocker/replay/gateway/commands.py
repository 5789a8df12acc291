"""Commands to workers for the shards of requests."""

from typing import Final

from mallee.mocker.replay.gateway.prompts import PromptTexts
from mallee.mocker.replay.gateway.requests import Shard
from mallee.protocol.messages import Command, Fork, Generate, Prefill, Sampling

GREEDY: Final = Sampling()
_RECOMPUTED_TTL_S: Final = 600.0  # of a capsule that is computed to be forked once


def again_name(shard: Shard) -> str:
    """The name under which a worker computes the capsule of `shard` anew."""
    return f"{shard.name}-r"


def command_of(shard: Shard, prompts: PromptTexts) -> Command:
    """The command that begins `shard`: for a fork away from its capsule a prefill; `fork_of` follows."""
    dispatch, state = shard.dispatch, shard.state
    if dispatch.is_fork:
        if shard.how == "stay":
            assert dispatch.capsule is not None, "without its capsule a fork can't stay with it"
            return fork_of(shard, dispatch.capsule)
        text = prompts.before(state.request)
        state.raws.append(text.raw)
        return Prefill(again_name(shard), text.raw, "", _RECOMPUTED_TTL_S, state.share)
    assert dispatch.text is not None, "what forks nothing has its whole text"
    raw, rows = dispatch.text.raw, shard.rows
    if not dispatch.max_tokens:
        return Prefill(shard.name, raw, "", 0.0, state.share)
    return Generate(
        shard.name, raw, dispatch.limits, GREEDY, len(rows), "", rows.start, state.share
    )


def fork_of(shard: Shard, capsule: str) -> Fork:
    """The fork of `capsule` into the rows of `shard`, each with its own text."""
    dispatch, rows = shard.dispatch, shard.rows
    suffixes = shard.state.suffixes[rows.start : rows.stop]
    return Fork(
        shard.name, capsule, suffixes, dispatch.limits, GREEDY, rows.start, shard.state.share
    )
