"""Searches that run at the client: a step is a fork of a capsule, and so is a verifier's question."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, TypeAlias

from mallee.client.calls import terms_of
from mallee.client.critic import result_of
from mallee.client.results import BranchState
from mallee.protocol.errors import InvalidParameter
from mallee.search.driver import NO_BUDGET, Expand, Score
from mallee.search.policy import Policy, SearchBudget
from mallee.search.results import SearchResult
from mallee.search.runner import AT_ONCE, Drawn, Ends, Runner
from mallee.search.scores import Verifier

Value: TypeAlias = Callable[[str], float | None]
"""The value of a text, from the end of the search's prompt on; None: it has none."""
AsyncValue: TypeAlias = Callable[[str], float | Awaitable[float | None] | None]
"""As `Value`, or a coroutine function; a plain one runs in a thread."""
LogprobScore: TypeAlias = Literal["mean_logprob", "sum_logprob"]
Fork: TypeAlias = Callable[[str, Any, Mapping[str, Any]], Any]
"""Begins forks of a capsule: its id, the branches, parameters."""
Read: TypeAlias = Callable[[str, Any, Mapping[str, Any]], Awaitable[Sequence[BranchState]]]
"""As `Fork`, but gives the finished branches."""


class Forks:
    """Steps by forks that `read` waits for. `params` are those of each that draws."""

    def __init__(self, read: Read, params: Mapping[str, Any], score: Any) -> None:
        self._read = read
        self._params = params
        self._score = score

    async def draw(self, work: Expand) -> list[Drawn]:
        own = {"max_tokens": work.max_tokens, "seed": work.seed, "logprobs": 0}
        return list(map(_drawn, await self._read(work.key, work.num, {**self._params, **own})))

    async def ask(self, verifier: Verifier, key: str) -> Drawn:
        params = {"cache_salt": self._params.get("cache_salt"), **terms_of(self._params)}
        params |= {"max_tokens": verifier.tokens, "temperature": 0.0, "seed": 0}
        params["logprobs"] = verifier.num_logprobs
        (branch,) = await self._read(key, [verifier.prompt], params)
        return _drawn(branch)

    async def value(self, work: Score) -> list[float | None]:
        return [await result_of(self._score, text) for text in work.texts]


async def run_async(fork: Fork, root: str, policy: Policy, **asked: Any) -> SearchResult:
    """A search from the capsule `root` on; the rest is as `run` has it."""

    async def read(*fork_of: Any) -> Sequence[BranchState]:
        async with fork(*fork_of) as branches:
            finished: Sequence[BranchState] = await branches.wait()
            return finished

    return await _run(read, root, policy, **asked)


def run(fork: Fork, root: str, policy: Policy, **asked: Any) -> SearchResult:
    """A search from the capsule `root` on, whose forks are read in threads. `asked` is as `_run` has it."""
    from anyio.from_thread import start_blocking_portal

    over = threading.Event()

    def read_now(*fork_of: Any) -> Sequence[BranchState]:
        with fork(*fork_of) as branches:
            for _ in branches.events():
                if over.is_set():
                    return []
            finished: Sequence[BranchState] = branches.wait()
            return finished

    async def read(*fork_of: Any) -> Sequence[BranchState]:
        return await asyncio.get_running_loop().run_in_executor(pool, read_now, *fork_of)

    with start_blocking_portal() as portal, ThreadPoolExecutor(AT_ONCE, "search") as pool:
        try:
            return portal.call(partial(_run, read, root, policy, **asked))
        finally:
            over.set()


async def _run(
    read: Read,
    root: str,
    policy: Policy,
    *,
    score: Any,
    seed: int,
    budget: SearchBudget | None,
    ends: Sequence[str],
    params: Mapping[str, Any],
) -> SearchResult:
    """Raises InvalidParameter for what is no `score`, and what the forks and `score` raise."""
    is_known = isinstance(score, Verifier) or score in ("mean_logprob", "sum_logprob")
    if not is_known and not callable(score):
        remedy = (
            'give "mean_logprob", "sum_logprob", a Verifier, a function of a text, or with where="gateway"'
            ' {"url": ...}'
        )
        raise InvalidParameter("score", score, remedy)
    step_ends = Ends.of(params.get("stop"), ends)
    own = {"stop": list(step_ends.stop), "include_stop_str_in_output": True}
    known = {name: value for name, value in params.items() if name != "stop"}
    runner = Runner(
        Forks(read, known | own if step_ends.stop else known, score),
        policy,
        root,
        score=score if is_known else "outside",
        seed=seed,
        budget=budget or NO_BUDGET,
        ends=step_ends,
    )
    async with aclosing(runner.nodes()) as nodes:
        async for _ in nodes:
            pass
    return runner.search.result()


def _drawn(branch: BranchState) -> Drawn:
    chances, num = branch.logprobs.get("token_logprobs", []), branch.completion_tokens
    return Drawn(
        branch.text,
        branch.finish_reason,
        branch.capsule,
        len(chances) if num is None else num,
        chances,
        branch.logprobs.get("top_logprobs", []),
        branch.token_ids,
    )
