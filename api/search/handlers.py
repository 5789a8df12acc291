"""`POST /v1/search`: what a search asks for becomes requests of the gateway, some at once.

The policy runs here and not inside the worker: that could save no more than the turn through the gateway,
4 ms an expansion, 5 % of a search by 16 tokens a step of an 8B model on an H200 and 2 % of one by 50
(`bench/search/overhead.py`). The worker would need tokenizers, stop strings, scopes, budgets and callbacks,
and a search could not go on when its worker dies.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mallee.api.branches.scoring import Question, TextSoFar, Verdict
from mallee.api.capsules.bulk import release_each
from mallee.api.deltas import LOWEST, TextDelta, text_logprobs
from mallee.api.entry.asking import INLINE_BODY_BYTES, Asking
from mallee.api.entry.middleware import age_s, caller_of
from mallee.api.errors import error_body, unexpected
from mallee.api.jobs import JobMaker, ids
from mallee.api.search.requests import SearchAnswer, SearchPlan, SearchRequest, Spent, read_search
from mallee.api.serve import Server, json_response
from mallee.api.sse import DONE, EventStream, event, unless_gone
from mallee.gateway.access.visits import Visit
from mallee.protocol.api.generate import ForkRequest
from mallee.protocol.api.shared import OMITTED
from mallee.protocol.errors import MalleeError, UnknownCapsule
from mallee.protocol.ids import CapsuleId, RequestId
from mallee.search.driver import Expand, Score
from mallee.search.results import node_result, num_blocks
from mallee.search.runner import Drawn, Runner
from mallee.search.scores import Verifier

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Requests:
    """Steps of a search as requests of its caller, each within the limits of the key.

    `name` groups its questions to a service. `capsules` are those that its branches have left, `spent` is
    what they took.
    """

    server: Server
    maker: JobMaker
    asking: Asking
    plan: SearchPlan
    visit: Visit
    name: RequestId
    spent: Spent
    capsules: list[CapsuleId] = field(default_factory=list)

    async def begin(self) -> "Run":
        """The search at the capsule where it begins, which is made if none was named. Raises MalleeError."""
        plan = self.plan
        if plan.prompt is None:
            capsules, prompt = self.server.gateway.capsules, list[int]()
            found = await capsules.show(plan.capsule, plan.scope)
            if plan.step.return_token_ids:
                prompt = (await capsules.tokens(plan.capsule, plan.scope)).tolist()
            return Run(self, found.capsule, found.boundary, prompt)
        self.spent.requests += 1
        visit = self.visit.another()
        await visit.ready()
        with visit:
            made = await self.server.make(plan.prompt, visit)
        self.spent.prefill_tokens += made.prefill_tokens
        assert made.capsule is not None
        return Run(self, made.capsule, made.boundary, ids(plan.prompt.tokens))

    async def draw(self, work: Expand) -> list[Drawn]:
        own = {"n": work.num, "max_tokens": work.max_tokens, "seed": work.seed}
        step = msgspec.structs.replace(self.plan.step, **own)
        found = await self._fork(work.key, step)
        return [_drawn(each, with_ids=step.return_token_ids) for each in found]

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
        top = text_logprobs(chances, self.server.tokenizer.token_bytes, 0)["top_logprobs"]
        return _drawn(deltas)._replace(top=top)

    async def value(self, work: Score) -> list[float | None]:
        """The values by a service of the client's. Raises CallbackFailed."""
        asked = enumerate(zip(work.texts, work.num_tokens, strict=True))
        question = Question(self.name, [TextSoFar(i, text, "", num) for i, (text, num) in asked])
        async with self.server.callbacks.turn(self.plan.scope) as turn:
            verdict = await turn.ask(self.plan.url, question, Verdict, question.flaw)
        return verdict.scores

    async def _fork(self, capsule: str, step: ForkRequest) -> list[list[TextDelta]]:
        """The deltas of each branch of a fork. Raises MalleeError."""
        server, visit = self.server, self.visit.another()
        self.spent.requests += 1
        await visit.ready()
        with visit:
            info = await server.gateway.capsules.show(CapsuleId(capsule), self.plan.scope)
            make = partial(self.maker.fork, step, info, self.plan.scope, self.plan.terms)
            is_long = sum(map(len, step.suffixes or ())) > INLINE_BODY_BYTES
            plan = await self.asking.in_pool(make) if is_long else make()
            await visit.ready(**plan.needs)
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


class Run:
    """A search that has begun, at the capsule `root` of `begun` tokens: `prompt`, if ids are returned."""

    def __init__(self, requests: Requests, root: CapsuleId, begun: int, prompt: list[int]) -> None:
        plan = requests.plan
        self.requests = requests
        self.begun = begun
        self.prompt = prompt
        self._root = root
        self.runner = Runner(
            requests,
            plan.policy,
            root,
            score=plan.score,
            seed=plan.seed,
            budget=plan.budget,
            ends=plan.ends,
        )
        self.search = self.runner.search

    async def release(self) -> None:
        """Forget the capsule that was made to begin with; all below it too, if there is no result.

        Of a search that began at a capsule of its caller's, what went on from its nodes.
        """
        requests, gateway = self.requests, self.requests.server.gateway
        scope, unkeep = requests.plan.scope, requests.visit.unkeep
        own = [] if requests.plan.prompt is None else [self._root]
        left = list(own)
        if not self.search.is_over:
            left += requests.capsules
            with suppress(UnknownCapsule):  # it was deleted meanwhile
                origins = own or requests.capsules
                left += gateway.requests.prune_below(self._root, origins, scope).left
        left = [*dict.fromkeys(left)]
        num = await release_each(gateway, left, scope, unkeep)
        if num < len(left):
            _log.warning("%d capsules of a search are left: no worker answers", len(left) - num)


def _drawn(deltas: list[TextDelta], *, with_ids: bool = False) -> Drawn:
    """A branch that has ended."""
    last = deltas[-1]
    return Drawn(
        "".join(delta.text for delta in deltas),
        last.finish,
        last.capsule,
        last.completion_tokens,
        [max(chance.logprob or 0.0, LOWEST) for delta in deltas for chance in delta.chances],
        tokens=[token for delta in deltas for token in delta.tokens] if with_ids else (),
    )


class SearchHandlers:
    """Runs searches by the policies of `kinds`. `draw_seed` gives a seed where none was given."""

    def __init__(
        self,
        server: Server,
        maker: JobMaker,
        asking: Asking,
        kinds: Mapping[str, type[msgspec.Struct]],
        *,
        draw_seed: Callable[[], int],
    ) -> None:
        self._server = server
        self._maker = maker
        self._asking = asking
        self._kinds = kinds
        self._draw_seed = draw_seed

    async def create(self, request: Request) -> Response:
        asked = await self._asking.read(request, SearchRequest)
        read = partial(read_search, kinds=self._kinds, maker=self._maker, draw_seed=self._draw_seed)
        plan = await self._asking.make(request, asked, read)
        requests = Requests(
            server=self._server,
            maker=self._maker,
            asking=self._asking,
            plan=plan,
            visit=caller_of(request).visit,
            name=RequestId(self._server.new_id()),
            spent=Spent(prefill_tokens=0, completion_tokens=0, requests=0),
        )
        run, is_streamed = await unless_gone(request.receive, requests.begin()), False
        try:
            if not asked.body.stream:
                return await unless_gone(request.receive, self._whole(request, run))
            is_streamed = True
        finally:
            if not is_streamed:
                await run.release()
        return EventStream(self._events(request, run), run.release, {})

    async def _whole(self, request: Request, run: Run) -> Response:
        async with aclosing(run.runner.nodes()) as nodes:
            async for _ in nodes:
                pass
        return json_response(self._result(request, run))

    async def _events(self, request: Request, run: Run) -> AsyncGenerator[bytes, None]:
        """An event for nodes that join the tree together, and one with the whole tree at the end."""
        try:
            async with aclosing(run.runner.nodes()) as nodes:
                async for fresh in nodes:
                    body = {"object": "search.nodes", "nodes": list(map(node_result, fresh))}
                    yield event(body)
            yield event(self._result(request, run)) + DONE
        except MalleeError as error:
            yield event(error_body(error))
        except Exception:
            request_id = self._server.new_id()
            _log.exception("search %s failed after its first byte", request_id)
            yield event(error_body(unexpected(request_id)))

    def _result(self, request: Request, run: Run) -> SearchAnswer:
        """The result of a search, which is counted now."""
        server, result = self._server, run.search.result()
        server.gateway.context.metrics.searched(result.reason, age_s(request))
        size = server.gateway.context.router.config.block_size
        returns_ids = run.requests.plan.step.return_token_ids
        return SearchAnswer(
            **msgspec.structs.asdict(result),
            object="search",
            created=int(server.clock()),
            model=server.model_name,
            seed=run.requests.plan.seed,
            blocks=num_blocks(run.search.tree.nodes, run.begun, size),
            spent=run.requests.spent,
            prompt_token_ids=run.prompt if returns_ids else OMITTED,
        )
