"""The sampler's state of requests and branches, made when one of their tokens is to be drawn.

Many thousands of branches may wait for that.
"""

from mallee.protocol.messages import Limits, Sampling
from mallee.worker.forward import Constraint, Ids, TokenHistory
from mallee.worker.kv.node import Node


class DrawRules:
    """Rules of all draws of one request.

    `is_plain`: draws need nothing but logits, and their updates carry nothing but tokens. `stop_ids`: beside
    the model's own; a set, as clients may give as many as they like. `shared`: distinct tokens of what its
    branches continue.
    """

    __slots__ = ("has_penalties", "is_plain", "sampling", "shared", "stop_ids")

    def __init__(self, sampling: Sampling, limits: Limits, *, has_grammar: bool) -> None:
        self.sampling = sampling
        self.has_penalties = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        self.is_plain = not (
            has_grammar
            or self.has_penalties
            or limits.min_tokens
            or limits.reasoning is not None
            or sampling.logprobs >= 0
        )
        self.stop_ids = frozenset(limits.stop_token_ids)
        self.shared: dict[Node | None, Ids] = {}


class Answer:
    """State of the draws of one branch.

    `history`: from the first draw on, if there are penalties. `has_reasoned`: its reasoning has ended, or
    there is none: no budget counts. `untold_drafts`: as `Update.drafts`, for the next one.
    """

    __slots__ = ("constraint", "has_reasoned", "history", "rules", "seed", "untold_drafts")

    def __init__(self, rules: DrawRules, seed: int, constraint: Constraint | None) -> None:
        self.rules = rules
        self.seed = seed  # of its stream of draws
        self.constraint = constraint
        self.history: TokenHistory | None = None
        self.has_reasoned = False
        self.untold_drafts: tuple[int, int] | None = None
