"""Swarms with rounds, agents and losers: sources of searches that no program by rules makes.

A round forks the context `width` times and spawns `agents`, and goes on when all or the first `needed` have
ended; those too late may be killed. It goes on from the branch that ended first, or rolled back to where
the round began.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mallee.synth.core.pace import TOKEN_S, service_s
from mallee.synth.programs.emit import Draft
from mallee.synth.programs.rule import Rule, Texts


@dataclass(frozen=True, slots=True)
class Rounds(Rule):
    """Rules of swarms; `needed` branches and agents must have ended before a round is joined."""

    name = "swarms"
    width: int = 8  # forks a round
    agents: int = 0  # spawned a round
    needed: int | None = None  # None: all; 1: the first
    kills_losers: bool = True  # answers of those too late end when the round does
    rollback: float = 0.0  # chance to go on from where the round began
    rounds: int = 1
    agent_turns: int = 3
    tool_wait_s: float = 1.0  # before each further turn of an agent, and before a join; mean
    texts: Texts = field(default_factory=Texts)

    def draft(self, rng: np.random.Generator) -> Sequence[Draft]:
        """One swarm."""
        drafts = [Draft(self.texts.task, 0, "root")]
        context = 0  # what the next round forks
        for _ in range(self.rounds):
            context = self._round(drafts, context, rng)
        return drafts

    def _round(self, drafts: list[Draft], context: int, rng: np.random.Generator) -> int:
        """Adds a round to `drafts`; returns the place of its join."""
        threads = [*self._branches(context, rng), *self._agents(context, rng)]
        ends_s = [sum(map(_takes_s, thread)) for thread in threads]
        order = sorted(range(len(threads)), key=lambda thread: (ends_s[thread], thread))
        winners = order[: len(threads) if self.needed is None else self.needed]
        if self.kills_losers:
            for loser in order[len(winners) :]:
                threads[loser] = _killed(threads[loser], ends_s[winners[-1]])
        lasts = []
        for thread in threads:
            _add(drafts, thread)
            lasts.append(len(drafts) - 1)
        # Agents' contexts are their own: a round goes on from a branch, or from where it began.
        branch = next((lasts[i] for i in winners if threads[i][0].cls == "branch"), context)
        drafts.append(
            Draft(
                tokens=self.texts.task,
                output_tokens=self.texts.outputs(rng, 1)[0],
                cls="join",
                parent=context if rng.random() < self.rollback else branch,
                waits=tuple(sorted(lasts[i] for i in winners)),
                tool_wait_s=_wait_s(rng, self.tool_wait_s),
            )
        )
        return len(drafts) - 1

    def _branches(self, context: int, rng: np.random.Generator) -> list[list[Draft]]:
        step = self.texts.step
        outputs = self.texts.outputs(rng, self.width)
        return [[Draft(step, output, "branch", parent=context)] for output in outputs]

    def _agents(self, context: int, rng: np.random.Generator) -> list[list[Draft]]:
        """Agents that `context` spawned; each turn goes on from the one before."""
        agents = []
        for _ in range(self.agents):
            outputs = self.texts.outputs(rng, self.agent_turns)
            task = self.texts.task
            thread = [Draft(task, outputs[0], "agent", waits=(context,))]
            for output in outputs[1:]:
                wait_s = _wait_s(rng, self.tool_wait_s)
                thread.append(Draft(task, output, "agent", tool_wait_s=wait_s))
            agents.append(thread)
        return agents


def _wait_s(rng: np.random.Generator, mean_s: float) -> float:
    return float(rng.exponential(mean_s)) if mean_s else 0.0


def _takes_s(draft: Draft) -> float:
    return draft.tool_wait_s + service_s(draft.tokens, draft.output_tokens)


def _killed(thread: Sequence[Draft], after_s: float) -> list[Draft]:
    """The drafts of a thread that had begun `after_s` after its begin; the last answer is cut."""
    kept: list[Draft] = []
    left_s = after_s
    for draft in thread:
        begun_s = draft.tool_wait_s + service_s(draft.tokens, 0)
        if kept and left_s <= begun_s:
            break
        had = max(1, int((left_s - begun_s) / TOKEN_S))
        kept.append(draft._replace(output_tokens=min(draft.output_tokens, had)))
        left_s -= _takes_s(draft)
    return kept


def _add(drafts: list[Draft], thread: Sequence[Draft]) -> None:
    """A thread's first draft says where it begins; each other forks the one before."""
    drafts.append(thread[0])
    for draft in thread[1:]:
        drafts.append(draft._replace(parent=len(drafts) - 1))
