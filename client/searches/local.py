"""Searches that run at the client: a step is a fork of a capsule, and so is a verifier's question.

`run` and `run_async` carry out what a `Search` asks for, some of it at once.
"""

import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from mallee.client.calls import terms_of
from mallee.client.critic import result_of
from mallee.client.results import BranchState
from mallee.protocol.errors import ContextLengthExceeded, InvalidParameter
from mallee.search.drawn import Drawn, Ends, proposal_of
from mallee.search.driver import NO_BUDGET, Expand, Score, Search
from mallee.search.policy import Policy, SearchBudget
from mallee.search.results import SearchResult
from mallee.search.scores import Scoring, Verifier
from mallee.search.tree import ROOT, Proposal

AT_ONCE: Final = 16  # requests of one search

Value: TypeAlias = Callable[[str], float | None]
"""The value of a text, from the end of the search's prompt on; None: it has none."""
AsyncValue: TypeAlias = Callable[[str], float | Awaitable[float | None] | None]
"""As `Value`, or a coroutine function; a plain one runs in a thread."""
LogprobScore: TypeAlias = Literal["mean_logprob", "sum_logprob"]
Work: TypeAlias = Expand | Score
Results: TypeAlias = list[Proposal] | list[float | None]
Open: TypeAlias = Callable[[str, Any, Mapping[str, Any]], Any]
"""Begins forks of a capsule: its id, the branches, parameters."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A search as its caller asked for it. `params` are those of every request."""

    search: Search
    params: Mapping[str, Any]
    ends: Ends
    score: Any
    fork: Open

    def draw(self, work: Expand) -> Any:
        """The branches of an expansion, under way."""
        stop = {"stop": list(self.ends.stop), "include_stop_str_in_output": True}
        drawn = {"max_tokens": work.max_tokens, "seed": work.seed, "logprobs": 0}
        params = {**self.params, **(stop if self.ends.stop else {}), **drawn}
        return self.fork(work.key, work.num, params)

    def ask(self, verifier: Verifier, proposal: Proposal) -> Any:
        """A verifier's answer about a proposal, under way. Its draw is greedy, the same everywhere."""
        salt = {"cache_salt": self.params.get("cache_salt")}
        drawn = {"max_tokens": verifier.tokens, "temperature": 0.0, "seed": 0}
        params = {**salt, **terms_of(self.params), **drawn, "logprobs": verifier.num_logprobs}
        return self.fork(proposal.key, [verifier.prompt], params)

    def proposals(self, branches: Sequence[BranchState]) -> list[Proposal]:
        found = (proposal_of(_drawn(branch), self.ends) for branch in branches)
        return [proposal for proposal in found if proposal is not None]

    def take(self, work: Work, results: Any) -> None:
        """Hand results to the search."""
        if isinstance(work, Expand):
            self.search.expanded(work.work, results)
        else:
            self.search.scored(work.work, list(map(checked, results)))


def planned(
    policy: Policy,
    root: str,
    fork: Open,
    *,
    score: Any,
    seed: int,
    budget: SearchBudget | None,
    ends: Sequence[str],
    params: Mapping[str, Any],
) -> Plan:
    """A search from the capsule `root` on. Raises InvalidParameter."""
    scoring: Scoring = "outside"
    if score in ("mean_logprob", "sum_logprob"):
        scoring = score
    elif not (callable(score) or isinstance(score, Verifier)):
        remedy = 'give "mean_logprob", "sum_logprob", a Verifier, or a function of a text'
        raise InvalidParameter("score", score, remedy)
    stop = params.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    search = Search(
        policy, Proposal("", 0, root), seed=seed, budget=budget or NO_BUDGET, scoring=scoring
    )
    rest = {key: value for key, value in params.items() if key != "stop"}
    return Plan(search, rest, Ends(stops, tuple(ends)), score, fork)


def run(plan: Plan) -> SearchResult:
    """The result of a search, by threads. What still runs at its end is ended."""
    over = threading.Event()
    running: dict[Future[Results], Work] = {}
    with ThreadPoolExecutor(AT_ONCE, "search") as pool:
        try:
            while not plan.search.is_over:
                for work in plan.search.work():
                    running[pool.submit(_carry_out, plan, work, over)] = work
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    plan.take(running.pop(future), future.result())
        finally:
            over.set()
            pool.shutdown(wait=True, cancel_futures=True)
    return plan.search.result()


def _carry_out(plan: Plan, work: Work, over: threading.Event) -> Results:
    if isinstance(work, Expand):
        with _within_window(work):
            return plan.proposals(_read(plan.draw(work), over))
        return []
    if not isinstance(plan.score, Verifier):
        return [plan.score(text) for text in work.texts]
    return [_verified(plan, plan.score, proposal, over) for proposal in work.proposals]


def _verified(
    plan: Plan, verifier: Verifier, proposal: Proposal, over: threading.Event
) -> float | None:
    with suppress(ContextLengthExceeded):
        found = _read(plan.ask(verifier, proposal), over) if proposal.key else []
        return verifier.value(*_said(found)) if found else None
    return None


@contextmanager
def _within_window(work: Expand) -> Iterator[None]:
    """Leaves the block where a node has filled the model's window. The search's beginning has to fit."""
    try:
        yield
    except ContextLengthExceeded:
        if work.node == ROOT:
            raise


def _read(branches: Any, over: threading.Event) -> Sequence[BranchState]:
    """The finished branches; nothing once the search is over."""
    with branches:
        for _ in branches:
            if over.is_set():
                return []
        finished: Sequence[BranchState] = branches.wait()
        return finished


async def run_async(plan: Plan) -> SearchResult:
    """As `run`, by tasks. Cancelled, it ends what still runs."""
    import anyio

    room = anyio.CapacityLimiter(AT_ONCE)
    failed: list[Exception] = []

    async def carry_out(work: Work) -> None:
        try:
            async with room:
                results = await _carry_out_async(plan, work)
            plan.take(work, results)
        except Exception as error:
            failed.append(error)  # the caller raises it: a group would wrap it
            group.cancel_scope.cancel()
            return
        begin()

    def begin() -> None:
        for work in plan.search.work():
            group.start_soon(carry_out, work)
        if plan.search.is_over:
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        begin()
    if failed:
        raise failed[0]
    return plan.search.result()


async def _carry_out_async(plan: Plan, work: Work) -> Results:
    if isinstance(work, Expand):
        with _within_window(work):
            async with plan.draw(work) as branches:
                return plan.proposals(await branches.wait())
        return []
    if not isinstance(plan.score, Verifier):
        return [await result_of(plan.score, text) for text in work.texts]
    return [await _verified_async(plan, plan.score, proposal) for proposal in work.proposals]


async def _verified_async(plan: Plan, verifier: Verifier, proposal: Proposal) -> float | None:
    if not proposal.key:
        return None
    with suppress(ContextLengthExceeded):
        async with plan.ask(verifier, proposal) as branches:
            return verifier.value(*_said(await branches.wait()))
    return None


def _said(branches: Sequence[BranchState]) -> tuple[str, Sequence[Mapping[str, float]]]:
    """The text of a verifier's answer, and the likeliest tokens of each position."""
    (branch,) = branches
    return branch.text, branch.logprobs.get("top_logprobs", [])


def _drawn(branch: BranchState) -> Drawn:
    chances = branch.logprobs.get("token_logprobs", [])
    num = branch.completion_tokens
    return Drawn(
        branch.text,
        branch.finish_reason,
        branch.capsule,
        len(chances) if num is None else num,
        chances,
    )


def checked(value: object) -> float | None:
    """A value that a score function gave. Raises InvalidParameter for what is none."""
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(float(value)) < float("inf"):  # type: ignore[arg-type]
        raise InvalidParameter("score", value, "a score is a finite number, or None")
    return float(value)  # type: ignore[arg-type]
