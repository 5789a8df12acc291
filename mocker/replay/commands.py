"""What workers are told of the parts of calls."""

from typing import Final

from mallee.mocker.replay.calls import Library, Part
from mallee.protocol.messages import Command, Fork, Generate, Prefill, Sampling

GREEDY: Final = Sampling()
_RECOMPUTED_TTL_S: Final = 600.0  # of a capsule that is computed to be forked once


def again_name(part: Part) -> str:
    """The name under which a worker computes the capsule of `part` anew."""
    return f"{part.name}-r"


def command_of(part: Part, library: Library) -> Command:
    """What begins `part`. Where its capsule is not, it is computed first, and `fork_of` follows."""
    order, call = part.order, part.call
    if order.is_fork:
        if part.how == "stay":
            assert order.capsule is not None, "without its capsule a fork can't stay with it"
            return fork_of(part, order.capsule)
        text = library.before(call.request)
        call.raws.append(text.raw)
        return Prefill(again_name(part), text.raw, "", _RECOMPUTED_TTL_S, call.share)
    assert order.text is not None, "what forks nothing has its whole text"
    raw, rows = order.text.raw, part.rows
    if not order.max_tokens:
        return Prefill(part.name, raw, "", 0.0, call.share)
    return Generate(part.name, raw, order.limits, GREEDY, len(rows), "", rows.start, call.share)


def fork_of(part: Part, capsule: str) -> Fork:
    """The rows of `part` continue `capsule`, each with its own text."""
    order, rows = part.order, part.rows
    suffixes = part.call.suffixes[rows.start : rows.stop]
    return Fork(part.name, capsule, suffixes, order.limits, GREEDY, rows.start, part.call.share)
