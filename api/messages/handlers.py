"""The handlers of `/v1/messages`: a request as a conversation, its plan, and its answer."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mallee.api.chat.reading import ChatReader
from mallee.api.entry.asking import Asked, Asking
from mallee.api.entry.middleware import caller_of
from mallee.api.grammars import read_output_format
from mallee.api.jobs import JobMaker, Plan
from mallee.api.messages.answers import MessageFormat
from mallee.api.messages.reading import Dialogue, read_dialogue
from mallee.api.messages.requests import (
    Thought,
    functions_of,
    owner_of,
    read_thinking,
    sampling,
    with_marks,
)
from mallee.api.messages.threads import ThreadKeeper, find_state, previous_of
from mallee.api.messages.tools import marks_of
from mallee.api.prompts import PromptReader, RenderedPrompt
from mallee.api.responses.conversations import Conversations
from mallee.api.responses.running import has_capsule_after
from mallee.api.responses.store import State
from mallee.api.responses.turns import PlannedTurn, TurnAsked, TurnMaker
from mallee.api.serve import Server, json_response
from mallee.api.text.conversation import Conversation, Function, with_names
from mallee.protocol.api.generate import ChatRequest
from mallee.protocol.api.messages import CountRequest, MessagesRequest, TokenCount
from mallee.protocol.api.shared import MAX_TENANT
from mallee.protocol.errors import (
    CapsuleStale,
    ContextLengthExceeded,
    InvalidParameter,
    LookupIncomplete,
    NotFound,
    PeerSilent,
    StoreAway,
    ThreadMismatch,
)
from mallee.protocol.ids import Scope
from mallee.router.dispatch.jobs import QueueTerms


class PromptTooLong(ContextLengthExceeded):
    """The prompt fills the window. Clients of Anthropic's know it by the message's first words."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(prompt_tokens, 1, limit)
        self.message = f"prompt is too long: {prompt_tokens} tokens > {limit - 1} maximum"
        self.args = (self.message,)


class _Rendered(NamedTuple):
    conversation: Conversation
    prompt: RenderedPrompt
    dialogue: Dialogue
    changed: str  # as in `Messages`


class MessagesHandlers:
    """Anthropic's two endpoints, for one model."""

    def __init__(
        self,
        server: Server,
        maker: JobMaker,
        asking: Asking,
        reader: PromptReader,
        chat: ChatReader,
        turns: TurnMaker,
        threads: Conversations,
    ) -> None:
        self._turns = turns
        self._threads = threads
        self._server = server
        self._maker = maker
        self._asking = asking
        self._reader = reader
        self._chat = chat
        self._max_model_len = server.gateway.context.model.max_model_len

    async def create(self, request: Request) -> Response:
        asked = await self._asking.read(request, MessagesRequest)
        if asked.body.thread is not None:
            return await self._in_thread(request, asked)
        plan, answer = await self._asking.make(request, asked, self._plan)
        return await self._server.answer(request, plan, answer)

    async def _in_thread(self, request: Request, asked: Asked[MessagesRequest]) -> Response:
        """An answer that can be gone on from, by the capsule of the one before while it is there."""
        scope, name = asked.scope, previous_of(asked.body.thread)
        previous = None if name is None else await find_state(self._threads, scope, name)

        gateway = self._server.gateway
        can_fork = previous is not None and await has_capsule_after(gateway, previous, scope)
        is_admitted = False
        while True:
            plan = partial(self._turn, previous=previous, has_capsule=can_fork)
            planned, shape = await self._asking.make(request, asked, plan)
            if not is_admitted:  # once: what is tried again is the same request
                await self._server.admit(caller_of(request), planned.plan)
                is_admitted = True
            keeper = ThreadKeeper(self._threads, scope, planned)
            try:
                return await self._server.answer(
                    request, planned.plan, shape, keeper, is_admitted=True
                )
            except (NotFound, LookupIncomplete, PeerSilent, StoreAway, CapsuleStale):
                if not can_fork:
                    raise
                can_fork = False  # the capsule went meanwhile

    async def count_tokens(self, request: Request) -> Response:
        asked = await self._asking.read(request, CountRequest)
        num = await self._asking.make(request, asked, self._count)
        return json_response(TokenCount(input_tokens=num))

    def _count(self, request: CountRequest, scope: Scope, terms: QueueTerms) -> int:
        self._maker.check_model(request.model)
        thought = read_thinking(request, None)
        found = self._rendered(request, thought, scope, remembers=False)
        return len(found.prompt.tokens)

    def _plan(
        self, request: MessagesRequest, scope: Scope, terms: QueueTerms
    ) -> tuple[Plan, MessageFormat]:
        self._maker.check_model(request.model)
        thought = read_thinking(request, request.max_tokens)
        functions = functions_of(request)
        conversation, prompt, dialogue, changed = self._rendered(request, thought, scope)
        wishes, keep_s = self._wishes(request, functions, thought, dialogue)
        fields = wishes(len(prompt.tokens))
        output = read_output_format(fields)
        chat = self._chat.begun(fields, conversation, prompt, output, changed=changed, is_hint=True)
        if dialogue.begun and chat.reading is not None and chat.reading.thinks_first:
            remedy = "this model reasons before it answers, so its answer can't be begun for it"
            raise InvalidParameter("messages", "assistant", remedy)
        plan = self._maker.conversation(fields, chat, scope, _owned(terms, request))
        return plan, self._shape(request, thought, keep_s, plan)

    def _turn(
        self,
        request: MessagesRequest,
        scope: Scope,
        terms: QueueTerms,
        *,
        previous: State | None,
        has_capsule: bool,
    ) -> tuple[PlannedTurn, MessageFormat]:
        """A turn of a thread, after `previous`; as `_plan`."""
        self._maker.check_model(request.model)
        thought = read_thinking(request, request.max_tokens)
        functions = functions_of(request)
        dialogue = read_dialogue(request.system, request.messages)
        if dialogue.begun:
            remedy = "the answer of a thread can't be begun for it; leave thread out"
            raise InvalidParameter("messages", "assistant", remedy)
        has_system = bool(request.system) and dialogue.messages[0].role == "system"
        system, messages = dialogue.messages[:has_system], dialogue.messages[has_system:]
        head = Conversation(system, functions)
        if previous is None:
            head, _ = self._chat.settled(head, request, scope)
        else:
            for param, given, known in (
                ("system", system, previous.system),
                ("tools", functions, previous.functions),
            ):
                if given and given != known:
                    raise ThreadMismatch(param, getattr(request, param))
            head, functions = previous.head, previous.functions
            before = [message for turn in previous.turns for message in turn]
            messages = with_names([*before, *messages])[len(before) :]
        wishes, keep_s = self._wishes(request, functions, thought, dialogue)
        turn = TurnAsked(
            self._chat.with_variables(head, thought.effort, None, is_hint=True),
            messages,
            read_output_format(wishes(0)),
            wishes,
            is_hint=True,
        )
        owned = _owned(terms, request)
        try:
            planned = self._turns.turn(turn, scope, owned, previous, has_capsule=has_capsule)
        except ContextLengthExceeded as error:
            raise PromptTooLong(error.fields["prompt_tokens"], self._max_model_len) from error
        return planned, self._shape(request, thought, keep_s, planned.plan)

    def _wishes(
        self,
        request: MessagesRequest,
        functions: tuple[Function, ...],
        thought: Thought,
        dialogue: Dialogue,
    ) -> tuple[Callable[[int], ChatRequest], float]:
        """By a prompt's tokens, of which it raises PromptTooLong; and seconds for which they are retained."""
        fields = sampling(request, functions)
        marked, keep_s = with_marks(request, [*marks_of(request.tools), *dialogue.marks])
        most = fields.max_tokens
        assert most is not None, "it is required"
        extras = request.mallee
        if request.diagnostics is not None:
            extras = msgspec.structs.replace(extras, diagnostics=True)

        def wishes(prompt_tokens: int) -> ChatRequest:
            room = self._max_model_len - prompt_tokens
            if room < 1:
                raise PromptTooLong(prompt_tokens, self._max_model_len)
            return msgspec.structs.replace(
                fields,
                max_tokens=min(most, room),
                cache_control=marked.cache_control,
                thinking_token_budget=thought.budget,
                mallee=extras,
            )

        return wishes, keep_s

    def _shape(
        self, request: MessagesRequest, thought: Thought, keep_s: float, plan: Plan
    ) -> MessageFormat:
        room = self._max_model_len - plan.prompt_tokens
        return MessageFormat(
            keep_s,
            is_clamped=request.max_tokens is not None and request.max_tokens > room,
            shows_thinking=thought.is_shown,
            diagnoses=request.diagnostics is not None,
        )

    def _rendered(
        self, request: CountRequest, thought: Thought, scope: Scope, *, remembers: bool = True
    ) -> _Rendered:
        dialogue = read_dialogue(request.system, request.messages)
        effort = "none" if dialogue.begun else thought.effort
        found = Conversation(dialogue.messages, functions_of(request))
        found, changed = self._chat.settled(found, request, scope, remembers=remembers)
        conversation = self._chat.with_variables(found, effort, None, is_hint=True)
        try:
            prompt = self._reader.conversation(
                conversation, scope, add_generation_prompt=True, begun=dialogue.begun
            )
        except ContextLengthExceeded as error:
            raise PromptTooLong(error.fields["prompt_tokens"], self._max_model_len) from error
        if remembers and self._chat.leaves_states:
            prompt = self._reader.marked(prompt, conversation, dialogue.places, scope)
        return _Rendered(conversation, prompt, dialogue, changed)


def _owned(terms: QueueTerms, request: MessagesRequest) -> QueueTerms:
    """`terms`, of the tenant that the request names if its key has none."""
    return terms if terms.tenant else terms._replace(tenant=owner_of(request)[:MAX_TENANT])
