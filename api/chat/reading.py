"""Chat requests as prompts, with what is needed to read their answers."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

from mallee.api.chat.forms import answer_form, read_choice, thought_form
from mallee.api.grammars import FORM_FIELDS, FREE_TEXT, OutputFormat, read_output_format
from mallee.api.prompts import PromptReader, RenderedPrompt
from mallee.api.text.answers import THINKING, Reading, Thinking, thinking_of
from mallee.api.text.chat import ChatTemplate, Source
from mallee.api.text.conversation import (
    Conversation,
    read_functions,
    read_marks,
    read_messages,
)
from mallee.api.text.heads import Heads
from mallee.api.text.tools.formats import FORMATS, format_of
from mallee.api.text.tools.parser import ToolFormat
from mallee.protocol.api.capsules import CapsuleRequest
from mallee.protocol.api.generate import EFFORTS, ChatRequest, TokenizeRequest
from mallee.protocol.api.shared import AnyRequest
from mallee.protocol.errors import BadRequest, InvalidParameter
from mallee.protocol.hashing import Tokens
from mallee.protocol.messages import ReasoningBudget
from mallee.router.dispatch.jobs import Messages
from mallee.runtime.config import ChatSettings

BUDGET: Final = "thinking_token_budget"
_FORMS: Final = attrgetter(*FORM_FIELDS)
_NO_FORM: Final = _FORMS(ChatRequest())
_thinking_of: Final = cache(thinking_of)


class Chat(NamedTuple):
    """A chat request that was read. `reading` is None where answers are plain text."""

    prompt: Tokens
    messages: Messages
    output: OutputFormat
    reading: Reading | None
    reasoning: ReasoningBudget | None = None


class ChatReader:
    """Reads chat requests for one model. Safe to use from several threads; remembers heads of prompts."""

    def __init__(
        self,
        reader: PromptReader,
        template: ChatTemplate,
        added_tokens: Mapping[str, int],
        settings: ChatSettings,
        *,
        leaves_states: bool = False,
    ) -> None:
        """`leaves_states`: the model has recurrent layers."""
        self._reader = reader
        self._template = template
        self._added_tokens = added_tokens
        self.settings = settings
        self.leaves_states: Final = leaves_states
        self._heads = Heads(moves=settings.move_changing_lines)
        family = template.family
        end = None if family is None else added_tokens.get(family.end_of_turn)
        # Of our own templates; checkpoints name the ends of theirs.
        self.stop_token_ids = () if end is None else (end,)

    def read(self, request: ChatRequest, scope: str) -> Chat:
        """Raises BadRequest."""
        found, begun = self._conversation(request, request.reasoning_effort), ""
        if request.continue_final_message:
            found, begun = self._continued(found, request)
        conversation, changed = self.settled(found, request, scope)
        prompt = self._reader.conversation(
            conversation,
            scope,
            add_generation_prompt=bool(begun) or request.add_generation_prompt is not False,
            begun=begun,
        )
        if self.leaves_states:
            prompt = self._reader.marked(prompt, conversation, read_marks(request.messages), scope)
        output = FREE_TEXT if _FORMS(request) == _NO_FORM else read_output_format(request)
        chat = self.begun(request, conversation, prompt, output, changed=changed)
        if begun and chat.reading is not None and chat.reading.thinks_first:
            remedy = "this model reasons before it answers, so its answer can't be begun for it"
            raise InvalidParameter("continue_final_message", True, remedy)
        return chat

    def _continued(
        self, conversation: Conversation, request: ChatRequest
    ) -> tuple[Conversation, str]:
        """The conversation before its last message, and the text of that, in which the answer goes on.

        Raises InvalidParameter.
        """
        if request.add_generation_prompt:
            remedy = "continue_final_message goes on in the last message; give one of the two"
            raise InvalidParameter("add_generation_prompt", True, remedy)
        *before, last = conversation.messages
        if last.role != "assistant" or not last.text or last.tool_calls:
            remedy = "the last message must be an assistant's, with a text and no calls"
            raise InvalidParameter("continue_final_message", True, remedy)
        found = replace(conversation, messages=before)
        if request.reasoning_effort is None:
            given = request.chat_template_kwargs
            found = self.with_variables(found, "none", given, is_hint=True)
        return found, last.text

    def settled(
        self, conversation: Conversation, request: AnyRequest, scope: str, *, remembers: bool = True
    ) -> tuple[Conversation, str]:
        """The conversation as it is to be rendered, and the line in front that has changed, if one has."""
        messages = conversation.messages
        if not messages or messages[0].role != "system":
            return conversation, ""
        client = f"{scope}\0{request.prompt_cache_key}\0{request.mallee.session}"
        head = self._heads.settle(messages, client, remembers=remembers)
        return replace(conversation, messages=head.messages), head.changed

    def begun(
        self,
        request: ChatRequest,
        conversation: Conversation,
        prompt: RenderedPrompt,
        output: OutputFormat,
        *,
        changed: str = "",
        is_hint: bool = False,
    ) -> Chat:
        """A conversation that was rendered, and the way in which its answer is read.

        `prompt` may be the rest of it alone. `changed`: the line in front by which it differs from one before
        it. `is_hint`: a bound on the reasoning may mean nothing. Raises BadRequest.
        """
        source = self._template.source_for(conversation)
        messages = _marks(prompt, conversation, changed)
        thinking = self._thinking(source)
        if thinking is None and not conversation.functions and request.tool_choice is None:
            return Chat(prompt.tokens, messages, output, None)
        choice = read_choice(request.tool_choice, tuple(conversation.functions))
        has_calls, form = choice.mode != "none", thinking.form if thinking else None
        if has_calls and form is None:
            form = self._form(source)
        is_open = thinking is not None and thinking.is_open_in(prompt.end)
        is_closed = thinking is not None and thinking.is_closed_in(prompt.end)
        may_think = None if is_closed else thinking
        if not has_calls and may_think is not None and output.grammar is not None:
            output = thought_form(output, self._added_tokens, may_think, is_open=is_open)
        if has_calls and form is not None:
            output = answer_form(
                form,
                choice,
                output,
                self._added_tokens,
                several=request.parallel_tool_calls is not False,
                thinking=may_think,
                is_open=is_open,
            )
        reading = None
        if form is not None or thinking is not None:
            functions = choice.functions if has_calls else {}
            reading = Reading(thinking, is_open, form, functions, is_forced=choice.is_named)
            if thinking is not None and thinking.form is not None and (is_open or is_closed):
                head = thinking.open if is_open else thinking.form.head
                reading = replace(reading, begun=head)
        bound = None
        if thinking is not None and request.thinking_token_budget is not None:
            bound = self._bound(request.thinking_token_budget, thinking, is_open=is_open)
            if bound is None and not is_hint:
                remedy = f"{thinking.close} is no token of its own here; leave it out"
                raise InvalidParameter(BUDGET, request.thinking_token_budget, remedy)
        return Chat(prompt.tokens, messages, output, reading, bound)

    def prefix(
        self, request: CapsuleRequest | TokenizeRequest, scope: str, *, starts: bool = False
    ) -> tuple[Tokens, Messages]:
        """The prompt of a capsule, and its messages; `starts`: as the tokenizer begins texts.

        Raises BadRequest.
        """
        conversation = self._conversation(request, None)
        prompt = self._reader.conversation(
            conversation, scope, add_generation_prompt=request.add_generation_prompt, starts=starts
        )
        if self.leaves_states:
            prompt = self._reader.marked(prompt, conversation, read_marks(request.messages), scope)
        return prompt.tokens, _marks(prompt, conversation)

    def _conversation(
        self, request: ChatRequest | CapsuleRequest | TokenizeRequest, effort: str | None
    ) -> Conversation:
        if request.messages is None:
            raise BadRequest("messages is required", param="messages")
        found = Conversation(read_messages(request.messages), read_functions(request.tools))
        if effort is None and request.chat_template_kwargs is None:
            return found
        return self.with_variables(found, effort, request.chat_template_kwargs)

    def with_variables(
        self, conversation: Conversation, effort: str | None, given: Any, *, is_hint: bool = False
    ) -> Conversation:
        """The conversation with what its template reads beside it; `is_hint`: an effort may mean nothing.

        Raises InvalidParameter.
        """
        source = self._template.source_for(conversation)
        variables = _effort(effort, source, is_hint=is_hint) | _variables(given, source)
        return Conversation(conversation.messages, conversation.functions, variables)

    def _thinking(self, source: Source) -> Thinking | None:
        name = self.settings.reasoning_parser
        found = _thinking_of(source.text) if name == "auto" else name
        return THINKING.get(found or "none")

    def _bound(
        self, max_tokens: int, thinking: Thinking, *, is_open: bool
    ) -> ReasoningBudget | None:
        """None: the model's marks are several tokens, of which others could be made too."""
        begin, close = map(self._added_tokens.get, thinking[:2])
        if close is None or (begin is None and not is_open):
            return None
        return ReasoningBudget(max_tokens, close, None if is_open else begin)

    def _form(self, source: Source) -> ToolFormat:
        name = self.settings.tool_parser
        found = format_of(source.text) if name == "auto" else name
        if found is None:
            raise BadRequest(
                "tools: the form in which this model writes calls is not known; name it as the setting"
                f" chat.tool_parser: {', '.join(FORMATS)}",
                param="tools",
            )
        return FORMATS[found]


def _marks(prompt: RenderedPrompt, conversation: Conversation, changed: str = "") -> Messages:
    """Marks of a conversation that was rendered, by which its messages are known again."""
    messages = conversation.messages
    has_system = bool(messages) and messages[0].role == "system"
    return Messages(prompt.digests, has_system, changed, prompt.places)


def _variables(given: Any, source: Source) -> dict[str, Any]:
    """`chat_template_kwargs`: those that the template reads."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidParameter("chat_template_kwargs", given, "give an object")
    for name, value in given.items():
        if name not in source.variables:
            known = ", ".join(sorted(source.variables)) or "none"
            remedy = f"this model's chat template does not read it; it reads {known}"
            raise InvalidParameter(f"chat_template_kwargs.{name}", value, remedy)
    return given


def _effort(effort: str | None, source: Source, *, is_hint: bool) -> dict[str, Any]:
    """`reasoning_effort` as the template's variable of that name, or as the switch that it has."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidParameter("reasoning_effort", effort, f"give one of {', '.join(EFFORTS)}")
    if "reasoning_effort" in source.variables and not (is_hint and effort == "none"):
        return {"reasoning_effort": effort}
    switches = [name for name in ("enable_thinking", "thinking") if name in source.variables]
    if not switches and effort != "none" and not is_hint:
        remedy = "this model's chat template knows no effort; leave it out, or give 'none'"
        raise InvalidParameter("reasoning_effort", effort, remedy)
    return dict.fromkeys(switches, effort != "none")
