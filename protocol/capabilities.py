"""Abilities of engines beyond answers from a text. Ours has all; a lease says what another lacks."""

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from mallee.protocol.errors import NotSupported
from mallee.protocol.messages import (
    Command,
    Demote,
    Fork,
    Generate,
    Grammar,
    Holder,
    Inject,
    Limits,
    Prefill,
    Prioritize,
    Promote,
    RetainSpan,
)

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
"""What is not there without the ability, and what to do instead."""


def needs_of(
    *,
    grammar: Grammar | None = None,
    limits: Limits | None = None,
    retain: Sequence[RetainSpan] = (),
    holders: Sequence[Holder] = (),
    resumes: bool = False,
) -> frozenset[Capability]:
    """The abilities that a request with these fields needs; for most none."""
    found: list[Capability] = []
    if resumes:
        found.append("restore")
    if retain:
        found.append("retain")
    if limits is not None and limits.reasoning is not None:
        found.append("reasoning_budgets")
    if any(holder.capsule for holder in holders):
        found.append("loans")
    if grammar is not None and (grammar.kind == "inherit" or grammar.consumed):
        found.append("grammar_state")
    return frozenset(found)


def needs(command: Command) -> frozenset[Capability]:
    """The abilities that `command` needs."""
    match command:
        case Generate(grammar=grammar, limits=limits, retain=retain):
            return needs_of(grammar=grammar, limits=limits, retain=retain)
        case Fork(grammar=grammar, limits=limits, retain=retain, resumes=resumes):
            return needs_of(grammar=grammar, limits=limits, retain=retain, resumes=resumes)
        case Prefill(retain=retain, holders=holders):
            # The grammar of a lost capsule's text: it is needed by forks that go on in it.
            return needs_of(retain=retain, holders=holders)
        case Inject():
            return frozenset(("inject",))
        case Prioritize():
            return frozenset(("priorities",))
        case Demote() | Promote():
            return frozenset(("tiers",))
    return frozenset()


def refusal(missing: frozenset[Capability]) -> NotSupported:
    """The error of a request that needs what no engine that may take it has."""
    first = min(missing)
    return NotSupported(first, REMEDIES[first])
