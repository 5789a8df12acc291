"""The handlers of `/v1/messages`: a request as a conversation, its plan, and its answer."""

from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mallee.api.chat.reading import ChatReader
from mallee.api.entry.asking import Asking
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
from mallee.api.messages.tools import marks_of
from mallee.api.prompts import PromptReader, RenderedPrompt
from mallee.api.serve import Server, json_response
from mallee.api.text.conversation import Conversation
from mallee.protocol.api.messages import CountRequest, MessagesRequest, TokenCount
from mallee.protocol.api.shared import MAX_TENANT
from mallee.protocol.errors import ContextLengthExceeded, InvalidParameter
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
    ) -> None:
        self._server = server
        self._maker = maker
        self._asking = asking
        self._reader = reader
        self._chat = chat
        self._max_model_len = server.gateway.context.model.max_model_len

    async def create(self, request: Request) -> Response:
        asked = await self._asking.read(request, MessagesRequest)
        plan, answer = await self._asking.make(request, asked, self._plan)
        return await self._server.answer(request, plan, answer)

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
        fields = sampling(request, functions)
        conversation, prompt, dialogue, changed = self._rendered(request, thought, scope)
        marked, keep_s = with_marks(request, [*marks_of(request.tools), *dialogue.marks])
        assert fields.max_tokens is not None, "it is required"
        room = self._max_model_len - len(prompt.tokens)
        if room < 1:
            raise PromptTooLong(len(prompt.tokens), self._max_model_len)
        diagnoses = request.diagnostics is not None
        extras = request.mallee
        if diagnoses:
            extras = msgspec.structs.replace(extras, diagnostics=True)
        fields = msgspec.structs.replace(
            fields,
            max_tokens=min(fields.max_tokens, room),
            cache_control=marked.cache_control,
            thinking_token_budget=thought.budget,
            mallee=extras,
        )
        output = read_output_format(fields)
        chat = self._chat.begun(fields, conversation, prompt, output, changed=changed, is_hint=True)
        if dialogue.begun and chat.reading is not None and chat.reading.is_open:
            remedy = "this model reasons before it answers, so its answer can't be begun for it"
            raise InvalidParameter("messages", "assistant", remedy)
        if not terms.tenant:
            terms = terms._replace(tenant=owner_of(request)[:MAX_TENANT])
        plan = self._maker.conversation(fields, chat, scope, terms)
        shape = MessageFormat(
            keep_s,
            is_clamped=request.max_tokens is not None and request.max_tokens > room,
            shows_thinking=thought.is_shown,
            diagnoses=diagnoses,
        )
        return plan, shape

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
