"""A search under way: what it asks for becomes requests inside of its own, some at once.

The policy runs here and not inside the worker: that could save no more than the turn through the gateway,
4 ms an expansion, 5 % of a search by 16 tokens a step of an 8B model on an H200 and 2 % of one by 50
(`bench/search/overhead.py`). The worker would need tokenizers, stop strings, scopes, budgets and callbacks,
and a search could not go on when its worker dies.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from starlette.requests import Request

from mallee.api.branches.scoring import Question, TextSoFar, Verdict
from mallee.api.callbacks.callbacks import Callbacks
from mallee.api.errors import from_answer
from mallee.api.search.inner import answer_of
from mallee.api.search.requests import SearchPlan, UrlScore
from mallee.protocol.errors import ContextLengthExceeded
from mallee.protocol.ids import RequestId, Scope
from mallee.search.blocks import num_blocks
from mallee.search.drawn import Drawn, proposal_of
from mallee.search.driver import Expand, Score, Search
from mallee.search.results import SearchResult
from mallee.search.scores import Verifier
from mallee.search.tree import ROOT, Node, Proposal

AT_ONCE: Final = 16  # requests of one search

T = TypeVar("T", bound=msgspec.Struct)


class _Extras(msgspec.Struct, frozen=True):
    capsule: str | None = None
    prefill_tokens: int = 0
    completion_tokens: int = 0


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]


class _Choice(msgspec.Struct, frozen=True):
    text: str
    finish_reason: str | None
    mallee: _Extras
    logprobs: _Logprobs | None = None


class _Fork(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class _Capsule(msgspec.Struct, frozen=True):
    id: str
    tokens: int
    prefill_tokens: int = 0


class Spent(NamedTuple):
    """Tokens that workers computed for a search: of prompts and questions, and drawn, also for what is
    not in its tree.
    """

    prefill_tokens: int
    completion_tokens: int
    requests: int


class Run:
    """One search of one request. `nodes` gives those that join the tree; then there is a `result`.

    `capsules` are those that its branches have left. `name` groups its questions to a gateway by URL.
    """

    def __init__(
        self,
        request: Request,
        plan: SearchPlan,
        *,
        name: RequestId,
        callbacks: Callbacks,
        scope: Scope,
        begun: int,
    ) -> None:
        """`begun`: tokens of the capsule that it begins with, if one was named."""
        self._request = request
        self._plan = plan
        self._name = name
        self._callbacks = callbacks
        self._scope = scope
        self._search: Search | None = None
        self._room = asyncio.Semaphore(AT_ONCE)
        self._prefilled = self._drawn = self._requests = 0
        self._begun = begun
        self.root: str | None = plan.capsule
        self.capsules: list[str] = []

    @property
    def is_whole(self) -> bool:
        """Whether it has come to its end."""
        return self._search is not None and self._search.is_over

    @property
    def spent(self) -> Spent:
        return Spent(self._prefilled, self._drawn, self._requests)

    @property
    def result(self) -> SearchResult:
        assert self._search is not None, "it has not begun"
        return self._search.result()

    def num_blocks(self, size: int) -> int:
        """KV blocks of `size` tokens that its tree takes."""
        assert self._search is not None, "it has not begun"
        return num_blocks(self._search.tree.nodes, self._begun, size)

    async def begin(self) -> None:
        """Make the capsule that it begins with, if none was named. Raises MalleeError."""
        plan = self._plan
        if self.root is None:
            body = {**plan.prompt, "add_generation_prompt": "messages" in plan.prompt}
            found = await self._ask("/v1/capsules", body, _Capsule)
            self._prefilled += found.prefill_tokens
            self.root, self._begun = found.id, found.tokens
        self._search = Search(
            plan.policy,
            Proposal("", 0, self.root),
            seed=plan.seed,
            budget=plan.budget,
            scoring=plan.scoring,
        )

    async def nodes(self) -> AsyncGenerator[list[Node], None]:
        """Nodes as they join the tree, until the search is over. Raises MalleeError.

        Closed, it ends what still runs.
        """
        search = self._search
        assert search is not None, "it has not begun"
        running: dict[asyncio.Task[Any], Expand | Score] = {}
        num_told = 1  # the root is known
        try:
            while not search.is_over:
                for work in search.work():
                    running[asyncio.ensure_future(self._carry_out(work))] = work
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
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _carry_out(self, work: Expand | Score) -> Coroutine[Any, Any, Any]:
        return self._expand(work) if isinstance(work, Expand) else self._value(work)

    async def _expand(self, work: Expand) -> list[Proposal]:
        """The continuations of a node; none where the window has no room for them."""
        drawn = {"n": work.num, "max_tokens": work.max_tokens, "seed": work.seed, "logprobs": 0}
        try:
            choices = await self._fork(work.key, {**self._plan.steps, **drawn})
        except ContextLengthExceeded:
            if work.node == ROOT:
                raise
            return []
        found = (proposal_of(_as_drawn(each), self._plan.ends) for each in choices)
        return [proposal for proposal in found if proposal is not None]

    async def _value(self, work: Score) -> list[float | None]:
        verifier = self._plan.verifier
        assert verifier is not None, "log-probabilities are counted by the search"
        if isinstance(verifier, UrlScore):
            return await self._called(verifier.url, work)
        asking = (self._verified(verifier, each) for each in work.proposals)
        return list(await asyncio.gather(*asking))

    async def _called(self, url: str, work: Score) -> list[float | None]:
        """The values of texts by a gateway of the client's. Raises CallbackFailed."""
        assert self._search is not None, "it has begun"
        tree = self._search.tree
        before = sum(each.proposal.num_tokens for each in tree.path(tree.nodes[work.node])[1:])
        texts = [
            TextSoFar(index, text, "", before + proposal.num_tokens)
            for index, (text, proposal) in enumerate(zip(work.texts, work.proposals, strict=True))
        ]
        question = Question(self._name, texts)
        async with self._callbacks.turn(self._scope) as turn:
            verdict = await turn.ask(url, question, Verdict, question.flaw)
        return verdict.scores

    async def _verified(self, verifier: Verifier, proposal: Proposal) -> float | None:
        """The value of a text, by a question to the model: greedy, the same everywhere."""
        if not proposal.key:
            return None
        drawn = {"max_tokens": verifier.tokens, "temperature": 0.0, "seed": 0}
        more = {"suffixes": [verifier.prompt], "logprobs": verifier.num_logprobs}
        try:
            (choice,) = await self._fork(proposal.key, {**drawn, **more})
        except ContextLengthExceeded:
            return None
        top: Sequence[Mapping[str, float]] = choice.logprobs.top_logprobs if choice.logprobs else ()
        return verifier.value(choice.text, top)

    async def _fork(self, capsule: str, body: Mapping[str, Any]) -> list[_Choice]:
        answer = await self._ask(f"/v1/capsules/{quote(capsule, safe='')}/fork", body, _Fork)
        for choice in answer.choices:
            self._prefilled += choice.mallee.prefill_tokens
            self._drawn += choice.mallee.completion_tokens
            if choice.mallee.capsule is not None:
                self.capsules.append(choice.mallee.capsule)
        return answer.choices

    async def _ask(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        """The answer to a request. Raises MalleeError as it was refused."""
        async with self._room:
            self._requests += 1
            answer = await answer_of(self._request, path, {**self._plan.common, **body})
        if answer.status >= 400:
            raise from_answer(answer.status, answer.body)
        return msgspec.json.decode(answer.body, type=kind)


def _as_drawn(choice: _Choice) -> Drawn:
    chances = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    extras = choice.mallee
    return Drawn(
        choice.text, choice.finish_reason, extras.capsule, extras.completion_tokens, chances
    )
