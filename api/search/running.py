"""A search under way: what it asks for becomes requests of the gateway, some at once.

The policy runs here and not inside the worker: that could save no more than the turn through the gateway,
4 ms an expansion, 5 % of a search by 16 tokens a step of an 8B model on an H200 and 2 % of one by 50
(`bench/search/overhead.py`). The worker would need tokenizers, stop strings, scopes, budgets and callbacks,
and a search could not go on when its worker dies.
"""

import logging
from contextlib import suppress
from functools import partial

import msgspec

from mallee.api.branches.scoring import Question, TextSoFar, Verdict
from mallee.api.capsules.bulk import release_each
from mallee.api.deltas import LOWEST, TextDelta, text_logprobs
from mallee.api.entry.asking import INLINE_BODY_BYTES, Asking
from mallee.api.jobs import JobMaker
from mallee.api.search.requests import SearchPlan, Spent
from mallee.api.serve import Server
from mallee.gateway.access.quotas import Visit
from mallee.protocol.api.generate import ForkRequest
from mallee.protocol.errors import UnknownCapsule
from mallee.protocol.ids import CapsuleId, RequestId, Scope
from mallee.router.dispatch.jobs import QueueTerms
from mallee.search.driver import Expand, Score, Search
from mallee.search.runner import Drawn, Runner
from mallee.search.scores import Verifier
from mallee.search.tree import Proposal

_log = logging.getLogger(__name__)


class Requests:
    """Steps of a search as requests of its caller, each within the limits of the key.

    `capsules` are those that its branches have left, `spent` is what they took.
    """

    def __init__(
        self,
        server: Server,
        maker: JobMaker,
        asking: Asking,
        plan: SearchPlan,
        *,
        scope: Scope,
        terms: QueueTerms,
        visit: Visit,
    ) -> None:
        self._server = server
        self._maker = maker
        self._asking = asking
        self._plan = plan
        self._scope = scope
        self._terms = terms
        self._visit = visit
        self._name = RequestId(server.new_id())  # groups its questions to a service
        self.spent = Spent(prefill_tokens=0, completion_tokens=0, requests=0)
        self.capsules: list[CapsuleId] = []

    async def begin(self) -> "Run":
        """The search at the capsule where it begins, which is made if none was named. Raises MalleeError."""
        plan = self._plan
        if plan.prompt is None:
            found = await self._server.gateway.capsules.show(plan.capsule, self._scope)
            return Run(self, plan, found.capsule, found.boundary)
        self.spent.requests += 1
        visit = self._visit.another()
        with visit:
            made = await self._server.make(plan.prompt, visit)
        self.spent.prefill_tokens += made.prefill_tokens
        assert made.capsule is not None
        return Run(self, plan, made.capsule, made.boundary)

    async def draw(self, work: Expand) -> list[Drawn]:
        own = {"n": work.num, "max_tokens": work.max_tokens, "seed": work.seed}
        step = msgspec.structs.replace(self._plan.step, **own)
        return list(map(_drawn, await self._fork(work.key, step)))

    async def ask(self, verifier: Verifier, key: str) -> Drawn:
        question = ForkRequest(
            suffixes=[verifier.prompt],
            max_tokens=verifier.tokens,
            temperature=0.0,
            seed=0,
            logprobs=verifier.num_logprobs,
        )
        (deltas,) = await self._fork(key, question)
        chances = [chance for delta in deltas for chance in delta.chances[:1]][:1]
        top = text_logprobs(chances, self._server.tokenizer.token_bytes, 0)["top_logprobs"]
        return _drawn(deltas)._replace(top=top)

    async def value(self, work: Score) -> list[float | None]:
        """The values by a service of the client's. Raises CallbackFailed."""
        asked = enumerate(zip(work.texts, work.num_tokens, strict=True))
        question = Question(self._name, [TextSoFar(i, text, "", num) for i, (text, num) in asked])
        async with self._server.callbacks.turn(self._scope) as turn:
            verdict = await turn.ask(self._plan.url, question, Verdict, question.flaw)
        return verdict.scores

    async def _fork(self, capsule: str, step: ForkRequest) -> list[list[TextDelta]]:
        """The deltas of each branch of a fork. Raises MalleeError."""
        server, visit = self._server, self._visit.another()
        self.spent.requests += 1
        with visit:
            info = await server.gateway.capsules.show(CapsuleId(capsule), self._scope)
            make = partial(self._maker.fork, step, info, self._scope, self._terms)
            is_long = sum(map(len, step.suffixes or ())) > INLINE_BODY_BYTES
            plan = await self._asking.in_pool(make) if is_long else make()
            visit.begin(plan.num_choices, plan.prompt_tokens)
            found: list[list[TextDelta]] = [[] for _ in range(plan.num_choices)]

            def take(delta: TextDelta) -> None:
                visit.charge(delta.num_tokens)
                found[delta.index].append(delta)

            await server.read(plan, 0.0, take)
        for *_, last in found:
            self.spent.prefill_tokens += last.prefill_tokens
            self.spent.completion_tokens += last.completion_tokens
            if last.capsule is not None:
                self.capsules.append(last.capsule)
        return found

    async def release(self, capsules: list[CapsuleId]) -> None:
        """Forget capsules, as far as their workers answer."""
        gateway, unkeep = self._server.gateway, self._visit.unkeep
        num = await release_each(gateway, capsules, self._scope, unkeep)
        if num < len(capsules):
            _log.warning("%d capsules of a search are left: no worker answers", len(capsules) - num)

    def end_below(self, root: CapsuleId, origins: list[CapsuleId]) -> list[CapsuleId]:
        """Cancel what went on from `origins`, which are below `root`; the capsules that this has left."""
        with suppress(UnknownCapsule):  # it was deleted meanwhile
            return self._server.gateway.requests.prune_below(root, origins, self._scope).left
        return []


class Run:
    """A search that has begun, at the capsule `root` of `begun` tokens."""

    def __init__(self, requests: Requests, plan: SearchPlan, root: CapsuleId, begun: int) -> None:
        self._root = root
        self._is_own = plan.prompt is not None
        self.begun = begun
        self.requests = requests
        self.search = Search(
            plan.policy,
            Proposal("", 0, root),
            seed=plan.seed,
            budget=plan.budget,
            scoring=plan.scoring,
        )
        self.runner = Runner(self.search, requests, ends=plan.ends, verifier=plan.verifier)

    async def release(self) -> None:
        """Forget the capsule that was made to begin with; all below it too, if there is no result.

        Of a search that began at a capsule of its caller's, what went on from its nodes.
        """
        own = [self._root] if self._is_own else []
        nodes = self.requests.capsules
        if self.search.is_over:
            await self.requests.release(own)
            return
        below = self.requests.end_below(self._root, own or nodes)
        await self.requests.release([*dict.fromkeys((*own, *nodes, *below))])


def _drawn(deltas: list[TextDelta]) -> Drawn:
    """A branch that has ended."""
    last = deltas[-1]
    return Drawn(
        "".join(delta.text for delta in deltas),
        last.finish,
        last.capsule,
        last.completion_tokens,
        [max(chance.logprob, LOWEST) for delta in deltas for chance in delta.chances],
    )
