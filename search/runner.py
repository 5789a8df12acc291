"""Carries out what a search asks for, some at once, by steps of its host: a gateway or an SDK."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from mallee.protocol.errors import ContextLengthExceeded
from mallee.search.driver import Expand, Score, Search
from mallee.search.policy import Policy, SearchBudget
from mallee.search.scores import Scoring, Verifier
from mallee.search.tree import ROOT, Node, Proposal

AT_ONCE: Final = 16  # steps of one search
_LOST: Final = ("error", "cancelled")  # finish reasons of branches that are none

T = TypeVar("T")


class Ends(NamedTuple):
    """The ends of steps. `stop`: strings after which the next step begins; they are part of the step.

    `marks`: a text with one of them in its last step is a whole answer.
    """

    stop: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    @classmethod
    def of(cls, stop: str | Sequence[str] | None, marks: Iterable[str]) -> "Ends":
        """From `stop` as requests give it."""
        return cls((stop,) if isinstance(stop, str) else tuple(stop or ()), tuple(marks))


class Drawn(NamedTuple):
    """One branch as its host has it: `finish` is its finish reason, `capsule` the state that it left.

    `top`: the likeliest tokens' log-probabilities in each place, if they were asked for; `tokens` likewise.
    """

    text: str
    finish: str | None
    capsule: str | None
    num_tokens: int
    logprobs: Sequence[float] = ()
    top: Sequence[Mapping[str, float]] = ()
    tokens: Sequence[int] = ()


class Steps(Protocol):
    """The requests of a search. Each raises as its host's do; cancelled, it leaves nothing running."""

    async def draw(self, work: Expand) -> Sequence[Drawn]:
        """Continuations of a state, with their log-probabilities."""
        ...

    async def ask(self, verifier: Verifier, key: str) -> Drawn:
        """The answer to a verifier's question about a state: a greedy draw, the same everywhere."""
        ...

    async def value(self, work: Score) -> Sequence[float | None]:
        """The values of texts by a function or a service."""
        ...


class Runner:
    """Runs one search from the state `root` on. With the `score` "outside" its steps give values."""

    def __init__(
        self,
        steps: Steps,
        policy: Policy,
        root: str,
        *,
        score: Scoring | Verifier,
        seed: int,
        budget: SearchBudget,
        ends: Ends,
    ) -> None:
        self._verifier = score if isinstance(score, Verifier) else None
        scoring: Scoring = "outside" if isinstance(score, Verifier) else score
        begin = Proposal("", 0, root)
        self.search = Search(policy, begin, seed=seed, budget=budget, scoring=scoring)
        self._steps = steps
        self._ends = ends
        self._room = asyncio.Semaphore(AT_ONCE)

    async def nodes(self) -> AsyncGenerator[list[Node], None]:
        """Nodes as they join the tree, until the search is over. Raises what its steps raise.

        Closed, it ends what still runs.
        """
        search, num_told = self.search, 1  # the root is known
        running: dict[asyncio.Task[Any], Expand | Score] = {}
        try:
            while not search.is_over:
                for work in search.work():
                    running[asyncio.create_task(self._carry_out(work))] = work
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    work, results = running.pop(task), task.result()
                    if isinstance(work, Expand):
                        search.expanded(work.work, results)
                    else:
                        search.scored(work.work, results)
                if fresh := search.tree.nodes[num_told:]:
                    num_told += len(fresh)
                    yield fresh
        finally:
            await _end(running)

    def _carry_out(self, work: Expand | Score) -> Coroutine[Any, Any, Any]:
        if isinstance(work, Expand):
            return self._expand(work)
        if self._verifier is None:
            return self._value(work)
        return _all(self._verified(self._verifier, each) for each in work.proposals)

    async def _expand(self, work: Expand) -> list[Proposal]:
        """The continuations of a node; none where the window has no room, unless it is the beginning."""
        try:
            async with self._room:
                drawn = await self._steps.draw(work)
        except ContextLengthExceeded:
            if work.node == ROOT:
                raise
            return []
        found = (proposal_of(each, self._ends) for each in drawn)
        return [proposal for proposal in found if proposal is not None]

    async def _value(self, work: Score) -> Sequence[float | None]:
        async with self._room:
            return await self._steps.value(work)

    async def _verified(self, verifier: Verifier, proposal: Proposal) -> float | None:
        """The value of a text by a question to the model; None where that can't be asked."""
        if not proposal.key:
            return None
        try:
            async with self._room:
                answer = await self._steps.ask(verifier, proposal.key)
        except ContextLengthExceeded:
            return None
        return verifier.value(answer.text, answer.top)


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first error is raised once the others have ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def proposal_of(drawn: Drawn, ends: Ends) -> Proposal | None:
    """The proposal of a branch; None if it failed.

    It is a whole answer if it ended by itself and not by a stop string, has a mark, ran out of its budget,
    or left no state from which it could go on.
    """
    if drawn.finish in _LOST:
        return None
    is_step = drawn.finish == "length" or (
        drawn.finish == "stop" and drawn.text.endswith(ends.stop)
    )
    has_mark = any(mark in drawn.text for mark in ends.marks)
    return Proposal(
        drawn.text,
        drawn.num_tokens,
        drawn.capsule or "",
        sum(drawn.logprobs) if drawn.logprobs else None,
        is_end=not is_step or has_mark or drawn.capsule is None,
        tokens=tuple(drawn.tokens),
        logprobs=tuple(drawn.logprobs) if drawn.tokens else (),
    )
