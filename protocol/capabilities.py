"""Abilities of engines beyond answers from a text. Ours has all; a lease says what another lacks."""

from typing import Any, Final, Literal, TypeAlias

from mallee.protocol.errors import NotSupported
from mallee.protocol.messages import Demote, Grammar, Inject, Prioritize, Promote

Capability: TypeAlias = Literal[
    "restore",
    "inject",
    "priorities",
    "tiers",
    "retain",
    "reasoning_budgets",
    "grammar_state",
    "loans",
]

REMEDIES: Final[dict[Capability, str]] = {
    "restore": "no branch goes on exactly as it was; fork the capsule instead",
    "inject": "no tokens are put into a branch that runs; cancel it, and go on from its text",
    "priorities": "the priority of a request stays; give it with the request",
    "tiers": "capsules are texts, which lie on no tier; fork it, and its KV is found or computed",
    "retain": "blocks are evicted as the engine likes; leave kv.retain out",
    "reasoning_budgets": "reasoning has no bound of its own; leave it out, or bound max_tokens",
    "grammar_state": "an answer can't go on inside a constrained text; ask for it anew",
    "loans": "state of another process can't be taken in; send the prompt's text",
}
"""The loss without each ability, and the remedy."""


def needs(work: Any) -> frozenset[Capability]:
    """The abilities that a command, or the job that it is made of, needs; for most none."""
    found: list[Capability] = []
    match work:
        case Inject():
            found = ["inject"]
        case Prioritize():
            found = ["priorities"]
        case Demote() | Promote():
            found = ["tiers"]
    if getattr(work, "resumes", False):
        found.append("restore")
    if getattr(work, "retain", ()):
        found.append("retain")
    if any(holder.capsule for holder in getattr(work, "holders", ())):
        found.append("loans")
    limits = getattr(work, "limits", None)
    if limits is not None and limits.max_tokens:  # it draws; a prefill may only repeat a text
        grammar: Grammar | None = work.grammar
        if limits.reasoning is not None:
            found.append("reasoning_budgets")
        if grammar is not None and (grammar.kind == "inherit" or grammar.consumed):
            found.append("grammar_state")
    return frozenset(found)


def refusal(missing: frozenset[Capability]) -> NotSupported:
    """The error of a request that needs what no engine that may take it has."""
    first = min(missing)
    return NotSupported(first, REMEDIES[first])
